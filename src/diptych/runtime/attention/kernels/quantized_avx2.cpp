// Weights in whole numbers with AVX2.
#pragma GCC target("avx2,fma,f16c")
#include "vector_avx2.h"
#include "quantized_gemm.h"

extern const QuantizedKernels QUANTIZED_AVX2 = {quantized_linear<Pairs, float>, quantized_linear<Pairs, bf16>};
