// Weights in whole numbers with AVX-512.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")
#include "vector_avx512.h"
#include "quantized_gemm.h"

extern const QuantizedKernels QUANTIZED_AVX512 = {quantized_linear<Pairs, float>, quantized_linear<Pairs, bf16>};
