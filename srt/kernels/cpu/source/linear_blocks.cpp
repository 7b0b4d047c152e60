// Products of rows with a matrix in blocks.
#include "blocks.h"
#include "blocks_kernels.h"
#include "memory.h"
#include "threads.h"
#include "tiles.h"

namespace umbel {
namespace {

constexpr long CHUNK_PANELS = 16;  // most: a thread that loses its core delays a loop little
constexpr long FEW_PANELS = 2;     // of few rows, which have nothing to share but what they wait for
constexpr long BLOCK_K = 64;       // blocks of 32 inputs that are multiplied at a time, most: their inputs stay near

BlockOperands operands_of(const MatrixPart& part, const BlockRows& x, long panel, long tile) {
    long first = tile * BlockRows::TILE, skipped = first * x.k;
    return {(const uint8_t*)part.panel(panel),
            0,
            part.k / 32,
            part.group_shift,
            x.bytes ? x.bytes + skipped : nullptr,
            x.shorts ? x.shorts + skipped : nullptr,
            x.factors + first * (x.k / 32) * 4,
            x.lanes(tile),
            x.tile_rows(tile)};
}

void multiply(const BlockKernels& kernels, const BlockOperands& operands, float* sums) {
    if (operands.shorts) return kernels.shorts(operands, sums);
#if defined(UMBEL_AMX)
    if (operands.rows > BlockKernels::FEW && tiles_allowed()) return kernels.tiled(operands, sums);
#endif
    (operands.rows <= BlockKernels::FEW ? kernels.few[operands.rows] : kernels.many)(operands, sums);
}

struct Call {
    const Matrix& weight;
    const BlockInputs& x;
    const float* bias;
    float* out;
    long out_stride;
};

// Sums of rows of bytes become sums of rows of inputs, at the front.
void add_terms(int terms, long rows, float* sums) {
    if (terms == 1) return;
    for (long row = 0; row < rows / 2; row++)
        for (long o = 0; o < PANEL; o++) sums[row * PANEL + o] = sums[2 * row * PANEL + o] + sums[(2 * row + 1) * PANEL + o];
}

void write(const Call& call, const BlockRows& x, const MatrixPart& part, long panel, long tile, float* sums) {
    long width = part.n - panel * PANEL < PANEL ? part.n - panel * PANEL : PANEL;
    long first = part.first + panel * PANEL;
    add_terms(x.terms, x.tile_rows(tile), sums);
    for (long row = 0; row < x.tile_rows(tile) / x.terms; row++) {
        float* out = call.out + (tile * BlockRows::TILE / x.terms + row) * call.out_stride + first;
        std::memcpy(out, sums + row * PANEL, width * sizeof(float));
        for (long o = 0; call.bias && o < width; o++) out[o] += call.bias[first + o];
    }
}

// Panels [begin, end) of one part times a tile of rows, a block of k at a time.
void multiply_chunk(const Call& call, const MatrixPart& part, long begin, long end, long tile) {
    const BlockRows& x = call.x.of(part.format);
    alignas(64) float sums[CHUNK_PANELS][BlockRows::TILE * PANEL];
#if defined(UMBEL_AMX)
    Tiles configured;
#endif
    const BlockKernels& kernels = block_kernels(part.format);
    long blocks = part.k / 32, rows = x.tile_rows(tile);
    long step = rows <= BlockKernels::FEW ? blocks : BLOCK_K;
    for (long panel = begin; panel < end; panel++) std::memset(sums[panel - begin], 0, rows * PANEL * sizeof(float));
    for (long at = 0; at < blocks; at += step)
        for (long panel = begin; panel < end; panel++) {
            BlockOperands operands = operands_of(part, x, panel, tile);
            operands.begin = at;
            operands.end = at + step < blocks ? at + step : blocks;
            multiply(kernels, operands, sums[panel - begin]);
        }
    for (long panel = begin; panel < end; panel++) write(call, x, part, panel, tile, sums[panel - begin]);
}

}  // namespace

void multiply_panel(const MatrixPart& part, const BlockInputs& inputs, long panel, float* tile) {
    const BlockRows& x = inputs.of(part.format);
    const BlockKernels& kernels = block_kernels(part.format);
#if defined(UMBEL_AMX)
    Tiles configured;
#endif
    alignas(64) float sums[BlockRows::TILE * PANEL];
    for (long t = 0; t < x.tiles(); t++) {
        long bytes = x.tile_rows(t) * PANEL * (long)sizeof(float);
        std::memset(sums, 0, bytes);
        multiply(kernels, operands_of(part, x, panel, t), sums);
        add_terms(x.terms, x.tile_rows(t), sums);
        std::memcpy(tile + t * BlockRows::TILE / x.terms * PANEL, sums, bytes / x.terms);
    }
}

void multiply_panel_row(const MatrixPart& part, const BlockInputs& inputs, long row, long panel, float* sums) {
    const BlockRows& x = inputs.of(part.format);
    BlockOperands operands = operands_of(part, x, panel, row / BlockRows::TILE);
    long lane = row % BlockRows::TILE;
    operands.shorts += lane * 32;
    operands.factors += lane * 4;
    operands.rows = 1;
    std::memset(sums, 0, PANEL * sizeof(float));
    multiply(block_kernels(part.format), operands, sums);
}

void linear_blocks(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                   long out_stride) {
    BlockInputs inputs = round_rows(weight, x, rows, x_stride);
    Call call{weight, inputs, bias, out, out_stride};
    const BlockRows& either = inputs.bytes.rows ? inputs.bytes : inputs.shorts;  // where there are both, of as many rows
    long panels = 0, tiles = either.tiles();
    for (long i = 0; i < weight.count; i++)
        if (is_blocks(weight.parts[i].format)) panels += weight.parts[i].panels;
    long group = even_grain(panels * tiles, 8), most = either.rows <= BlockKernels::FEW ? FEW_PANELS : CHUNK_PANELS;
    if (group > most) group = most;
    long groups = 0;
    for (long i = 0; i < weight.count; i++)
        if (is_blocks(weight.parts[i].format)) groups += (weight.parts[i].panels + group - 1) / group;
    parallel(groups * tiles, 1, [&](long begin, long end) {  // neighbours share panels
        for (long chunk = begin; chunk < end; chunk++) {
            long number = chunk / tiles;
            const MatrixPart* part = weight.parts;
            for (;; part++) {
                if (!is_blocks(part->format)) continue;
                long own = (part->panels + group - 1) / group;
                if (number < own) break;
                number -= own;
            }
            long first = number * group, last = first + group < part->panels ? first + group : part->panels;
            multiply_chunk(call, *part, first, last, chunk % tiles);
        }
    });
}

}  // namespace umbel
