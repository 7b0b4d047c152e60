// The F32 and BF16 formats. Which of the two ways a matrix goes is decided once, by format and instruction set.
#pragma once

#include "linear.h"

namespace umbel {

// `fill_matrix` for F32 and BF16: float32 sources are rounded to nearest even for BF16.
void pack_float(Matrix& matrix, long first, long count, const void* source, bool source_is_bf16, long row_stride);

// `linear` and `linear_panel` by vectors of float32: every instruction set, both formats.
void linear_vectors(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                    long out_stride);
void linear_panel_vectors(const Matrix& weight, const float* x, long rows, long x_stride, long panel, float* tile);

#if defined(UMBEL_AMX)
// The same by tiles, for BF16: x is rounded to bfloat16, sums are float32.
void linear_tiles(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                  long out_stride);
void linear_panel_tiles(const Matrix& weight, const float* x, long rows, long x_stride, long panel, float* tile);
#endif

}  // namespace umbel
