// A decode step through all layers, in one parallel region. A layer of a small model is tens of microseconds of work: entering
// a region for each of its parts would cost as much again. The parts are those of the other files, so that the result
// is bitwise what they give one by one.
//
// Functions "for a team of threads" are called by every thread of a region alike; each computes its share and returns
// without waiting for the others. Outside of a region one thread computes everything.
#pragma once
#include "attention.h"
#include "elementwise.h"
#include "gemm.h"
#include "mixture.h"

namespace {

// the widest rows that any layer multiplies
INLINE int64_t widest_rows(const Step &s) {
    int64_t widest = maximum(s.hidden, s.heads * s.dim);
    for (int64_t i = 0; i < s.num_layers; i++) {
        widest = maximum(widest, s.layers[i].inner_size);
        if (s.layers[i].mixture) widest = maximum(widest, s.layers[i].mixture->shared_inner);
    }
    return widest;
}

// memory for the mixture of any layer
template <typename T>
INLINE char *mixtures_memory(const Step &s) {
    static thread_local GrowingMemory memory;
    int64_t most = 0;
    for (int64_t i = 0; i < s.num_layers; i++)
        if (const Mixture *m = s.layers[i].mixture)
            most = maximum(most, lay_out_mixture<T>(*m, s.rows, s.hidden, nullptr).bytes);
    return memory.of(most);
}

// the convolution of a layer in two parts with a meeting between them, for a team of threads: several rows may be of one
// sequence, and all see what the others leave in the cache
template <typename T>
void keep_inputs(const Step &s, const LayerConvolution &c) {
    static thread_local GrowingMemory memory;
    const int64_t size = 2 * s.kv_heads * s.dim, row_size = c.num_caches * size;
    T *own = (T *)memory.of(row_size * sizeof(T));
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < s.rows; r++) {
        gate_inputs((const T *)s.qkv + r * 3 * s.hidden, own, s.hidden);
        memset(own + s.hidden, 0, (row_size - s.hidden) * sizeof(T));
        for (int64_t i = 0; i < c.num_caches; i++) {
            Rope place = {};
            place.slots = s.slots[c.caches[i].group];
            place.k_cache = c.caches[i].k_cache, place.v_cache = c.caches[i].v_cache;
            place.kv_heads = s.kv_heads, place.dim = s.dim, place.block_size = s.block_size;
            for (int64_t h = 0; h < s.kv_heads; h++) {
                const T *k = own + i * size + h * s.dim;
                write_kv(place, r, h, k, k + s.kv_heads * s.dim);
            }
        }
    }
}

template <typename T>
void convolve(const Step &s, const LayerConvolution &c) {
    static thread_local GrowingMemory memory;
    const int64_t size = 2 * s.kv_heads * s.dim, row_size = c.num_caches * size;
    T *rows = (T *)memory.of(c.taps * row_size * sizeof(T));
    const T *seen[MAX_TAPS];
    for (int64_t tap = 0; tap < c.taps; tap++) seen[tap] = rows + tap * row_size;
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < s.rows; r++) {
        for (int64_t tap = 0; tap < c.taps; tap++) {
            const int64_t position = s.positions[r] - (c.taps - 1) + tap;
            T *row = rows + tap * row_size;
            if (position < 0) memset(row, 0, row_size * sizeof(T));
            for (int64_t i = 0; position >= 0 && i < c.num_caches; i++) {
                const int32_t *table = s.block_tables[c.caches[i].group] + r * s.table_stride;
                const int64_t slot = table[position / s.block_size] * s.block_size + position % s.block_size;
                read_kv(c.caches[i], slot, s.kv_heads, s.dim, s.block_size, row + i * size);
            }
        }
        convolve_row(seen, (const T *)s.qkv + (3 * r + 1) * s.hidden, (const T *)c.weight, (const T *)c.bias,
                     (T *)s.attended + r * s.hidden, s.hidden, c.taps);
    }
}

template <class S>
void run_decode_step(const Kernels &kernels, const Step &s) {
    typedef typename S::T T;
    const int64_t queries = s.heads * s.dim, width = queries + 2 * s.kv_heads * s.dim;
    char *memory = team_memory(s.rows, widest_rows(s)), *mixtures = mixtures_memory<T>(s);
    Barrier barrier;
#pragma omp parallel
    {
        Meeting meeting{&barrier, omp_get_num_threads()};
        const Team team{memory, &meeting, wait_at_meeting};
        auto meet = [&] { wait_at_meeting(&meeting); };
        auto project = [&](const char *x, const Weight &weight, char *y, int64_t n, int64_t k, Gate gate) {
            const Linear p{x, weight, y, s.rows, n, k, k, gate ? n / 2 : n, gate};
            weight.bits ? kernels.quantized(p, team) : linear<S>(p);
            meet();
        };
        // a thread norms the same rows each time, and need not wait for the others in between. What comes after the
        // sum goes to x, or stays in residual alone where there is no norm before the next part
        auto add_norm = [&](const NormWeight &after, const NormWeight &before) {
            if (after.weight) norm<T>({s.x, nullptr, after, s.x, s.rows, s.hidden, 1.0f});
            norm<T>({s.x, s.residual, before, s.x, s.rows, s.hidden, s.multiplier});
            meet();
        };
        auto input_of = [&](const NormWeight &before) { return before.weight ? s.x : s.residual; };
        auto gated_mlp = [&](const char *x, const Expert &mlp, char *y, int64_t inner, Gate gate) {
            project(x, mlp.gate_up, s.inner, 2 * inner, s.hidden, gate);
            project(s.inner, mlp.down, y, s.hidden, inner, NOT_GATED);
        };
        // the expert of all rows comes first: the sum of the others takes the place of their input
        auto mix = [&](const char *x, const Mixture &m) {
            const MixtureMemory memory = lay_out_mixture<T>(m, s.rows, s.hidden, mixtures);
            choose_experts<S>(m, x, s.rows, s.hidden, memory, meeting);
            if (m.shared.gate_up.w) gated_mlp(x, m.shared, memory.shared, m.shared_inner, m.gate);
            experts<S>(kernels, {m.experts, x, (const int64_t *)memory.chosen, (const float *)memory.weights, s.x, s.rows,
                                 m.routing.count, m.routing.top_k, s.hidden, m.inner, s.hidden, m.gate},
                       memory.pairs, meeting);
            meet();
            if (m.shared.gate_up.w) norm<T>({memory.shared, s.x, {}, nullptr, s.rows, s.hidden, 1.0f});
        };
        if (s.layers[0].input_norm.weight) {
            norm<T>({s.residual, nullptr, s.layers[0].input_norm, s.x, s.rows, s.hidden, 1.0f});
            meet();
        }
        auto attend = [&](const Layer &l) {
            project(input_of(l.input_norm), l.qkv, s.qkv, width, s.hidden, NOT_GATED);
            rope_and_cache<T>({s.qkv, s.positions, l.cos_sin, l.query_scale, s.slots[l.group], l.k_cache, l.v_cache, l.q_norm,
                               l.k_norm, s.rows, s.heads, s.kv_heads, s.dim, l.rotary, s.block_size, l.norms_rows, s.is_int8});
            meet();
            const Attention attention{s.qkv, l.k_cache, l.v_cache, s.block_tables[l.group], s.query_start, s.context_lens,
                                      s.attended, s.partials, width, s.table_stride, s.rows, s.rows, s.heads,
                                      s.kv_heads, s.dim, s.block_size, l.window, s.is_int8, l.scale, l.softcap, l.sinks};
            attend_segments<S>(attention);
            meet();
            combine_segments<S>(attention);
            meet();
            if (l.attention_gate.w) {
                project(input_of(l.input_norm), l.attention_gate, s.gates, queries, s.hidden, NOT_GATED);
                gate<T>({s.attended, s.gates, s.rows, queries});
                meet();
            }
            project(s.attended, l.output, s.x, s.hidden, queries, NOT_GATED);
        };
        auto mix_by_convolution = [&](const Layer &l) {
            project(input_of(l.input_norm), l.qkv, s.qkv, 3 * s.hidden, s.hidden, NOT_GATED);
            keep_inputs<T>(s, *l.convolution);
            meet();
            convolve<T>(s, *l.convolution);
            meet();
            project(s.attended, l.output, s.x, s.hidden, s.hidden, NOT_GATED);
        };
        for (int64_t index = 0; index < s.num_layers; index++) {
            const Layer &l = s.layers[index];
            l.convolution ? mix_by_convolution(l) : attend(l);
            add_norm(l.attention_norm, l.mlp_norm);
            l.mixture ? mix(input_of(l.mlp_norm), *l.mixture)
                      : gated_mlp(input_of(l.mlp_norm), {l.gate_up, l.down}, s.x, l.inner_size, l.gate);
            add_norm(l.output_norm, index + 1 < s.num_layers ? s.layers[index + 1].input_norm : s.norm);
        }
    }
}

}  // namespace
