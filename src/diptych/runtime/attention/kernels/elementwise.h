// Norms, activation and rotation around attention. Sums are in fp32 and in a fixed order per row.
#pragma once
#include "arithmetic.h"
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

// rms_norm of a row; when the normed value is rounded is a matter of what the reference implementations do
template <typename T>
INLINE void norm_row(const T *x, const NormWeight &w, T *out, int64_t dim) {
    const Vec factor = all(inverse_rms(x, dim, w.eps));
    if (w.is_wide) {
        const float *weight = (const float *)w.weight;
        for (int64_t i = 0; i < dim; i += 16)
            store(out + i, load(x + i, dim - i) * factor * load(weight + i, dim - i), dim - i);
        return;
    }
    const T *weight = (const T *)w.weight;
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
            const Vec multiplier = all(p.multiplier);
            for (int64_t i = 0; i < p.dim; i += 16)
                store(sum + i, load(x + i, p.dim - i) * multiplier + load((const T *)sum + i, p.dim - i), p.dim - i);
            x = sum;
        }
        if (p.weight.weight) norm_row(x, p.weight, (T *)p.out + r * p.dim, p.dim);
    }
}

template <typename T>
void run_norm(const Norm &p) {
#pragma omp parallel if (p.rows >= PARALLEL_ROWS)
    norm<T>(p);
}

template <typename T>
void run_activate(const Activation &p) {
#pragma omp parallel for schedule(static) if (p.rows >= PARALLEL_ROWS)
    for (int64_t r = 0; r < p.rows; r++)
        for (int64_t i = 0; i < p.dim; i += 16) {
            const T *gate = (const T *)p.gate_up + r * 2 * p.dim + i;
            const Vec g = load(gate, p.dim - i), u = load(gate + p.dim, p.dim - i);
            store((T *)p.out + r * p.dim + i, gated(g, u, p.gate), p.dim - i);
        }
}

// for a team of threads: see decode_step.h
template <typename T>
void gate(const Gating &p) {
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < p.rows; r++) {
        T *x = (T *)p.x + r * p.dim;
        const T *gates = (const T *)p.gate + r * p.dim;
        for (int64_t i = 0; i < p.dim; i += 16)
            store(x + i, load((const T *)x + i, p.dim - i) * sigmoid(load(gates + i, p.dim - i)), p.dim - i);
    }
}

template <typename T>
void run_gate(const Gating &p) {
#pragma omp parallel if (p.rows >= PARALLEL_ROWS)
    gate<T>(p);
}

template <typename T>
void run_softcap(const Softcap &p) {
    const Vec cap = all(p.cap);
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < p.rows; r++) {
        T *x = (T *)p.x + r * p.dim;
        for (int64_t i = 0; i < p.dim; i += 16)
            store(x + i, tanh_ps(load((const T *)x + i, p.dim - i) / cap) * cap, p.dim - i);
    }
}

// the first `rotary` values of a head: pairs are half of it apart
template <typename T>
INLINE void rotate(T *head, const float *cos_sin, int64_t rotary) {
    const int64_t half = rotary / 2;
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

// a row of K or V of one head as whole numbers from -127 to 127: put(d, number) for each of `dim` values. Returns what they
// are multiplied with, which is not a number where one of the values is none, or none that is finite
template <typename T, typename P>
INLINE float put_numbers(const T *x, int64_t dim, P put) {
    Vec most = zeros(), broken = zeros();
    for (int64_t i = 0; i < dim; i += 16) {
        const Vec v = load(x + i, dim - i);
        most = larger(most, larger(v, zeros() - v));
        broken = fmadd(v, zeros(), broken);
    }
    const float largest = largest_of(most);
    const Vec steps = all(largest > 1e-30f ? 127.0f / largest : 0.0f);
    for (int64_t i = 0; i < dim; i += 16) {
        char numbers[16];
        store_bytes(numbers, rounded(load(x + i, dim - i) * steps));
        for (int64_t d = 0; d < minimum(dim - i, 16); d++) put(i + d, numbers[d]);
    }
    return largest / 127.0f + sum_of(broken);
}

template <typename T>
INLINE void write_int8(const Rope &r, int64_t row, int64_t head, const T *k, const T *v) {
    const int64_t slot = r.slots[row], block = slot / r.block_size, offset = slot % r.block_size;
    const int64_t base = (block * r.kv_heads + head) * int8_head_bytes(r.block_size, r.dim);
    const int64_t scales = base + numbers_of_head(r.block_size, r.dim);
    char *kc = r.k_cache + base + offset / 16 * 16 * r.dim + offset % 16 * 2;
    char *vc = r.v_cache + base + offset / 2 * 2 * r.dim + offset % 2;
    ((float *)(r.k_cache + scales))[offset] =
        put_numbers(k, r.dim, [&](int64_t d, char number) { kc[d / 2 * 32 + d % 2] = number; });
    ((float *)(r.v_cache + scales))[offset] =
        put_numbers(v, r.dim, [&](int64_t d, char number) { vc[d * 2] = number; });
}

// for a team of threads: see decode_step.h
template <typename T>
void rope_and_cache(const Rope &r) {
    const int64_t width = (r.heads + 2 * r.kv_heads) * r.dim;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < r.rows; row++) {
        T *q = (T *)r.qkv + row * width, *k = q + r.heads * r.dim, *v = k + r.kv_heads * r.dim;
        const float *cos_sin = r.cos_sin + r.positions[row] * r.rotary;
        if (r.norms_rows) {
            if (r.q_norm.weight) norm_row((const T *)q, r.q_norm, q, r.heads * r.dim);
            if (r.k_norm.weight) norm_row((const T *)k, r.k_norm, k, r.kv_heads * r.dim);
        }
        for (int64_t h = 0; h < r.heads + r.kv_heads; h++) {
            T *head = q + h * r.dim;
            const NormWeight &norm = h < r.heads ? r.q_norm : r.k_norm;
            if (norm.weight && !r.norms_rows) norm_row((const T *)head, norm, head, r.dim);
            rotate(head, cos_sin, r.rotary);
        }
        if (r.query_scale) {
            const Vec scale = all(r.query_scale[r.positions[row]]);
            for (int64_t i = 0; i < r.heads * r.dim; i += 16)
                store(q + i, load((const T *)q + i, r.heads * r.dim - i) * scale, r.heads * r.dim - i);
        }
        for (int64_t h = 0; h < r.kv_heads; h++)
            r.is_int8 ? write_int8(r, row, h, k + h * r.dim, v + h * r.dim)
                      : write_kv(r, row, h, k + h * r.dim, v + h * r.dim);
    }
}

// the row that write_kv has written for all heads: K, then V
template <typename T>
INLINE void read_kv(const InputsCache &cache, int64_t slot, int64_t kv_heads, int64_t dim, int64_t block_size, T *out) {
    constexpr int L = 4 / sizeof(T);
    const int64_t block = slot / block_size, offset = slot % block_size;
    for (int64_t h = 0; h < kv_heads; h++) {
        const int64_t base = (block * kv_heads + h) * block_size * dim;
        const T *kc = (const T *)cache.k_cache + base + offset / 16 * 16 * dim + offset % 16 * L;
        T *k = out + h * dim, *v = k + kv_heads * dim;
        for (int64_t u = 0; u < dim / L; u++) memcpy(k + u * L, kc + u * 16 * L, 4);
        const T *vc = (const T *)cache.v_cache + base + offset / L * L * dim + offset % L;
        for (int64_t d = 0; d < dim; d++) v[d] = vc[d * L];
    }
}

// b * x of a row of b, c and x
template <typename T>
INLINE void gate_inputs(const T *row, T *inputs, int64_t width) {
    for (int64_t i = 0; i < width; i += 16)
        store(inputs + i, load(row + i, width - i) * load(row + 2 * width + i, width - i), width - i);
}

// a row of a convolution; seen: b * x of each tap
template <typename T>
INLINE void convolve_row(const T *const *seen, const T *c, const T *weight, const T *bias, T *out, int64_t width,
                         int64_t taps) {
    for (int64_t i = 0; i < width; i += 16) {
        const int64_t count = width - i;
        Vec sum = bias ? load(bias + i, count) : zeros();
        for (int64_t tap = 0; tap < taps; tap++)
            sum = fmadd(load(seen[tap] + i, count), load(weight + tap * width + i, count), sum);
        T rounded[16];
        store((T *)rounded, sum);
        store(out + i, load((const T *)rounded) * load(c + i, count), count);
    }
}

template <typename T>
void run_convolution(const Convolution &p) {
    const T *projected = (const T *)p.projected, *before = (const T *)p.before;
    T *inputs = (T *)p.inputs;
    const int64_t width = p.width, count = p.taps - 1;
#pragma omp parallel if (p.rows >= PARALLEL_ROWS)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < p.rows; r++) gate_inputs(projected + r * 3 * width, inputs + r * width, width);
        int64_t s = 0;  // the sequence of the row
#pragma omp for schedule(static)
        for (int64_t r = 0; r < p.rows; r++) {
            while (p.query_start[s + 1] <= r) s++;
            const T *seen[MAX_TAPS];
            for (int64_t tap = 0; tap <= count; tap++) {
                const int64_t row = r - count + tap, behind_first = row - p.query_start[s];
                seen[tap] = behind_first < 0 ? before + ((s + 1) * count + behind_first) * width : inputs + row * width;
            }
            convolve_row(seen, projected + (3 * r + 1) * width, (const T *)p.weight, (const T *)p.bias,
                         (T *)p.out + r * width, width, p.taps);
        }
    }
}

template <typename T>
void run_rope_and_cache(const Rope &r) {
#pragma omp parallel if (r.rows >= PARALLEL_ROWS)
    rope_and_cache<T>(r);
}

}  // namespace
