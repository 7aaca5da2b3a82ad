// How a set multiplies: units of 32 bits of one matrix against factors of the other, for the vectors of the set that
// includes this. T: what tensors hold. Factor: what the other matrix is held as while it is multiplied: T, or fp32 where
// bf16 has no instruction of its own and would be widened once for each product. PARTS: of a unit, multiplied one by one.
//
// A set that HAS_TILES names the arithmetic of shapes that fill them: Tiled, see tiles.h.
//
// Other tile sizes are what registers hold: of GEMM_ROWS x 2 and of ATTENTION_ROWS x span(rows) sums, the units they are
// multiplied with, and a factor.
#pragma once
#include "kernels.h"

namespace {

INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }

template <int N> struct Number {
    static constexpr int value = N;
};

// call(Number<rows>) for rows below R, else call(Number<R>)
template <int R, typename F>
INLINE void with_rows(int64_t rows, F call) {
    if constexpr (R > 1)
        if (rows < R) return with_rows<R - 1>(rows, call);
    call(Number<R>{});
}

struct NoTiles {};

struct Fp32 {
    typedef float T;
    typedef float Factor;
    typedef Vec Operand;
    static constexpr int LANES = 1, PARTS = 1;
    static constexpr bool IS_TILED = false, HAS_TILES = false;
    typedef NoTiles Tiles;
    static constexpr int GEMM_ROWS = MANY_REGISTERS ? 12 : 6, CHUNK = 96;
    static constexpr int ATTENTION_ROWS = MANY_REGISTERS ? 7 : 6, VECTORS = ATTENTION_ROWS * 8;
    static constexpr int span(int rows) { return MANY_REGISTERS || rows == 1 ? 4 : rows == 2 ? 2 : 1; }
    template <int> INLINE Operand units(const void *p) { return load((const float *)p); }
    template <int> INLINE Operand broadcast(const Factor *p) { return all(*p); }
    INLINE Vec mul_add(Vec sum, Operand a, Operand b) { return fmadd(a, b, sum); }
};

struct WidenedBf16 {
    typedef bf16 T;
    typedef float Factor;
    typedef Vec Operand;
    static constexpr int LANES = 2, PARTS = 2;
    static constexpr bool IS_TILED = false, HAS_TILES = false;
    typedef NoTiles Tiles;
    static constexpr int GEMM_ROWS = MANY_REGISTERS ? 12 : 6, CHUNK = 48;  // rows take twice the room of the cache
    static constexpr int ATTENTION_ROWS = MANY_REGISTERS ? 12 : 6, VECTORS = 60;
    static constexpr int span(int rows) {
        return MANY_REGISTERS ? (rows <= 5 ? 4 : 2) : rows == 1 ? 4 : rows == 2 ? 2 : 1;
    }
    template <int PART> INLINE Operand units(const void *p) { return PART == 0 ? load_even(p) : load_odd(p); }
    template <int PART> INLINE Operand broadcast(const Factor *p) { return all(p[PART]); }
    INLINE Vec mul_add(Vec sum, Operand a, Operand b) { return fmadd(a, b, sum); }
};

#ifdef HAS_AVX512_BF16
struct DotBf16 {
    typedef bf16 T;
    typedef bf16 Factor;
    typedef __m512i Operand;
    static constexpr int LANES = 2, PARTS = 1;
    static constexpr bool IS_TILED = false, HAS_TILES = false;
    typedef NoTiles Tiles;
    static constexpr int GEMM_ROWS = 12, CHUNK = 96, ATTENTION_ROWS = 7, VECTORS = 56;
    static constexpr int span(int) { return 4; }
    template <int> INLINE Operand units(const void *p) { return _mm512_loadu_si512(p); }
    template <int> INLINE Operand broadcast(const Factor *p) { return broadcast_unit(p); }
    INLINE Vec mul_add(Vec sum, Operand a, Operand b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
};
#endif

// sum[i][c] += part PART of factors(i) times that of units(c), where both give places in memory
template <class S, int PART, int R, int C, typename F, typename U>
INLINE void multiply_add_part(Vec (&sum)[R][C], F factors, U units) {
    if constexpr (MANY_REGISTERS) {
        typename S::Operand b[C];
        for (int c = 0; c < C; c++) b[c] = S::template units<PART>(units(c));
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            const typename S::Operand a = S::template broadcast<PART>(factors(i));
            for (int c = 0; c < C; c++) sum[i][c] = S::mul_add(sum[i][c], a, b[c]);
        }
    } else {
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            const typename S::Operand b = S::template units<PART>(units(c));
#pragma GCC unroll 12
            for (int i = 0; i < R; i++)
                sum[i][c] = S::mul_add(sum[i][c], S::template broadcast<PART>(factors(i)), b);
        }
    }
}

// all parts, one after the other: what a unit holds is in registers a part at a time
template <class S, int R, int C, typename F, typename U>
INLINE void multiply_add(Vec (&sum)[R][C], F factors, U units) {
    multiply_add_part<S, 0>(sum, factors, units);
    if constexpr (S::PARTS == 2) multiply_add_part<S, 1>(sum, factors, units);
}

template <int R, int C> INLINE void clear(Vec (&sum)[R][C]) {
    for (int i = 0; i < R; i++)
        for (int c = 0; c < C; c++) sum[i][c] = zeros();
}

}  // namespace
