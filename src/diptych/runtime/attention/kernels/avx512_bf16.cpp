// bf16 with the dot products of AVX512_BF16.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#define HAS_AVX512_BF16
#include "vector_avx512.h"
#include "kernel_set.h"

extern const Kernels AVX512_BF16 = kernels_of<DotBf16>();
