#include <cmath>
#include <limits>

#include "linear_int8.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long PIECE = 512;  // inputs that are converted at once

UMBEL_INLINE void load_piece(const void* row, Source source, long at, long count, float* piece) {
    switch (source) {
        case Source::F32: std::memcpy(piece, (const float*)row + at, count * sizeof(float)); break;
        case Source::BF16:
            for (long i = 0; i < count; i++) piece[i] = from_bf16(((const bf16*)row)[at + i]);
            break;
        case Source::F16:
            for (long i = 0; i < count; i++) piece[i] = from_f16(((const f16*)row)[at + i]);
            break;
    }
}

// The largest magnitude of a row, NaN when one of its values is no number.
float largest_weight(const void* row, Source source, long k) {
    float piece[PIECE];
    int32_t largest = 0;  // as bits, because then a NaN is larger than all numbers
    for (long at = 0; at < k; at += PIECE) {
        long count = k - at < PIECE ? k - at : PIECE;
        load_piece(row, source, at, count, piece);
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
void pack_output(const void* row, Source source, long k, float scale, int8_t* out) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 · 2^23: the fraction is rounded away, the integer is in the low bits
    float piece[PIECE];
    int8_t bytes[PIECE];
    for (long at = 0; at < k; at += PIECE) {
        long count = k - at < PIECE ? k - at : PIECE;
        load_piece(row, source, at, count, piece);
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

void pack_one(MatrixPart& part, long output, const void* weights, Source source) {
    float scale = largest_weight(weights, source, part.k) / 127.0f;
    int8_t* out = (int8_t*)part.data + output / PANEL * part.k_padded * PANEL + output % PANEL * 4;
    part.scales[output] = scale;
    if (scale >= SMALLEST_SCALE)
        pack_output(weights, source, part.k, scale, out);
    else  // zeros, or weights that are no numbers, as their scale then says
        for (long at = 0; at < part.k; at += 4) std::memset(out + at * PANEL, 0, 4);
}

}  // namespace

void pack_int8(MatrixPart& part, long first, long count, const void* from, Source source, long row_stride) {
    parallel(count, even_grain(count, 8, PANEL), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const char* weights = (const char*)from + row * row_stride * source_bytes(source);
            pack_one(part, first + row, weights, source);
        }
    });
}

}  // namespace umbel
