// What amx.cpp computes, with tiles in plain C++ and everything else with AVX2: so that machines without AMX test it.
#pragma GCC target("avx2,fma")
#include "vector_avx2.h"
#include "emulated_tiles.h"
#include "kernel_set.h"

namespace {

struct AmxEmulated : WidenedBf16 {
    typedef TiledBf16<EmulatedTiles> Tiled;
    static constexpr bool HAS_TILES = true;
};

}  // namespace

extern const Kernels AMX_EMULATED_BF16 = kernels_of<AmxEmulated>();
