// Packs weights for gemm.h and quantized_gemm.h, in the same order for every instruction set, and reads rows of them.
#include <cstring>

#include "kernels.h"

namespace {

// row r of the packed order: where column c of panel p comes from
int64_t source_row(int64_t panel, int64_t column, int64_t n, bool gated) {
    if (!gated) return panel * 32 + column;
    const int64_t inner = n / 2, c = panel * 16 + column % 16;
    return c >= inner ? n : (column < 16 ? c : inner + c);
}

int64_t num_panels(int64_t n, bool gated) { return gated ? (n / 2 + 15) / 16 : (n + 31) / 32; }

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

// element e of a group in a column of a weight in whole numbers: its byte, and for 4 bits which half
int64_t byte_of(const Weight &w, int64_t e, int64_t column) { return (e / (32 / w.bits) * 32 + column) * 4 + e % 4; }
bool is_high(const Weight &w, int64_t e) { return w.bits == 4 && e / 4 % 2; }

float from_half(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    uint32_t bits;
    if (exponent == 0) {
        const float value = (float)fraction * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

float scale_at(const char *scales, int64_t column, bool is_fp32) {
    float value;
    uint16_t half;
    if (is_fp32) {
        memcpy(&value, scales + column * 4, 4);
        return value;
    }
    memcpy(&half, scales + column * 2, 2);
    return from_half(half);
}

bf16 to_bf16(float x) {  // of a finite number, to nearest even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void pack_group(const Weight &w, const uint8_t *values, int64_t column, char *out) {
    for (int64_t e = 0; e < w.group; e++)
        out[byte_of(w, e, column)] |= is_high(w, e) ? values[e] << 4 : values[e];
}

float value_at(const Weight &w, int64_t k, const char *group, int64_t e, int64_t column) {
    const uint8_t byte = group[byte_of(w, e, column)];
    const int value = w.bits == 8 ? byte : is_high(w, e) ? byte >> 4 : byte & 15;
    const char *scales = group + numbers_bytes(w.group, w.bits);
    const bool is_fp32 = w.group == k;
    const float scale = scale_at(scales, column, is_fp32);
    if (!w.has_mins) return scale * (float)(value - (w.bits == 8 ? 128 : 8));
    return scale * (float)value - scale_at(scales + scales_bytes(w, k), column, is_fp32);
}

}  // namespace

extern "C" {

// w [n, k] with k a multiple of the lanes of a unit
void diptych_pack(const void *w, void *packed, int64_t n, int64_t k, int64_t gated, int64_t is_bf16) {
    if (is_bf16)
        pack_as((const bf16 *)w, (bf16 *)packed, n, k, gated);
    else
        pack_as((const float *)w, (float *)packed, n, k, gated);
}

// bytes of the packed weight
int64_t diptych_quantized_size(int64_t n, int64_t k, int64_t gated, int64_t bits, int64_t group, int64_t has_mins) {
    return num_panels(n, gated) * panel_bytes({nullptr, nullptr, bits, group, has_mins}, k);
}

// values [n, k]; scales, mins (or null) [n, k / group] fp16, or fp32 where a row is one group
void diptych_pack_quantized(const uint8_t *values, const char *scales, const char *mins, char *packed, int64_t n,
                            int64_t k, int64_t gated, int64_t bits, int64_t group) {
    const Weight w{nullptr, nullptr, bits, group, mins != nullptr};
    const int64_t size = scales_bytes(w, k) / 32, groups = k / group, panels = num_panels(n, gated);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++) {
        char *out = packed + panel * panel_bytes(w, k);
        memset(out, 0, panel_bytes(w, k));
        for (int64_t column = 0; column < 32; column++) {
            const int64_t row = source_row(panel, column, n, gated);
            if (row >= n) continue;  // scales of 0
            for (int64_t g = 0; g < groups; g++) {
                char *to = out + g * group_bytes(w, k);
                pack_group(w, values + row * k + g * group, column, to);
                to += numbers_bytes(group, bits) + column * size;
                memcpy(to, scales + (row * groups + g) * size, size);
                if (mins) memcpy(to + scales_bytes(w, k), mins + (row * groups + g) * size, size);
            }
        }
    }
}

// rows `ids` of a weight [n, k] that is not gated, as T: out [count, k]
void diptych_quantized_rows(const Weight *weight, const int64_t *ids, void *out, int64_t count, int64_t k,
                            int64_t is_bf16) {
    const Weight &w = *weight;
#pragma omp parallel for schedule(static) if (count >= 16)
    for (int64_t i = 0; i < count; i++) {
        const char *panel = w.w + ids[i] / 32 * panel_bytes(w, k);
        for (int64_t j = 0; j < k; j++) {
            const char *group = panel + j / w.group * group_bytes(w, k);
            const float value = value_at(w, k, group, j % w.group, ids[i] % 32);
            if (is_bf16)
                ((bf16 *)out)[i * k + j] = to_bf16(value);
            else
                ((float *)out)[i * k + j] = value;
        }
    }
}
}
