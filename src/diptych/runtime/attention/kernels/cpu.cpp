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

}  // namespace

extern "C" {

// bit 0: AVX2 and FMA; 1: AVX-512 (F, BW, VL, DQ), too; 2: AVX512_BF16, too; 3: AMX tiles and bf16, too
int64_t diptych_cpu_features() {
    __builtin_cpu_init();
    unsigned a, b, c, d;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 1;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return 3;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1) || !may_use_tiles()) return 7;
    return 15;
}
}
