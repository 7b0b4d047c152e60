// The F32, BF16 and F16 formats, and codes that stand for floats. Which of the two ways a matrix goes is decided once, by
// format and instruction set.
#pragma once

#include "elementwise.h"
#include "inputs.h"

namespace umbel {

// `fill_part` for floats: what is wider than the format is rounded to nearest even.
void pack_float(MatrixPart& part, long first, long count, const void* from, Source source, long row_stride);

// `linear` and `linear_panel` by vectors of float32: every instruction set and format.
void linear_vectors(const MatrixPart& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                    long out_stride);
void linear_panel_vectors(const MatrixPart& weight, const float* x, long rows, long x_stride, long panel, float* tile);

// Whether products with it round x to bfloat16: they go by tiles or by pairs.
bool rounds_inputs(const MatrixPart& weight);

#if defined(__AVX512F__)
#define UMBEL_PAIRS
// Whether products with it go by pairs of bfloat16, which not every machine with AVX-512 multiplies.
bool by_pairs(const MatrixPart& weight);

// The same by pairs, for BF16: x is rounded to bfloat16, sums are float32.
void linear_pairs(const MatrixPart& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                  long out_stride);
void linear_panel_pairs(const MatrixPart& weight, const float* x, long rows, long x_stride, long panel, float* tile);
#endif

#if defined(UMBEL_AMX)
// Whether products with it go by tiles.
bool by_tiles(const MatrixPart& weight);

// out[r, 0:n] = x[r] Wᵀ (+ bias) of rows that are tiles already.
void linear_tiled(const MatrixPart& weight, const TiledRows& x, const float* bias, float* out, long out_stride);

// out[r, i] = activation(gate[r, i]) · up[r, i] with [gate, up] = x[r] Wᵀ (+ bias), W = [2 · out.k, x.k]: what lies
// between the products of an MLP never leaves the caches. out.k is a multiple of 32.
void gated_tiled(const MatrixPart& weight, const TiledRows& x, const float* bias, Activation activation,
                 const TiledRows& out);

// The same by tiles, for BF16: x is rounded to bfloat16, sums are float32.
void linear_tiles(const MatrixPart& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                  long out_stride);
void linear_panel_tiles(const MatrixPart& weight, const float* x, long rows, long x_stride, long panel, float* tile);
#endif

}  // namespace umbel
