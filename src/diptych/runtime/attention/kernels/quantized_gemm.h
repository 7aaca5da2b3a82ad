// y = x W^T (+ bias) with W in whole numbers of 8 or 4 bits, and rows of x that are quantised to 8 bits when they come: one
// scale per row. Products of a group are summed in 32-bit integers, which are exact: a row's result is bitwise the same
// in every batch, and before the scales with every instruction set.
//
// Packed: panels of 32 columns as in gemm.h. A panel holds its groups of K one after the other: units of 32 bits
// [group / elements of a unit][2][16], then 32 scales and, where the format has them, 32 mins: fp16, or fp32 where a row
// is one group. A unit of 8 bits holds 4 elements; one of 4 bits holds 8, the first four in the lower halves of its bytes.
#pragma once
#include "gemm.h"
#include "whole_numbers.h"

namespace {

// bytes of the numbers of a group of `elements`, and of its scales (or mins)
INLINE int64_t numbers_bytes(int64_t elements, int64_t bits) { return elements * 4 * bits; }
INLINE int64_t scales_bytes(const Weight &w, int64_t k) { return w.group == k ? 128 : 64; }
INLINE int64_t group_bytes(const Weight &w, int64_t k) {
    return numbers_bytes(w.group, w.bits) + scales_bytes(w, k) * (w.has_mins ? 2 : 1);
}

// rows of x in whole numbers of -127 ... 127. `stride` bytes apart; sums: of each group
struct QuantizedRows {
    char *x;
    int64_t stride, groups;
    float *scales;
    int32_t *sums;
};

// in memory of quantized_bytes(rows, k), in the order in which I multiplies; rows that fill tiles are readable
template <class I>
INLINE QuantizedRows lay_out(char *memory, int64_t rows, int64_t k, int64_t groups) {
    const int64_t stride = (k * I::FACTOR_BYTES + 63) / 64 * 64, readable = (rows + 31) / 32 * 32;
    float *scales = (float *)(memory + readable * stride);
    return {memory, stride, groups, scales, (int32_t *)(scales + rows)};
}

// a row that holds infinity or no number gets a scale that is no number
template <class I, typename T>
INLINE void quantize_row(const T *x, int64_t k, int64_t group, const QuantizedRows &rows, int64_t row) {
    Vec largest = zeros(), sound = zeros();
    for (int64_t i = 0; i < k; i += 16) {
        const Vec v = load(x + i, k - i);
        largest = larger(largest, larger(v, zeros() - v));
        sound = fmadd(v, zeros(), sound);
    }
    const float limit = largest_of(largest), broken = sum_of(sound);  // 0, or no number
    const bool is_usable = broken == 0.0f && limit > 1e-30f;
    rows.scales[row] = is_usable ? limit / 127.0f : broken;
    const Vec factor = all(is_usable ? 127.0f / limit : 0.0f);
    char *out = rows.x + row * rows.stride;
    for (int64_t g = 0; g < rows.groups; g++) {
        Ints sum = no_ints();
        const int64_t end = (g + 1) * group;
        for (int64_t i = g * group; i < end; i += 16) {
            const Ints whole = is_usable ? rounded(load(x + i, k - i) * factor) : no_ints();
            I::put(out + i * I::FACTOR_BYTES, whole);
            sum = add(sum, whole);
        }
        rows.sums[row * rows.groups + g] = sum_of(sum);
    }
}

// sum[i][c] += the numbers of a group times rows i
template <class I, int BITS, int R, int C>
INLINE void multiply_group(Ints (&sum)[R][C], const char *x, int64_t stride, const char *w, int64_t elements) {
    constexpr int PER_UNIT = 32 / BITS, STEP = 4 * I::FACTOR_BYTES;
    for (int64_t u = 0; u < elements / PER_UNIT; u++, w += 128, x += PER_UNIT / 4 * STEP) {
        Ints units[C];
        for (int c = 0; c < C; c++) units[c] = load_ints(w + c * 64);
        if (R <= 4) {  // limited by memory: ask for what is needed soon
            _mm_prefetch(w + 2048, _MM_HINT_T0);
            _mm_prefetch(w + 2112, _MM_HINT_T0);
        }
#pragma GCC unroll 2
        for (int part = 0; part < PER_UNIT / 4; part++) {
            typename I::Operand b[C];
            for (int c = 0; c < C; c++)
                b[c] = I::units(BITS == 8 ? units[c] : part == 0 ? low_halves(units[c]) : high_halves(units[c]));
#pragma GCC unroll 12
            for (int i = 0; i < R; i++) {
                const typename I::Factor a = I::broadcast(x + i * stride + part * STEP);
                for (int c = 0; c < C; c++) sum[i][c] = I::mul_add(sum[i][c], b[c], a);
            }
        }
    }
}

INLINE Vec load_scales(const char *p, int64_t vector, bool is_fp32) {
    return is_fp32 ? load((const float *)p + vector * 16) : load_halves(p + vector * 32);
}

// vectors [first, first + C) of one panel for R rows
template <class I, int BITS, bool GROUPED, int R, int C>
INLINE void quantized_columns(const Linear &p, const QuantizedRows &rows, int64_t row, int64_t panel, int first,
                              Vec (&result)[R][2]) {
    const Weight &w = p.weight;
    const int64_t step = group_bytes(w, p.k), offset = w.has_mins ? 0 : BITS == 8 ? 128 : 8;
    const char *group = w.w + panel * step * rows.groups;
    Vec total[R][C];
    if (GROUPED) clear(total);
    for (int64_t g = 0; g < (GROUPED ? rows.groups : 1); g++, group += step) {
        Ints sum[R][C];
        for (int i = 0; i < R; i++)
            for (int c = 0; c < C; c++)
                sum[i][c] = all_ints((int32_t)-offset * rows.sums[(row + i) * rows.groups + g]);
        multiply_group<I, BITS>(sum, rows.x + row * rows.stride + g * w.group * I::FACTOR_BYTES, rows.stride,
                                group + first * 64, w.group);
        const char *scales = group + numbers_bytes(w.group, BITS);
        for (int c = 0; c < C; c++) {
            const Vec scale = load_scales(scales, first + c, !GROUPED);
            for (int i = 0; i < R; i++)
                total[i][c] = GROUPED ? fmadd(to_floats(sum[i][c]), scale, total[i][c]) : to_floats(sum[i][c]) * scale;
            if (!w.has_mins) continue;
            const Vec least = load_scales(scales + (GROUPED ? 64 : 128), first + c, !GROUPED);
            for (int i = 0; i < R; i++)
                total[i][c] = fnmadd(least, all((float)rows.sums[(row + i) * rows.groups + g]), total[i][c]);
        }
    }
    for (int i = 0; i < R; i++)
        for (int c = 0; c < C; c++) result[i][first + c] = total[i][c] * all(rows.scales[row + i]);
}

template <class I, typename T, int BITS, bool GROUPED, int R>
INLINE void quantized_tile(const Linear &p, const QuantizedRows &rows, int64_t row, int64_t panel) {
    constexpr int C = MANY_REGISTERS || R == 1 ? 2 : 1;
    Vec result[R][2];
    for (int first = 0; first < 2; first += C)
        quantized_columns<I, BITS, GROUPED, R, C>(p, rows, row, panel, first, result);
    auto put = [&](auto columns) {
        for (int i = 0; i < R; i++) columns.put(row + i, result[i][0], result[i][1]);
    };
    p.gated ? put(Columns<T, true>(p, panel)) : put(Columns<T, false>(p, panel));
}

template <class I, typename T, int BITS, bool GROUPED>
void pass_quantized_panel(const Linear &p, const QuantizedRows &rows, int64_t row, int64_t end, int64_t panel) {
    constexpr int ROWS = GROUPED ? I::GROUPED_ROWS : I::ROWS;
    for (; row < end; row += ROWS)
        with_rows<ROWS>(end - row, [&](auto count) {
            quantized_tile<I, T, BITS, GROUPED, decltype(count)::value>(p, rows, row, panel);
        });
}

template <class I, typename T>
void pass_quantized_panels(const Linear &p, const QuantizedRows &rows, int64_t row, int64_t end, int64_t first,
                           int64_t last) {
    const bool is_grouped = p.weight.group != p.k;
    for (int64_t panel = first; panel < last; panel++) {
        if (p.weight.bits == 8)
            is_grouped ? pass_quantized_panel<I, T, 8, true>(p, rows, row, end, panel)
                       : pass_quantized_panel<I, T, 8, false>(p, rows, row, end, panel);
        else
            is_grouped ? pass_quantized_panel<I, T, 4, true>(p, rows, row, end, panel)
                       : pass_quantized_panel<I, T, 4, false>(p, rows, row, end, panel);
    }
}

// the rows of the call in whole numbers. Few rows: each thread makes its own; else all make them together and wait
template <class I, typename T>
INLINE QuantizedRows quantize_rows(const Linear &p, const Team &team) {
    constexpr int64_t FEW = 4;
    const int64_t groups = p.k / p.weight.group;
    const T *x = (const T *)p.x;
    if (p.m < FEW) {
        const QuantizedRows rows = lay_out<I>(staging(quantized_bytes(p.m, p.k)), p.m, p.k, groups);
        for (int64_t row = 0; row < p.m; row++) quantize_row<I>(x + row * p.x_stride, p.k, p.weight.group, rows, row);
        return rows;
    }
    const QuantizedRows rows = lay_out<I>(team.memory, p.m, p.k, groups);
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < p.m; row++) quantize_row<I>(x + row * p.x_stride, p.k, p.weight.group, rows, row);
    team.wait(team.barrier);
    return rows;
}

// pass(first row, end, panel range) for this thread's share of the work
template <int CHUNK, typename F>
INLINE void share_panels(const Linear &p, F pass) {
    const int64_t panels = (p.n + 31) / 32;
    if (p.m > CHUNK) return share<CHUNK>(p, panels < 64 ? 1 : 8, pass);
#pragma omp for schedule(static) nowait
    for (int64_t panel = 0; panel < panels; panel++) pass(0, p.m, panel, panel + 1);
}

// for a team of threads: see decode_step.h
template <class I, typename T>
void quantized_linear(const Linear &p, const Team &team) {
    const QuantizedRows rows = quantize_rows<I, T>(p, team);
    share_panels<96>(p, [&](int64_t row, int64_t end, int64_t first, int64_t last) {
        pass_quantized_panels<I, T>(p, rows, row, end, first, last);
    });
}

}  // namespace
