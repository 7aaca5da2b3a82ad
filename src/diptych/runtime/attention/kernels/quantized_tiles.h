// Weights of 8 bits with one scale per row through tiles; the others as the set without tiles computes them.
#pragma once
#include "quantized_gemm.h"

namespace {

template <class T> struct TilesOfBytes : T {
    ALWAYS_INLINE TilesOfBytes() {}  // written out: compilers make one for another target
    ALWAYS_INLINE ~TilesOfBytes() {}
    template <int SUM, int A, int B> ALWAYS_INLINE void dot(Number<SUM> sum, Number<A> rows, Number<B> units) {
        T::dot_bytes(sum, rows, units);
    }
};

// the order of rows that are loaded as tiles
struct Bytes {
    static constexpr int FACTOR_BYTES = 1;
    INLINE void put(char *out, Ints whole) { store_bytes(out, whole); }
};

// sum += a span's results [32][32] for the first `count` rows, as quantized_columns adds them
INLINE void add_span(const int32_t (&results)[32][32], const QuantizedRows &rows, int64_t row, int count, int64_t span,
                     float (&sum)[32][32]) {
    for (int i = 0; i < count; i++) {
        const Ints start = all_ints(rows.starts[(row + i) * rows.pieces + span]);
        const Vec scale = all(rows.scales[(row + i) * rows.spans + span]);
        for (int column = 0; column < 32; column += 16) {
            const Vec total = to_floats(add(start, load_ints((const char *)(results[i] + column))));
            store(sum[i] + column, fmadd(total, scale, load(sum[i] + column)));
        }
    }
}

template <typename T, bool GATED, bool TWO, class Tiles>
INLINE void quantized_tile_rows(const Linear &p, Tiles &tiles, const QuantizedRows &rows, const Cut &cut, int64_t row,
                                int count, int64_t panel) {
    const char *w = p.weight.w + panel * panel_bytes(p.weight, p.k);
    alignas(64) float sum[32][32] = {};
    alignas(64) int32_t results[32][32];
    for (int64_t span = 0; span < rows.spans; span++) {
        const int64_t start = span * cut.span;
        const char *x = rows.x + row * rows.stride + start;
        multiply_tiles<TWO>(tiles, x, rows.stride, (cut.end_of_span(span) - start) / 64, [&](int64_t step) -> TileUnits {
            const char *units = w + start * 32 + step * 2048;
            if (row == 0)
                for (int line = 0; line < 32; line++) _mm_prefetch(units + 4096 + line * 64, _MM_HINT_T0);
            return {units, units + 64, 128};
        });
        store_tiles<TWO>(tiles, results, 32);
        add_span(results, rows, row, count, span, sum);
    }
    const Columns<T, GATED> columns(p, panel);
    const Vec left = load_scales(w + p.k * 32, 0, true), right = load_scales(w + p.k * 32, 1, true);
    for (int i = 0; i < count; i++) columns.put(row + i, load(sum[i]) * left, load(sum[i] + 16) * right);
}

template <typename T, bool GATED, class Tiles>
void pass_quantized_tiles(const Linear &p, Tiles &tiles, const QuantizedRows &rows, int64_t row, int64_t end,
                          int64_t panel) {
    const Cut cut(p);
    for (; row < end; row += 32) {
        const int count = end - row < 32 ? (int)(end - row) : 32;
        if (count > 16)
            quantized_tile_rows<T, GATED, true>(p, tiles, rows, cut, row, count, panel);
        else
            quantized_tile_rows<T, GATED, false>(p, tiles, rows, cut, row, count, panel);
    }
}

// for a team of threads; others: computes what does not fill tiles
template <typename T, class Tiles>
INLINE void quantized_tiled_linear(const Linear &p, const Team &team, TeamLinear *others) {
    if (p.weight.bits != 8 || p.weight.group != p.k || p.weight.has_mins || p.k % 64) return others(p, team);
    const QuantizedRows rows = quantize_rows<Bytes, T>(p, team);
    TilesOfBytes<Tiles> tiles;
    share_panels<128>(p, [&](int64_t row, int64_t end, int64_t first, int64_t last) {
        for (int64_t panel = first; panel < last; panel++)
            p.gate ? pass_quantized_tiles<T, true>(p, tiles, rows, row, end, panel)
                    : pass_quantized_tiles<T, false>(p, tiles, rows, row, end, panel);
    });
}

}  // namespace
