// Causal attention over the paged KV cache, read in place, for one new token or thousands.
//
// Keys are taken in segments of 256 tokens that begin at multiples of 256. For each query vector, a segment gives a
// maximum, a sum and a weighted sum of values; segments are combined in order. The arithmetic of one query vector is
// the same whether it is alone (decode, where segments of one sequence may run on different threads) or in a tile with
// others (prefill), and however the prompt was cut into chunks: results are bitwise equal.
//
// Memory is asked for ahead of its use, into the L2 cache: a core has few outstanding misses for L1, and blocks lie at
// random places, where the hardware does not guess. Scores become powers of 2 (the scale includes log2 e).
//
// A cache of whole numbers is multiplied as T, which holds them exactly: those of a segment are written out once for all
// vectors that go through it. Scales of keys are multiplied to the scores, those of values to the weights.
//
// All query heads that share a KV head, and the neighbouring tokens of a prompt, are multiplied against the same vectors
// of keys or values together. A prompt's vectors are cut into equal parts whatever token they belong to, so that tiles
// are full for every number of heads.
#pragma once
#include <omp.h>

#include "exponential.h"
#include "tiles.h"

namespace {

constexpr int GROUPS = SEGMENT / 16;

// query vectors that go through the same keys together
template <class S> struct Vectors {
    static constexpr int CAPACITY = S::VECTORS;
    const typename S::Factor *q[CAPACITY];
    int64_t low[CAPACITY], high[CAPACITY];  // visible keys [low, high)
    float maximum[CAPACITY], sum[CAPACITY];
    alignas(64) float out[CAPACITY * MAX_DIM];
    alignas(64) typename S::Factor copy[CAPACITY * MAX_DIM];  // of q, where it is not used in place
    int count;
};

template <class S> struct Scratch {
    alignas(64) float scores[S::VECTORS * SEGMENT];
    alignas(64) typename S::Factor weights[S::VECTORS * SEGMENT];
    alignas(64) float out[S::VECTORS * MAX_DIM];
    const char *k[GROUPS], *v[GROUPS];
    const char *then_v[GROUPS];  // what to ask for while keys are read: the values
    const char *next_k[GROUPS];  // and while values are: keys that this thread will read after these
    const float *k_scales[GROUPS], *v_scales[GROUPS];
    alignas(64) typename S::T numbers[SEGMENT * MAX_DIM];  // whole numbers, written out
    int first;                   // the groups before it are seen by no vector, and are not read
    alignas(64) char tail[32 * MAX_DIM * 4];  // the last values of a sequence, zeros behind them
};

// keys and values of one sequence and KV head: [start, min(start + 256, end)), where start is a multiple of 256
struct Segment {
    const int32_t *table;
    int64_t kv_head, start, end;
};

// groups of 16 tokens; tiles take them by two
template <class S>
INLINE int num_groups(const Segment &s) {
    const int64_t tokens = minimum(s.end - s.start, SEGMENT);
    return tokens <= 0 ? 0 : S::IS_TILED ? (int)((tokens + 31) / 32 * 2) : (int)((tokens + 15) / 16);
}

// whether tiles compute this: never a question of how many tokens there are
INLINE bool fits_tiles(const Attention &a) { return a.dim % 32 == 0 && a.block_size % 32 == 0; }

template <class S>
INLINE void set_query(Vectors<S> &v, int i, const typename S::T *q, int64_t dim) {
    if constexpr (!S::IS_TILED && sizeof(typename S::T) == sizeof(typename S::Factor)) {
        v.q[i] = q;
    } else {
        typename S::Factor *copy = v.copy + i * dim;
        v.q[i] = copy;
        if constexpr (S::IS_TILED)
            memcpy(copy, q, dim * sizeof(*q));
        else
            for (int64_t d = 0; d < dim; d += 16) store(copy + d, load(q + d));
    }
}

template <class S, int R, int G>
INLINE void score_tile(const Attention &a, const Vectors<S> &v, Scratch<S> &s, int vector, int group) {
    const bool first = vector == 0;  // the first tile waits for memory: it asks for the values, which come next
    Vec sum[R][G];
    clear(sum);
    const int64_t units = a.dim / S::LANES;
    for (int64_t u = 0; u < units; u++) {
        multiply_add<S>(
            sum, [&](int i) { return v.q[vector + i] + u * S::LANES; }, [&](int g) { return s.k[group + g] + u * 64; });
        if (first)
            for (int g = 0; g < G; g++) _mm_prefetch(s.then_v[group + g] + u * 64, _MM_HINT_T1);
    }
    for (int i = 0; i < R; i++)
        for (int g = 0; g < G; g++) store(s.scores + (vector + i) * SEGMENT + (group + g) * 16, sum[i][g]);
}

template <class S, int R>
INLINE void score_rows(const Attention &a, const Vectors<S> &v, Scratch<S> &s, int vector, int groups) {
    constexpr int G = S::span(R);
    int group = s.first;
    for (; group + G <= groups; group += G) score_tile<S, R, G>(a, v, s, vector, group);
    for (; group < groups; group++) score_tile<S, R, 1>(a, v, s, vector, group);
}

template <class S, int R, int Z>
INLINE void value_tile(const Attention &a, Scratch<S> &s, int vector, int groups, int64_t first_dim) {
    Vec sum[R][Z];
    clear(sum);
    for (int group = s.first; group < groups; group++) {
        const char *v = s.v[group] + first_dim * 4;
        const char *next = vector == 0 ? s.next_k[group] + first_dim * 4 : nullptr;
        const typename S::Factor *w = s.weights + vector * SEGMENT + group * 16;
        for (int u = 0; u < 16 / S::LANES; u++, v += a.dim * 4) {
            multiply_add<S>(
                sum, [&](int i) { return w + i * SEGMENT + u * S::LANES; }, [&](int z) { return v + z * 64; });
            if (next) {
                for (int z = 0; z < Z; z++) _mm_prefetch(next + z * 64, _MM_HINT_T1);
                next += a.dim * 4;
            }
        }
    }
    for (int i = 0; i < R; i++)
        for (int z = 0; z < Z; z++) store(s.out + (vector + i) * a.dim + first_dim + z * 16, sum[i][z]);
}

template <class S, int R>
INLINE void value_rows(const Attention &a, Scratch<S> &s, int vector, int groups) {
    constexpr int Z = S::span(R);
    int64_t dim = 0;
    for (; dim + 16 * Z <= a.dim; dim += 16 * Z) value_tile<S, R, Z>(a, s, vector, groups, dim);
    for (; dim < a.dim; dim += 16) value_tile<S, R, 1>(a, s, vector, groups, dim);
}

// 16 or 32 vectors against all groups, through tiles; rows behind the last vector are of no use and do no harm
template <class S, bool TWO>
INLINE void score_tiled(const Attention &a, typename S::Tiles &tiles, const Vectors<S> &v, Scratch<S> &s, int vector,
                        int groups) {
    for (int group = s.first; group < groups; group += 2) {
        const char *first = s.k[group], *second = s.k[group + 1];
        multiply_tiles<TWO>(
            tiles, (const char *)(v.copy + vector * a.dim), a.dim * 2, a.dim / 32, [&](int64_t step) -> TileUnits {
                if (vector == 0)  // see score_tile
                    for (int line = 0; line < 16; line++) {
                        _mm_prefetch(s.then_v[group] + step * 1024 + line * 64, _MM_HINT_T1);
                        _mm_prefetch(s.then_v[group + 1] + step * 1024 + line * 64, _MM_HINT_T1);
                    }
                return {first + step * 1024, second + step * 1024, 64};
            });
        store_tiles<TWO>(tiles, s.scores + vector * SEGMENT + group * 16, SEGMENT);
    }
}

template <class S, bool TWO>
INLINE void value_tiled(const Attention &a, typename S::Tiles &tiles, Scratch<S> &s, int vector, int groups) {
    for (int64_t dim = 0; dim < a.dim; dim += 32) {
        multiply_tiles<TWO>(
            tiles, (const char *)(s.weights + vector * SEGMENT + s.first * 16), SEGMENT * 2, (groups - s.first) / 2,
            [&](int64_t step) -> TileUnits {
                const int64_t pair = s.first / 2 + step;
                if (vector == 0)
                    for (int line = 0; line < 16; line++) {
                        _mm_prefetch(s.next_k[2 * pair] + dim * 32 + line * 64, _MM_HINT_T1);
                        _mm_prefetch(s.next_k[2 * pair + 1] + dim * 32 + line * 64, _MM_HINT_T1);
                    }
                const char *units = s.v[2 * pair] + dim * 4;  // both groups lie in one block, one behind the other
                return {units, units + 64, a.dim * 4};
            });
        store_tiles<TWO>(tiles, s.out + vector * a.dim + dim, a.dim);
    }
}

// 16 products of queries and keys to scores with a cap
INLINE void cap_scores(const Attention &a, float *scores) {
    store(scores, tanh_ps(load((const float *)scores) * all(a.scale / a.softcap)) * all(a.softcap));
}

// weights = 2^(score - max) of the visible keys, 0 elsewhere; returns whether any key is visible
template <class S>
INLINE bool soften(const Attention &a, const Vectors<S> &v, Scratch<S> &s, int vector, int64_t start, int groups,
                   float &top, float &total) {
    float *scores = s.scores + vector * SEGMENT;
    typename S::Factor *weights = s.weights + vector * SEGMENT;
    const int64_t low = maximum(v.low[vector] - start, 0), high = minimum(v.high[vector] - start, groups * 16);
    if (high <= low) {
        memset(weights + s.first * 16, 0, (groups - s.first) * 16 * sizeof(*weights));
        return false;
    }
    if (a.is_int8)
        for (int64_t group = low / 16; group * 16 < high; group++)
            store(scores + group * 16, load((const float *)scores + group * 16) * load(s.k_scales[group]));
    if (a.softcap > 0.0f)
        for (int64_t group = low / 16; group * 16 < high; group++) cap_scores(a, scores + group * 16);
    auto visible = [&](int group) { return lanes(low - group * 16, high - group * 16); };
    // groups [full, end) are visible as a whole, which needs no masks and gives the same numbers
    const int full = (int)((low + 15) / 16), end = (int)maximum(high / 16, full);
    Vec best = all(-__builtin_inff());
    for (int group = full; group < end; group++) best = larger(best, load(scores + group * 16));
    for (int group = (int)(low / 16); group < full; group++)
        best = larger_in(visible(group), best, load(scores + group * 16));
    if (end < groups) best = larger_in(visible(end), best, load(scores + end * 16));
    const float factor = (a.softcap > 0.0f ? 1.0f : a.scale) * 1.44269504088896341f;  // from here on powers of 2
    top = largest_of(best) * factor;
    const Vec scale = all(factor), shift = all(top);
    Vec sum = zeros();
    auto power = [&](int group) { return exp2_ps<typename S::T>(fmsub(load(scores + group * 16), scale, shift)); };
    auto put = [&](int group) {
        const Vec w = power(group);
        sum = sum + w;
        store(weights + group * 16, a.is_int8 ? w * load(s.v_scales[group]) : w);
    };
    // scales of keys that nobody sees may be anything
    auto put_visible = [&](int group) {
        const Lanes seen = visible(group);
        const Vec w = only(seen, power(group));
        sum = sum + w;
        store(weights + group * 16, a.is_int8 ? only(seen, w * load(s.v_scales[group])) : w);
    };
    const int before = (int)minimum(full, groups);
    for (int group = s.first; group < before; group++) put_visible(group);
    for (int group = full; group < end; group++) put(group);
    for (int group = end; group < groups; group++) put_visible(group);
    total = sum_of(sum);
    return true;
}

// (maximum, sum, out) of what is so far and of one more segment
INLINE void combine(float &top, float &sum, float *out, float more_top, float more_sum, const float *more,
                    int64_t dim) {
    const float high = top > more_top ? top : more_top;
    const float keep = top == high ? 1.0f : exp2_one(top - high);
    const float take = more_top == high ? 1.0f : exp2_one(more_top - high);
    top = high;
    sum = sum * keep + more_sum * take;
    const Vec k = all(keep), t = all(take);
    for (int64_t d = 0; d < dim; d += 16) store(out + d, fmadd(load(more + d), t, load((const float *)out + d) * k));
}

template <class S>
INLINE void reset(Vectors<S> &v, int64_t dim) {
    for (int i = 0; i < v.count; i++) v.maximum[i] = -__builtin_inff(), v.sum[i] = 0.0f;
    memset(v.out, 0, v.count * dim * sizeof(float));
}

// the first `count` of `tokens` tokens' values, zeros behind them: whatever lies in the cache past the end of a sequence
// (it may be a NaN that a failed request left) must not meet a weight of 0
template <class S>
INLINE const char *end_of_values(const Attention &a, Scratch<S> &s, const char *v, int count, int tokens) {
    const int64_t row = a.dim * 4, full = count / S::LANES;
    memcpy(s.tail, v, full * row);
    memset(s.tail + full * row, 0, (tokens / S::LANES - full) * row);
    if (count % S::LANES)
        for (int64_t d = 0; d < row; d += 4) memcpy(s.tail + full * row + d, v + full * row + d, 4 / S::LANES);
    return s.tail;
}

// the first byte of what a block holds for a KV head, and which of its tokens a group begins with
struct Place {
    const char *head;
    int64_t offset;
};

INLINE Place place_of(const Attention &a, const Segment &from, int group, const char *cache, int64_t head_bytes) {
    const int64_t token = from.start + group * 16;
    const int64_t head = (int64_t)from.table[token / a.block_size] * a.kv_heads + from.kv_head;
    return {cache + head * head_bytes, token % a.block_size};
}

// where the groups of a segment lie, and those of the next one. low: the first key that a vector sees. What lies before
// it may be a block that a window has given up: it belongs to another sequence, and may hold a NaN, which must not meet
// a weight of 0. Groups never cross blocks, so that none of those from the first on lies there. A sum is the same
// without them, whose weights are zeros
template <class S>
INLINE int find_groups(const Attention &a, const Segment &segment, const Segment &next, int64_t low, Scratch<S> &s) {
    constexpr int STEP = S::IS_TILED ? 2 : 1;
    const int64_t bytes = a.is_int8 ? 1 : 4 / S::LANES;
    const int64_t head_bytes = a.is_int8 ? int8_head_bytes(a.block_size, a.dim) : a.block_size * a.dim * bytes;
    const int64_t scales = numbers_of_head(a.block_size, a.dim);  // where they lie, in whole numbers
    auto place = [&](const Segment &from, int group, const char *cache) {
        return place_of(a, from, group, cache, head_bytes);
    };
    auto rows = [&](const Place &p) { return p.head + p.offset * a.dim * bytes; };
    const int groups = num_groups<S>(segment), next_groups = num_groups<S>(next);
    s.first = (int)(maximum(low - segment.start, 0) / (16 * STEP) * STEP);
    for (int group = s.first; group < groups; group++) {
        const Place k = place(segment, group, a.k_cache), v = place(segment, group, a.v_cache);
        s.k[group] = rows(k);
        s.v[group] = s.then_v[group] = rows(v);
        s.next_k[group] = group < next_groups ? rows(place(next, group, a.k_cache)) : s.k[group];
        s.k_scales[group] = (const float *)(k.head + scales) + k.offset;
        s.v_scales[group] = (const float *)(v.head + scales) + v.offset;
    }
    if (a.is_int8) return groups;  // no whole number is a NaN, and scales of keys that nobody sees are not used
    const int last = groups - STEP;
    const int64_t left = segment.end - segment.start - last * 16;
    if (left < 16 * STEP) {
        s.v[last] = end_of_values(a, s, s.v[last], (int)left, 16 * STEP);
        s.then_v[last] = s.v[last];
        if (S::IS_TILED) s.v[last + 1] = s.then_v[last + 1] = s.v[last] + a.dim * 32;
    }
    return groups;
}

// the whole numbers of all groups of K or V as they are multiplied; `next` is asked for meanwhile
template <class S, bool IS_K>
INLINE void write_out(const Attention &a, Scratch<S> &s, const char **rows, const char **next, int groups) {
    constexpr bool IS_WIDE = sizeof(typename S::T) == 4;
    // of 32 numbers in a row, fp32 has those at even places in one row (of 16 tokens of K, or of a token's V) and those
    // at odd ones in the next
    const int64_t apart = IS_K ? 16 : a.dim, in_row = IS_WIDE && !IS_K ? a.dim * 2 : 32;
    for (int group = s.first; group < groups; group++) {
        typename S::T *out = s.numbers + group * 16 * a.dim;
        const char *in = rows[group];
        for (int64_t begin = 0; begin < 16 * a.dim; begin += in_row)
            for (int64_t at = 0; at < in_row; at += 32)
                widen_numbers(out + begin + (IS_WIDE && !IS_K ? at / 2 : at), in + begin + at, apart);
        for (int64_t at = 0; at < 16 * a.dim; at += 64) _mm_prefetch(next[group] + at, _MM_HINT_T1);
        rows[group] = (const char *)out;
        next[group] = (const char *)out;  // the tiles need ask for nothing
    }
}

template <class S>
INLINE void score(const Attention &a, typename S::Tiles &tiles, const Vectors<S> &v, Scratch<S> &s, int groups) {
    if constexpr (S::IS_TILED)
        for (int i = 0; i < v.count; i += 32)
            v.count - i > 16 ? score_tiled<S, true>(a, tiles, v, s, i, groups)
                             : score_tiled<S, false>(a, tiles, v, s, i, groups);
    else
        for (int i = 0; i < v.count; i += S::ATTENTION_ROWS)
            with_rows<S::ATTENTION_ROWS>(
                v.count - i, [&](auto rows) { score_rows<S, decltype(rows)::value>(a, v, s, i, groups); });
}

template <class S>
INLINE void weigh_values(const Attention &a, typename S::Tiles &tiles, const Vectors<S> &v, Scratch<S> &s, int groups) {
    if constexpr (S::IS_TILED)
        for (int i = 0; i < v.count; i += 32)
            v.count - i > 16 ? value_tiled<S, true>(a, tiles, s, i, groups)
                             : value_tiled<S, false>(a, tiles, s, i, groups);
    else
        for (int i = 0; i < v.count; i += S::ATTENTION_ROWS)
            with_rows<S::ATTENTION_ROWS>(
                v.count - i, [&](auto rows) { value_rows<S, decltype(rows)::value>(a, s, i, groups); });
}

// add the keys of a segment, which holds at least one, to the running result of the vectors; `next` will be added
// after it
template <class S>
void add_segment(const Attention &a, typename S::Tiles &tiles, const Segment &segment, const Segment &next, Vectors<S> &v,
                 Scratch<S> &s) {
    const int groups = find_groups<S>(a, segment, next, v.low[0], s);  // later vectors see later keys
    if (a.is_int8) write_out<S, true>(a, s, s.k, s.then_v, groups);
    score<S>(a, tiles, v, s, groups);
    float top[S::VECTORS], total[S::VECTORS];
    bool any[S::VECTORS];
    for (int i = 0; i < v.count; i++) any[i] = soften(a, v, s, i, segment.start, groups, top[i], total[i]);
    if (a.is_int8) write_out<S, false>(a, s, s.v, s.next_k, groups);
    weigh_values<S>(a, tiles, v, s, groups);
    for (int i = 0; i < v.count; i++)
        if (any[i]) combine(v.maximum[i], v.sum[i], v.out + i * a.dim, top[i], total[i], s.out + i * a.dim, a.dim);
}

// the weighted values of a query vector, divided by the sum of the weights: that of a sink is one of them
template <typename T>
INLINE void finish(const Attention &a, const float *out, float top, float sum, int64_t token, int64_t head) {
    T *target = (T *)a.out + (token * a.heads + head) * a.dim;
    float keep = 1.0f;
    if (a.sinks) {
        const float sink = a.sinks[head] * 1.44269504088896341f, high = top > sink ? top : sink;
        keep = top == high ? 1.0f : exp2_one(top - high);
        sum = sum * keep + (sink == high ? 1.0f : exp2_one(sink - high));
    }
    const Vec inverse = all(keep / sum);
    for (int64_t d = 0; d < a.dim; d += 16) store(target + d, load(out + d) * inverse);
}

INLINE int64_t first_visible(const Attention &a, int64_t position) {
    return a.window > 0 ? maximum(position - a.window + 1, 0) : 0;
}

// vectors [first, last) of a prompt and a KV head, where its query heads of the first token come first
template <class S>
void prefill_part(const Attention &a, typename S::Tiles &tiles, int64_t seq, int64_t kv_head, int64_t first, int64_t last,
                  Vectors<S> &v, Scratch<S> &s) {
    typedef typename S::T T;
    const int64_t begin = a.query_start[seq], group = a.heads / a.kv_heads;
    const int64_t computed = a.context_lens[seq] - (a.query_start[seq + 1] - begin);
    v.count = (int)(last - first);
    for (int i = 0; i < v.count; i++) {
        const int64_t row = (first + i) / group, head = kv_head * group + (first + i) % group;
        set_query<S>(v, i, (const T *)a.q + (begin + row) * a.q_stride + head * a.dim, a.dim);
        v.low[i] = first_visible(a, computed + row);
        v.high[i] = computed + row + 1;
    }
    reset(v, a.dim);
    const int64_t end = v.high[v.count - 1];
    const int32_t *table = a.block_tables + seq * a.table_stride;
    for (int64_t start = v.low[0] / SEGMENT * SEGMENT; start < end; start += SEGMENT)
        add_segment<S>(a, tiles, {table, kv_head, start, end}, {table, kv_head, start + SEGMENT, end}, v, s);
    for (int i = 0; i < v.count; i++)
        finish<T>(a, v.out + i * a.dim, v.maximum[i], v.sum[i], begin + (first + i) / group,
                  kv_head * group + (first + i) % group);
}

// prompts: tasks are (sequence, part of its vectors, KV head), the longest first
template <class S>
void prefill(const Attention &a) {
    const int64_t group = a.heads / a.kv_heads;
    auto vectors = [&](int64_t seq) { return (a.query_start[seq + 1] - a.query_start[seq]) * group; };
    auto tasks_of = [&](int64_t seq) { return (vectors(seq) + S::VECTORS - 1) / S::VECTORS * a.kv_heads; };
    int64_t tasks = 0;
    for (int64_t seq = a.decodes; seq < a.seqs; seq++) tasks += tasks_of(seq);
#pragma omp parallel
    {
        Vectors<S> v;
        Scratch<S> s;
        typename S::Tiles tiles;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = tasks - 1; task >= 0; task--) {
            int64_t seq = a.decodes, left = task;
            for (; left >= tasks_of(seq); seq++) left -= tasks_of(seq);
            const int64_t first = left / a.kv_heads * S::VECTORS, last = minimum(first + S::VECTORS, vectors(seq));
            prefill_part<S>(a, tiles, seq, left % a.kv_heads, first, last, v, s);
        }
    }
}

// the segment that a decode task reads: tasks are (sequence, KV head, segment), empty past the context or the window
INLINE Segment decode_segment(const Attention &a, int64_t task, int64_t segments) {
    const int64_t seq = task / segments / a.kv_heads, context = a.context_lens[seq], start = task % segments * SEGMENT;
    const bool seen = start < context && start + SEGMENT > first_visible(a, context - 1);
    return {a.block_tables + seq * a.table_stride, task / segments % a.kv_heads, start, seen ? context : start};
}

template <class S>
void decode_task(const Attention &a, typename S::Tiles &tiles, int64_t task, int64_t segments, const Segment &next, Vectors<S> &v,
                 Scratch<S> &s) {
    const int64_t group = a.heads / a.kv_heads, width = a.dim + 2, seq = task / segments / a.kv_heads;
    const Segment segment = decode_segment(a, task, segments);
    const typename S::T *q = (const typename S::T *)a.q + a.query_start[seq] * a.q_stride;
    for (int64_t head = 0; head < group; head += S::VECTORS) {
        v.count = (int)minimum(group - head, S::VECTORS);
        for (int i = 0; i < v.count; i++) {
            set_query<S>(v, i, q + (segment.kv_head * group + head + i) * a.dim, a.dim);
            v.low[i] = first_visible(a, segment.end - 1);
            v.high[i] = segment.end;
        }
        reset(v, a.dim);
        add_segment<S>(a, tiles, segment, next, v, s);
        float *partial = a.partials + (task * group + head) * width;
        for (int i = 0; i < v.count; i++) {
            partial[i * width] = v.maximum[i], partial[i * width + 1] = v.sum[i];
            memcpy(partial + i * width + 2, v.out + i * a.dim, a.dim * sizeof(float));
        }
    }
}

INLINE int64_t decode_segments(const Attention &a) {
    int64_t longest = 0;
    for (int64_t s = 0; s < a.decodes; s++) longest = maximum(longest, a.context_lens[s]);
    return (longest + SEGMENT - 1) / SEGMENT;
}

template <class S>
void decode(const Attention &a) {
    const int64_t segments = decode_segments(a), tasks = a.decodes * a.kv_heads * segments;
    // neighbours go to one thread, which fetches the next one's keys while it computes
    const int64_t run = maximum(minimum(tasks / (4 * omp_get_num_threads()), 16), 1);
    Vectors<S> v;
    Scratch<S> s;
    typename S::Tiles tiles;
    auto is_empty = [&](int64_t task) {
        const Segment segment = decode_segment(a, task, segments);
        return segment.end <= segment.start;
    };
#pragma omp for schedule(dynamic, run) nowait
    for (int64_t task = 0; task < tasks; task++) {
        if (is_empty(task)) continue;
        int64_t after = task + 1;
        while (after < tasks && after % run && is_empty(after)) after++;
        const Segment next = decode_segment(a, after < tasks ? after : task, segments);
        decode_task<S>(a, tiles, task, segments, next, v, s);
    }
}

// decodes, for a team of threads (see decode_step.h): each segment on its own; then, when all threads are done, each
// sequence's segments are combined in order
template <class S>
void attend_segments(const Attention &a) {
    if constexpr (S::HAS_TILES)
        if (fits_tiles(a)) return decode<typename S::Tiled>(a);
    decode<S>(a);
}

template <class S>
void combine_segments(const Attention &a) {
    const int64_t group = a.heads / a.kv_heads, width = a.dim + 2, segments = decode_segments(a);
    alignas(64) float out[MAX_DIM];
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < a.decodes * a.heads; task++) {
        const int64_t seq = task / a.heads, head = task % a.heads, context = a.context_lens[seq];
        const int64_t first = first_visible(a, context - 1) / SEGMENT;
        float top = -__builtin_inff(), sum = 0.0f;
        memset(out, 0, a.dim * sizeof(float));
        for (int64_t segment = first; segment * SEGMENT < context; segment++) {
            const int64_t place = (seq * a.kv_heads + head / group) * segments + segment;
            const float *partial = a.partials + (place * group + head % group) * width;
            combine(top, sum, out, partial[0], partial[1], partial + 2, a.dim);
        }
        finish<typename S::T>(a, out, top, sum, a.query_start[seq], head);
    }
}

template <class S>
void run_attention(const Attention &a) {
    if (a.decodes > 0) {
#pragma omp parallel
        {
            attend_segments<S>(a);
#pragma omp barrier
            combine_segments<S>(a);
        }
    }
    if (a.seqs <= a.decodes) return;
    if constexpr (S::HAS_TILES)
        if (fits_tiles(a)) return prefill<typename S::Tiled>(a);
    prefill<S>(a);
}

}  // namespace
