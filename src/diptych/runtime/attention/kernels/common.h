// What the kernels share: 32-bit units, conversions, exp. Everything here is compiled for AVX-512 (with BF16) and is only
// called after cpu.cpp has found the instructions; nothing from the C++ library is instantiated in these files, so that
// no function compiled for AVX-512 can be picked by the linker for code that runs elsewhere.
//
// One idea carries all of them: data that is multiplied lies in units of 32 bits, which hold one fp32 or two bf16 that
// belong to neighbouring steps of the sum. A register holds 16 units of 16 different results. fmadd (fp32) and dpbf16
// (bf16) then have the same shape, and each result is summed in the same order whatever the tile it is computed in:
// a row's result does not depend on the other rows of a batch.
#pragma once
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

template <typename T> struct Unit;  // LANES values of T in 32 bits

template <> struct Unit<float> {
    static constexpr int LANES = 1;
    INLINE __m512 mul_add(__m512 sum, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
    INLINE __m512 load(const float *p) { return _mm512_loadu_ps(p); }
    INLINE __m512 load(const float *p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
    INLINE void store(float *p, __m512 v) { _mm512_storeu_ps(p, v); }
    INLINE void store(float *p, __mmask16 m, __m512 v) { _mm512_mask_storeu_ps(p, m, v); }
    INLINE float get(const float *p) { return *p; }
};

template <> struct Unit<bf16> {
    static constexpr int LANES = 2;
    INLINE __m512 mul_add(__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
    INLINE __m512 widen(__m256i v) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
    }
    INLINE __m512 load(const bf16 *p) { return widen(_mm256_loadu_si256((const __m256i *)p)); }
    INLINE __m512 load(const bf16 *p, __mmask16 m) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
    INLINE void store(bf16 *p, __m512 v) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v)); }
    INLINE void store(bf16 *p, __mmask16 m, __m512 v) {
        _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh(v));
    }
    INLINE float get(const bf16 *p) {
        uint32_t bits = (uint32_t)*p << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
};

INLINE __m512i broadcast_unit(const void *p) {
    int32_t unit;
    memcpy(&unit, p, 4);
    return _mm512_set1_epi32(unit);
}

INLINE __mmask16 tail_mask(int64_t count) { return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1); }

// e^x for x <= 0 and a little above: 2^(x log2 e) as 2^n * p(r), |r| <= 1/2, relative error below 2e-7; 0 for -inf
INLINE __m512 exp_ps(__m512 x) {
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
    const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    // r = x - n ln 2, in two parts so that it is exact enough for large n
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    // far below the range everything is 0 (and -inf, for which r is not a number, too)
    const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GT_OQ);
    return _mm512_maskz_scalef_ps(keep, p, n);
}

// 2^x as 2^n * p(r), |r| <= 1/2; the relative error is below 3e-7 (fp32) or 3e-6 (where the result becomes bf16)
template <typename T>
INLINE __m512 exp2_ps(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p;
    if (sizeof(T) == 4) {
        p = _mm512_set1_ps(1.3276471483e-03f);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.6755413304e-03f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5507132751e-02f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4022119724e-01f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9314696706e-01f));
    } else {
        p = _mm512_set1_ps(9.5701013979e-03f);
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.5917860279e-02f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.4024744841e-01f));
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.9312181474e-01f));
    }
    return _mm512_scalef_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f)), n);
}

// 2^x; 0 for -inf
INLINE float exp2_one(float x) { return _mm512_cvtss_f32(exp2_ps<float>(_mm512_set1_ps(x < -200.0f ? -200.0f : x))); }
