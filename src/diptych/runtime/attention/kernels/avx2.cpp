// fp32, and bf16 widened in registers, with AVX2 and FMA.
#pragma GCC target("avx2,fma,f16c")
#include "vector_avx2.h"
#include "kernel_set.h"

extern const Kernels AVX2_FP32 = kernels_of<Fp32>(), AVX2_BF16 = kernels_of<WidenedBf16>();
