// Packs weights for gemm.h; the order is the same for every instruction set.
#include "kernels.h"

namespace {

// row r of the packed order: where column c of panel p comes from
int64_t source_row(int64_t panel, int64_t column, int64_t n, bool gated) {
    if (!gated) return panel * 32 + column;
    const int64_t inner = n / 2, c = panel * 16 + column % 16;
    return c >= inner ? n : (column < 16 ? c : inner + c);
}

template <typename T>
void pack_as(const T *w, T *packed, int64_t n, int64_t k, bool gated) {
    constexpr int LANES = 4 / sizeof(T);
    const int64_t panels = (n + 31) / 32, units = k / LANES;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++) {
        T *out = packed + panel * 32 * k;
        for (int64_t column = 0; column < 32; column++) {
            const int64_t row = source_row(panel, column, n, gated);
            for (int64_t u = 0; u < units; u++)
                for (int lane = 0; lane < LANES; lane++)
                    out[(u * 32 + column) * LANES + lane] = row < n ? w[row * k + u * LANES + lane] : (T)0;
        }
    }
}

}  // namespace

// w [n, k] with k a multiple of the lanes of a unit
extern "C" void diptych_pack(const void *w, void *packed, int64_t n, int64_t k, int64_t gated, int64_t is_bf16) {
    if (is_bf16)
        pack_as((const bf16 *)w, (bf16 *)packed, n, k, gated);
    else
        pack_as((const float *)w, (float *)packed, n, k, gated);
}
