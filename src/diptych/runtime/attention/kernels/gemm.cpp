// y = x W^T (+ bias), with W packed once into panels of 32 columns. One packed copy serves one row (limited by reading W)
// and thousands (limited by multiplying): a panel is read from memory once per call and stays in the cache while all
// rows pass it. Each result is one accumulator summed along K in order, so that a row's result is bitwise the same for
// every number of rows.
//
// Packed: [ceil(N / 32)][K / LANES][2][16] units. For the gated form (silu(gate) * up) a panel holds 16 gate columns and
// the 16 up columns that belong to them, and its 16 results are finished in registers.
#include "kernels.h"

namespace {

constexpr int ROWS = 12;   // rows of a tile: 24 accumulators, 2 weights, 1 broadcast
constexpr int CHUNK = 96;  // rows of a task

template <typename T, int R, bool GATED>
INLINE void tile(const Linear &p, int64_t row, int64_t panel) {
    using U = Unit<T>;
    const int64_t units = p.k / U::LANES;
    const T *x = (const T *)p.x + row * p.x_stride;
    const char *w = p.w + panel * units * 128;
    __m512 sum[R][2];
    for (int i = 0; i < R; i++) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t u = 0; u < units; u++) {
        const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
        if (R <= 4) {  // limited by memory: ask for what is needed soon
            _mm_prefetch(w + 2048, _MM_HINT_T0);
            _mm_prefetch(w + 2112, _MM_HINT_T0);
        }
        w += 128;
#pragma GCC unroll 12
        for (int i = 0; i < R; i++) {
            const __m512i a = broadcast_unit(x + i * p.x_stride + u * U::LANES);
            sum[i][0] = U::mul_add(sum[i][0], a, w0);
            sum[i][1] = U::mul_add(sum[i][1], a, w1);
        }
    }
    const int64_t column = panel * (GATED ? 16 : 32);
    for (int half = 0; half < (GATED ? 1 : 2); half++) {
        const int64_t first = column + 16 * half, left = (GATED ? p.n / 2 : p.n) - first;
        if (left <= 0) break;
        const __mmask16 mask = tail_mask(left);
        for (int i = 0; i < R; i++) {
            __m512 value = sum[i][half];
            if (GATED) {
                const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_max_ps(sum[i][0], _mm512_set1_ps(-80.f))));
                value = _mm512_mul_ps(_mm512_div_ps(sum[i][0], _mm512_add_ps(_mm512_set1_ps(1.f), e)), sum[i][1]);
            } else if (p.bias) {
                value = _mm512_add_ps(value, U::load((const T *)p.bias + first, mask));
            }
            U::store((T *)p.y + (row + i) * p.y_stride + first, mask, value);
        }
    }
}

template <typename T, bool GATED>
void rows(const Linear &p, int64_t row, int64_t end, int64_t panel) {
    for (; row + ROWS <= end; row += ROWS) tile<T, ROWS, GATED>(p, row, panel);
    switch (end - row) {
        case 11: return tile<T, 11, GATED>(p, row, panel);
        case 10: return tile<T, 10, GATED>(p, row, panel);
        case 9: return tile<T, 9, GATED>(p, row, panel);
        case 8: return tile<T, 8, GATED>(p, row, panel);
        case 7: return tile<T, 7, GATED>(p, row, panel);
        case 6: return tile<T, 6, GATED>(p, row, panel);
        case 5: return tile<T, 5, GATED>(p, row, panel);
        case 4: return tile<T, 4, GATED>(p, row, panel);
        case 3: return tile<T, 3, GATED>(p, row, panel);
        case 2: return tile<T, 2, GATED>(p, row, panel);
        case 1: return tile<T, 1, GATED>(p, row, panel);
    }
}

template <typename T, bool GATED>
void gemm(const Linear &p) {
    const int64_t panels = (p.n + 31) / 32, chunks = (p.m + CHUNK - 1) / CHUNK;
    if (chunks == 1) {
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < panels; panel++) rows<T, GATED>(p, 0, p.m, panel);
        return;
    }
    // a task is a chunk of rows against a few panels: the rows stay in the L2 cache, the panels pass by
    const int64_t group = panels < 64 ? 1 : 8, groups = (panels + group - 1) / group;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < groups * chunks; task++) {
        const int64_t row = task % chunks * CHUNK, end = row + CHUNK < p.m ? row + CHUNK : p.m;
        const int64_t first = task / chunks * group, last = first + group < panels ? first + group : panels;
        for (int64_t panel = first; panel < last; panel++) rows<T, GATED>(p, row, end, panel);
    }
}

// row r of the packed order: where column c of panel p comes from
INLINE int64_t source_row(int64_t panel, int64_t column, int64_t n, bool gated) {
    if (!gated) return panel * 32 + column;
    const int64_t inner = n / 2, c = panel * 16 + column % 16;
    return c >= inner ? n : (column < 16 ? c : inner + c);
}

template <typename T>
void pack(const T *w, T *packed, int64_t n, int64_t k, bool gated) {
    constexpr int L = Unit<T>::LANES;
    const int64_t panels = (n + 31) / 32, units = k / L;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++) {
        T *out = packed + panel * 32 * k;
        for (int64_t column = 0; column < 32; column++) {
            const int64_t row = source_row(panel, column, n, gated);
            for (int64_t u = 0; u < units; u++)
                for (int lane = 0; lane < L; lane++)
                    out[(u * 32 + column) * L + lane] = row < n ? w[row * k + u * L + lane] : (T)0;
        }
    }
}

}  // namespace

template <typename T>
void linear(const Linear &p) {
    p.gated ? gemm<T, true>(p) : gemm<T, false>(p);
}

template void linear<float>(const Linear &);
template void linear<bf16>(const Linear &);

extern "C" {

void diptych_pack(const void *w, void *packed, int64_t n, int64_t k, int64_t gated, int64_t is_bf16) {
    if (is_bf16)
        pack((const bf16 *)w, (bf16 *)packed, n, k, gated);
    else
        pack((const float *)w, (float *)packed, n, k, gated);
}

void diptych_linear(const void *x, const void *w, const void *bias, void *y, int64_t m, int64_t n, int64_t k,
                    int64_t x_stride, int64_t gated, int64_t is_bf16) {
    const Linear p{(const char *)x, (const char *)w, (const char *)bias, (char *)y, m, n, k, x_stride,
                   gated ? n / 2 : n, gated != 0};
#pragma omp parallel
    is_bf16 ? linear<bf16>(p) : linear<float>(p);
}
}
