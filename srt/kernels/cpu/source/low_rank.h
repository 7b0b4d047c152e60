// Low-rank changes of linear maps, in the rows that ask for them: out[r] += scale · B (A x[r]). Arithmetic is float32,
// and a row gives the same bits alone and in a batch, with one thread and with many.
#pragma once

#include "inputs.h"

namespace umbel {

// How both matrices of a change are stored.
enum class LowRankNumbers : int { F32 = 0, BF16 = 1, INT16 = 2 };

// The change of one map among those that a product computes.
struct LowRankPart {
    const void* down;     // A: [rank / 4, ceil(k / 16), 4, 16], padded with zeros
    const void* up;       // B: [ceil(width / 32), rank, 32], padded with zeros
    const float* scales;  // [rank]: what products with rows of A are multiplied with
    long rank;            // a multiple of 4
    long first, width;    // its outputs are [first, first + width) of the product's
    LowRankNumbers numbers;
};

// The changes that one adapter makes to one product.
struct LowRankChange {
    const LowRankPart* parts;
    long count;
};

// Rows by adapter: group g has rows [starts[g], starts[g + 1]) of `rows`.
struct AdapterGroups {
    long count;
    const int64_t* adapters;  // [count]
    const int64_t* starts;    // [count + 1]
    const int64_t* rows;
};

// The changes of one product by all adapters, [adapters]; nullptr: there are none. A change of no parts changes nothing.
using LowRankChanges = const LowRankChange*;

// Adds the changes of the groups' adapters to out, whose rows are the product of the same rows of x. Uses the whole
// team. False: there is no memory for what lies between A and B.
class LowRankProducts {
  public:
    bool add(LowRankChanges changes, const AdapterGroups& groups, const Inputs& x, float* out, long out_stride);
    bool add(LowRankChanges changes, const AdapterGroups& groups, const float* x, long k, float* out, long out_stride);

  private:
    Buffer between_;  // [rows of groups, ranks of an adapter]
};

}  // namespace umbel
