// Lays out float weights in panels of 16 outputs.
//
//   source  [count, k]                    panel p, BF16: one 32-bit lane is inputs k and k+1 of one output
//   row o:  w(o,0) w(o,1) w(o,2) ...  →   (0,0 0,1)(1,0 1,1) ... (15,0 15,1) (0,2 0,3)(1,2 1,3) ...
//                                         panel p, F32 and F16: (0,0)(1,0) ... (15,0) (0,1)(1,1) ...
//
// Codes lie as BF16 does: of 8 bits in lanes of 16 bits with 2 inputs, of 4 bits in lanes of 32 bits with 8, the first
// lowest.
#include <limits>

#include "linear_float.h"
#include "memory.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long SPAN = 64;  // inputs that are turned at a time: 16 outputs of them stay in the first cache

UMBEL_INLINE float as_float(const void* row, Source source, long at) {
    switch (source) {
        case Source::F32: return ((const float*)row)[at];
        case Source::BF16: return from_bf16(((const bf16*)row)[at]);
        case Source::F16: return from_f16(((const f16*)row)[at]);
    }
    __builtin_unreachable();
}

UMBEL_INLINE vf as_floats(const void* row, Source source, long at) {
    switch (source) {
        case Source::F32: return load((const float*)row + at);
        case Source::BF16: return load((const bf16*)row + at);
        case Source::F16: return load((const f16*)row + at);
    }
    __builtin_unreachable();
}

// [0, width) of a row into `line`, the rest of it 0.
void read_span(const void* row, Source source, long at, long width, float* line) {
    long i = 0;
    for (; i + VL <= width; i += VL) store(line + i, as_floats(row, source, at + i));
    for (; i < width; i++) line[i] = as_float(row, source, at + i);
    for (; i < SPAN; i++) line[i] = 0;
}

void read_span(const void* row, Source source, long at, long width, bf16* line) {
    long i = 0;
    if (source == Source::BF16) {
        std::memcpy(line, (const bf16*)row + at, width * sizeof(bf16));
        i = width;
    } else {
        for (; i + VL <= width; i += VL) store(line + i, as_floats(row, source, at + i));
        for (; i < width; i++) line[i] = to_bf16(as_float(row, source, at + i));
    }
    for (; i < SPAN; i++) line[i] = 0;
}

void read_span(const void* row, Source source, long at, long width, f16* line) {
    long i = 0;
    if (source == Source::F16) {
        std::memcpy(line, (const f16*)row + at, width * sizeof(f16));
        i = width;
    }
    for (; i < width; i++) line[i] = to_f16(as_float(row, source, at + i));
    for (; i < SPAN; i++) line[i] = {0};
}

// Outputs [low, high) of one panel; `from` is the row of output `low`. `Lane` holds inputs that lie next to each other.
template <class Weight, class Lane>
void fill_panel(void* panel, long k, long low, long high, const char* from, Source source, long row_bytes) {
    constexpr long LANE = sizeof(Lane) / sizeof(Weight);
    alignas(64) Weight lines[PANEL][SPAN];
    for (long at = 0; at < k; at += SPAN) {
        long width = k - at < SPAN ? k - at : SPAN;
        for (long o = low; o < high; o++) read_span(from + (o - low) * row_bytes, source, at, width, lines[o]);
        Lane* lanes = (Lane*)panel + at / LANE * PANEL;
        for (long i = 0; i < SPAN / LANE; i++)
            for (long o = low; o < high; o++) std::memcpy(lanes + i * PANEL + o, &lines[o][i * LANE], sizeof(Lane));
    }
}

}  // namespace

void pack_float(MatrixPart& part, long first, long count, const void* from, Source source, long row_stride) {
    if (count <= 0) return;
    long first_panel = first / PANEL, end = first + count;
    long panels = (end + PANEL - 1) / PANEL - first_panel;
    long row_bytes = row_stride * source_bytes(source);
    auto fill = part.format == Format::BF16  ? fill_panel<bf16, uint32_t>
                : part.format == Format::F16 ? fill_panel<f16, uint16_t>
                                             : fill_panel<float, uint32_t>;
    parallel(panels, even_grain(panels, 8), [&](long begin, long stop) {
        for (long panel = first_panel + begin; panel < first_panel + stop; panel++) {
            long low = panel * PANEL < first ? first : panel * PANEL;
            long high = (panel + 1) * PANEL < end ? (panel + 1) * PANEL : end;
            const char* rows = (const char*)from + (low - first) * row_bytes;
            fill((char*)part.data + panel * part.panel_bytes, part.k, low - panel * PANEL, high - panel * PANEL, rows,
                 source, row_bytes);
        }
    });
}

void pack_codes(MatrixPart& part, long first, long count, const uint8_t* codes, const float* scales,
                const float* table) {
    const bool is_bytes = part.format == Format::FLOAT8;
    const long k = part.k, groups = k / part.group, row_bytes = is_bytes ? k : k / 2;
    if (table) std::memcpy(part.table, table, sizeof part.table);
    auto pack = [&](long row) {
        long panel = (first + row) / PANEL, lane = (first + row) % PANEL;
        const uint8_t* from = codes + row * row_bytes;
        uint8_t* out = (uint8_t*)part.data + panel * part.panel_bytes;
        float* own_scales = part.scales + panel * groups * PANEL + lane;
        for (long g = 0; g < groups; g++) own_scales[g * PANEL] = scales[row * groups + g];
        if (!is_bytes) {
            for (long i = 0; i < row_bytes; i += 4) std::memcpy(out + i * PANEL + lane * 4, from + i, 4);
            return;
        }
        for (long i = 0; i < k; i++) {
            out[i / 2 * PANEL * 2 + lane * 2 + i % 2] = from[i];
            if ((from[i] & 127) == 127) own_scales[i / part.group * PANEL] = std::numeric_limits<float>::quiet_NaN();
        }
    };
    parallel(count, even_grain(count, 8, PANEL), [&](long begin, long end) {
        for (long row = begin; row < end; row++) pack(row);
    });
}

}  // namespace umbel
