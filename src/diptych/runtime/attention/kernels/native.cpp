// What Python calls: each function with the table of a set and a dtype (diptych_kernels) as its first argument.
#include <cstring>

#include "kernels.h"

extern "C" {

// The kernels of a set, or null where it has none for the dtype; whether the processor can run them is not asked here.
// A set that ends in _vnni is the one before it with instructions for whole numbers
const Kernels *diptych_kernels(const char *set, int64_t is_bf16) {
    struct Entry {
        const char *name;
        Kernels kernels[2];  // fp32, bf16
    };
    const auto with = [](Kernels kernels, TeamLinear *quantized) {
        kernels.quantized = quantized;
        return kernels;
    };
    static const Entry SETS[] = {
        {"avx2", {with(AVX2_FP32, QUANTIZED_AVX2.fp32), with(AVX2_BF16, QUANTIZED_AVX2.bf16)}},
        {"avx2_vnni", {with(AVX2_FP32, QUANTIZED_AVX2_VNNI.fp32), with(AVX2_BF16, QUANTIZED_AVX2_VNNI.bf16)}},
        {"avx512", {with(AVX512_FP32, QUANTIZED_AVX512.fp32), with(AVX512_WIDENED_BF16, QUANTIZED_AVX512.bf16)}},
        {"avx512_vnni",
         {with(AVX512_FP32, QUANTIZED_AVX512_VNNI.fp32), with(AVX512_WIDENED_BF16, QUANTIZED_AVX512_VNNI.bf16)}},
        {"avx512_bf16", {{}, with(AVX512_BF16, QUANTIZED_AVX512_VNNI.bf16)}},
        {"amx", {{}, with(AMX_BF16, quantized_amx)}},
        {"amx_emulated", {{}, with(AMX_EMULATED_BF16, quantized_amx_emulated)}},
    };
    for (const Entry &entry : SETS) {
        const Kernels &kernels = entry.kernels[is_bf16 != 0];
        if (strcmp(set, entry.name) == 0 && kernels.linear) return &kernels;
    }
    return nullptr;
}

void diptych_linear(const Kernels *kernels, const void *x, const Weight *weight, void *y, int64_t m, int64_t n,
                    int64_t k, int64_t x_stride, const Gate *gate) {
    kernels->linear(*kernels, {(const char *)x, *weight, (char *)y, m, n, k, x_stride, *gate ? n / 2 : n, *gate});
}

// in fp32, whatever the kernels compute in
void diptych_wide_linear(const Kernels *kernels, const float *x, const Weight *weight, float *y, int64_t m, int64_t n,
                         int64_t k) {
    kernels->wide_linear(*kernels, {(const char *)x, *weight, (char *)y, m, n, k, k, n, NOT_GATED});
}

// residual: null for out = rms_norm(x)
void diptych_norm(const Kernels *kernels, const void *x, void *residual, const void *weight, int64_t is_wide, void *out,
                  int64_t rows, int64_t dim, float eps, float multiplier) {
    kernels->norm({(const char *)x, (char *)residual, {(const char *)weight, is_wide, eps}, (char *)out, rows, dim,
                   multiplier});
}

// x += multiplier * more
void diptych_add(const Kernels *kernels, const void *more, void *x, int64_t rows, int64_t dim, float multiplier) {
    kernels->norm({(const char *)more, (char *)x, {}, nullptr, rows, dim, multiplier});
}

void diptych_activate(const Kernels *kernels, const void *gate_up, void *out, int64_t rows, int64_t dim,
                      const Gate *gate) {
    kernels->activate({(const char *)gate_up, (char *)out, rows, dim, *gate});
}

void diptych_gate(const Kernels *kernels, void *x, const void *gate, int64_t rows, int64_t dim) {
    kernels->gate({(char *)x, (const char *)gate, rows, dim});
}

void diptych_softcap(const Kernels *kernels, void *x, int64_t rows, int64_t dim, float cap) {
    kernels->softcap({(char *)x, rows, dim, cap});
}

// norms_are_wide: of both q_norm and k_norm
void diptych_rope_and_cache(const Kernels *kernels, void *qkv, const int64_t *positions, const float *cos_sin,
                            const float *query_scale, const int64_t *slots, void *k_cache, void *v_cache,
                            const void *q_norm, const void *k_norm, int64_t norms_are_wide, int64_t norms_rows,
                            int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t rotary,
                            int64_t block_size, int64_t is_int8, float eps) {
    kernels->rope_and_cache({(char *)qkv, positions, cos_sin, query_scale, slots, (char *)k_cache, (char *)v_cache,
                             {(const char *)q_norm, norms_are_wide, eps}, {(const char *)k_norm, norms_are_wide, eps},
                             rows, heads, kv_heads, dim, rotary, block_size, norms_rows, is_int8});
}

void diptych_convolve(const Kernels *kernels, const Convolution *convolution) { kernels->convolve(*convolution); }

// floats that `partials` must hold
int64_t diptych_attention_workspace(int64_t decodes, int64_t max_context, int64_t heads, int64_t dim) {
    return decodes * ((max_context + SEGMENT - 1) / SEGMENT) * heads * (dim + 2);
}

void diptych_attention(const Kernels *kernels, const void *q, const void *k_cache, const void *v_cache,
                       const int32_t *block_tables, const int32_t *query_start, const int32_t *context_lens, void *out,
                       float *partials, const int64_t *sizes, float scale, float softcap, const float *sinks) {
    kernels->attention({(const char *)q, (const char *)k_cache, (const char *)v_cache, block_tables, query_start,
                        context_lens, (char *)out, partials, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
                        sizes[5], sizes[6], sizes[7], sizes[8], sizes[9], scale, softcap, sinks});
}

void diptych_decode_step(const Kernels *kernels, const Step *step) { kernels->decode_step(*kernels, *step); }

void diptych_choose(const Kernels *kernels, const Choice *choice) { kernels->choose(*choice); }

void diptych_experts(const Kernels *kernels, const Experts *experts) { kernels->experts(*kernels, *experts); }

int64_t diptych_abi() { return 13; }
}
