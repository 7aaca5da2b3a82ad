// The table of one set: the templates for its arithmetic. What computes weights in whole numbers comes later (native.cpp).
#pragma once
#include "decode_step.h"

namespace {

template <class S>
constexpr Kernels kernels_of() {
    typedef typename S::T T;
    return {run_linear<S>, run_linear<Fp32>, run_norm<T>, run_activate<T>, run_gate<T>, run_softcap<T>,
            run_rope_and_cache<T>, run_convolution<T>, run_attention<S>, run_decode_step<S>, run_choose<T>, run_experts<S>, nullptr};
}

}  // namespace
