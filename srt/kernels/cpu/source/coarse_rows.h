// Inputs in 7 bits, for estimates of many rows: with AVX2 a product of bytes costs less than one of 16 bits.
//
// A row has one scale, chosen for most of its inputs. The few groups of four that hold larger ones (hidden states have
// such channels) are left out, and added in 16 bits. What rounding has lost is known for each row, so a bound can be kept.
//
// Two kinds of weights are multiplied with them: INT8, in exact integers, and blocks in Q8_0, whose sums of 32 inputs are
// exact and are added as float32.
#pragma once

#include "blocks.h"
#include "linear.h"
#include "linear_int8.h"

namespace umbel {

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(UMBEL_AMX)
#define UMBEL_COARSE_ROWS  // elsewhere 16 bits are as fast as memory
#endif

#if defined(UMBEL_COARSE_ROWS)

constexpr int COARSE_OFFSET = 64;  // what is added to every stored input, so that it is unsigned

struct LargeGroups {  // of one tile
    static constexpr int MOST = 24;
    int count;
    int32_t groups[MOST];
    int16_t values[MOST][INT8_ROWS][4];
    float numbers[MOST][INT8_ROWS][4];  // the same, converted once and not for every panel
};

// Whether blocks of this format are multiplied with inputs in 7 bits.
constexpr bool takes_coarse(Format format) { return SHORT_INPUTS && format == Format::Q8_0; }

struct CoarseRows {
    long rows, k_padded, tiles;
    const uint8_t* values;  // tile by tile: [k / 4][rows of the tile][4]
    const float* scales;    // [rows]; NaN where a row is not of numbers
    const float* errors;    // [rows] |x − x^|, rounded up
    const LargeGroups* large;  // [tiles]

    long first_row(long tile) const { return tile * rows / tiles; }
};

// Into memory of the calling thread, which the next call overwrites. Uses the whole team.
CoarseRows quantize_coarsely(const MatrixPart& weight, const float* x, long rows, long x_stride);

// What is added to sums because stored inputs are unsigned, for each output: COARSE_OFFSET times the sum of its stored
// weights, or of the weights of blocks.
struct CoarseOffsets {
    const int32_t* integers;
    const float* blocks;
};

// As Int8Products. Of blocks nothing is left to be multiplied.
class CoarseProducts {
  public:
    static constexpr int MOST_ROWS = INT8_ROWS;

    CoarseProducts(const MatrixPart& weight, const CoarseRows& x, CoarseOffsets offsets)
        : weight_(weight), x_(x), offsets_(offsets) {}

    void compute(long tile, long panel, long turn, long turns, float* sums) const;

  private:
    const MatrixPart& weight_;
    const CoarseRows& x_;
    CoarseOffsets offsets_;
};

// What float32 loses of a row's sums over blocks, as a share of the norm of an output's weights.
float lost_by_blocks(const MatrixPart& weight, const CoarseRows& x, long row);

// The norm of every output of a panel of Q8_0, rounded up, and its offset.
void measure_blocks(const MatrixPart& weight, long panel, float* norms, float* offsets);

#endif

}  // namespace umbel
