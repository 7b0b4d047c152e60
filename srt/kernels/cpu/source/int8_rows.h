// Inputs of the INT8 kernels: rows of 16-bit integers with one scale for every BLOCK inputs.
//
// 16 bits and not 8: the product of two 16-bit integers costs as much as two of 8 bits, and the error of 8 bits for an
// input is about that of its weight, more where a row has outliers. The error of 16 bits is not seen beside it.
#pragma once

#include "linear.h"

namespace umbel {

constexpr long INT8_BLOCK = 1024;  // inputs that share a scale, and whose products are summed as integers

#if defined(__AVX512F__)
constexpr int INT8_ROWS = 12;  // rows of one tile: 2 sums for each, of 32 registers
#else
constexpr int INT8_ROWS = 6;  // of 16 registers
#endif

// Rows are laid out tile by tile, as the kernels read them.
//   by vectors: tiles of up to INT8_ROWS rows; [k / 4][rows of the tile][4] int16
//   by AMX:     tiles of 16 rows, padded with zeros; [k / 64][upper, lower byte][16 rows][64] int8
struct Int8Rows {
    long rows, k_padded, blocks, tiles;
    bool by_amx;
    const int16_t* values;
    const float* scales;  // [rows, blocks]; input = scale × value. NaN where a row is not of numbers

    long first_row(long tile) const { return by_amx ? tile * 16 : tile * rows / tiles; }
    const int16_t* tile_values(long tile) const { return values + first_row(tile) * k_padded; }
};

// Quantises rows for products with `weight` into memory of the calling thread, which the next call overwrites. Uses the
// whole team.
Int8Rows quantize_rows(const MatrixPart& weight, const float* x, long rows, long x_stride);

// The largest integer of a block so that its sum of products stays a 32-bit integer.
constexpr long largest_input(long block) {
    long fits = 0x7fffffffL / (127 * block);
    return fits < 32767 ? fits : 32767;
}

}  // namespace umbel
