// Vectors of 16 fp32 in AVX-512 registers. Included behind a #pragma GCC target that allows them; the same functions as
// those of vector_avx2.h. HAS_AVX512_BF16, HAS_VNNI: the target has these
// instructions, too (it defines no macro of its own in time).
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace {

typedef __m512 Vec;  // + - * / are the compiler's
typedef __mmask16 Lanes;

constexpr bool MANY_REGISTERS = true;  // 32 of a whole vector

INLINE __mmask16 tail_mask(int64_t count) { return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1); }

INLINE Vec zeros() { return _mm512_setzero_ps(); }
INLINE Vec all(float x) { return _mm512_set1_ps(x); }
INLINE float first(Vec v) { return _mm512_cvtss_f32(v); }
INLINE Vec fmadd(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
INLINE Vec fmsub(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }    // a b - c
INLINE Vec fnmadd(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE float sum_of(Vec v) { return _mm512_reduce_add_ps(v); }
INLINE float largest_of(Vec v) { return _mm512_reduce_max_ps(v); }
INLINE Vec to_integer(Vec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Vec times_power_of_2(Vec v, Vec n) { return _mm512_scalef_ps(v, n); }  // v 2^n, n whole numbers

// the lanes from <= lane < to; both may lie outside of 0 ... 16
INLINE Lanes lanes(int64_t from, int64_t to) {
    return (Lanes)(tail_mask(to > 0 ? to : 0) & ~tail_mask(from > 0 ? from : 0));
}
INLINE Lanes lanes_above(Vec v, float limit) { return _mm512_cmp_ps_mask(v, all(limit), _CMP_GT_OQ); }
INLINE Vec only(Lanes keep, Vec v) { return _mm512_maskz_mov_ps(keep, v); }  // 0 elsewhere
INLINE Vec larger_in(Lanes which, Vec a, Vec b) { return _mm512_mask_max_ps(a, which, a, b); }  // a elsewhere

INLINE Vec widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
INLINE __m256i narrow(Vec v) {
#ifdef HAS_AVX512_BF16
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
#endif
}

INLINE Vec load(const float *p) { return _mm512_loadu_ps(p); }
INLINE Vec load(const float *p, int64_t count) { return _mm512_maskz_loadu_ps(tail_mask(count), p); }  // zeros behind it
INLINE Vec load(const bf16 *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }
INLINE Vec load(const bf16 *p, int64_t count) { return widen(_mm256_maskz_loadu_epi16(tail_mask(count), p)); }
INLINE void store(float *p, Vec v) { _mm512_storeu_ps(p, v); }
INLINE void store(float *p, Vec v, int64_t count) { _mm512_mask_storeu_ps(p, tail_mask(count), v); }
INLINE void store(bf16 *p, Vec v) { _mm256_storeu_si256((__m256i *)p, narrow(v)); }
INLINE void store(bf16 *p, Vec v, int64_t count) { _mm256_mask_storeu_epi16(p, tail_mask(count), narrow(v)); }

// 16 units of two bf16: the first ones, the second ones
INLINE Vec load_even(const void *p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
INLINE Vec load_odd(const void *p) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)));
}

// 16 whole numbers of 32 bits; not __m512i, which is a vector of 64: sums would change type at each instruction
typedef int32_t Ints __attribute__((vector_size(64), may_alias));
INLINE Ints no_ints() { return (Ints)_mm512_setzero_si512(); }
INLINE Ints all_ints(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
INLINE Ints add(Ints a, Ints b) { return a + b; }
INLINE int32_t sum_of(Ints v) { return _mm512_reduce_add_epi32((__m512i)v); }
INLINE Ints rounded(Vec v) { return (Ints)_mm512_cvtps_epi32(v); }
INLINE Vec to_floats(Ints v) { return _mm512_cvtepi32_ps((__m512i)v); }
INLINE Vec load_halves(const char *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }  // fp16

// 64 bytes, in lanes of four
INLINE Ints load_ints(const char *p) { return (Ints)_mm512_loadu_si512(p); }
INLINE Ints low_halves(Ints bytes) { return (Ints)_mm512_and_si512((__m512i)bytes, _mm512_set1_epi8(15)); }
INLINE Ints high_halves(Ints bytes) { return low_halves((Ints)_mm512_srli_epi16((__m512i)bytes, 4)); }
INLINE Ints even_bytes(Ints bytes) { return (Ints)_mm512_and_si512((__m512i)bytes, _mm512_set1_epi16(255)); }  // as 16 bits
INLINE Ints odd_bytes(Ints bytes) { return (Ints)_mm512_srli_epi16((__m512i)bytes, 8); }
INLINE Ints sums_of_pairs(Ints a, Ints b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
INLINE void store_bytes(char *p, Ints v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)v)); }
INLINE void store_even_then_odd(char *p, Ints v) {  // as 16 bits, of each four
    const __m512i ordered = _mm512_shuffle_epi32((__m512i)v, (_MM_PERM_ENUM)0xd8);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(ordered));
}

// whole numbers of 8 bits as they are multiplied: 32 neighbours as bf16, which holds them exactly; as fp32 those at even
// places, and those at odd ones `stride` behind them
INLINE void widen_numbers(bf16 *p, const char *bytes, int64_t) {
    const Vec first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
    const Vec second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes + 1)));
#ifdef HAS_AVX512_BF16
    _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second, first));
#else
    const auto cut = [](Vec v) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(v), 16)); };
    _mm256_storeu_si256((__m256i *)p, cut(first));
    _mm256_storeu_si256((__m256i *)p + 1, cut(second));
#endif
}
INLINE void widen_numbers(float *p, const char *bytes, int64_t stride) {
    const __m512i pairs = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)bytes));
    _mm512_storeu_ps(p, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24)));
    _mm512_storeu_ps(p + stride, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 24)));
}
#ifdef HAS_VNNI
INLINE Ints dot(Ints sum, Ints unsigned_bytes, Ints bytes) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)bytes);
}
#endif

INLINE __m512i broadcast_unit(const void *p) {
    int32_t unit;
    memcpy(&unit, p, 4);
    return _mm512_set1_epi32(unit);
}
INLINE Ints broadcast_4_bytes(const char *p) { return (Ints)broadcast_unit(p); }

}  // namespace
