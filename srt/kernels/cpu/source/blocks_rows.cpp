// Rounds rows of inputs to signed bytes or 16-bit integers with a scale for each 32.
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
typedef int16_t vshort __attribute__((vector_size(VL * 2)));

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

// VL integers, in the order of the products.
UMBEL_INLINE void put(int8_t* to, vi integers) {
    vbyte bytes = __builtin_convertvector(integers, vbyte);
    std::memcpy(to, &bytes, sizeof bytes);
}

template <int... Lane>
UMBEL_INLINE vshort even_before_odd(vshort v, std::integer_sequence<int, Lane...>) {
    return __builtin_shufflevector(v, v, (Lane / 4 * 4 + Lane % 2 * 2 + Lane % 4 / 2)...);
}

UMBEL_INLINE void put(int16_t* to, vi integers) {
    vshort shorts = even_before_odd(__builtin_convertvector(integers, vshort), std::make_integer_sequence<int, VL>{});
    std::memcpy(to, &shorts, sizeof shorts);
}

// 32 inputs as bytes or shorts.
template <class Integer>
UMBEL_INLINE void round_block(const float* x, Integer* values, float* factors) {
    constexpr float MOST = std::numeric_limits<Integer>::max();
    vi most{};
    for (int i = 0; i < STEPS; i++) {
        vi bits = float_to_bits(load(x + i * VL)) & 0x7fffffff;  // as bits a NaN is larger than all numbers
        most = most > bits ? most : bits;
    }
    int32_t bits = largest_of(most);
    float largest;
    std::memcpy(&largest, &bits, 4);
    if (!(largest <= std::numeric_limits<float>::max())) {
        std::memset(values, 0, 32 * sizeof(Integer));
        factors[0] = std::numeric_limits<float>::quiet_NaN();
        factors[1] = factors[2] = factors[3] = 0;
        return;
    }
    if (largest < SMALLEST) largest = SMALLEST;
    float inverse = MOST / largest;
    int32_t halves[2];
    for (int half = 0; half < 2; half++) {
        vi sum{};
        for (int i = half * STEPS / 2; i < (half + 1) * STEPS / 2; i++) {
            vi value = float_to_bits(load(x + i * VL) * inverse + SHIFT) - float_to_bits(splat(SHIFT));
            sum += value;
            put(values + i * VL, value);
        }
        halves[half] = sum_of(sum);
    }
    factors[0] = largest / MOST;
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

BlockRows take_rows(const Matrix& weight, long rows, bool shorts) {
    thread_local Buffer bytes_memory, shorts_memory, factors_memory[2];
    int terms = shorts ? 1 : weight.input_terms;
    long lanes = (rows * terms + 15) / 16 * 16, k = weight.k;
    BlockRows result{rows * terms, k, terms, nullptr, nullptr, factors_memory[shorts].take<float>(lanes * (k / 32) * 4)};
    if (shorts)
        result.shorts = shorts_memory.take<int16_t>(lanes * k);
    else
        result.bytes = bytes_memory.take<int8_t>(lanes * k + 64);  // a tile reads two rows for its last one
    return result;
}

// 32 inputs of a row, in one of the forms.
void round_inputs(const BlockRows& rows, long row, long block, const float* inputs) {
    long place = rows.place(row * rows.terms, block);
    float* factors = (float*)rows.factors + place * 4;
    if (rows.shorts) return round_block(inputs, (int16_t*)rows.shorts + place * 32, factors);
    int8_t* bytes = (int8_t*)rows.bytes + place * 32;
    round_block(inputs, bytes, factors);
    if (rows.terms == 1) return;
    alignas(64) float rest[32];
    take_rounded(inputs, bytes, factors[0], rest);
    round_block(rest, bytes + 32, factors + 4);
}

}  // namespace

BlockInputs round_rows(const Matrix& weight, const float* x, long rows, long x_stride) {
    BlockInputs result{weight.input_terms == 2, {}, {}};
    for (long i = 0; i < weight.count; i++) {
        Format format = weight.parts[i].format;
        if (!is_blocks(format) || result.of(format).rows) continue;
        bool shorts = takes_shorts(format, result.fine);
        (shorts ? result.shorts : result.bytes) = take_rows(weight, rows, shorts);
    }
    auto round = [&](long row, long begin, long end) {
        for (long block = begin; block < end; block++) {
            const float* inputs = x + row * x_stride + block * 32;
            alignas(64) float ordered[32];
            if (weight.order) {
                for (long i = 0; i < 32; i++) ordered[i] = x[row * x_stride + weight.order[block * 32 + i]];
                inputs = ordered;
            }
            if (result.bytes.rows) round_inputs(result.bytes, row, block, inputs);
            if (result.shorts.rows) round_inputs(result.shorts, row, block, inputs);
        }
    };
    long blocks = weight.k / 32;
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
