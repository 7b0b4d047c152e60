// One row of logits while a token is chosen from it.
//
// A row is read once: for the maxima of its blocks and, where a nucleus or a log-probability needs it, its mass. What
// follows (the k-th largest, the end of a nucleus, the race of the noise) looks only into blocks whose maximum says
// that they matter; nothing sorts the vocabulary.
#pragma once

#include <limits>
#include <vector>

#include "noise.h"
#include "simd.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace umbel::sampling {

constexpr long BLOCK = 128;         // tokens that share a maximum
constexpr long CHUNK_BLOCKS = 128;  // of a chunk: 64 KiB of logits, still in the L2 cache when they are read again
constexpr long VECTORS = BLOCK / VL;
constexpr double ROUNDING = 1e-6;  // of a mass that is summed in float32
constexpr float NEVER = -std::numeric_limits<float>::infinity();  // the logit of what may not be chosen

// Bit i: lane i of the mask is set.
UMBEL_INLINE uint32_t lanes(vi mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    uint32_t bits = 0;
    for (int i = 0; i < VL; i++) bits |= (uint32_t)(mask[i] & 1) << i;
    return bits;
#endif
}

struct Candidate {
    float logit;
    int32_t token;
};

// What is asked of a row. inverse_temperature 0: the most likely token, and nothing else counts.
struct Wish {
    double inverse_temperature;
    uint64_t key;
    int top_k;  // 0: all
    double top_p;
    double min_p;
};

class Row {
  public:
    // mask: bit t % 32 of word t / 32 says that token t may be chosen; nullptr: all may. `maxima` and `masses` are
    // the row's own memory: blocks() and 2 · chunks() entries.
    Row(const float* logits, const uint32_t* mask, long vocab, float* maxima, double* masses)
        : logits_(logits), mask_(mask), vocab_(vocab), maxima_(maxima), masses_(masses) {}

    static long blocks(long vocab) { return (vocab + BLOCK - 1) / BLOCK; }
    static long chunks(long vocab) { return (blocks(vocab) + CHUNK_BLOCKS - 1) / CHUNK_BLOCKS; }

    // Block maxima of a chunk and, unless inverse_temperature is 0, its mass. Every chunk once, in any order.
    void summarise(long chunk, double inverse_temperature);

    // After all chunks are summarised: the best logit and its first token.
    // False: there is a NaN, or no token with a finite logit that may be chosen.
    bool find_best();
    float best() const { return best_.logit; }
    int32_t best_token() const { return best_.token; }

    // Sum over the row of exp((logit − best) · inverse_temperature), the one it was summarised with.
    double mass(double inverse_temperature) const;

    // The winner among the tokens that top_k, top_p and min_p leave in the race.
    int32_t race(const Wish& wish) const;

    // The `count` largest logits and their tokens, best first, ties by token; −1 and −∞ where there are no more.
    void largest(long count, int32_t* tokens, float* logits) const;

  private:
    // The block's logits: where they lie, or in `scratch`, where those that may not be chosen or lie behind the end
    // of the vocabulary are −∞.
    const float* block(long index, float* scratch) const;
    bool ruled_out(long index) const;
    void collect(float least, std::vector<Candidate>& out) const;
    // The smallest logit that stays in the race; those that tie with it stay too.
    float floor(const Wish& wish) const;
    float kth_maximum(long k) const;
    float kth_largest(long k) const;
    float nucleus_end(const Wish& wish, float floor) const;
    // From the largest logit down to the bin in which the sum of weights reaches `wanted` (if negative: that share of
    // the sum over all at or above the floor): appends the bin's candidates, gives the sum of what lies above them.
    template <class Weigh>
    double collect_decisive(float floor, double wanted, Weigh&& weigh, std::vector<Candidate>& out,
                            double* total_wanted = nullptr) const;
    float least_by_min_p(const Wish& wish) const;

    const float* logits_;
    const uint32_t* mask_;
    long vocab_;
    float* maxima_;   // [blocks]
    double* masses_;  // [chunks, 2] largest logit (NaN: there is one), sum of exp((logit − largest) · inverse temperature)
    Candidate best_{NEVER, -1};
};

}  // namespace umbel::sampling
