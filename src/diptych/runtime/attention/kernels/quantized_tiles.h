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

template <typename T, bool GATED, bool TWO, class Tiles>
INLINE void quantized_tile_rows(const Linear &p, Tiles &tiles, const QuantizedRows &rows, int64_t row, int count,
                                int64_t panel) {
    const char *w = p.weight.w + panel * group_bytes(p.weight, p.k);
    multiply_tiles<TWO>(tiles, rows.x + row * rows.stride, rows.stride, p.k / 64, [&](int64_t step) -> TileUnits {
        const char *units = w + step * 2048;
        if (row == 0)
            for (int line = 0; line < 32; line++) _mm_prefetch(units + 4096 + line * 64, _MM_HINT_T0);
        return {units, units + 64, 128};
    });
    alignas(64) int32_t sums[32][32];
    store_tiles<TWO>(tiles, sums, 32);
    const Columns<T, GATED> columns(p, panel);
    const Vec left_scale = load_scales(w + p.k * 32, 0, true), right_scale = load_scales(w + p.k * 32, 1, true);
    for (int i = 0; i < count; i++) {
        const Ints start = all_ints(-128 * rows.sums[row + i]);
        const Vec left = to_floats(add(start, load_ints((const char *)sums[i])));
        const Vec right = to_floats(add(start, load_ints((const char *)(sums[i] + 16))));
        const Vec scale = all(rows.scales[row + i]);
        columns.put(row + i, left * left_scale * scale, right * right_scale * scale);
    }
}

template <typename T, bool GATED, class Tiles>
void pass_quantized_tiles(const Linear &p, Tiles &tiles, const QuantizedRows &rows, int64_t row, int64_t end,
                          int64_t panel) {
    for (; row < end; row += 32) {
        const int count = end - row < 32 ? (int)(end - row) : 32;
        if (count > 16)
            quantized_tile_rows<T, GATED, true>(p, tiles, rows, row, count, panel);
        else
            quantized_tile_rows<T, GATED, false>(p, tiles, rows, row, count, panel);
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
            p.gated ? pass_quantized_tiles<T, true>(p, tiles, rows, row, end, panel)
                    : pass_quantized_tiles<T, false>(p, tiles, rows, row, end, panel);
    });
}

}  // namespace
