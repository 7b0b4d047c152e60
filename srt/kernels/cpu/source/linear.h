// Linear maps x → x Wᵀ + b with weights that are laid out once.
#pragma once

#include "simd.h"

namespace umbel {

enum class Format : int { F32 = 0, BF16 = 1, INT8 = 2 };

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
};

// out[r, 0:n] = x[r, 0:k] Wᵀ (+ bias). x and out are float32 with strides in elements. Uses the whole team.
void linear(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
            long out_stride);

}  // namespace umbel
