// Matrices as objects of the C interface, and the choice of a kernel by format.
#include "linear.h"

#include <new>

#include "linear_float.h"
#include "linear_int8.h"
#include "memory.h"
#include "tiles.h"

namespace umbel {
namespace {

constexpr long GROUP = 64;  // k is padded to a multiple of this

long element_bytes(Format format) {
    switch (format) {
        case Format::F32: return 4;
        case Format::BF16: return 2;
        case Format::INT8: return 1;
    }
    return 0;
}

}  // namespace

#if defined(UMBEL_AMX)
bool by_tiles(const Matrix& weight) { return weight.format == Format::BF16 && !weight.exact && tiles_allowed(); }
#endif

Matrix* create_matrix(Format format, long n, long k, bool exact) {
    Matrix* matrix = new (std::nothrow) Matrix{};
    if (!matrix) return nullptr;
    matrix->format = format;
    matrix->n = n;
    matrix->k = k;
    matrix->exact = exact;
    matrix->panels = (n + PANEL - 1) / PANEL;
    matrix->k_padded = (k + GROUP - 1) / GROUP * GROUP;
    matrix->data_bytes = matrix->panels * matrix->k_padded * PANEL * element_bytes(format);
    matrix->data = allocate_pages(matrix->data_bytes);
    if (format == Format::INT8) matrix->scales = new (std::nothrow) float[matrix->panels * PANEL]{};
    if (!matrix->data || (format == Format::INT8 && !matrix->scales)) {
        free_matrix(matrix);
        return nullptr;
    }
    return matrix;
}

void free_matrix(Matrix* matrix) {
    if (!matrix) return;
    free_pages(matrix->data, matrix->data_bytes);
    delete[] matrix->scales;
    delete matrix;
}

void fill_matrix(Matrix& matrix, long first, long count, const void* source, bool source_is_bf16, long row_stride) {
    if (matrix.format == Format::INT8)
        pack_int8(matrix, first, count, source, source_is_bf16, row_stride);
    else
        pack_float(matrix, first, count, source, source_is_bf16, row_stride);
}

void linear(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
            long out_stride) {
    if (rows <= 0) return;
    if (weight.format == Format::INT8) return linear_int8(weight, x, rows, x_stride, bias, out, out_stride);
#if defined(UMBEL_AMX)
    if (by_tiles(weight)) return linear_tiles(weight, x, rows, x_stride, bias, out, out_stride);
#endif
    linear_vectors(weight, x, rows, x_stride, bias, out, out_stride);
}

void linear_panel(const Matrix& weight, const float* x, long rows, long x_stride, long panel, float* tile) {
#if defined(UMBEL_AMX)
    if (by_tiles(weight)) return linear_panel_tiles(weight, x, rows, x_stride, panel, tile);
#endif
    linear_panel_vectors(weight, x, rows, x_stride, panel, tile);
}

}  // namespace umbel

extern "C" {

using umbel::Matrix;

void* umbel_matrix_create(int format, long n, long k, int exact) {
    return umbel::create_matrix((umbel::Format)format, n, k, exact != 0);
}

void umbel_matrix_fill(void* matrix, long first, long count, const void* source, int source_is_bf16, long row_stride) {
    umbel::fill_matrix(*(Matrix*)matrix, first, count, source, source_is_bf16 != 0, row_stride);
}

void umbel_matrix_free(void* matrix) { umbel::free_matrix((Matrix*)matrix); }

long umbel_matrix_bytes(const void* matrix) {
    const Matrix& weight = *(const Matrix*)matrix;
    return weight.data_bytes + (weight.scales ? weight.panels * umbel::PANEL * (long)sizeof(float) : 0);
}

void umbel_linear(const void* matrix, const float* x, long rows, long x_stride, const float* bias, float* out,
                  long out_stride) {
    umbel::linear(*(const Matrix*)matrix, x, rows, x_stride, bias, out, out_stride);
}

void umbel_linear_panel(const void* matrix, const float* x, long rows, long x_stride, long panel, float* tile) {
    umbel::linear_panel(*(const Matrix*)matrix, x, rows, x_stride, panel, tile);
}

}  // extern "C"
