// The INT8 format: weights as signed bytes with one scale for each output, weight = scale × stored.
#pragma once

#include "int8_rows.h"
#include "linear.h"
#include "tiles.h"

namespace umbel {

// Fills outputs [first, first + count) of an INT8 part whose data and scales are allocated: scale = max|w| / 127,
// stored = w / scale to nearest. `from` is [count, k] with rows `row_stride` elements apart.
// `first` is any output, so that matrices can be stacked along n. What pads the panels stays as it is: zero. Uses the
// whole team.
void pack_int8(MatrixPart& part, long first, long count, const void* from, Source source, long row_stride);

constexpr float SMALLEST_SCALE = 1e-35f;  // below it a quotient would not be exact; such weights count as zeros

// `linear` for an INT8 matrix. Inputs are rounded to 16 bits (see int8_rows.h), products are summed exactly. A row gives
// the same bits alone and in a batch.
void linear_int8(const MatrixPart& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                 long out_stride);

// Products of tiles of rows with panels, still to be multiplied by the weights' scales. Made in every chunk of a loop,
// because it may configure the AMX tiles of its thread.
class Int8Products {
  public:
    static constexpr int MOST_ROWS = 16;  // of a tile

    Int8Products(const MatrixPart& weight, const Int8Rows& x) : weight_(weight), x_(x) {}

    // sums[row of the tile, 0:16] of one panel. While it is used the next one comes from memory: of `turns` calls for this
    // panel, each asks for its share.
    void compute(long tile, long panel, long turn, long turns, float* sums) const;

  private:
    const MatrixPart& weight_;
    const Int8Rows& x_;
#if defined(UMBEL_AMX)
    Tiles tiles_;
#endif
};

// How many tiles of rows fit into the second cache beside the panels that visit them.
long int8_tiles_together(const Int8Rows& x);

}  // namespace umbel
