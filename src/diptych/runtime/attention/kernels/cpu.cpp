// Which instructions this processor has. Compiled for the oldest x86-64, so that it can run anywhere.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

// the system lets a process use tiles when it asks, before its threads do
bool may_use_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

bool has_f16c() {
    unsigned a, b, c = 0, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

}  // namespace

extern "C" {

// bit 0: AVX2, FMA and F16C; 1: AVX-512 (F, BW, VL, DQ), too; 2: its VNNI and BF16, too; 3: AMX tiles, bf16 and int8, too;
// 4: the VNNI of AVX-512 and bit 1; 5: AVX-VNNI and bit 0
int64_t diptych_cpu_features() {
    __builtin_cpu_init();
    unsigned a = 0, b, c, d = 0, later = 0;
    __get_cpuid_count(7, 1, &later, &b, &c, &d);  // zeros where there is no such leaf
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool has_vnni = has_avx512 && (c >> 11 & 1), has_bf16 = has_vnni && (later >> 5 & 1);
    const bool has_amx = has_bf16 && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) && may_use_tiles();
    return has_avx2 | has_avx512 << 1 | has_bf16 << 2 | has_amx << 3 | has_vnni << 4 |
           (has_avx2 && (later >> 4 & 1)) << 5;
}
}
