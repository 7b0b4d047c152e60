// What all ways through a block of keys share: exchanges between lanes, and rows of the pool that are fetched ahead.
#pragma once

#include <utility>

#include "simd.h"

namespace umbel {

#define UMBEL_UNROLL _Pragma("GCC unroll 16")

constexpr int BLOCK = 64;  // keys at a time: one block of keys and values stays in the L2 cache
constexpr int AHEAD = 8;   // keys between a row that is used and the one that is fetched
constexpr int LINE = 16;   // elements between fetches; head_dim is a multiple of it

constexpr long whole(long count, long unit) { return (count + unit - 1) / unit * unit; }

// ------------------------------------------------------------------------------------------------ lanes

template <int... Lane>
UMBEL_INLINE vf pick(vf a, vf b, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Lane...);
#else
    return __builtin_shuffle(a, b, vi{Lane...});
#endif
}

// Which lane of the pair (a, b) comes to lane j, for the four exchanges between vectors whose index differs in `bit`.
template <int BIT, int... J>
constexpr auto own_lanes(std::integer_sequence<int, J...>) {  // a[j] and b[j]
    return std::integer_sequence<int, ((J & BIT) ? VL + J : J)...>{};
}
template <int BIT, int... J>
constexpr auto other_lanes(std::integer_sequence<int, J...>) {  // a[j ^ bit] and b[j ^ bit]
    return std::integer_sequence<int, ((J & BIT) ? VL + (J ^ BIT) : (J ^ BIT))...>{};
}
template <int BIT, int... J>
constexpr auto first_lanes(std::integer_sequence<int, J...>) {  // a[j] and b[j - bit]
    return std::integer_sequence<int, ((J & BIT) ? VL + J - BIT : J)...>{};
}
template <int BIT, int... J>
constexpr auto second_lanes(std::integer_sequence<int, J...>) {  // a[j + bit] and b[j]
    return std::integer_sequence<int, ((J & BIT) ? VL + J : J + BIT)...>{};
}
using Lanes = std::make_integer_sequence<int, VL>;

// Lane i of the result is the sum of v[i].
template <int BIT = VL / 2>
UMBEL_INLINE vf sums(vf (&v)[VL]) {
    if constexpr (BIT == 0) {
        return v[0];
    } else {
        UMBEL_UNROLL for (int i = 0; i < BIT; i++) {
            vf own = pick(v[i], v[i + BIT], own_lanes<BIT>(Lanes{}));
            v[i] = own + pick(v[i], v[i + BIT], other_lanes<BIT>(Lanes{}));
        }
        return sums<BIT / 2>(v);
    }
}

template <int BIT = VL / 2>
UMBEL_INLINE void transpose(vf (&v)[VL]) {
    if constexpr (BIT > 0) {
        UMBEL_UNROLL for (int i = 0; i < VL; i++) {
            if (i & BIT) continue;
            vf a = v[i], b = v[i + BIT];
            v[i] = pick(a, b, first_lanes<BIT>(Lanes{}));
            v[i + BIT] = pick(a, b, second_lanes<BIT>(Lanes{}));
        }
        transpose<BIT / 2>(v);
    }
}

// All lanes become one value, of an operation whose order does not matter.
template <int BIT = VL / 2, class Operation>
UMBEL_INLINE float across(vf v, Operation&& operation) {
    if constexpr (BIT == 0) {
        return v[0];
    } else {
        return across<BIT / 2>(operation(v, pick(v, v, other_lanes<BIT>(Lanes{}))), operation);
    }
}

UMBEL_INLINE vf spread(float x) { return x - vf{}; }  // one broadcast: x - 0 is x, where 0 + x is an addition

// Keeps a value in a register: compilers rather load it anew for every product, and loads are what runs out.
UMBEL_INLINE void hold([[maybe_unused]] vf& v) {
#if defined(__x86_64__) && defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#endif
}

// ------------------------------------------------------------------------------------------------ rows

inline void prefetch_row(const void* row, long bytes) {
    for (long at = 0; at < bytes; at += 64) prefetch((const char*)row + at);
}

// COUNT rows of a run of keys or values. Behind its end the last is repeated.
template <int COUNT, class Element>
struct Rows {
    const Element* row[COUNT];

    Rows(const Element* base, long row_stride, const int32_t* slots, long k, long count) {
        UMBEL_UNROLL for (int i = 0; i < COUNT; i++)
            row[i] = base + slots[k + i < count ? k + i : count - 1] * row_stride;
    }
};

// Fetches such rows a few lines at a time while others are computed, one row after the other: what the machine fetches
// by itself follows runs of lines. Several rows at once, or all lines at once, cost a third of the read speed.
template <int COUNT, class Element>
class Fetcher {
  public:
    Fetcher(const Rows<COUNT, Element>& rows, long head_dim) : rows_(rows), row_bytes_(head_dim * sizeof(Element)) {}

    UMBEL_INLINE void fetch_lines() {  // as many as LINE elements of every row take
        UMBEL_UNROLL for (long i = 0; i < (COUNT * LINE * (long)sizeof(Element) + 63) / 64; i++) {
            if (row_ == COUNT) return;
            prefetch((const char*)rows_.row[row_] + at_);
            at_ += 64;
            if (at_ >= row_bytes_) at_ = 0, row_++;
        }
    }

  private:
    const Rows<COUNT, Element>& rows_;
    long row_bytes_, at_ = 0;
    int row_ = 0;
};

}  // namespace umbel
