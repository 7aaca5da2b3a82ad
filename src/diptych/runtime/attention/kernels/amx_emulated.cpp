// What amx.cpp computes, with tiles in plain C++ and everything else with AVX2: so that machines without AMX test it.
#pragma GCC target("avx2,fma,f16c")
#include "vector_avx2.h"
#include "emulated_tiles.h"
#include "kernel_set.h"
#include "quantized_tiles.h"

namespace {

struct AmxEmulated : WidenedBf16 {
    typedef TiledBf16<EmulatedTiles> Tiled;
    static constexpr bool HAS_TILES = true;
};

}  // namespace

extern const Kernels AMX_EMULATED_BF16 = kernels_of<AmxEmulated>();

void quantized_amx_emulated(const Linear &p, const Team &team) {
    quantized_tiled_linear<bf16, EmulatedTiles>(p, team, QUANTIZED_AVX2.bf16);
}
