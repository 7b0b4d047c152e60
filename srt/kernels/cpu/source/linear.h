// Linear maps x → x Wᵀ + b with weights that are laid out once.
#pragma once

#include "simd.h"

namespace umbel {

// How a part of a matrix is stored. From Q4_0 on: blocks of 32 or 256 inputs as ggml has them (blocks.h), and integers
// of 4 or 8 bits in groups of 32 · 2^i inputs with a float16 scale and a zero point among the codes. From FLOAT8 on:
// codes that stand for floats, e4m3 or one of 16 numbers, in groups of 8 · i inputs with a float32 scale.
enum class Format : int {
    F32 = 0, BF16 = 1, INT8 = 2, F16 = 3,
    Q4_0 = 4, Q4_1 = 5, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
    Q2_K = 9, Q3_K = 10, Q4_K = 11, Q5_K = 12, Q6_K = 13,
    IQ4_NL = 14, IQ4_XS = 15, MXFP4 = 16, INT4 = 17, INT8_GROUPS = 18,
    FLOAT8 = 19, NF4 = 20, FP4 = 21, E2M1 = 22,
};

constexpr bool is_blocks(Format format) { return format >= Format::Q4_0 && format < Format::FLOAT8; }
constexpr bool is_coded(Format format) { return format >= Format::FLOAT8; }

// The type of the numbers that a float or INT8 part is filled from.
enum class Source : int { F32 = 0, BF16 = 1, F16 = 2 };
constexpr long source_bytes(Source source) { return source == Source::F32 ? 4 : 2; }

constexpr long PANEL = 16;  // outputs of a panel

// Some outputs of a matrix in one format, in panels of 16 outputs. Inputs come in groups, all 16 outputs of one group
// together, so that a panel is one stream: F32 by 1, BF16 and F16 by 2 (one 32-bit lane), INT8, blocks and FLOAT8 by 4,
// codes of 4 bits by 8. Rows and columns are padded with zeros.
struct MatrixPart {
    Format format;
    long first;        // its first output in the matrix
    long n, k;
    long panels;       // ceil(n / 16)
    long k_padded;     // a multiple of 64; of blocks: k
    long panel_bytes;
    void* data;        // panels × panel_bytes, in 2 MiB pages
    long data_bytes;
    float* scales;     // INT8: [panels · 16]; codes: [panels][k / group][16]; weight = scale × stored; else nullptr
    bool exact;        // BF16: x stays float32, also where tiles would multiply it rounded
    long group;        // inputs that share a scale, of codes and of integers with zero points
    int group_shift;   // of integers with zero points: log2(group / 32)
    float table[16];   // what codes of 4 bits stand for

    const char* panel(long index) const { return (const char*)data + index * panel_bytes; }
};

// A weight [n, k] as a stack of parts.
struct Matrix {
    long n, k;
    long count;
    MatrixPart* parts;
    int input_terms = 1;             // of blocks: bytes of an input, see BlockRows
    const int32_t* order = nullptr;  // [k] of blocks: weight i is multiplied with input order[i]; the matrix owns it

    // The only part, where that holds no blocks: nullptr otherwise.
    const MatrixPart* plain() const { return count == 1 && !is_blocks(parts->format) ? parts : nullptr; }
};

// An empty part, all zeros, `data` nullptr when there is no memory. The creator frees it.
// `group`: inputs that share a scale, where the format says so.
MatrixPart create_part(Format format, long first, long n, long k, bool exact, long group = 0);
void free_part(MatrixPart& part);

// Puts the panels of a matrix on the nodes of the threads that read them first, before it is filled. With one node it
// does nothing.
void place_on_nodes(const Matrix& matrix);

struct PanelRange {
    long first, end;
};
// The panels of one part with which ranks [first, end) of the team begin.
PanelRange panels_of(const Matrix& matrix, long part, int first, int end);

// Lays out outputs [first, first + count) of a float or INT8 part from source [count, k] with rows `row_stride` elements
// apart. `first` is any output of the part, so that several sources can be stacked along n. Uses the whole team.
void fill_part(MatrixPart& part, long first, long count, const void* from, Source source, long row_stride);

// Fills outputs of a part in codes. codes: of FLOAT8 [count, k]; of 4 bits [count, k / 2], input 2i in the lower half of
// byte i. scales: [count, k / group]. `table`: what the 16 codes stand for. The output of a FLOAT8 code that is no number
// is none. Uses the whole team.
void pack_codes(MatrixPart& part, long first, long count, const uint8_t* codes, const float* scales,
                const float* table);

// out[r, 0:n] = x[r, 0:k] Wᵀ (+ bias). x and out are float32 with strides in elements. Uses the whole team.
//
// All formats but INT8: an output is summed in one fixed order, whatever the number of rows, threads or panels of the
// call: a row gives the same bits alone, in a batch, and in `linear_panel`.
void linear(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
            long out_stride);

// Outputs [16 · panel, 16 · panel + 16) of a part in floats for some rows, without bias: tile[r, 0:16], rows 16
// apart. Bit by bit what `linear` gives; what lies past n means nothing. Runs on the calling thread, also inside a loop
// of the team.
void linear_panel(const MatrixPart& weight, const float* x, long rows, long x_stride, long panel, float* tile);

}  // namespace umbel
