// A layer's mixture of experts within a decode step: the router, the choice, the experts, and the expert of all rows. The
// parts are those of the other files, so that the result is bitwise what they give one by one.
#pragma once
#include "experts.h"
#include "routing.h"

namespace {

// what the threads of a team compute together on the way through a mixture
struct MixtureMemory {
    char *wide, *logits, *chosen, *weights, *shared, *pairs;
    int64_t bytes;
};

// memory: null to count the bytes
template <typename T>
INLINE MixtureMemory lay_out_mixture(const Mixture &m, int64_t rows, int64_t hidden, char *memory) {
    const int64_t pairs = rows * m.routing.top_k;
    const int64_t sizes[] = {m.router_is_wide ? rows * hidden * 4 : 0, rows * m.routing.count * 4, pairs * 8, pairs * 4,
                             m.shared.gate_up.w ? rows * hidden * (int64_t)sizeof(T) : 0,
                             pairs_bytes<T>(pairs, m.inner, hidden)};
    MixtureMemory found;
    char **parts[] = {&found.wide, &found.logits, &found.chosen, &found.weights, &found.shared, &found.pairs};
    found.bytes = 0;
    for (int i = 0; i < 6; i++) {
        *parts[i] = memory + found.bytes;
        found.bytes += aligned(sizes[i]);
    }
    return found;
}

// x [rows, hidden] as fp32
template <typename T>
INLINE void widen_rows(const char *x, char *wide, int64_t rows, int64_t hidden) {
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = row * hidden; i < (row + 1) * hidden; i += 16)
            store((float *)wide + i, load((const T *)x + i, (row + 1) * hidden - i), (row + 1) * hidden - i);
}

// the logits of the router, and what follows from them: for a team of threads, which has met when this returns
template <class S>
INLINE void choose_experts(const Mixture &m, const char *x, int64_t rows, int64_t hidden, const MixtureMemory &memory,
                           Meeting &meeting) {
    typedef typename S::T T;
    const int64_t count = m.routing.count;
    if (m.router_is_wide) {
        widen_rows<T>(x, memory.wide, rows, hidden);
        wait_at_meeting(&meeting);
        linear<Fp32>({memory.wide, m.router, memory.logits, rows, count, hidden, hidden, count, NOT_GATED});
    } else {
        linear<S>({x, m.router, memory.logits, rows, count, hidden, hidden, count, NOT_GATED});
    }
    wait_at_meeting(&meeting);
    choose<T>({memory.logits, m.router_is_wide, rows, m.routing, (int64_t *)memory.chosen, (float *)memory.weights});
    wait_at_meeting(&meeting);
}

}  // namespace
