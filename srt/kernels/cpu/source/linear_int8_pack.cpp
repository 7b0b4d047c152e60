#include <cmath>
#include <limits>

#include "linear_int8.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long PIECE = 512;  // inputs that are converted at once

UMBEL_INLINE void load_piece(const void* source, bool is_bf16, long at, long count, float* piece) {
    if (!is_bf16) {
        std::memcpy(piece, (const float*)source + at, count * sizeof(float));
        return;
    }
    const bf16* half = (const bf16*)source + at;
    for (long i = 0; i < count; i++) piece[i] = from_bf16(half[i]);
}

// The largest magnitude of a row, NaN when one of its values is no number.
float largest_weight(const void* source, bool is_bf16, long k) {
    float piece[PIECE];
    int32_t largest = 0;  // as bits, because then a NaN is larger than all numbers
    for (long at = 0; at < k; at += PIECE) {
        long count = k - at < PIECE ? k - at : PIECE;
        load_piece(source, is_bf16, at, count, piece);
        for (long i = 0; i < count; i++) {
            int32_t bits;
            std::memcpy(&bits, piece + i, 4);
            bits &= 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
    }
    float value;
    std::memcpy(&value, &largest, 4);
    return value <= std::numeric_limits<float>::max() ? value : std::numeric_limits<float>::quiet_NaN();
}

// Stored bytes of one output: groups of 4 inputs, 64 bytes apart.
void pack_output(const void* source, bool is_bf16, long k, float scale, int8_t* out) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 · 2^23: the fraction is rounded away, the integer is in the low bits
    float piece[PIECE];
    int8_t bytes[PIECE];
    for (long at = 0; at < k; at += PIECE) {
        long count = k - at < PIECE ? k - at : PIECE;
        load_piece(source, is_bf16, at, count, piece);
        for (long i = 0; i < count; i++) {
            float shifted = piece[i] / scale + SHIFT;
            int32_t bits;
            std::memcpy(&bits, &shifted, 4);
            bytes[i] = (int8_t)bits;
        }
        for (long i = count; i % 4; i++) bytes[i] = 0;
        for (long i = 0; i < count; i += 4) std::memcpy(out + (at + i) * PANEL, bytes + i, 4);
    }
}

void pack_one(Matrix& matrix, long output, const void* weights, bool is_bf16) {
    float scale = largest_weight(weights, is_bf16, matrix.k) / 127.0f;
    int8_t* out = (int8_t*)matrix.data + output / PANEL * matrix.k_padded * PANEL + output % PANEL * 4;
    matrix.scales[output] = scale;
    if (scale >= SMALLEST_SCALE)
        pack_output(weights, is_bf16, matrix.k, scale, out);
    else  // zeros, or weights that are no numbers, as their scale then says
        for (long at = 0; at < matrix.k; at += 4) std::memset(out + at * PANEL, 0, 4);
}

}  // namespace

void pack_int8(Matrix& matrix, long first, long count, const void* source, bool source_is_bf16, long row_stride) {
    parallel(count, even_grain(count, 8, PANEL), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const char* weights = (const char*)source + row * row_stride * (source_is_bf16 ? 2 : 4);
            pack_one(matrix, first + row, weights, source_is_bf16);
        }
    });
}

}  // namespace umbel
