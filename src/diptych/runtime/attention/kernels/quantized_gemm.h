// y = x W^T (+ bias) with W in whole numbers of 8 or 4 bits, and rows of x that are quantised to 8 bits when they come: one
// scale for each span, because a row of a real model has a few elements that are far larger than the others. Products of
// whole numbers are summed in 32-bit integers, which are exact, and the sums are scaled and added in order: a row's result
// is bitwise the same in every batch and with every instruction set.
//
// Packed: panels of 32 columns as in gemm.h. A panel holds its groups of K one after the other: units of 32 bits
// [group / elements of a unit][2][16], then 32 scales and, where the format has them, 32 mins: fp16, or fp32 where a row
// is one group. A unit of 8 bits holds 4 elements; one of 4 bits holds 8, the first four in the lower halves of its bytes.
#pragma once
#include "gemm.h"
#include "whole_numbers.h"

namespace {

// How a row is cut. A piece is summed in integers: a group of W that has scales of its own, or a span. A span of groups is
// as many as fit into 128 elements, at least one; where W has no groups, it is 256 elements (half of it would cost tiles
// much of their speed), and the last one of a row may be shorter.
struct Cut {
    static constexpr int64_t SPAN = 256, SPAN_OF_GROUPS = 128;
    int64_t k, piece, span;
    int32_t offset;  // what is subtracted from each number of W, negated
    bool is_grouped;

    ALWAYS_INLINE Cut(const Linear &p) : k(p.k), is_grouped(p.weight.group != p.k || p.weight.has_mins) {
        offset = p.weight.has_mins ? 0 : p.weight.bits == 8 ? -128 : -8;
        piece = is_grouped ? p.weight.group : SPAN;
        span = is_grouped ? maximum(piece, SPAN_OF_GROUPS / piece * piece) : SPAN;
    }
    ALWAYS_INLINE int64_t pieces() const { return (k + piece - 1) / piece; }
    ALWAYS_INLINE int64_t spans() const { return (k + span - 1) / span; }
    ALWAYS_INLINE int64_t end_of_span(int64_t index) const { return minimum(k, (index + 1) * span); }
};

// rows of x in whole numbers of -127 ... 127. `stride` bytes apart; scales: of each span; starts, sums: of each piece. A
// sum of products begins with the start, which is the sum of the elements times the offset of W; where there is none, but
// mins, these need the sums themselves
struct QuantizedRows {
    char *x;
    int64_t stride, spans, pieces;
    float *scales;
    int32_t *starts, *sums;
};

// in memory of quantized_bytes(rows, k), in the order in which I multiplies; rows that fill tiles are readable
template <class I>
INLINE QuantizedRows lay_out(char *memory, int64_t rows, const Cut &cut) {
    const int64_t stride = (cut.k * I::FACTOR_BYTES + 63) / 64 * 64, readable = (rows + 31) / 32 * 32;
    float *scales = (float *)(memory + readable * stride);
    int32_t *starts = (int32_t *)(scales + rows * cut.spans());
    return {memory, stride, cut.spans(), cut.pieces(), scales, starts, starts + rows * cut.pieces()};
}

// elements [start, end) of a row; returns their scale, which is no number where they hold infinity or no number
template <class I, typename T>
INLINE float quantize_span(const T *x, int64_t start, int64_t end, const Cut &cut, char *out, int32_t *starts,
                           int32_t *sums) {
    Vec largest = zeros(), sound = zeros();
    for (int64_t i = start; i < end; i += 16) {
        const Vec v = load(x + i, end - i);
        largest = larger(largest, larger(v, zeros() - v));
        sound = fmadd(v, zeros(), sound);
    }
    const float limit = largest_of(largest), broken = sum_of(sound);  // 0, or no number
    const bool is_usable = broken == 0.0f && limit > 1e-30f;
    const Vec factor = all(is_usable ? 127.0f / limit : 0.0f);
    for (; start < end; start += cut.piece) {
        Ints sum = no_ints();
        const int64_t last = minimum(end, start + cut.piece);
        for (int64_t i = start; i < last; i += 16) {
            const Ints whole = is_usable ? rounded(load(x + i, last - i) * factor) : no_ints();
            I::put(out + i * I::FACTOR_BYTES, whole);
            sum = add(sum, whole);
        }
        *sums = sum_of(sum);
        *starts++ = *sums++ * cut.offset;
    }
    return is_usable ? limit / 127.0f : broken;
}

template <class I, typename T>
INLINE void quantize_row(const T *x, const Cut &cut, const QuantizedRows &rows, int64_t row) {
    for (int64_t span = 0; span < rows.spans; span++) {
        const int64_t start = span * cut.span, piece = row * rows.pieces + start / cut.piece;
        rows.scales[row * rows.spans + span] =
            quantize_span<I>(x, start, cut.end_of_span(span), cut, rows.x + row * rows.stride, rows.starts + piece,
                             rows.sums + piece);
    }
}

// sum[i][c] += the numbers of a piece times rows i. fetches: they are not yet in the cache
template <class I, int BITS, int R, int C>
INLINE void multiply_piece(Ints (&sum)[R][C], const char *x, int64_t stride, const char *w, int64_t elements,
                           bool fetches) {
    constexpr int PER_UNIT = 32 / BITS, STEP = 4 * I::FACTOR_BYTES;
    for (int64_t u = 0; u < elements / PER_UNIT; u++, w += 128, x += PER_UNIT / 4 * STEP) {
        Ints units[C];
        for (int c = 0; c < C; c++) units[c] = load_ints(w + c * 64);
        if (fetches) {
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

// R rows of a panel on their way along K; vectors [first, first + C) of the panel
template <class I, int BITS, bool GROUPED, int R, int C> struct Walk {
    const Linear &p;
    const QuantizedRows &rows;
    const Cut &cut;
    int64_t row;
    int first;
    const char *w;     // of the next piece
    int64_t step;      // bytes of W from piece to piece
    int64_t piece = 0;

    // the products of the next piece, `elements` long, in 32-bit integers
    ALWAYS_INLINE void multiply(Ints (&sum)[R][C], int64_t elements) {
        for (int i = 0; i < R; i++)
            for (int c = 0; c < C; c++) sum[i][c] = all_ints(rows.starts[(row + i) * rows.pieces + piece]);
        multiply_piece<I, BITS>(sum, rows.x + row * rows.stride + piece * cut.piece * I::FACTOR_BYTES, rows.stride,
                                w + first * 64, elements, row == 0);
    }
    // the sum of a span, before the scales of rows; with the scales of W where it is grouped
    ALWAYS_INLINE void sum_span(Vec (&total)[R][C], int64_t start, int64_t end) {
        Ints sum[R][C];
        if constexpr (!GROUPED) {
            multiply(sum, end - start);
            for (int i = 0; i < R; i++)
                for (int c = 0; c < C; c++) total[i][c] = to_floats(sum[i][c]);
            w += step, piece++;
        } else {
            clear(total);
            for (; start < end; start += cut.piece, w += step, piece++) {
                multiply(sum, cut.piece);
                add_scaled(sum, total);
            }
        }
    }
    ALWAYS_INLINE void add_scaled(const Ints (&sum)[R][C], Vec (&total)[R][C]) {
        const bool is_fp32 = p.weight.group == p.k;
        const char *scales = w + numbers_bytes(p.weight.group, BITS);
        for (int c = 0; c < C; c++) {
            const Vec scale = load_scales(scales, first + c, is_fp32);
            for (int i = 0; i < R; i++) total[i][c] = fmadd(to_floats(sum[i][c]), scale, total[i][c]);
            if (!p.weight.has_mins) continue;
            const Vec least = load_scales(scales + scales_bytes(p.weight, p.k), first + c, is_fp32);
            for (int i = 0; i < R; i++)
                total[i][c] = fnmadd(least, all((float)rows.sums[(row + i) * rows.pieces + piece]), total[i][c]);
        }
    }
};

// vectors [first, first + C) of one panel for R rows
template <class I, int BITS, bool GROUPED, int R, int C>
INLINE void quantized_columns(const Linear &p, const QuantizedRows &rows, const Cut &cut, int64_t row, int64_t panel,
                              int first, Vec (&result)[R][2]) {
    const int64_t step = GROUPED ? group_bytes(p.weight, p.k) : numbers_bytes(cut.piece, BITS);
    const char *w = p.weight.w + panel * panel_bytes(p.weight, p.k);
    Walk<I, BITS, GROUPED, R, C> walk{p, rows, cut, row, first, w, step};
    Vec sum[R][C];
    clear(sum);
    for (int64_t span = 0; span < rows.spans; span++) {
        Vec total[R][C];
        walk.sum_span(total, span * cut.span, cut.end_of_span(span));
        for (int i = 0; i < R; i++) {
            const Vec scale = all(rows.scales[(row + i) * rows.spans + span]);
            for (int c = 0; c < C; c++) sum[i][c] = fmadd(total[i][c], scale, sum[i][c]);
        }
    }
    for (int c = 0; c < C; c++) {
        if constexpr (!GROUPED) {
            const Vec scale = load_scales(w + numbers_bytes(p.k, BITS), first + c, true);
            for (int i = 0; i < R; i++) sum[i][c] = sum[i][c] * scale;
        }
        for (int i = 0; i < R; i++) result[i][first + c] = sum[i][c];
    }
}

template <class I, typename T, int BITS, bool GROUPED, int R>
INLINE void quantized_tile(const Linear &p, const QuantizedRows &rows, const Cut &cut, int64_t row, int64_t panel) {
    constexpr int C = MANY_REGISTERS || R == 1 ? 2 : 1;
    Vec result[R][2];
    for (int first = 0; first < 2; first += C)
        quantized_columns<I, BITS, GROUPED, R, C>(p, rows, cut, row, panel, first, result);
    auto put = [&](auto columns) {
        for (int i = 0; i < R; i++) columns.put(row + i, result[i][0], result[i][1]);
    };
    p.gate ? put(Columns<T, true>(p, panel)) : put(Columns<T, false>(p, panel));
}

template <class I, typename T, int BITS, bool GROUPED>
void pass_quantized_panel(const Linear &p, const QuantizedRows &rows, const Cut &cut, int64_t row, int64_t end,
                          int64_t panel) {
    constexpr int ROWS = GROUPED ? I::GROUPED_ROWS : I::ROWS;
    for (; row < end; row += ROWS)
        with_rows<ROWS>(end - row, [&](auto count) {
            quantized_tile<I, T, BITS, GROUPED, decltype(count)::value>(p, rows, cut, row, panel);
        });
}

template <class I, typename T>
void pass_quantized_panels(const Linear &p, const QuantizedRows &rows, int64_t row, int64_t end, int64_t first,
                           int64_t last) {
    const Cut cut(p);
    for (int64_t panel = first; panel < last; panel++) {
        if (p.weight.bits == 8)
            cut.is_grouped ? pass_quantized_panel<I, T, 8, true>(p, rows, cut, row, end, panel)
                           : pass_quantized_panel<I, T, 8, false>(p, rows, cut, row, end, panel);
        else
            cut.is_grouped ? pass_quantized_panel<I, T, 4, true>(p, rows, cut, row, end, panel)
                           : pass_quantized_panel<I, T, 4, false>(p, rows, cut, row, end, panel);
    }
}

// the rows of the call in whole numbers. Few rows: each thread makes its own; else all make them together and wait
template <class I, typename T>
INLINE QuantizedRows quantize_rows(const Linear &p, const Team &team) {
    constexpr int64_t FEW = 4;
    const Cut cut(p);
    const T *x = (const T *)p.x;
    if (p.m < FEW) {
        const QuantizedRows rows = lay_out<I>(staging(quantized_bytes(p.m, p.k)), p.m, cut);
        for (int64_t row = 0; row < p.m; row++) quantize_row<I>(x + row * p.x_stride, cut, rows, row);
        return rows;
    }
    const QuantizedRows rows = lay_out<I>(team.memory, p.m, cut);
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < p.m; row++) quantize_row<I>(x + row * p.x_stride, cut, rows, row);
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
