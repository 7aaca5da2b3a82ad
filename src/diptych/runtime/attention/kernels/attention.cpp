// Causal attention over the paged KV cache, read in place, for one new token or thousands.
//
// Keys are taken in segments of 256 tokens that begin at multiples of 256. For each query vector, a segment gives a
// maximum, a sum and a weighted sum of values; segments are combined in order. The arithmetic of one query vector is
// the same whether it is alone (decode, where segments of one sequence may run on different threads) or in a tile with
// others (prefill), and however the prompt was cut into chunks: results are bitwise equal.
//
// Memory is asked for ahead of its use, into the L2 cache: a core has few outstanding misses for L1, and blocks lie at
// random places, where the hardware does not guess. Scores are powers of 2 (the scale includes log2 e).
//
// All query heads that share a KV head, and the neighbouring tokens of a prompt, are multiplied against a register of
// keys or values together: a tile of 7 vectors and 4 registers.
#include "kernels.h"

#include <omp.h>

namespace {

constexpr int SEGMENT = 256, GROUPS = SEGMENT / 16, MAX_VECTORS = 56, MAX_DIM = 256, TILE = 7;

// query vectors that go through the same keys together
struct Vectors {
    const char *q[MAX_VECTORS];
    int64_t low[MAX_VECTORS], high[MAX_VECTORS];  // visible keys [low, high)
    float maximum[MAX_VECTORS], sum[MAX_VECTORS];
    alignas(64) float out[MAX_VECTORS * MAX_DIM];
    int count;
};

struct Scratch {
    alignas(64) float scores[MAX_VECTORS * SEGMENT];
    alignas(64) float weights[MAX_VECTORS * SEGMENT];  // as T
    alignas(64) float out[MAX_VECTORS * MAX_DIM];
    const char *k[GROUPS], *v[GROUPS];
    const char *next_k[GROUPS];  // keys that this thread will read after these
    alignas(64) char tail[16 * MAX_DIM * 4];  // the last group of values of a sequence, zeros behind it
};

// keys and values of one sequence and KV head: [start, min(start + 256, end)), where start is a multiple of 256
struct Segment {
    const int32_t *table;
    int64_t kv_head, start, end;
    INLINE int groups(const Segment &s) {
        const int64_t tokens = s.end - s.start;
        return tokens <= 0 ? 0 : tokens < SEGMENT ? (int)((tokens + 15) / 16) : GROUPS;
    }
};

INLINE int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }

template <typename T, int R, int G>
INLINE void score_tile(const Attention &a, const Vectors &v, Scratch &s, int vector, int group) {
    const bool first = vector == 0;  // the first tile waits for memory: it asks for the values, which come next
    using U = Unit<T>;
    __m512 sum[R][G];
    for (int i = 0; i < R; i++)
        for (int g = 0; g < G; g++) sum[i][g] = _mm512_setzero_ps();
    const int64_t units = a.dim / U::LANES;
    for (int64_t u = 0; u < units; u++) {
        __m512i k[G];
        for (int g = 0; g < G; g++) k[g] = _mm512_loadu_si512(s.k[group + g] + u * 64);
        if (first)
            for (int g = 0; g < G; g++) _mm_prefetch(s.v[group + g] + u * 64, _MM_HINT_T1);
#pragma GCC unroll 7
        for (int i = 0; i < R; i++) {
            const __m512i q = broadcast_unit(v.q[vector + i] + u * 4);
            for (int g = 0; g < G; g++) sum[i][g] = U::mul_add(sum[i][g], q, k[g]);
        }
    }
    const __m512 scale = _mm512_set1_ps(a.scale * 1.44269504088896341f);  // from here on powers of 2
    for (int i = 0; i < R; i++)
        for (int g = 0; g < G; g++)
            _mm512_store_ps(s.scores + (vector + i) * SEGMENT + (group + g) * 16, _mm512_mul_ps(sum[i][g], scale));
}

template <typename T, int R>
INLINE void score_rows(const Attention &a, const Vectors &v, Scratch &s, int vector, int groups) {
    int group = 0;
    for (; group + 4 <= groups; group += 4) score_tile<T, R, 4>(a, v, s, vector, group);
    for (; group < groups; group++) score_tile<T, R, 1>(a, v, s, vector, group);
}

template <typename T, int R, int Z>
INLINE void value_tile(const Attention &a, const T *weights, float *out, const Scratch &s, int vector, int groups,
                       int64_t first_dim) {
    using U = Unit<T>;
    __m512 sum[R][Z];
    for (int i = 0; i < R; i++)
        for (int z = 0; z < Z; z++) sum[i][z] = _mm512_setzero_ps();
    for (int group = 0; group < groups; group++) {
        const char *v = s.v[group] + first_dim * 4;
        const char *next = vector == 0 ? s.next_k[group] + first_dim * 4 : nullptr;
        const T *w = weights + vector * SEGMENT + group * 16;
        for (int u = 0; u < 16 / U::LANES; u++, v += a.dim * 4) {
            __m512i value[Z];
            for (int z = 0; z < Z; z++) value[z] = _mm512_loadu_si512(v + z * 64);
            if (next) {
                for (int z = 0; z < Z; z++) _mm_prefetch(next + z * 64, _MM_HINT_T1);
                next += a.dim * 4;
            }
#pragma GCC unroll 7
            for (int i = 0; i < R; i++) {
                const __m512i weight = broadcast_unit(w + i * SEGMENT + u * U::LANES);
                for (int z = 0; z < Z; z++) sum[i][z] = U::mul_add(sum[i][z], weight, value[z]);
            }
        }
    }
    for (int i = 0; i < R; i++)
        for (int z = 0; z < Z; z++) _mm512_storeu_ps(out + (vector + i) * a.dim + first_dim + z * 16, sum[i][z]);
}

template <typename T, int R>
INLINE void value_rows(const Attention &a, Scratch &s, int vector, int groups) {
    int64_t dim = 0;
    for (; dim + 64 <= a.dim; dim += 64) value_tile<T, R, 4>(a, (const T *)s.weights, s.out, s, vector, groups, dim);
    for (; dim < a.dim; dim += 16) value_tile<T, R, 1>(a, (const T *)s.weights, s.out, s, vector, groups, dim);
}

#define EACH_TILE(CALL)                                    \
    for (int vector = 0; vector < v.count; vector += TILE) \
        switch (v.count - vector) {                        \
            case 1: CALL(1); break;                        \
            case 2: CALL(2); break;                        \
            case 3: CALL(3); break;                        \
            case 4: CALL(4); break;                        \
            case 5: CALL(5); break;                        \
            case 6: CALL(6); break;                        \
            default: CALL(7);                              \
        }

// weights = 2^(score - max) of the visible keys, 0 elsewhere; returns whether any key is visible
template <typename T>
INLINE bool soften(const Vectors &v, Scratch &s, int vector, int64_t start, int groups, float &top, float &total) {
    const float *scores = s.scores + vector * SEGMENT;
    T *weights = (T *)s.weights + vector * SEGMENT;
    const int64_t low = maximum(v.low[vector] - start, 0), high = minimum(v.high[vector] - start, groups * 16);
    if (high <= low) {
        memset(weights, 0, groups * 16 * sizeof(T));
        return false;
    }
    auto visible = [&](int group) {
        const int64_t from = maximum(low - group * 16, 0);
        return (__mmask16)(tail_mask(maximum(high - group * 16, 0)) & ~tail_mask(from));
    };
    // groups [full, end) are visible as a whole, which needs no masks and gives the same numbers
    const int full = (int)((low + 15) / 16), end = (int)maximum(high / 16, full);
    __m512 best = _mm512_set1_ps(-__builtin_inff());
    for (int group = full; group < end; group++) best = _mm512_max_ps(best, _mm512_load_ps(scores + group * 16));
    for (int group = (int)(low / 16); group < full; group++)
        best = _mm512_mask_max_ps(best, visible(group), best, _mm512_load_ps(scores + group * 16));
    if (end < groups) best = _mm512_mask_max_ps(best, visible(end), best, _mm512_load_ps(scores + end * 16));
    top = _mm512_reduce_max_ps(best);
    const __m512 shift = _mm512_set1_ps(top);
    __m512 sum = _mm512_setzero_ps();
    auto put = [&](int group, __m512 w) {
        sum = _mm512_add_ps(sum, w);
        Unit<T>::store(weights + group * 16, w);
    };
    auto power = [&](int group) {
        return exp2_ps<T>(_mm512_sub_ps(_mm512_load_ps(scores + group * 16), shift));
    };
    const int before = (int)minimum(full, groups);
    for (int group = 0; group < before; group++) put(group, _mm512_maskz_mov_ps(visible(group), power(group)));
    for (int group = full; group < end; group++) put(group, power(group));
    for (int group = end; group < groups; group++) put(group, _mm512_maskz_mov_ps(visible(group), power(group)));
    total = _mm512_reduce_add_ps(sum);
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
    const __m512 k = _mm512_set1_ps(keep), t = _mm512_set1_ps(take);
    for (int64_t d = 0; d < dim; d += 16) {
        const __m512 kept = _mm512_mul_ps(_mm512_loadu_ps(out + d), k);
        _mm512_storeu_ps(out + d, _mm512_fmadd_ps(_mm512_loadu_ps(more + d), t, kept));
    }
}

INLINE void reset(Vectors &v, int64_t dim) {
    for (int i = 0; i < v.count; i++) v.maximum[i] = -__builtin_inff(), v.sum[i] = 0.0f;
    memset(v.out, 0, v.count * dim * sizeof(float));
}

// the first `count` of 16 tokens' values, zeros behind them: whatever lies in the cache past the end of a sequence (it may
// be a NaN that a failed request left) must not meet a weight of 0
template <typename T>
INLINE const char *end_of_values(const Attention &a, Scratch &s, const char *v, int count) {
    const int64_t row = a.dim * 4, full = count / Unit<T>::LANES;
    memcpy(s.tail, v, full * row);
    memset(s.tail + full * row, 0, (16 / Unit<T>::LANES - full) * row);
    if (count % Unit<T>::LANES)
        for (int64_t d = 0; d < row; d += 4) memcpy(s.tail + full * row + d, v + full * row + d, sizeof(T));
    return s.tail;
}

// add the keys of a segment to the running result of the vectors; `next` will be added after it
template <typename T>
void add_segment(const Attention &a, const Segment &segment, const Segment &next, Vectors &v, Scratch &s) {
    auto place = [&](const Segment &from, int group, const char *cache) {
        const int64_t token = from.start + group * 16, offset = token % a.block_size;
        const int64_t base = ((int64_t)from.table[token / a.block_size] * a.kv_heads + from.kv_head) * a.block_size;
        return cache + (base + offset) * a.dim * sizeof(T);
    };
    const int64_t start = segment.start;
    const int groups = Segment::groups(segment), next_groups = Segment::groups(next);
    for (int group = 0; group < groups; group++) {
        s.k[group] = place(segment, group, a.k_cache);
        s.v[group] = place(segment, group, a.v_cache);
        const int64_t left = segment.end - start - group * 16;
        if (left < 16) s.v[group] = end_of_values<T>(a, s, s.v[group], (int)left);
        s.next_k[group] = group < next_groups ? place(next, group, a.k_cache) : s.k[group];
    }
#define SCORE(R) score_rows<T, R>(a, v, s, vector, groups)
    EACH_TILE(SCORE)
    float top[MAX_VECTORS], total[MAX_VECTORS];
    bool any[MAX_VECTORS];
    for (int i = 0; i < v.count; i++) any[i] = soften<T>(v, s, i, start, groups, top[i], total[i]);
#define VALUE(R) value_rows<T, R>(a, s, vector, groups)
    EACH_TILE(VALUE)
    for (int i = 0; i < v.count; i++)
        if (any[i]) combine(v.maximum[i], v.sum[i], v.out + i * a.dim, top[i], total[i], s.out + i * a.dim, a.dim);
}

template <typename T>
INLINE void finish(const Attention &a, const float *out, float sum, int64_t token, int64_t head) {
    T *target = (T *)a.out + (token * a.heads + head) * a.dim;
    const __m512 inverse = _mm512_set1_ps(1.0f / sum);
    for (int64_t d = 0; d < a.dim; d += 16)
        Unit<T>::store(target + d, _mm512_mul_ps(_mm512_loadu_ps(out + d), inverse));
}

INLINE int64_t first_visible(const Attention &a, int64_t position) {
    return a.window > 0 ? maximum(position - a.window + 1, 0) : 0;
}

// one tile of a prompt: `rows` tokens from `row`, for the query heads [head, head + heads) of one KV head
template <typename T>
void prefill_tile(const Attention &a, int64_t seq, int64_t kv_head, int64_t head, int64_t heads, int64_t row,
                  int64_t rows, Vectors &v, Scratch &s) {
    const int64_t begin = a.query_start[seq], context = a.context_lens[seq];
    const int64_t first = context - (a.query_start[seq + 1] - begin) + row;
    v.count = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++, v.count++) {
            v.q[v.count] = a.q + ((begin + row + r) * a.q_stride + (head + h) * a.dim) * sizeof(T);
            v.low[v.count] = first_visible(a, first + r);
            v.high[v.count] = first + r + 1;
        }
    reset(v, a.dim);
    const int64_t end = first + rows;
    const int32_t *table = a.block_tables + seq * a.table_stride;
    for (int64_t start = v.low[0] / SEGMENT * SEGMENT; start < end; start += SEGMENT)
        add_segment<T>(a, {table, kv_head, start, end}, {table, kv_head, start + SEGMENT, end}, v, s);
    int i = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++, i++) finish<T>(a, v.out + i * a.dim, v.sum[i], begin + row + r, head + h);
}

// prompts: tasks are (sequence, KV head, part of its query heads, tile of tokens), the longest first
template <typename T>
void prefill(const Attention &a) {
    const int64_t group = a.heads / a.kv_heads, parts = (group + MAX_VECTORS - 1) / MAX_VECTORS;
    const int64_t heads = (group + parts - 1) / parts, tile = maximum(MAX_VECTORS / heads, 1);
    int64_t tasks = 0;
    for (int64_t s = a.decodes; s < a.seqs; s++)
        tasks += (a.query_start[s + 1] - a.query_start[s] + tile - 1) / tile * a.kv_heads * parts;
#pragma omp parallel
    {
        Vectors v;
        Scratch s;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = tasks - 1; task >= 0; task--) {
            int64_t seq = a.decodes, left = task;
            for (;; seq++) {
                const int64_t here =
                    (a.query_start[seq + 1] - a.query_start[seq] + tile - 1) / tile * a.kv_heads * parts;
                if (left < here) break;
                left -= here;
            }
            const int64_t row = left / (a.kv_heads * parts) * tile, kv_head = left / parts % a.kv_heads;
            const int64_t part = left % parts, num_rows = a.query_start[seq + 1] - a.query_start[seq];
            const int64_t skip = part * heads;
            prefill_tile<T>(a, seq, kv_head, kv_head * group + skip, minimum(heads, group - skip), row,
                            minimum(tile, num_rows - row), v, s);
        }
    }
}

// the segment that a decode task reads: tasks are (sequence, KV head, segment), empty past the context or the window
INLINE Segment decode_segment(const Attention &a, int64_t task, int64_t segments) {
    const int64_t seq = task / segments / a.kv_heads, context = a.context_lens[seq], start = task % segments * SEGMENT;
    const bool seen = start < context && start + SEGMENT > first_visible(a, context - 1);
    return {a.block_tables + seq * a.table_stride, task / segments % a.kv_heads, start, seen ? context : start};
}

template <typename T>
void decode_task(const Attention &a, int64_t task, int64_t segments, const Segment &next, Vectors &v, Scratch &s) {
    const int64_t group = a.heads / a.kv_heads, width = a.dim + 2, seq = task / segments / a.kv_heads;
    const Segment segment = decode_segment(a, task, segments);
    for (int64_t head = 0; head < group; head += MAX_VECTORS) {
        v.count = (int)minimum(group - head, MAX_VECTORS);
        for (int i = 0; i < v.count; i++) {
            v.q[i] = a.q + (a.query_start[seq] * a.q_stride + (segment.kv_head * group + head + i) * a.dim) * sizeof(T);
            v.low[i] = first_visible(a, segment.end - 1);
            v.high[i] = segment.end;
        }
        reset(v, a.dim);
        add_segment<T>(a, segment, next, v, s);
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

}  // namespace

template <typename T>
void attend_segments(const Attention &a) {
    const int64_t segments = decode_segments(a), tasks = a.decodes * a.kv_heads * segments;
    // neighbours go to one thread, which fetches the next one's keys while it computes
    const int64_t run = maximum(minimum(tasks / (4 * omp_get_num_threads()), 16), 1);
    Vectors v;
    Scratch s;
#pragma omp for schedule(dynamic, run) nowait
    for (int64_t task = 0; task < tasks; task++) {
        const Segment segment = decode_segment(a, task, segments);
        if (Segment::groups(segment) == 0) continue;
        int64_t after = task + 1;
        while (after < tasks && after % run && Segment::groups(decode_segment(a, after, segments)) == 0) after++;
        decode_task<T>(a, task, segments, after < tasks ? decode_segment(a, after, segments) : segment, v, s);
    }
}

template <typename T>
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
        finish<T>(a, out, sum, a.query_start[seq], head);
    }
}

template void attend_segments<float>(const Attention &);
template void attend_segments<bf16>(const Attention &);
template void combine_segments<float>(const Attention &);
template void combine_segments<bf16>(const Attention &);

extern "C" {

// floats that `partials` must hold
int64_t diptych_attention_workspace(int64_t decodes, int64_t max_context, int64_t heads, int64_t dim) {
    return decodes * ((max_context + SEGMENT - 1) / SEGMENT) * heads * (dim + 2);
}

void diptych_attention(const void *q, const void *k_cache, const void *v_cache, const int32_t *block_tables,
                       const int32_t *query_start, const int32_t *context_lens, void *out, float *partials,
                       const int64_t *sizes, float scale, int64_t is_bf16) {
    const Attention a{(const char *)q, (const char *)k_cache, (const char *)v_cache, block_tables, query_start,
                      context_lens, (char *)out, partials, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                      sizes[6], sizes[7], sizes[8], scale};
    if (a.decodes > 0) {
#pragma omp parallel
        {
            is_bf16 ? attend_segments<bf16>(a) : attend_segments<float>(a);
#pragma omp barrier
            is_bf16 ? combine_segments<bf16>(a) : combine_segments<float>(a);
        }
    }
    if (a.seqs > a.decodes) is_bf16 ? prefill<bf16>(a) : prefill<float>(a);
}
}
