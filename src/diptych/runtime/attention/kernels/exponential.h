// Powers of e and of 2 by polynomials, over the vectors of the set that includes this.
#pragma once
#include "kernels.h"

namespace {

// e^x for x <= 0 and a little above: 2^(x log2 e) as 2^n * p(r), |r| <= 1/2, relative error below 2e-7; 0 for -inf
INLINE Vec exp_ps(Vec x) {
    const Vec n = to_integer(x * all(1.44269504088896341f));
    // r = x - n ln 2, in two parts so that it is exact enough for large n
    Vec r = fnmadd(n, all(0.693359375f), x);
    r = fnmadd(n, all(-2.12194440e-4f), r);
    Vec p = all(1.9875691500e-4f);
    p = fmadd(p, r, all(1.3981999507e-3f));
    p = fmadd(p, r, all(8.3334519073e-3f));
    p = fmadd(p, r, all(4.1665795894e-2f));
    p = fmadd(p, r, all(1.6666665459e-1f));
    p = fmadd(p, r, all(5.0000001201e-1f));
    p = fmadd(p, r * r, r + all(1.0f));
    // far below the range everything is 0 (and -inf, for which r is not a number, too)
    return only(lanes_above(x, -87.0f), times_power_of_2(p, n));
}

// 1 + e^-x, for the functions below
INLINE Vec one_and_exp(Vec x) { return all(1.0f) + exp_ps(zeros() - larger(x, all(-80.0f))); }

INLINE Vec sigmoid(Vec x) { return all(1.0f) / one_and_exp(x); }
INLINE Vec silu(Vec x) { return x / one_and_exp(x); }

// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2u)
INLINE Vec gelu_tanh(Vec x) {
    const Vec u = fmadd(x * x * x, all(0.044715f), x);
    return x / one_and_exp(u * all(1.5957691216057308f));
}

// what a gate makes of its own results and of those that it is multiplied with. The larger of two is the second one
// where any of them is not a number
INLINE Vec gated(Vec x, Vec up, const Gate &gate) {
    if (gate.kind == CLAMPED_SWISH) {
        const Vec limit = all(gate.limit), least = zeros() - limit;
        x = zeros() - larger(least, zeros() - x);
        up = larger(least, zeros() - larger(least, zeros() - up));
        return (up + all(1.0f)) * (x * sigmoid(x * all(gate.alpha)));
    }
    return (gate.kind == GELU_TANH ? gelu_tanh(x) : silu(x)) * up;
}

// tanh(x), to 2e-7 of 1
INLINE Vec tanh_ps(Vec x) { return all(2.0f) / one_and_exp(x + x) - all(1.0f); }

// 2^x as 2^n * p(r), |r| <= 1/2; the relative error is below 3e-7 (fp32) or 3e-6 (where the result becomes bf16)
template <typename T>
INLINE Vec exp2_ps(Vec x) {
    const Vec n = to_integer(x), r = x - n;
    Vec p;
    if (sizeof(T) == 4) {
        p = all(1.3276471483e-03f);
        p = fmadd(p, r, all(9.6755413304e-03f));
        p = fmadd(p, r, all(5.5507132751e-02f));
        p = fmadd(p, r, all(2.4022119724e-01f));
        p = fmadd(p, r, all(6.9314696706e-01f));
    } else {
        p = all(9.5701013979e-03f);
        p = fmadd(p, r, all(5.5917860279e-02f));
        p = fmadd(p, r, all(2.4024744841e-01f));
        p = fmadd(p, r, all(6.9312181474e-01f));
    }
    return times_power_of_2(fmadd(p, r, all(1.0f)), n);
}

// 2^x; 0 for -inf
INLINE float exp2_one(float x) { return first(exp2_ps<float>(all(x < -200.0f ? -200.0f : x))); }

}  // namespace
