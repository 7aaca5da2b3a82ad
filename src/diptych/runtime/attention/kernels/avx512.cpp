// fp32, and bf16 widened in registers, with AVX-512.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#include "vector_avx512.h"
#include "kernel_set.h"

extern const Kernels AVX512_FP32 = kernels_of<Fp32>(), AVX512_WIDENED_BF16 = kernels_of<WidenedBf16>();
