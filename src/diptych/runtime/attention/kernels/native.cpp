// What Python calls: each function with the table of a set and a dtype (diptych_kernels) as its first argument.
#include <cstring>

#include "kernels.h"

extern "C" {

// the kernels of a set, or null where it has none for the dtype; whether the processor can run them is not asked here
const Kernels *diptych_kernels(const char *set, int64_t is_bf16) {
    const struct {
        const char *name;
        const Kernels *fp32, *bf16;
    } sets[] = {
        {"avx2", &AVX2_FP32, &AVX2_BF16},
        {"avx512", &AVX512_FP32, &AVX512_WIDENED_BF16},
        {"avx512_bf16", nullptr, &AVX512_BF16},
        {"amx", nullptr, &AMX_BF16},
        {"amx_emulated", nullptr, &AMX_EMULATED_BF16},
    };
    for (const auto &entry : sets)
        if (strcmp(set, entry.name) == 0) return is_bf16 ? entry.bf16 : entry.fp32;
    return nullptr;
}

void diptych_linear(const Kernels *kernels, const void *x, const void *w, const void *bias, void *y, int64_t m,
                    int64_t n, int64_t k, int64_t x_stride, int64_t gated) {
    kernels->linear({(const char *)x, (const char *)w, (const char *)bias, (char *)y, m, n, k, x_stride,
                     gated ? n / 2 : n, gated != 0});
}

// residual: null for out = rms_norm(x)
void diptych_norm(const Kernels *kernels, const void *x, void *residual, const void *weight, void *out, int64_t rows,
                  int64_t dim, float eps) {
    kernels->norm({(const char *)x, (char *)residual, (const char *)weight, (char *)out, rows, dim, eps});
}

void diptych_silu_and_mul(const Kernels *kernels, const void *gate_up, void *out, int64_t rows, int64_t dim) {
    kernels->silu_and_mul({(const char *)gate_up, (char *)out, rows, dim});
}

void diptych_rope_and_cache(const Kernels *kernels, void *qkv, const int64_t *positions, const float *cos_sin,
                            const int64_t *slots, void *k_cache, void *v_cache, const void *q_norm, const void *k_norm,
                            int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, float eps) {
    kernels->rope_and_cache({(char *)qkv, positions, cos_sin, slots, (char *)k_cache, (char *)v_cache,
                             (const char *)q_norm, (const char *)k_norm, rows, heads, kv_heads, dim, block_size, eps});
}

// floats that `partials` must hold
int64_t diptych_attention_workspace(int64_t decodes, int64_t max_context, int64_t heads, int64_t dim) {
    return decodes * ((max_context + SEGMENT - 1) / SEGMENT) * heads * (dim + 2);
}

void diptych_attention(const Kernels *kernels, const void *q, const void *k_cache, const void *v_cache,
                       const int32_t *block_tables, const int32_t *query_start, const int32_t *context_lens, void *out,
                       float *partials, const int64_t *sizes, float scale) {
    kernels->attention({(const char *)q, (const char *)k_cache, (const char *)v_cache, block_tables, query_start,
                        context_lens, (char *)out, partials, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
                        sizes[5], sizes[6], sizes[7], sizes[8], scale});
}

void diptych_decode_step(const Kernels *kernels, const Step *step) { kernels->decode_step(*step); }

int64_t diptych_abi() { return 5; }
}
