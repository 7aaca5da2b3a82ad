// A decode step through all layers, in one parallel region. A layer of a small model is tens of microseconds of work: entering
// a region for each of its parts would cost as much again. The parts are those of the other files, so that the result
// is bitwise what they give one by one.
#include <omp.h>

#include "barrier.h"
#include "kernels.h"

namespace {

struct Layer {
    const char *input_norm, *mlp_norm;                      // [hidden]
    const char *qkv, *output, *gate_up, *down;              // packed
    const char *qkv_bias, *output_bias, *down_bias;         // or null
    const char *q_norm, *k_norm;                            // [dim] or null
    char *k_cache, *v_cache;
    int64_t window;
};

struct Step {
    const Layer *layers;
    const char *norm;                // [hidden]: behind the last layer
    const float *cos_sin;            // [max positions, dim]
    char *residual;                  // [rows, hidden]: the tokens' embeddings; overwritten
    char *x;                         // [rows, hidden]: the result
    char *qkv, *attended, *inner;    // scratch: [rows, (heads + 2 kv_heads) * dim], [rows, heads * dim], [rows, inner_size]
    float *partials;                 // scratch, see Attention
    const int64_t *positions, *slots;  // [rows]
    const int32_t *block_tables, *query_start, *context_lens;  // see Attention
    int64_t num_layers, rows, hidden, inner_size, heads, kv_heads, dim, block_size, table_stride;
    float eps, scale;
};

template <typename T>
void decode_step(const Step &s) {
    const int64_t queries = s.heads * s.dim, width = queries + 2 * s.kv_heads * s.dim;
    Barrier barrier;
#pragma omp parallel
    {
        const int threads = omp_get_num_threads();
        auto meet = [&] { barrier.wait(threads); };
        auto project = [&](const char *x, const char *w, const char *bias, char *y, int64_t n, int64_t k, bool gated) {
            linear<T>({x, w, bias, y, s.rows, n, k, k, gated ? n / 2 : n, gated});
            meet();
        };
        auto add_norm = [&](const char *weight) {
            add_rms_norm((const T *)s.x, (T *)s.residual, (const T *)weight, (T *)s.x, s.rows, s.hidden, s.eps);
            meet();
        };
        rms_norm((const T *)s.residual, (const T *)s.layers[0].input_norm, (T *)s.x, s.rows, s.hidden, s.eps);
        meet();
        for (int64_t index = 0; index < s.num_layers; index++) {
            const Layer &l = s.layers[index];
            project(s.x, l.qkv, l.qkv_bias, s.qkv, width, s.hidden, false);
            rope_and_cache<T>({s.qkv, s.positions, s.cos_sin, s.slots, l.k_cache, l.v_cache, l.q_norm, l.k_norm, s.rows,
                               s.heads, s.kv_heads, s.dim, s.block_size, s.eps});
            meet();
            const Attention attention{s.qkv, l.k_cache, l.v_cache, s.block_tables, s.query_start, s.context_lens,
                                      s.attended, s.partials, width, s.table_stride, s.rows, s.rows, s.heads,
                                      s.kv_heads, s.dim, s.block_size, l.window, s.scale};
            attend_segments<T>(attention);
            meet();
            combine_segments<T>(attention);
            meet();
            project(s.attended, l.output, l.output_bias, s.x, s.hidden, queries, false);
            add_norm(l.mlp_norm);
            project(s.x, l.gate_up, nullptr, s.inner, 2 * s.inner_size, s.hidden, true);
            project(s.inner, l.down, l.down_bias, s.x, s.hidden, s.inner_size, false);
            add_norm(index + 1 < s.num_layers ? s.layers[index + 1].input_norm : s.norm);
        }
    }
}

}  // namespace

extern "C" void diptych_decode_step(const void *step, int64_t is_bf16) {
    is_bf16 ? decode_step<bf16>(*(const Step *)step) : decode_step<float>(*(const Step *)step);
}
