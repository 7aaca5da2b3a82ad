// The kernels as a team of threads calls them, from inside a parallel region: every thread makes the same call, computes
// its share and returns without waiting for the others. Outside of a region one thread computes everything. T is float or
// bf16; pointers of void and char are to T.
#pragma once
#include "common.h"

// y = x W^T (+ bias), or silu(gate) * up when gated; W as diptych_pack leaves it
struct Linear {
    const char *x;     // [m, k]
    const char *w;     // packed
    const char *bias;  // [n] or null
    char *y;           // [m, n], or [m, n / 2] when gated
    int64_t m, n, k, x_stride, y_stride;  // strides in elements
    bool gated;
};

struct Rope {
    char *qkv;                 // [rows, (heads + 2 kv_heads) * dim]
    const int64_t *positions;  // [rows]
    const float *cos_sin;      // [positions, dim]
    const int64_t *slots;      // [rows]
    char *k_cache, *v_cache;
    const char *q_norm, *k_norm;  // [dim] or null
    int64_t rows, heads, kv_heads, dim, block_size;
    float eps;
};

struct Attention {
    const char *q;  // [tokens, heads, dim], rows q_stride apart (in elements)
    const char *k_cache, *v_cache;
    const int32_t *block_tables;  // [seqs, table_stride]
    const int32_t *query_start;   // [seqs + 1]
    const int32_t *context_lens;  // [seqs]
    char *out;                    // [tokens, heads, dim]
    float *partials;              // [decode tasks, group, dim + 2]
    int64_t q_stride, table_stride, seqs, decodes, heads, kv_heads, dim, block_size, window;
    float scale;
};

template <typename T> void linear(const Linear &p);

// [rows, dim]; out may be x
template <typename T> void rms_norm(const T *x, const T *weight, T *out, int64_t rows, int64_t dim, float eps);

// residual += x; out = rms_norm(residual), which may be x
template <typename T>
void add_rms_norm(const T *x, T *residual, const T *weight, T *out, int64_t rows, int64_t dim, float eps);

// rotates q and k in place, writes k and v into the cache
template <typename T> void rope_and_cache(const Rope &r);

// decodes: each segment on its own; then, when all threads are done, each sequence's segments are combined in order
template <typename T> void attend_segments(const Attention &a);
template <typename T> void combine_segments(const Attention &a);
