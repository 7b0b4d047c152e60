// Linear maps x → x Wᵀ + b with weights that are laid out once.
#pragma once

#include "simd.h"

namespace umbel {

enum class Format : int { F32 = 0, BF16 = 1, INT8 = 2 };

constexpr long PANEL = 16;  // outputs of a panel

// A weight [n, k] in panels of 16 outputs. Inputs come in groups, all 16 outputs of one group together, so that a panel
// is one stream: F32 by 1, BF16 by 2 (one 32-bit lane), INT8 by 4. Rows and columns are padded with zeros.
struct Matrix {
    Format format;
    long n, k;
    long panels;    // ceil(n / 16)
    long k_padded;  // a multiple of 64
    void* data;     // panels × k_padded × 16 elements, in 2 MiB pages
    long data_bytes;
    float* scales;  // INT8: [panels · 16], weight = scale × stored; else nullptr
    bool exact;     // BF16: x stays float32, also where tiles would multiply it rounded
};

// An empty matrix, all zeros; nullptr when there is no memory. Whoever creates it frees it.
Matrix* create_matrix(Format format, long n, long k, bool exact);
void free_matrix(Matrix* matrix);

// Lays out outputs [first, first + count) from source [count, k], float32 or bfloat16, with rows `row_stride` elements
// apart. `first` is any output, so that several sources can be stacked along n. Uses the whole team.
void fill_matrix(Matrix& matrix, long first, long count, const void* source, bool source_is_bf16, long row_stride);

// out[r, 0:n] = x[r, 0:k] Wᵀ (+ bias). x and out are float32 with strides in elements. Uses the whole team.
//
// F32 and BF16: an output is summed in one fixed order, whatever the number of rows, threads or panels of the call: a
// row gives the same bits alone, in a batch, and in `linear_panel`.
void linear(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
            long out_stride);

// Outputs [16 · panel, 16 · panel + 16) of an F32 or BF16 matrix for some rows, without bias: tile[r, 0:16], rows 16
// apart. Bit by bit what `linear` gives; what lies past n means nothing. Runs on the calling thread, also inside a loop
// of the team.
void linear_panel(const Matrix& weight, const float* x, long rows, long x_stride, long panel, float* tile);

}  // namespace umbel
