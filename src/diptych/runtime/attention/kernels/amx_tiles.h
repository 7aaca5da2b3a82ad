// The tiles of a processor with AMX: eight of 16 rows of 64 bytes. A thread configures them when it begins a kernel and
// gives them back at its end: while they are in use, every switch of threads saves and restores 8 KB.
//
// In assembly, because the compilers' intrinsics want literal tile numbers, and older ones lose track of what the
// instructions read and write.
#pragma once
#include "arithmetic.h"

namespace {

struct AmxTiles {
    AmxTiles(const AmxTiles &) = delete;
    ALWAYS_INLINE AmxTiles() {
        struct alignas(64) Configuration {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        };
        const Configuration configuration;
        __asm__ volatile("ldtilecfg %0" : : "m"(configuration) : "memory");
    }
    ALWAYS_INLINE ~AmxTiles() { __asm__ volatile("tilerelease" : : : "memory"); }

    template <int N> ALWAYS_INLINE void zero(Number<N>) { __asm__ volatile("tilezero %%tmm%c0" : : "i"(N)); }

    // 16 rows of 64 bytes, `stride` bytes apart
    template <int N> ALWAYS_INLINE void load(Number<N>, const void *from, int64_t stride) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(N) : "memory");
    }
    template <int N> ALWAYS_INLINE void store(Number<N>, void *to, int64_t stride) {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(N) : "memory");
    }

    // sum[m][n] += a[m][2 i] b[i][2 n] + a[m][2 i + 1] b[i][2 n + 1] for 16 steps i
    template <int SUM, int A, int B> ALWAYS_INLINE void dot(Number<SUM>, Number<A>, Number<B>) {
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
    }

    // sum[m][n] += a[m][4 i + j] b[i][4 n + j] for 16 steps i and j < 4, in whole numbers: a signed, b unsigned
    template <int SUM, int A, int B> ALWAYS_INLINE void dot_bytes(Number<SUM>, Number<A>, Number<B>) {
        __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
    }
};

}  // namespace
