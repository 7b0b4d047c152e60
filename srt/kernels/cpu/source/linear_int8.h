// The INT8 format: weights as signed bytes with one scale for each output, weight = scale × stored.
#pragma once

#include "linear.h"

namespace umbel {

// Fills outputs [first, first + count) of an INT8 matrix whose data and scales are allocated: scale = max|w| / 127,
// stored = w / scale to nearest. source is [count, k] with rows `row_stride` elements apart, float32 or bfloat16. `first`
// is any output, so that matrices can be stacked along n. Outputs and inputs that pad the panels stay as they are: zero.
// Uses the whole team.
void pack_int8(Matrix& matrix, long first, long count, const void* source, bool source_is_bf16, long row_stride);

// `linear` for an INT8 matrix: x is quantised to 16 bits, so what is left is the error of the weights.
void linear_int8(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                 long out_stride);

}  // namespace umbel
