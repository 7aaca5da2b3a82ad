// Vectors of 16 fp32 in pairs of AVX registers. Included behind a #pragma GCC target that allows AVX2 and FMA; the same
// functions as those of vector_avx512.h.
#pragma once
#include <immintrin.h>

#include <cstring>

#include "kernels.h"

namespace {

struct Vec {
    __m256 low, high;
};
typedef Vec Lanes;  // all bits of a lane, or none

constexpr bool MANY_REGISTERS = false;  // 16 of half a vector

INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }

INLINE Vec all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Vec zeros() { return all(0.0f); }
INLINE float first(Vec v) { return _mm256_cvtss_f32(v.low); }
INLINE Vec fmadd(Vec a, Vec b, Vec c) {  // a b + c
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE Vec fmsub(Vec a, Vec b, Vec c) {  // a b - c
    return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
INLINE Vec fnmadd(Vec a, Vec b, Vec c) {  // c - a b
    return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
INLINE Vec larger(Vec a, Vec b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE float sum_of(Vec v) {
    const __m256 eight = _mm256_add_ps(v.low, v.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE float largest_of(Vec v) {
    const __m256 eight = _mm256_max_ps(v.low, v.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE Vec to_integer(Vec v) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(v.low, NEAREST), _mm256_round_ps(v.high, NEAREST)};
}
INLINE __m256 power_of_2(__m256 n) {  // 0 below 2^-126
    const __m256 inside = _mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-127.0f)), _mm256_set1_ps(127.0f));
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(inside), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
INLINE Vec times_power_of_2(Vec v, Vec n) {  // v 2^n, n whole numbers
    return {_mm256_mul_ps(v.low, power_of_2(n.low)), _mm256_mul_ps(v.high, power_of_2(n.high))};
}

// the lanes from <= lane < to; both may lie outside of 0 ... 16
INLINE __m256 eight_lanes(int64_t from, int64_t to) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const int first = from < 0 ? 0 : from > 8 ? 8 : (int)from, end = to < 0 ? 0 : to > 8 ? 8 : (int)to;
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                                   _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane)));
}
INLINE Lanes lanes(int64_t from, int64_t to) { return {eight_lanes(from, to), eight_lanes(from - 8, to - 8)}; }
INLINE Lanes lanes_above(Vec v, float limit) {
    const __m256 least = _mm256_set1_ps(limit);
    return {_mm256_cmp_ps(v.low, least, _CMP_GT_OQ), _mm256_cmp_ps(v.high, least, _CMP_GT_OQ)};
}
INLINE Vec only(Lanes keep, Vec v) { return {_mm256_and_ps(keep.low, v.low), _mm256_and_ps(keep.high, v.high)}; }
INLINE Vec larger_in(Lanes which, Vec a, Vec b) {  // a elsewhere
    const Vec both = larger(a, b);
    return {_mm256_blendv_ps(a.low, both.low, which.low), _mm256_blendv_ps(a.high, both.high, which.high)};
}

INLINE __m256 widen(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }
INLINE __m256i narrow(__m256 v) {  // to nearest even, in the lower halves of 32 bits
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256 is_nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(is_nan)), 16);
}

INLINE Vec load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE Vec load(const bf16 *p) {
    return {widen(_mm_loadu_si128((const __m128i *)p)), widen(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INLINE void store(float *p, Vec v) {
    _mm256_storeu_ps(p, v.low);
    _mm256_storeu_ps(p + 8, v.high);
}
INLINE void store(bf16 *p, Vec v) {
    const __m256i mixed = _mm256_packus_epi32(narrow(v.low), narrow(v.high));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}

// the first `count` elements; zeros behind them
template <typename T> INLINE Vec load(const T *p, int64_t count) {
    if (count >= 16) return load(p);
    T part[16] = {};
    memcpy(part, p, (count > 0 ? count : 0) * sizeof(T));
    return load((const T *)part);
}
template <typename T> INLINE void store(T *p, Vec v, int64_t count) {
    if (count >= 16) return store(p, v);
    T part[16];
    store((T *)part, v);
    memcpy(p, part, (count > 0 ? count : 0) * sizeof(T));
}

// 16 units of two bf16: the first ones, the second ones
INLINE __m256 first_of_pairs(const __m256i *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p), 16));
}
INLINE __m256 second_of_pairs(const __m256i *p) {
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(p), _mm256_set1_epi32((int)0xffff0000)));
}
INLINE Vec load_even(const void *p) { return {first_of_pairs((const __m256i *)p), first_of_pairs((const __m256i *)p + 1)}; }
INLINE Vec load_odd(const void *p) {
    return {second_of_pairs((const __m256i *)p), second_of_pairs((const __m256i *)p + 1)};
}

// 16 whole numbers of 32 bits; not __m256i, which is a vector of 64: sums would change type at each instruction
typedef int32_t EightInts __attribute__((vector_size(32), may_alias));
struct Ints {
    EightInts low, high;
};
INLINE Ints ints(__m256i low, __m256i high) { return {(EightInts)low, (EightInts)high}; }
INLINE __m256i low_of(Ints v) { return (__m256i)v.low; }
INLINE __m256i high_of(Ints v) { return (__m256i)v.high; }
INLINE Ints all_ints(int32_t x) { return ints(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
INLINE Ints no_ints() { return all_ints(0); }
INLINE Ints add(Ints a, Ints b) { return {a.low + b.low, a.high + b.high}; }
INLINE int32_t sum_of(Ints v) {
    const __m256i eight = (__m256i)(v.low + v.high);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
INLINE Ints rounded(Vec v) { return ints(_mm256_cvtps_epi32(v.low), _mm256_cvtps_epi32(v.high)); }
INLINE Vec to_floats(Ints v) { return {_mm256_cvtepi32_ps(low_of(v)), _mm256_cvtepi32_ps(high_of(v))}; }
INLINE Vec load_halves(const char *p) {  // fp16
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p + 1))};
}

// 64 bytes, in lanes of four
INLINE Ints load_ints(const char *p) {
    return ints(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1));
}
INLINE Ints masked(Ints v, __m256i mask) { return {v.low & (EightInts)mask, v.high & (EightInts)mask}; }
INLINE Ints low_halves(Ints bytes) { return masked(bytes, _mm256_set1_epi8(15)); }
INLINE Ints high_halves(Ints bytes) {
    return low_halves(ints(_mm256_srli_epi16(low_of(bytes), 4), _mm256_srli_epi16(high_of(bytes), 4)));
}
INLINE Ints even_bytes(Ints bytes) { return masked(bytes, _mm256_set1_epi16(255)); }  // as 16 bits
INLINE Ints odd_bytes(Ints bytes) {
    return ints(_mm256_srli_epi16(low_of(bytes), 8), _mm256_srli_epi16(high_of(bytes), 8));
}
INLINE Ints sums_of_pairs(Ints a, Ints b) {
    return ints(_mm256_madd_epi16(low_of(a), low_of(b)), _mm256_madd_epi16(high_of(a), high_of(b)));
}
INLINE __m256i as_16_bits(Ints v) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(low_of(v), high_of(v)), 0xd8);
}
INLINE void store_bytes(char *p, Ints v) {
    const __m256i words = as_16_bits(v);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)p, bytes);
}
INLINE void store_even_then_odd(char *p, Ints v) {  // as 16 bits, of each four
    const Ints ordered = ints(_mm256_shuffle_epi32(low_of(v), 0xd8), _mm256_shuffle_epi32(high_of(v), 0xd8));
    _mm256_storeu_si256((__m256i *)p, as_16_bits(ordered));
}
INLINE Ints broadcast_4_bytes(const char *p) {
    int32_t unit;
    memcpy(&unit, p, 4);
    return all_ints(unit);
}

// see vector_avx512.h
INLINE void widen_numbers(bf16 *p, const char *bytes, int64_t) {
    for (int part = 0; part < 2; part++, bytes += 16, p += 16) {
        const auto eight = [&](int at) {
            const __m256i wide = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(bytes + at)));
            return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(wide)), 16);
        };
        const __m256i mixed = _mm256_packus_epi32(eight(0), eight(8));
        _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(mixed, 0xd8));
    }
}
INLINE void widen_numbers(float *p, const char *bytes, int64_t stride) {
    for (int part = 0; part < 2; part++, bytes += 16, p += 8) {
        const __m256i pairs = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)bytes));
        _mm256_storeu_ps(p, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 24), 24)));
        _mm256_storeu_ps(p + stride, _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 24)));
    }
}
#ifdef HAS_VNNI
INLINE Ints dot(Ints sum, Ints unsigned_bytes, Ints bytes) {
    return ints(_mm256_dpbusd_avx_epi32(low_of(sum), low_of(unsigned_bytes), low_of(bytes)),
                _mm256_dpbusd_avx_epi32(high_of(sum), high_of(unsigned_bytes), high_of(bytes)));
}
#endif

}  // namespace
