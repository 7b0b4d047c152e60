// The noise of a draw: a function of (key, token), where the key stands for (seed, position). The definition is in
// srt/sampling/sampler.py, and this is the same one.
#pragma once

#include <cmath>

#include "simd.h"

namespace umbel {

constexpr double LARGEST_NOISE = 22.8739;  // of hash 0, rounded up

template <class Word>  // uint32_t, or vu for VL tokens at once
UMBEL_INLINE Word token_hash(uint64_t key, Word token) {
    uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
    Word h = token ^ low;
    h = (h ^ (h >> 17)) * 0xed5ad4bbu;
    h = (h ^ (h >> 11)) + high;
    h = h * 0xac4c1b51u;
    h = (h ^ (h >> 15)) * 0x31848babu;
    return h ^ (h >> 14);
}

// A small hash is large noise.
inline double gumbel(uint32_t hash) { return -std::log(-std::log1p(((double)hash + 0.5) * -0x1p-32)); }

// Noise of at least `noise` has a hash of at most this (most hashes up to it do have such noise: rounding is upwards).
inline uint32_t largest_hash(double noise) {
    double hashes = -std::expm1(-std::exp(-noise)) * 0x1p32 + 2.0;
    return hashes < 4294967295.0 ? (uint32_t)hashes : 0xffffffffu;
}

// What a token enters the race with. The product is rounded before the sum: a fused one would make other ties.
inline double score(float logit, double inverse_temperature, uint32_t hash) {
    volatile double scaled = logit * inverse_temperature;
    return scaled + gumbel(hash);
}

}  // namespace umbel
