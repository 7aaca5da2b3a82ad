// The experts of a row and their weights, from the logits of a router. A row's are computed in one order by one thread, so
// that they depend on no other row.
//
// Of equal scores, that of the lowest index is the larger one. Weights are added, where they are divided by their sum, in
// ascending order of experts.
#pragma once
#include "elementwise.h"
#include "gemm.h"

namespace {

constexpr float SMALLEST_SUM = 1e-20f;  // of sigmoids: with this added, weights of zero stay zeros

INLINE float exp_one(float x) { return first(exp_ps(all(x))); }

INLINE float largest_of(const float *x, int64_t count) {
    Vec best = all(-__builtin_inff());
    for (int64_t i = 0; i < count; i += 16) best = larger_in(lanes(0, count - i), best, load(x + i, count - i));
    return largest_of(best);
}

// x = softmax(x)
INLINE void softmax(float *x, int64_t count) {
    const Vec top = all(largest_of((const float *)x, count));
    Vec sum = zeros();
    for (int64_t i = 0; i < count; i += 16) {
        const Vec e = only(lanes(0, count - i), exp_ps(load((const float *)x + i, count - i) - top));
        store(x + i, e, count - i);
        sum = sum + e;
    }
    const Vec total = all(sum_of(sum));
    for (int64_t i = 0; i < count; i += 16) store(x + i, load((const float *)x + i, count - i) / total, count - i);
}

// the places of the largest scores, the largest first
INLINE void find_largest(const float *scores, int64_t count, int64_t top_k, int64_t *found) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t end = i < top_k ? i : top_k;
        int64_t place = end;
        while (place > 0 && scores[i] > scores[found[place - 1]]) place--;
        if (place == top_k) continue;
        for (int64_t j = minimum(end, top_k - 1); j > place; j--) found[j] = found[j - 1];
        found[place] = i;
    }
}

INLINE void sort_ascending(int64_t *found, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        const int64_t moved = found[i];
        int64_t j = i;
        for (; j > 0 && found[j - 1] > moved; j--) found[j] = found[j - 1];
        found[j] = moved;
    }
}

// the weight of an expert: that of a softmax over those that are worse than it by no more than twice the jitter of the
// larger magnitude. taken: is left out, too (-1: none)
INLINE float sparsemixer_weight(const float *logits, int64_t count, int64_t expert, int64_t taken, float jitter) {
    const float best = logits[expert];
    float sum = 0.0f;
    for (int64_t i = 0; i < count; i++) {
        const float magnitude = logits[i] < 0.0f ? -logits[i] : logits[i];
        const bool is_worse = (best - logits[i]) / (magnitude > best ? magnitude : best) > 2.0f * jitter;
        if (i != taken && !is_worse) sum += exp_one(logits[i] - best);
    }
    return 1.0f / sum;
}

INLINE void choose_two(const Routing &r, const float *logits, int64_t *chosen, float *weights) {
    find_largest(logits, r.count, 2, chosen);
    weights[0] = sparsemixer_weight(logits, r.count, chosen[0], -1, r.jitter);
    weights[1] = sparsemixer_weight(logits, r.count, chosen[1], chosen[0], r.jitter);
    if (chosen[0] < chosen[1]) return;
    const int64_t first = chosen[0];
    const float weight = weights[0];
    chosen[0] = chosen[1], chosen[1] = first;
    weights[0] = weights[1], weights[1] = weight;
}

// scores: logits when it is called; other: scratch; [count] each
INLINE void choose_row(const Routing &r, float *scores, float *other, int64_t *chosen, float *weights) {
    if (r.scoring == SPARSEMIXER) {
        choose_two(r, scores, chosen, weights);
    } else {
        if (r.scoring == SOFTMAX) softmax(scores, r.count);
        if (r.scoring == SIGMOID)
            for (int64_t i = 0; i < r.count; i += 16)
                store(scores + i, sigmoid(load((const float *)scores + i, r.count - i)), r.count - i);
        const float *by = scores;
        if (r.correction) {
            for (int64_t i = 0; i < r.count; i++) other[i] = scores[i] + r.correction[i];
            by = other;
        }
        find_largest(by, r.count, r.top_k, chosen);
        sort_ascending(chosen, r.top_k);
        for (int64_t i = 0; i < r.top_k; i++) weights[i] = scores[chosen[i]];
        if (r.scoring == SOFTMAX_OF_TOP) softmax(weights, r.top_k);
    }
    if (r.is_normalized) {
        float total = weights[0];
        for (int64_t i = 1; i < r.top_k; i++) total += weights[i];
        if (r.scoring == SIGMOID) total += SMALLEST_SUM;
        for (int64_t i = 0; i < r.top_k; i++) weights[i] /= total;
    }
    if (r.scale != 1.0f)
        for (int64_t i = 0; i < r.top_k; i++) weights[i] *= r.scale;
}

// for a team of threads: see decode_step.h
template <typename T>
void choose(const Choice &c) {
    static thread_local GrowingMemory memory;
    const Routing &r = c.routing;
    float *scores = (float *)memory.of(r.count * 2 * sizeof(float)), *other = scores + r.count;
#pragma omp for schedule(static) nowait
    for (int64_t row = 0; row < c.rows; row++) {
        for (int64_t i = 0; i < r.count; i += 16) {
            const int64_t at = row * r.count + i, count = r.count - i;
            store(scores + i, c.is_wide ? load((const float *)c.logits + at, count) : load((const T *)c.logits + at, count),
                  count);
        }
        choose_row(r, scores, other, c.chosen + row * r.top_k, c.weights + row * r.top_k);
    }
}

template <typename T>
void run_choose(const Choice &c) {
#pragma omp parallel if (c.rows >= PARALLEL_ROWS)
    choose<T>(c);
}

}  // namespace
