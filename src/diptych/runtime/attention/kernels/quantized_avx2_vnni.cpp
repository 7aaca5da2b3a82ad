// Weights in whole numbers with the dot products of AVX-VNNI.
#pragma GCC target("avx2,fma,f16c,avxvnni")
#define HAS_VNNI
#include "vector_avx2.h"
#include "quantized_gemm.h"

extern const QuantizedKernels QUANTIZED_AVX2_VNNI = {quantized_linear<Dots, float>, quantized_linear<Dots, bf16>};
