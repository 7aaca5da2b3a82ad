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
        for (int64_t index = 0; index < s.num_layers; index++) {
            const Layer &l = s.layers[index];
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
            add_norm(l.attention_norm, l.mlp_norm);
            l.mixture ? mix(input_of(l.mlp_norm), *l.mixture)
                      : gated_mlp(input_of(l.mlp_norm), {l.gate_up, l.down}, s.x, l.inner_size, l.gate);
            add_norm(l.output_norm, index + 1 < s.num_layers ? s.layers[index + 1].input_norm : s.norm);
        }
    }
}

}  // namespace
