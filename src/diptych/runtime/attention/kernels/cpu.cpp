// Which instructions this processor has. Compiled for the oldest x86-64, so that it can run anywhere.
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

extern "C" {

// bit 0: AVX-512 (F, BW, VL, DQ); bit 1: AVX512_BF16
int64_t diptych_cpu_features() {
    int64_t features = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma"))
        features |= 1;
    unsigned a, b, c, d;
    if ((features & 1) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1)) features |= 2;
#endif
    return features;
}

int64_t diptych_abi() { return 4; }
}
