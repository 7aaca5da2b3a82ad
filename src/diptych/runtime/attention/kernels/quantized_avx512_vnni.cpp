// Weights in whole numbers with the dot products of AVX512_VNNI.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")
#define HAS_VNNI
#include "vector_avx512.h"
#include "quantized_gemm.h"

extern const QuantizedKernels QUANTIZED_AVX512_VNNI = {quantized_linear<Dots, float>, quantized_linear<Dots, bf16>};
