// Lays out float32 and bfloat16 weights in panels of 16 outputs.
//
//   source  [count, k]                    panel p, BF16: one 32-bit lane is inputs k and k+1 of one output
//   row o:  w(o,0) w(o,1) w(o,2) ...  →   (0,0 0,1)(1,0 1,1) ... (15,0 15,1) (0,2 0,3)(1,2 1,3) ...
//                                         panel p, F32: (0,0)(1,0) ... (15,0) (0,1)(1,1) ...
#include "linear_float.h"
#include "memory.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long SPAN = 64;  // inputs that are turned at a time: 16 outputs of them stay in the first cache

UMBEL_INLINE float as_float(const void* row, bool is_bf16, long at) {
    return is_bf16 ? from_bf16(((const bf16*)row)[at]) : ((const float*)row)[at];
}

// [0, width) of a row into `line`, the rest of it 0.
void read_span(const void* row, bool is_bf16, long at, long width, float* line) {
    long i = 0;
    for (; i + VL <= width; i += VL)
        store(line + i, is_bf16 ? load((const bf16*)row + at + i) : load((const float*)row + at + i));
    for (; i < width; i++) line[i] = as_float(row, is_bf16, at + i);
    for (; i < SPAN; i++) line[i] = 0;
}

void read_span(const void* row, bool is_bf16, long at, long width, bf16* line) {
    long i = 0;
    if (is_bf16) {
        std::memcpy(line, (const bf16*)row + at, width * sizeof(bf16));
        i = width;
    } else {
        for (; i + VL <= width; i += VL) store(line + i, load((const float*)row + at + i));
        for (; i < width; i++) line[i] = to_bf16(as_float(row, false, at + i));
    }
    for (; i < SPAN; i++) line[i] = 0;
}

// Outputs [low, high) of one panel; `source` is the row of output `low`.
template <class Weight>
void fill_panel(Weight* panel, long k, long low, long high, const char* source, bool is_bf16, long row_bytes) {
    constexpr long LANE = 4 / sizeof(Weight);  // inputs of one 32-bit lane
    alignas(64) Weight lines[PANEL][SPAN];
    for (long at = 0; at < k; at += SPAN) {
        long width = k - at < SPAN ? k - at : SPAN;
        for (long o = low; o < high; o++) read_span(source + (o - low) * row_bytes, is_bf16, at, width, lines[o]);
        uint32_t* lanes = (uint32_t*)panel + at / LANE * PANEL;
        for (long i = 0; i < SPAN / LANE; i++)
            for (long o = low; o < high; o++) std::memcpy(lanes + i * PANEL + o, &lines[o][i * LANE], 4);
    }
}

}  // namespace

void pack_float(Matrix& matrix, long first, long count, const void* source, bool source_is_bf16, long row_stride) {
    if (count <= 0) return;
    long first_panel = first / PANEL, end = first + count;
    long panels = (end + PANEL - 1) / PANEL - first_panel;
    long row_bytes = row_stride * (source_is_bf16 ? 2 : 4);
    parallel(panels, even_grain(panels, 8), [&](long begin, long stop) {
        for (long panel = first_panel + begin; panel < first_panel + stop; panel++) {
            long from = panel * PANEL < first ? first : panel * PANEL;
            long to = (panel + 1) * PANEL < end ? (panel + 1) * PANEL : end;
            long low = from - panel * PANEL, high = to - panel * PANEL;
            const char* rows = (const char*)source + (from - first) * row_bytes;
            long offset = panel * matrix.k_padded * PANEL;
            if (matrix.format == Format::BF16)
                fill_panel((bf16*)matrix.data + offset, matrix.k, low, high, rows, source_is_bf16, row_bytes);
            else
                fill_panel((float*)matrix.data + offset, matrix.k, low, high, rows, source_is_bf16, row_bytes);
        }
    });
}

}  // namespace umbel
