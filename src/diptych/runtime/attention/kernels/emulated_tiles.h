// Tiles of a processor with AMX in plain C++, for tests: the same interface as AmxTiles and the arithmetic that is
// documented for TDPBF16PS. For each dot the products of the even and of the odd lanes are added in two sums, each step
// rounded once (fused), which are then added to each other and to the result. Subnormal numbers count as zero.
#pragma once
#include <cstring>

#include "arithmetic.h"

namespace {

class EmulatedTiles {
  public:
    EmulatedTiles() { memset(tiles_, 0, sizeof tiles_); }

    template <int N> void zero(Number<N>) { memset(tiles_[N], 0, sizeof tiles_[N]); }
    template <int N> void load(Number<N>, const void *from, int64_t stride) {
        for (int row = 0; row < 16; row++) memcpy(tiles_[N][row], (const char *)from + row * stride, 64);
    }
    template <int N> void store(Number<N>, void *to, int64_t stride) {
        for (int row = 0; row < 16; row++) memcpy((char *)to + row * stride, tiles_[N][row], 64);
    }
    template <int SUM, int A, int B> void dot(Number<SUM>, Number<A>, Number<B>) {
        for (int m = 0; m < 16; m++) {
            float even[16] = {}, odd[16] = {};
            for (int i = 0; i < 16; i++) {
                const float a_even = widened(tiles_[A][m][i] << 16), a_odd = widened(tiles_[A][m][i]);
                for (int n = 0; n < 16; n++) {
                    even[n] = flushed(__builtin_fmaf(a_even, widened(tiles_[B][i][n] << 16), even[n]));
                    odd[n] = flushed(__builtin_fmaf(a_odd, widened(tiles_[B][i][n]), odd[n]));
                }
            }
            float sum[16];
            memcpy(sum, tiles_[SUM][m], 64);
            for (int n = 0; n < 16; n++) sum[n] = flushed(flushed(sum[n]) + flushed(even[n] + odd[n]));
            memcpy(tiles_[SUM][m], sum, 64);
        }
    }

    template <int SUM, int A, int B> void dot_bytes(Number<SUM>, Number<A>, Number<B>) {
        for (int m = 0; m < 16; m++)
            for (int n = 0; n < 16; n++)
                for (int i = 0; i < 16; i++)
                    for (int j = 0; j < 4; j++)
                        tiles_[SUM][m][n] += (int8_t)(tiles_[A][m][i] >> 8 * j) * (int)(tiles_[B][i][n] >> 8 * j & 255);
    }

  private:
    static float flushed(float x) {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        bits &= bits & 0x7f800000 ? 0xffffffff : 0x80000000;
        memcpy(&x, &bits, 4);
        return x;
    }
    static float widened(uint32_t bits) {  // the bf16 in the upper half
        bits &= 0xffff0000;
        float x;
        memcpy(&x, &bits, 4);
        return flushed(x);
    }

    alignas(64) uint32_t tiles_[8][16][16];
};

}  // namespace
