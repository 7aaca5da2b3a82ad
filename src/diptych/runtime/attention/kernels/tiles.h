// Products of bf16 matrices through tiles: 32 rows x 32 columns of results at a time in four tiles, from two tiles of rows
// and two of units. A row's sums are the same in all of them.
#pragma once
#include "arithmetic.h"

namespace {

// AmxTiles or EmulatedTiles as an arithmetic, see arithmetic.h
template <class T_> struct TiledBf16 {
    typedef bf16 T;
    typedef bf16 Factor;
    typedef T_ Tiles;
    static constexpr int LANES = 2, VECTORS = 64;
    static constexpr bool IS_TILED = true;
};

constexpr Number<0> SUM_00{};
constexpr Number<1> SUM_01{};
constexpr Number<2> SUM_10{};
constexpr Number<3> SUM_11{};
constexpr Number<4> ROWS_0{};
constexpr Number<5> ROWS_1{};
constexpr Number<6> UNITS_0{};
constexpr Number<7> UNITS_1{};

// where the units of one step lie: 16 rows of 16 units for the first 16 columns and as many for the others
struct TileUnits {
    const char *first, *second;
    int64_t stride;  // bytes
};

// sums = rows x units over `steps` of 32 bf16 or 64 bytes. rows: 16, or 32 when TWO, `stride` bytes apart, all readable: what is
// in rows that nobody asked for does not matter. units(step) gives TileUnits.
template <bool TWO, class Tiles, typename U>
INLINE void multiply_tiles(Tiles &tiles, const char *rows, int64_t stride, int64_t steps, U units) {
    tiles.zero(SUM_00);
    tiles.zero(SUM_01);
    if (TWO) {
        tiles.zero(SUM_10);
        tiles.zero(SUM_11);
    }
    for (int64_t step = 0; step < steps; step++, rows += 64) {
        const TileUnits u = units(step);
        tiles.load(ROWS_0, rows, stride);
        tiles.load(UNITS_0, u.first, u.stride);
        tiles.load(UNITS_1, u.second, u.stride);
        tiles.dot(SUM_00, ROWS_0, UNITS_0);
        tiles.dot(SUM_01, ROWS_0, UNITS_1);
        if (TWO) {
            tiles.load(ROWS_1, rows + 16 * stride, stride);
            tiles.dot(SUM_10, ROWS_1, UNITS_0);
            tiles.dot(SUM_11, ROWS_1, UNITS_1);
        }
    }
}

// the results, of 32 bits, rows `stride` elements apart
template <bool TWO, class Tiles>
INLINE void store_tiles(Tiles &tiles, void *results, int64_t stride) {
    float *out = (float *)results;
    tiles.store(SUM_00, out, stride * 4);
    tiles.store(SUM_01, out + 16, stride * 4);
    if (TWO) {
        tiles.store(SUM_10, out + 16 * stride, stride * 4);
        tiles.store(SUM_11, out + 16 * stride + 16, stride * 4);
    }
}

}  // namespace
