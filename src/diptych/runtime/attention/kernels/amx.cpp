// bf16 with the tiles of AMX, and with the dot products of AVX512_BF16 for shapes that do not fill them.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")
#define HAS_AVX512_BF16
#include "vector_avx512.h"
#include "amx_tiles.h"
#include "kernel_set.h"
#include "quantized_tiles.h"

namespace {

struct Amx : DotBf16 {
    typedef TiledBf16<AmxTiles> Tiled;
    static constexpr bool HAS_TILES = true;
};

}  // namespace

extern const Kernels AMX_BF16 = kernels_of<Amx>();

void quantized_amx(const Linear &p, const Team &team) {
    quantized_tiled_linear<bf16, AmxTiles>(p, team, QUANTIZED_AVX512_VNNI.bf16);
}
