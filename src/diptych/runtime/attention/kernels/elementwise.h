// Norms, activation and rotation around attention. Sums are in fp32 and in a fixed order per row.
#pragma once
#include "exponential.h"

namespace {

constexpr int64_t PARALLEL_ROWS = 16;  // below this, waking threads costs more than it saves

template <typename T>
INLINE float inverse_rms(const T *x, int64_t dim, float eps) {
    Vec sum = zeros();
    for (int64_t i = 0; i < dim; i += 16) {
        const Vec v = load(x + i, dim - i);
        sum = fmadd(v, v, sum);
    }
    return 1.0f / __builtin_sqrtf(sum_of(sum) / (float)dim + eps);
}

// the normed value is rounded to T before it is scaled, as the reference implementations do
template <typename T>
INLINE void scale_row(const T *x, const T *weight, T *out, int64_t dim, float inverse) {
    const Vec factor = all(inverse);
    for (int64_t i = 0; i < dim; i += 16) {
        T rounded[16];
        store((T *)rounded, load(x + i, dim - i) * factor);
        store(out + i, load((const T *)rounded) * load(weight + i, dim - i), dim - i);
    }
}

// for a team of threads: see decode_step.h
template <typename T>
void norm(const Norm &p) {
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < p.rows; r++) {
        const T *x = (const T *)p.x + r * p.dim;
        if (p.residual) {
            T *sum = (T *)p.residual + r * p.dim;
            for (int64_t i = 0; i < p.dim; i += 16)
                store(sum + i, load(x + i, p.dim - i) + load((const T *)sum + i, p.dim - i), p.dim - i);
            x = sum;
        }
        scale_row(x, (const T *)p.weight, (T *)p.out + r * p.dim, p.dim, inverse_rms(x, p.dim, p.eps));
    }
}

template <typename T>
void run_norm(const Norm &p) {
#pragma omp parallel if (p.rows >= PARALLEL_ROWS)
    norm<T>(p);
}

template <typename T>
void run_silu_and_mul(const Activation &p) {
#pragma omp parallel for schedule(static) if (p.rows >= PARALLEL_ROWS)
    for (int64_t r = 0; r < p.rows; r++)
        for (int64_t i = 0; i < p.dim; i += 16) {
            const T *gate = (const T *)p.gate_up + r * 2 * p.dim + i;
            const Vec g = load(gate, p.dim - i), u = load(gate + p.dim, p.dim - i);
            store((T *)p.out + r * p.dim + i, silu(g) * u, p.dim - i);
        }
}

template <typename T>
INLINE void rotate(T *head, const float *cos_sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const int64_t count = half - i;
        const Vec a = load((const T *)head + i, count), b = load((const T *)head + half + i, count);
        const Vec c = load(cos_sin + i, count), s = load(cos_sin + half + i, count);
        store(head + i, fmsub(a, c, b * s), count);
        store(head + half + i, fmadd(b, c, a * s), count);
    }
}

// K [blocks, kv_heads, block_size / 16, dim / L, 16, L], V [blocks, kv_heads, block_size / L, dim, L]
template <typename T>
INLINE void write_kv(const Rope &r, int64_t row, int64_t head, const T *k, const T *v) {
    constexpr int L = 4 / sizeof(T);
    const int64_t slot = r.slots[row], block = slot / r.block_size, offset = slot % r.block_size;
    const int64_t base = (block * r.kv_heads + head) * r.block_size * r.dim;
    T *kc = (T *)r.k_cache + base + offset / 16 * 16 * r.dim + offset % 16 * L;
    for (int64_t u = 0; u < r.dim / L; u++) memcpy(kc + u * 16 * L, k + u * L, 4);
    T *vc = (T *)r.v_cache + base + offset / L * L * r.dim;
    if (L == 1) {
        memcpy(vc, v, r.dim * sizeof(T));
        return;
    }
    for (int64_t d = 0; d < r.dim; d++) vc[d * L + offset % L] = v[d];
}

// for a team of threads: see decode_step.h
template <typename T>
void rope_and_cache(const Rope &r) {
    const int64_t width = (r.heads + 2 * r.kv_heads) * r.dim;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < r.rows; row++) {
        T *q = (T *)r.qkv + row * width, *k = q + r.heads * r.dim, *v = k + r.kv_heads * r.dim;
        const float *cos_sin = r.cos_sin + r.positions[row] * r.dim;
        for (int64_t h = 0; h < r.heads + r.kv_heads; h++) {
            T *head = q + h * r.dim;
            const T *norm = (const T *)(h < r.heads ? r.q_norm : r.k_norm);
            if (norm) scale_row((const T *)head, norm, head, r.dim, inverse_rms((const T *)head, r.dim, r.eps));
            rotate(head, cos_sin, r.dim);
        }
        for (int64_t h = 0; h < r.kv_heads; h++) write_kv(r, row, h, k + h * r.dim, v + h * r.dim);
    }
}

template <typename T>
void run_rope_and_cache(const Rope &r) {
#pragma omp parallel if (r.rows >= PARALLEL_ROWS)
    rope_and_cache<T>(r);
}

}  // namespace
