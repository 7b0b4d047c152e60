// The functions of an MLP's gate, a vector at a time, for the kernels that apply them where a product ends.
#pragma once

#include <cmath>

#include "elementwise.h"

namespace umbel {

UMBEL_INLINE vf silu(vf x) { return x * reciprocal(exp(-x) + 1.0f); }
UMBEL_INLINE vf gelu_tanh(vf x) {  // (1 + tanh(y)) / 2 is 1 / (1 + exp(-2y)), with one exponential and no cancellation
    vf minus_twice = x * (x * x * -0.0713548162726f - 1.5957691216057f);
    return x * reciprocal(exp(minus_twice) + 1.0f);
}
UMBEL_INLINE vf gelu(vf x) {
    vf result = x;
    for (int i = 0; i < VL; i++) result[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
    return result;
}
UMBEL_INLINE vf relu(vf x) { return max(x, vf{}); }
UMBEL_INLINE vf relu_squared(vf x) { return relu(x) * relu(x); }

// body(function) with the activation as a function of one vector, which the compiler can put inline.
template <class Body>
UMBEL_INLINE void with_activation(Activation activation, Body&& body) {
    switch (activation) {
        case Activation::SILU: return body([](vf x) { return silu(x); });
        case Activation::GELU_TANH: return body([](vf x) { return gelu_tanh(x); });
        case Activation::GELU: return body([](vf x) { return gelu(x); });
        case Activation::RELU: return body([](vf x) { return relu(x); });
        case Activation::RELU_SQUARED: return body([](vf x) { return relu_squared(x); });
    }
}

}  // namespace umbel
