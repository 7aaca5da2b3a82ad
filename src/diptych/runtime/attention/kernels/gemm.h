// y = x W^T (+ bias), with W packed once into panels of 32 columns. One packed copy serves one row (limited by reading W)
// and thousands (limited by multiplying): a panel is read from memory once per call and stays in the cache while all
// rows pass it. Each result is one accumulator summed along K in order, so that a row's result is bitwise the same for
// every number of rows.
//
// Packed: [ceil(N / 32)][K / LANES][2][16] units. For the gated form (activation(gate) * up) a panel holds 16 gate columns and
// the 16 up columns that belong to them, and the bias lies in that order, too, with room for all columns of the last panel.
#pragma once
#include <omp.h>

#include <cstdlib>

#include "barrier.h"
#include "exponential.h"
#include "tiles.h"

namespace {

// memory that grows; it keeps what was there until it does
struct GrowingMemory {
    char *memory = nullptr;
    int64_t size = 0;

    ALWAYS_INLINE char *of(int64_t bytes) {
        if (bytes > size) {
            free(memory);
            size = (bytes + 4095) / 4096 * 4096;
            memory = (char *)aligned_alloc(64, size);
            memset(memory, 0, size);
        }
        return memory;
    }
};

// of this thread, for rows that must be copied before they are multiplied
static char *staging(int64_t bytes) {
    static thread_local GrowingMemory memory;
    return memory.of(bytes);
}

// where the results of a panel go: 32 columns, or 16 of gates and the 16 they belong to
template <typename T, bool GATED> class Columns {
  public:
    ALWAYS_INLINE Columns(const Linear &p, int64_t panel) {
        const int64_t column = panel * (GATED ? 16 : 32);
        count_ = (GATED ? p.n / 2 : p.n) - column;
        y_ = (T *)p.y + column;
        stride_ = p.y_stride;
        gate_ = p.gate;
        left_bias_ = right_bias_ = zeros();
        if (!p.weight.bias) return;
        const T *bias = (const T *)p.weight.bias + panel * 32;
        left_bias_ = load(bias, count_);
        if (GATED || count_ > 16) right_bias_ = load(bias + 16, GATED ? count_ : count_ - 16);
    }
    ALWAYS_INLINE void put(int64_t row, Vec left, Vec right) const {
        T *y = y_ + row * stride_;
        if (GATED) return store(y, gated(left + left_bias_, right + right_bias_, gate_), count_);
        store(y, left + left_bias_, count_);
        if (count_ > 16) store(y + 16, right + right_bias_, count_ - 16);
    }

  private:
    T *y_;
    int64_t stride_, count_;
    Gate gate_;
    Vec left_bias_, right_bias_;
};

// bytes that rows in whole numbers take at most, with a scale and two sums for each 32 elements: see quantized_gemm.h
INLINE int64_t quantized_bytes(int64_t rows, int64_t k) {
    return (rows + 31) / 32 * 32 * (k * 2 + 64) + rows * (k / 32 + 1) * 12;
}

// the memory of a Team, for a call of this thread
static char *team_memory(int64_t rows, int64_t k) {
    static thread_local GrowingMemory memory;
    return memory.of(quantized_bytes(rows, k));
}

template <class S> struct Rows {
    const typename S::Factor *x;
    int64_t stride;  // elements
};

// rows [row, end) as factors
template <class S>
INLINE Rows<S> factors_of(const Linear &p, int64_t row, int64_t end) {
    typedef typename S::T T;
    typedef typename S::Factor Factor;
    const T *x = (const T *)p.x + row * p.x_stride;
    if constexpr (sizeof(Factor) == sizeof(T)) {
        return {x, p.x_stride};
    } else {
        Factor *copy = (Factor *)staging((end - row) * p.k * sizeof(Factor));
        for (int64_t i = 0; i < end - row; i++)
            for (int64_t k = 0; k < p.k; k += 16)
                store(copy + i * p.k + k, load(x + i * p.x_stride + k, p.k - k), p.k - k);
        return {copy, p.k};
    }
}

template <class S, int R, bool GATED>
INLINE void tile(const Linear &p, const typename S::Factor *x, int64_t stride, int64_t row, int64_t panel) {
    constexpr int HALVES = MANY_REGISTERS || R <= 2 ? 2 : 1;
    const int64_t units = p.k / S::LANES;
    Vec results[R][2];
    for (int half = 0; half < 2; half += HALVES) {
        const char *w = p.weight.w + panel * units * 128 + half * 64;
        Vec sum[R][HALVES];
        clear(sum);
        for (int64_t u = 0; u < units; u++, w += 128) {
            multiply_add<S>(
                sum, [&](int i) { return x + i * stride + u * S::LANES; }, [&](int c) { return w + c * 64; });
            if (R <= 4) {  // limited by memory: ask for what is needed soon
                _mm_prefetch(w + 2048, _MM_HINT_T0);
                _mm_prefetch(w + 2112, _MM_HINT_T0);
            }
        }
        for (int i = 0; i < R; i++)
            for (int c = 0; c < HALVES; c++) results[i][half + c] = sum[i][c];
    }
    const Columns<typename S::T, GATED> columns(p, panel);
#pragma GCC unroll 12
    for (int i = 0; i < R; i++) columns.put(row + i, results[i][0], results[i][1]);
}

template <class S, bool GATED>
void pass_panel(const Linear &p, Rows<S> rows, int64_t row, int64_t end, int64_t panel) {
    for (; row < end; row += S::GEMM_ROWS, rows.x += S::GEMM_ROWS * rows.stride)
        with_rows<S::GEMM_ROWS>(end - row, [&](auto count) {
            tile<S, decltype(count)::value, GATED>(p, rows.x, rows.stride, row, panel);
        });
}

// rows [row, row + count) of one panel through tiles; x holds 32 rows, or 16 unless TWO. fetches: the panel is not yet
// in the cache
template <class Tiles, bool GATED, bool TWO>
INLINE void tile_rows(const Linear &p, Tiles &tiles, const char *x, int64_t stride, int64_t row, int count,
                      int64_t panel, bool fetches) {
    const char *w = p.weight.w + panel * p.k * 64;
    multiply_tiles<TWO>(tiles, x, stride, p.k / 32, [&](int64_t step) -> TileUnits {
        const char *units = w + step * 2048;
        if (fetches)
            for (int line = 0; line < 32; line++) _mm_prefetch(units + 4096 + line * 64, _MM_HINT_T0);
        return {units, units + 64, 128};
    });
    alignas(64) float sum[32][32];
    store_tiles<TWO>(tiles, sum[0], 32);
    const Columns<bf16, GATED> columns(p, panel);
    for (int i = 0; i < count; i++) columns.put(row + i, load(sum[i]), load(sum[i] + 16));
}

// rest: the last rows of the call that do not fill a tile, with room behind them
template <class Tiles, bool GATED>
void pass_panel_tiled(const Linear &p, Tiles &tiles, const char *rest, int64_t row, int64_t end,
                      int64_t panel) {
    bool fetches = true;
    for (; row + 32 <= end; row += 32, fetches = false)
        tile_rows<Tiles, GATED, true>(p, tiles, p.x + row * p.x_stride * 2, p.x_stride * 2, row, 32, panel, fetches);
    const int count = (int)(end - row);
    if (count > 16)
        tile_rows<Tiles, GATED, true>(p, tiles, rest, p.k * 2, row, count, panel, fetches);
    else if (count > 0)
        tile_rows<Tiles, GATED, false>(p, tiles, rest, p.k * 2, row, count, panel, fetches);
}

// pass(first row, end, panel range) for this thread's share of the work. A task is a chunk of rows against a group of
// panels: the rows stay in the L2 cache, the panels pass by. The next task shares with it what is larger
template <int CHUNK, typename F>
INLINE void share(const Linear &p, int64_t group, F pass) {
    const int64_t panels = (p.n + 31) / 32, chunks = (p.m + CHUNK - 1) / CHUNK, groups = (panels + group - 1) / group;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t task = 0; task < groups * chunks; task++) {
        const bool keeps_rows = group * 32 < CHUNK;
        const int64_t row = (keeps_rows ? task / groups : task % chunks) * CHUNK, end = minimum(row + CHUNK, p.m);
        const int64_t first = (keeps_rows ? task % groups : task / chunks) * group, last = minimum(first + group, panels);
        pass(row, end, first, last);
    }
}

template <class S, bool GATED>
void gemm(const Linear &p) {
    const int64_t panels = (p.n + 31) / 32;
    if (p.m <= S::CHUNK) {
        const Rows<S> rows = factors_of<S>(p, 0, p.m);
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < panels; panel++) pass_panel<S, GATED>(p, rows, 0, p.m, panel);
        return;
    }
    constexpr int64_t FEW = sizeof(typename S::Factor) == sizeof(typename S::T) ? 1 : 4;  // rows are copied for each task
    share<S::CHUNK>(p, panels < 64 ? FEW : 8, [&](int64_t row, int64_t end, int64_t first, int64_t last) {
        const Rows<S> rows = factors_of<S>(p, row, end);
        for (int64_t panel = first; panel < last; panel++) pass_panel<S, GATED>(p, rows, row, end, panel);
    });
}

template <class Tiles, bool GATED>
void gemm_tiled(const Linear &p) {
    constexpr int CHUNK = 128;
    const int64_t panels = (p.n + 31) / 32, rest = p.m % 32;
    char *copy = rest ? staging(32 * p.k * 2) : nullptr;
    for (int64_t i = 0; i < rest; i++)
        memcpy(copy + i * p.k * 2, p.x + (p.m - rest + i) * p.x_stride * 2, p.k * 2);
    Tiles tiles;
    if (p.m <= CHUNK) {
#pragma omp for schedule(static) nowait
        for (int64_t panel = 0; panel < panels; panel++) pass_panel_tiled<Tiles, GATED>(p, tiles, copy, 0, p.m, panel);
        return;
    }
    share<CHUNK>(p, panels < 64 ? 4 : 16, [&](int64_t row, int64_t end, int64_t first, int64_t last) {
        for (int64_t panel = first; panel < last; panel++)
            pass_panel_tiled<Tiles, GATED>(p, tiles, copy, row, end, panel);
    });
}

// for a team of threads: see decode_step.h. Which arithmetic computes a layer depends on its K, never on the rows
template <class S>
void linear(const Linear &p) {
    if constexpr (S::HAS_TILES) {
        typedef typename S::Tiled::Tiles Tiles;
        if (p.k % 32 == 0) return p.gate ? gemm_tiled<Tiles, true>(p) : gemm_tiled<Tiles, false>(p);
    }
    p.gate ? gemm<S, true>(p) : gemm<S, false>(p);
}

constexpr int64_t QUANTIZED_ROWS = 1024;  // at once: they are kept twice

template <class S>
void run_quantized_linear(const Kernels &kernels, const Linear &p) {
    typedef typename S::T T;
    for (int64_t row = 0; row < p.m; row += QUANTIZED_ROWS) {
        Linear part = p;
        part.m = minimum(QUANTIZED_ROWS, p.m - row);
        part.x += row * p.x_stride * sizeof(T);
        part.y += row * p.y_stride * sizeof(T);
        Barrier barrier;
        char *memory = team_memory(part.m, p.k);
#pragma omp parallel
        {
            Meeting meeting{&barrier, omp_get_num_threads()};
            kernels.quantized(part, {memory, &meeting, wait_at_meeting});
        }
    }
}

template <class S>
void run_linear(const Kernels &kernels, const Linear &p) {
    if (p.weight.bits) return run_quantized_linear<S>(kernels, p);
#pragma omp parallel
    linear<S>(p);
}

}  // namespace
