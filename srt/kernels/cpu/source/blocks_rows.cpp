// Rounds rows of inputs to signed bytes with a scale for each 32.
#include <limits>
#include <utility>

#include "blocks.h"
#include "memory.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr float SMALLEST = 1e-30f;  // below it the inverse of a scale would not be a number; its values count as zeros
constexpr float SHIFT = 12582912.0f;  // 1.5 · 2^23: the fraction is rounded away, the integer is in the low bits
constexpr int STEPS = 32 / VL;
typedef int8_t vbyte __attribute__((vector_size(VL)));

template <int BY, int... Lane>
UMBEL_INLINE vi rotated(vi v, std::integer_sequence<int, Lane...>) {
    return __builtin_shufflevector(v, v, (Lane + BY) % VL...);
}

// All lanes of v taken together, in halves: lane by lane takes several times as long as what is rounded.
template <int BY = VL / 2, class Take>
UMBEL_INLINE int32_t fold(vi v, Take&& take) {
    if constexpr (BY == 0)
        return v[0];
    else
        return fold<BY / 2>(take(v, rotated<BY>(v, std::make_integer_sequence<int, VL>{})), take);
}

UMBEL_INLINE int32_t largest_of(vi v) {
    return fold(v, [](vi a, vi b) { return a > b ? a : b; });
}

UMBEL_INLINE int32_t sum_of(vi v) {
    return fold(v, [](vi a, vi b) { return a + b; });
}

// 32 inputs.
UMBEL_INLINE void round_block(const float* x, int8_t* values, float* factors) {
    vi most{};
    for (int i = 0; i < STEPS; i++) {
        vi bits = float_to_bits(load(x + i * VL)) & 0x7fffffff;  // as bits a NaN is larger than all numbers
        most = most > bits ? most : bits;
    }
    int32_t bits = largest_of(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    if (!(largest <= std::numeric_limits<float>::max())) {
        std::memset(values, 0, 32);
        factors[0] = std::numeric_limits<float>::quiet_NaN();
        factors[1] = factors[2] = factors[3] = 0;
        return;
    }
    if (largest < SMALLEST) largest = SMALLEST;
    float inverse = 127.0f / largest;
    int32_t halves[2];
    for (int half = 0; half < 2; half++) {
        vi sum{};
        for (int i = half * STEPS / 2; i < (half + 1) * STEPS / 2; i++) {
            vi value = float_to_bits(load(x + i * VL) * inverse + SHIFT) - float_to_bits(splat(SHIFT));
            sum += value;
            vbyte bytes = __builtin_convertvector(value, vbyte);
            std::memcpy(values + i * VL, &bytes, VL);
        }
        halves[half] = sum_of(sum);
    }
    factors[0] = largest / 127.0f;
    factors[1] = (float)(halves[0] + halves[1]);
    factors[2] = (float)halves[0];
    factors[3] = (float)halves[1];
}

// What the bytes lack of 32 inputs.
UMBEL_INLINE void take_rounded(const float* x, const int8_t* values, float scale, float* rest) {
    for (int i = 0; i < STEPS; i++) {
        vbyte bytes;
        std::memcpy(&bytes, values + i * VL, VL);
        store(rest + i * VL, fnma(__builtin_convertvector(bytes, vf), splat(scale), load(x + i * VL)));
    }
}

}  // namespace

BlockRows round_rows(const Matrix& weight, const float* x, long rows, long x_stride) {
    thread_local Buffer values_memory, factors_memory;
    long k = weight.k;
    int terms = weight.input_terms;
    long padded = (rows * terms + 15) / 16 * 16, blocks = k / 32;
    int8_t* values = values_memory.take<int8_t>(padded * k + 64);  // a tile reads two rows for its last one
    float* factors = factors_memory.take<float>(padded * blocks * 4);
    BlockRows result{rows * terms, k, terms, values, factors};
    auto round = [&](long row, long begin, long end) {
        long lane = row * terms, tile = lane / BlockRows::TILE, first = tile * BlockRows::TILE, lanes = result.lanes(tile);
        for (long block = begin; block < end; block++) {
            const float* inputs = x + row * x_stride + block * 32;
            alignas(64) float ordered[32], rest[32];
            if (weight.order) {
                for (long i = 0; i < 32; i++) ordered[i] = x[row * x_stride + weight.order[block * 32 + i]];
                inputs = ordered;
            }
            long place = first * blocks + block * lanes + (lane - first);
            round_block(inputs, values + place * 32, factors + place * 4);
            if (terms == 1) continue;
            take_rounded(inputs, values + place * 32, factors[place * 4], rest);
            round_block(rest, values + (place + 1) * 32, factors + (place + 1) * 4);
        }
    };
    if (rows == 1) {
        parallel(blocks, 512, [&](long begin, long end) { round(0, begin, end); });
    } else {
        parallel(rows, even_grain(rows, 4), [&](long begin, long end) {
            for (long row = begin; row < end; row++) round(row, 0, blocks);
        });
    }
    return result;
}

}  // namespace umbel
