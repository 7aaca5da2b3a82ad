// Norms and rotation around attention. Sums are in fp32 and in a fixed order per row.
#include "kernels.h"

namespace {

constexpr int64_t PARALLEL_ROWS = 16;  // below this, waking threads costs more than it saves

template <typename T>
INLINE float inverse_rms(const T *x, int64_t dim, float eps) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < dim; i += 16) {
        const __m512 v = Unit<T>::load(x + i, tail_mask(dim - i));
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / __builtin_sqrtf(_mm512_reduce_add_ps(sum) / (float)dim + eps);
}

// the normed value is rounded to T before it is scaled, as the reference implementations do
template <typename T>
INLINE void scale_row(const T *x, const T *weight, T *out, int64_t dim, float inverse) {
    const __m512 factor = _mm512_set1_ps(inverse);
    for (int64_t i = 0; i < dim; i += 16) {
        const __mmask16 mask = tail_mask(dim - i);
        T rounded[16];
        Unit<T>::store(rounded, _mm512_mul_ps(Unit<T>::load(x + i, mask), factor));
        Unit<T>::store(out + i, mask, _mm512_mul_ps(Unit<T>::load(rounded), Unit<T>::load(weight + i, mask)));
    }
}

}  // namespace

template <typename T>
void rms_norm(const T *x, const T *weight, T *out, int64_t rows, int64_t dim, float eps) {
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < rows; r++)
        scale_row(x + r * dim, weight, out + r * dim, dim, inverse_rms(x + r * dim, dim, eps));
}

template <typename T>
void add_rms_norm(const T *x, T *residual, const T *weight, T *out, int64_t rows, int64_t dim, float eps) {
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < rows; r++) {
        T *sum = residual + r * dim;
        for (int64_t i = 0; i < dim; i += 16) {
            const __mmask16 mask = tail_mask(dim - i);
            const __m512 a = Unit<T>::load(x + r * dim + i, mask), b = Unit<T>::load(sum + i, mask);
            Unit<T>::store(sum + i, mask, _mm512_add_ps(a, b));
        }
        scale_row(sum, weight, out + r * dim, dim, inverse_rms(sum, dim, eps));
    }
}

namespace {

template <typename T>
void silu_and_mul(const T *x, T *out, int64_t rows, int64_t dim) {
#pragma omp parallel for schedule(static) if (rows >= PARALLEL_ROWS)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < dim; i += 16) {
            const __mmask16 mask = tail_mask(dim - i);
            const T *gate = x + r * 2 * dim + i;
            const __m512 g = Unit<T>::load(gate, mask), u = Unit<T>::load(gate + dim, mask);
            const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_max_ps(g, _mm512_set1_ps(-80.f))));
            const __m512 silu = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.f), e));
            Unit<T>::store(out + r * dim + i, mask, _mm512_mul_ps(silu, u));
        }
}

template <typename T>
INLINE void rotate(T *head, const float *cos_sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = tail_mask(half - i);
        const __m512 a = Unit<T>::load(head + i, mask), b = Unit<T>::load(head + half + i, mask);
        const __m512 c = _mm512_maskz_loadu_ps(mask, cos_sin + i), s = _mm512_maskz_loadu_ps(mask, cos_sin + half + i);
        Unit<T>::store(head + i, mask, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        Unit<T>::store(head + half + i, mask, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

// K [blocks, kv_heads, block_size / 16, dim / L, 16, L], V [blocks, kv_heads, block_size / L, dim, L]
template <typename T>
INLINE void write_kv(const Rope &r, int64_t row, int64_t head, const T *k, const T *v) {
    constexpr int L = Unit<T>::LANES;
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

}  // namespace

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
            if (norm) scale_row(head, norm, head, r.dim, inverse_rms(head, r.dim, r.eps));
            rotate(head, cos_sin, r.dim);
        }
        for (int64_t h = 0; h < r.kv_heads; h++) write_kv(r, row, h, k + h * r.dim, v + h * r.dim);
    }
}

#define INSTANTIATE(T)                                                                            \
    template void rms_norm<T>(const T *, const T *, T *, int64_t, int64_t, float);                \
    template void add_rms_norm<T>(const T *, T *, const T *, T *, int64_t, int64_t, float);       \
    template void rope_and_cache<T>(const Rope &);
INSTANTIATE(float)
INSTANTIATE(bf16)

extern "C" {

void diptych_rms_norm(const void *x, const void *weight, void *out, int64_t rows, int64_t dim, float eps, int64_t is_bf16) {
#pragma omp parallel if (rows >= PARALLEL_ROWS)
    if (is_bf16)
        rms_norm((const bf16 *)x, (const bf16 *)weight, (bf16 *)out, rows, dim, eps);
    else
        rms_norm((const float *)x, (const float *)weight, (float *)out, rows, dim, eps);
}

void diptych_add_rms_norm(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t dim,
                          float eps, int64_t is_bf16) {
#pragma omp parallel if (rows >= PARALLEL_ROWS)
    if (is_bf16)
        add_rms_norm((const bf16 *)x, (bf16 *)residual, (const bf16 *)weight, (bf16 *)out, rows, dim, eps);
    else
        add_rms_norm((const float *)x, (float *)residual, (const float *)weight, (float *)out, rows, dim, eps);
}

void diptych_silu_and_mul(const void *x, void *out, int64_t rows, int64_t dim, int64_t is_bf16) {
    if (is_bf16)
        silu_and_mul((const bf16 *)x, (bf16 *)out, rows, dim);
    else
        silu_and_mul((const float *)x, (float *)out, rows, dim);
}

void diptych_rope_and_cache(void *qkv, const int64_t *positions, const float *cos_sin, const int64_t *slots,
                            void *k_cache, void *v_cache, const void *q_norm, const void *k_norm, int64_t rows,
                            int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, float eps,
                            int64_t is_bf16) {
    const Rope r{(char *)qkv, positions, cos_sin, slots, (char *)k_cache, (char *)v_cache, (const char *)q_norm,
                 (const char *)k_norm, rows, heads, kv_heads, dim, block_size, eps};
#pragma omp parallel if (rows >= PARALLEL_ROWS)
    is_bf16 ? rope_and_cache<bf16>(r) : rope_and_cache<float>(r);
}
}
