// Routed experts: y[row] = the sum over the row's experts of weight * down(activation(gate x) * up x).
//
// Pairs of a row and one of its experts are sorted by expert. Then the work is shared in one of two ways, which give the
// same bits, because a row's result of a linear layer depends neither on the rows beside it, nor on the thread, nor on how
// many panels the thread computes:
//
//   by experts   a task is an expert with some of its rows: gate_up and down follow each other in the caches of one
//                thread, and an expert's weights are read once for all of these rows.
//   by panels    where there are few tasks for the threads: they share all panels of all experts that are used, a
//                contiguous share each; gate_up of all experts first, then down, with a barrier between.
//
// Every pair has its result in T in a place of its own, and at the end each row's are scaled and added in fp32 in ascending
// order of experts: one order, however the rows were spread, and in whatever order the router named the experts.
//
// Each thread of a team sorts the pairs for itself, which takes less than waiting for another to do it.
#pragma once
#include "gemm.h"

namespace {

constexpr int64_t EXPERT_ROWS = 192;  // of a task: they stay in the L2 cache while the panels pass
constexpr int64_t TASKS_OF_A_THREAD = 8;  // with fewer, panels are shared

struct ExpertTask {
    int64_t expert, first, count;  // pairs
};

struct RoutedRows {
    int32_t *rows, *places;  // [pairs] the row of each pair; [rows][top_k] the pairs of each row, ascending
    float *weights;          // [rows][top_k], in the order of places
    ExpertTask *tasks;
    int64_t num_tasks;
    char *inner, *results;   // [pairs][inner], [pairs][hidden]: of all threads
};

INLINE int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// bytes of what the threads of a team compute together
template <typename T>
INLINE int64_t pairs_bytes(int64_t pairs, int64_t inner, int64_t hidden) {
    return aligned(pairs * inner * sizeof(T)) + aligned(pairs * hidden * sizeof(T));
}

// the pairs of a row, in ascending order of experts, which is that of pairs
INLINE void place_row(const Experts &e, int64_t row, int32_t *starts, const RoutedRows &routed) {
    int32_t *places = routed.places + row * e.top_k;
    float *weights = routed.weights + row * e.top_k;
    for (int64_t i = 0; i < e.top_k; i++) {
        const int32_t pair = starts[e.chosen[row * e.top_k + i]]++;
        routed.rows[pair] = (int32_t)row;
        int64_t j = i;
        for (; j > 0 && places[j - 1] > pair; j--) places[j] = places[j - 1], weights[j] = weights[j - 1];
        places[j] = pair, weights[j] = e.weights[row * e.top_k + i];
    }
}

// shared: pairs_bytes, the same for all threads of a team
template <typename T>
INLINE RoutedRows sort_rows(const Experts &e, char *shared) {
    static thread_local GrowingMemory memory;
    const int64_t pairs = e.rows * e.top_k, most = e.count + pairs / EXPERT_ROWS + 1;
    const int64_t sizes[] = {pairs * 4, pairs * 4, pairs * 4, most * (int64_t)sizeof(ExpertTask), (e.count + 1) * 4};
    int64_t total = 0;
    for (int64_t size : sizes) total += aligned(size);
    char *at = memory.of(total), *parts[5];
    for (int i = 0; i < 5; at += aligned(sizes[i]), i++) parts[i] = at;
    RoutedRows routed{(int32_t *)parts[0], (int32_t *)parts[1], (float *)parts[2], (ExpertTask *)parts[3], 0, shared,
                      shared + aligned(pairs * e.inner * sizeof(T))};
    int32_t *starts = (int32_t *)parts[4];
    memset(starts, 0, (e.count + 1) * 4);
    for (int64_t i = 0; i < pairs; i++) starts[e.chosen[i] + 1]++;
    for (int64_t expert = 0; expert < e.count; expert++) {
        const int64_t begin = starts[expert], count = starts[expert + 1];
        const int64_t chunks = (count + EXPERT_ROWS - 1) / EXPERT_ROWS;  // of about the same size
        for (int64_t i = 0; i < chunks; i++) {
            const int64_t from = begin + count * i / chunks, to = begin + count * (i + 1) / chunks;
            routed.tasks[routed.num_tasks++] = {expert, from, to - from};
        }
        starts[expert + 1] = (int32_t)(begin + count);
    }
    for (int64_t row = 0; row < e.rows; row++) place_row(e, row, starts, routed);
    return routed;
}

static void wait_for_nobody(void *) {}

// a layer in one thread: in a team of its own
template <class S>
INLINE void compute_alone(const Kernels &kernels, const Linear &p) {
    static thread_local GrowingMemory memory;
    const Team alone{p.weight.bits ? memory.of(quantized_bytes(p.m, p.k)) : nullptr, nullptr, wait_for_nobody};
#pragma omp parallel num_threads(1)
    p.weight.bits ? kernels.quantized(p, alone) : linear<S>(p);
}

// panels [first, last) of a layer, as a layer
template <typename T>
INLINE Linear panels_of(const Linear &p, int64_t first, int64_t last) {
    const int64_t column = first * (p.gate ? 16 : 32);  // of y
    Linear part = p;
    part.weight.w += first * (p.weight.bits ? panel_bytes(p.weight, p.k) : p.k * 32 * (int64_t)sizeof(T));
    if (p.weight.bias) part.weight.bias += first * 32 * sizeof(T);
    part.y += column * sizeof(T);
    part.n = minimum(p.n, last * 32) - first * 32;
    return part;
}

// the rows of a task, one after the other
template <typename T>
INLINE char *gather_rows(const Experts &e, const RoutedRows &routed, const ExpertTask &task) {
    static thread_local GrowingMemory memory;
    const int64_t bytes = e.hidden * sizeof(T);
    char *rows = memory.of(task.count * bytes);
    for (int64_t i = 0; i < task.count; i++)
        memcpy(rows + i * bytes, e.x + routed.rows[task.first + i] * e.x_stride * sizeof(T), bytes);
    return rows;
}

template <typename T>
INLINE Linear gate_up_of(const Experts &e, const RoutedRows &routed, const ExpertTask &task) {
    return {gather_rows<T>(e, routed, task), e.experts[task.expert].gate_up,
            routed.inner + task.first * e.inner * sizeof(T), task.count, 2 * e.inner, e.hidden, e.hidden, e.inner, e.gate};
}

template <typename T>
INLINE Linear down_of(const Experts &e, const RoutedRows &routed, const ExpertTask &task) {
    return {routed.inner + task.first * e.inner * sizeof(T), e.experts[task.expert].down,
            routed.results + task.first * e.hidden * sizeof(T), task.count, e.hidden, e.inner, e.inner, e.hidden,
            NOT_GATED};
}

// this thread's share of the panels of all tasks
template <class S>
INLINE void share_panels_of_experts(const Kernels &kernels, const Experts &e, const RoutedRows &routed, bool is_down) {
    typedef typename S::T T;
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t each = ((is_down ? e.hidden : 2 * e.inner) + 31) / 32, all = each * routed.num_tasks;
    const int64_t last = all * (thread + 1) / threads;
    for (int64_t panel = all * thread / threads; panel < last;) {
        const ExpertTask &task = routed.tasks[panel / each];
        const Linear p = is_down ? down_of<T>(e, routed, task) : gate_up_of<T>(e, routed, task);
        const int64_t begin = panel % each, end = minimum(each, begin + last - panel);
        compute_alone<S>(kernels, panels_of<T>(p, begin, end));
        panel += end - begin;
    }
}

template <typename T>
INLINE void add_experts(const Experts &e, const RoutedRows &routed, int64_t row, int64_t first, int64_t last) {
    const int32_t *places = routed.places + row * e.top_k;
    const float *weights = routed.weights + row * e.top_k;
    const T *results = (const T *)routed.results;
    T *y = (T *)e.y + row * e.hidden;
    for (int64_t i = first; i < last; i += 16) {
        Vec sum = zeros();
        for (int64_t j = 0; j < e.top_k; j++)
            sum = sum + load(results + places[j] * e.hidden + i, last - i) * all(weights[j]);
        store(y + i, sum, last - i);
    }
}

// this thread's share of the sums: rows, or columns of each where there are fewer rows than threads
template <typename T>
INLINE void share_sums(const Experts &e, const RoutedRows &routed) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    if (e.rows >= threads) {
        for (int64_t row = e.rows * thread / threads; row < e.rows * (thread + 1) / threads; row++)
            add_experts<T>(e, routed, row, 0, e.hidden);
        return;
    }
    const int64_t vectors = (e.hidden + 15) / 16;
    const int64_t first = vectors * thread / threads * 16, last = minimum(e.hidden, vectors * (thread + 1) / threads * 16);
    for (int64_t row = 0; row < e.rows; row++) add_experts<T>(e, routed, row, first, last);
}

// for a team of threads: see decode_step.h. shared: as sort_rows takes it. y may be x
template <class S>
void experts(const Kernels &kernels, const Experts &e, char *shared, Meeting &meeting) {
    typedef typename S::T T;
    const RoutedRows routed = sort_rows<T>(e, shared);
    if (routed.num_tasks < TASKS_OF_A_THREAD * meeting.threads) {
        share_panels_of_experts<S>(kernels, e, routed, false);
        wait_at_meeting(&meeting);
        share_panels_of_experts<S>(kernels, e, routed, true);
    } else {
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t i = 0; i < routed.num_tasks; i++) {
            compute_alone<S>(kernels, gate_up_of<T>(e, routed, routed.tasks[i]));
            compute_alone<S>(kernels, down_of<T>(e, routed, routed.tasks[i]));
        }
    }
    wait_at_meeting(&meeting);
    share_sums<T>(e, routed);
}

template <class S>
void run_experts(const Kernels &kernels, const Experts &e) {
    static thread_local GrowingMemory memory;
    char *shared = memory.of(pairs_bytes<typename S::T>(e.rows * e.top_k, e.inner, e.hidden));
    Barrier barrier;
#pragma omp parallel
    {
        Meeting meeting{&barrier, omp_get_num_threads()};
        experts<S>(kernels, e, shared, meeting);
    }
}

}  // namespace
