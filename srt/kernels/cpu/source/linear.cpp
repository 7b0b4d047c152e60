// Matrices as objects of the C interface, and the choice of a kernel by format.
#include "linear.h"

#include <algorithm>
#include <new>
#include <utility>

#include "blocks.h"
#include "linear_float.h"
#include "linear_int8.h"
#include "memory.h"
#include "nodes.h"
#include "threads.h"
#include "tiles.h"

namespace umbel {
namespace {

constexpr long GROUP = 64;  // k of floats and INT8 is padded to a multiple of this

long element_bytes(Format format) {
    switch (format) {
        case Format::F32: return 4;
        case Format::BF16:
        case Format::F16: return 2;
        default: return 1;
    }
}

long bits_of(Format format) { return is_coded(format) && format != Format::FLOAT8 ? 4 : 8 * element_bytes(format); }

// Of the numbers in `scales`.
long count_scales(const MatrixPart& part) {
    if (part.format == Format::INT8) return part.panels * PANEL;
    return is_coded(part.format) ? part.panels * PANEL * (part.k / part.group) : 0;
}

void linear_plain(const MatrixPart& part, const float* x, long rows, long x_stride, const float* bias, float* out,
                  long out_stride) {
    if (part.format == Format::INT8) return linear_int8(part, x, rows, x_stride, bias, out, out_stride);
#if defined(UMBEL_AMX)
    if (by_tiles(part)) return linear_tiles(part, x, rows, x_stride, bias, out, out_stride);
#endif
#if defined(UMBEL_PAIRS)
    if (by_pairs(part)) return linear_pairs(part, x, rows, x_stride, bias, out, out_stride);
#endif
    linear_vectors(part, x, rows, x_stride, bias, out, out_stride);
}

// False when there is no memory.
bool add_part(Matrix& matrix, Format format, long n, long group, bool exact) {
    MatrixPart* grown = new (std::nothrow) MatrixPart[matrix.count + 1];
    if (!grown) return false;
    for (long i = 0; i < matrix.count; i++) grown[i] = matrix.parts[i];
    delete[] std::exchange(matrix.parts, grown);
    MatrixPart& part = grown[matrix.count];
    part = create_part(format, matrix.n, n, matrix.k, exact, group);
    if (!part.data) return false;
    matrix.count++;
    matrix.n += n;
    return true;
}

}  // namespace

#if defined(UMBEL_AMX)
bool by_tiles(const MatrixPart& part) { return part.format == Format::BF16 && !part.exact && tiles_allowed(); }
#endif

bool rounds_inputs([[maybe_unused]] const MatrixPart& part) {
#if defined(UMBEL_AMX)
    if (by_tiles(part)) return true;
#endif
#if defined(UMBEL_PAIRS)
    if (by_pairs(part)) return true;
#endif
    return false;
}

MatrixPart create_part(Format format, long first, long n, long k, bool exact, long group) {
    MatrixPart part{};
    part.format = format;
    part.first = first;
    part.n = n;
    part.k = k;
    part.exact = exact;
    part.group = group;
    part.group_shift = is_blocks(format) && group ? __builtin_ctzl((unsigned long)group) - 5 : 0;
    part.panels = (n + PANEL - 1) / PANEL;
    part.k_padded = is_blocks(format) ? k : (k + GROUP - 1) / GROUP * GROUP;
    part.panel_bytes =
        is_blocks(format) ? block_panel_bytes(part) : part.k_padded * PANEL * bits_of(format) / 8;
    part.data_bytes = part.panels * part.panel_bytes;
    part.data = allocate_pages(part.data_bytes);
    long scales = count_scales(part);
    if (scales) part.scales = new (std::nothrow) float[scales]{};
    if (!part.data || (scales && !part.scales)) free_part(part);
    return part;
}

void free_part(MatrixPart& part) {
    free_pages(std::exchange(part.data, nullptr), part.data_bytes);
    delete[] std::exchange(part.scales, nullptr);
}

// The panels of all blocks are one loop, those of any other part have one of their own: see `linear`. Threads take several
// panels at a time, so a thread may begin a few panels from here.
PanelRange panels_of(const Matrix& matrix, long part, int first, int end) {
    const MatrixPart& own = matrix.parts[part];
    long count = own.panels, before = 0;
    for (long i = 0; is_blocks(own.format) && i < matrix.count; i++) {
        if (i == part || !is_blocks(matrix.parts[i].format)) continue;
        count += matrix.parts[i].panels;
        if (i < part) before += matrix.parts[i].panels;
    }
    return {std::max(run_begin(count, first, team_size()) - before, 0L),
            std::min(run_begin(count, end, team_size()) - before, own.panels)};
}

// A page lies on the node of the first thread that writes to it.
void place_on_nodes(const Matrix& matrix) {
    constexpr long PAGE = 4096;
    team_nodes().each([&](int first_rank, int end_rank) {
        for (long i = 0; i < matrix.count; i++) {
            const MatrixPart& part = matrix.parts[i];
            PanelRange own = panels_of(matrix, i, first_rank, end_rank);
            long at = (own.first * part.panel_bytes + PAGE - 1) / PAGE * PAGE;
            for (; at < own.end * part.panel_bytes; at += PAGE) ((volatile char*)part.data)[at] = 0;
        }
    });
}

void fill_part(MatrixPart& part, long first, long count, const void* from, Source source, long row_stride) {
    if (part.format == Format::INT8)
        pack_int8(part, first, count, from, source, row_stride);
    else
        pack_float(part, first, count, from, source, row_stride);
}

void linear(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
            long out_stride) {
    if (rows <= 0) return;
    bool blocks = false;
    for (long i = 0; i < weight.count; i++) {
        const MatrixPart& part = weight.parts[i];
        blocks = blocks || is_blocks(part.format);
        if (!is_blocks(part.format))
            linear_plain(part, x, rows, x_stride, bias ? bias + part.first : nullptr, out + part.first, out_stride);
    }
    if (blocks) linear_blocks(weight, x, rows, x_stride, bias, out, out_stride);
}

void linear_panel(const MatrixPart& weight, const float* x, long rows, long x_stride, long panel, float* tile) {
#if defined(UMBEL_AMX)
    if (by_tiles(weight)) return linear_panel_tiles(weight, x, rows, x_stride, panel, tile);
#endif
#if defined(UMBEL_PAIRS)
    if (by_pairs(weight)) return linear_panel_pairs(weight, x, rows, x_stride, panel, tile);
#endif
    linear_panel_vectors(weight, x, rows, x_stride, panel, tile);
}

}  // namespace umbel

extern "C" {

using namespace umbel;

// Parts are added from the front; the matrix is ready when all have been filled.
// `order`: [k], copied; or null.
void* umbel_matrix_create(long k, int input_terms, const int32_t* order) {
    Matrix* matrix = new (std::nothrow) Matrix{0, k, 0, nullptr, input_terms};
    if (!matrix || !order) return matrix;
    int32_t* own = new (std::nothrow) int32_t[k];
    if (!own) {
        delete matrix;
        return nullptr;
    }
    std::memcpy(own, order, k * sizeof(int32_t));
    matrix->order = own;
    return matrix;
}

int umbel_matrix_add(void* matrix, int format, long n, long group, int exact) {
    return add_part(*(Matrix*)matrix, (Format)format, n, group, exact != 0);
}

// After all parts, before they are filled.
void umbel_matrix_place(const void* matrix) { place_on_nodes(*(const Matrix*)matrix); }

// `panels_of` for tests. range: [2].
void umbel_matrix_panels_of(const void* matrix, long part, int first_rank, int end_rank, long* range) {
    PanelRange found = panels_of(*(const Matrix*)matrix, part, first_rank, end_rank);
    range[0] = found.first, range[1] = found.end;
}

void umbel_matrix_fill(void* matrix, long part, long first, long count, const void* from, int source, long row_stride) {
    fill_part(((Matrix*)matrix)->parts[part], first, count, from, (Source)source, row_stride);
}

void umbel_matrix_fill_blocks(void* matrix, long part, long first, long count, const void* from, long row_bytes,
                              long head_rows) {
    pack_blocks(((Matrix*)matrix)->parts[part], first, count, (const uint8_t*)from, row_bytes, head_rows);
}

void umbel_matrix_fill_integers(void* matrix, long part, long first, long count, const uint8_t* codes,
                                const void* scales, const uint8_t* zeros) {
    pack_integers(((Matrix*)matrix)->parts[part], first, count, codes, (const f16*)scales, zeros);
}

void umbel_matrix_fill_codes(void* matrix, long part, long first, long count, const uint8_t* codes, const float* scales,
                             const float* table) {
    pack_codes(((Matrix*)matrix)->parts[part], first, count, codes, scales, table);
}

void umbel_matrix_free(void* matrix) {
    Matrix* it = (Matrix*)matrix;
    if (!it) return;
    for (long i = 0; i < it->count; i++) free_part(it->parts[i]);
    delete[] it->parts;
    delete[] it->order;
    delete it;
}

long umbel_matrix_part_bytes(const void* matrix, long index) {
    const MatrixPart& part = ((const Matrix*)matrix)->parts[index];
    return part.data_bytes + count_scales(part) * (long)sizeof(float);
}

long umbel_matrix_bytes(const void* matrix) {
    long bytes = 0;
    for (long i = 0; i < ((const Matrix*)matrix)->count; i++) bytes += umbel_matrix_part_bytes(matrix, i);
    return bytes;
}

void umbel_linear(const void* matrix, const float* x, long rows, long x_stride, const float* bias, float* out,
                  long out_stride) {
    linear(*(const Matrix*)matrix, x, rows, x_stride, bias, out, out_stride);
}

// Of a matrix of one part.
void umbel_linear_panel(const void* matrix, const float* x, long rows, long x_stride, long panel, float* tile) {
    const Matrix& it = *(const Matrix*)matrix;
    const MatrixPart& part = *it.parts;
    if (is_blocks(part.format))
        return multiply_panel(part, round_rows(it, x, rows, x_stride), panel, tile);
    linear_panel(part, x, rows, x_stride, panel, tile);
}

}  // extern "C"
