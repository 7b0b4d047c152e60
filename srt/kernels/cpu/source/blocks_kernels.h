// Products of one panel of blocks with rows.
#pragma once

#include <utility>

#include "blocks.h"

namespace umbel {

// What a kernel reads: blocks of 32 inputs [begin, end) of one panel, whole units of it, and rows of one tile.
struct BlockOperands {
    const uint8_t* panel;
    long begin, end;
    int group_shift;
    const int8_t* bytes;    // [k / 32][lanes][32], from the first row on; one of the two is nullptr
    const int16_t* shorts;
    const float* factors;  // [k / 32][lanes][4]
    long lanes;
    long rows;
};

// sums[r, 0:16] += x[r] · panel over those blocks.
typedef void (*BlockKernel)(const BlockOperands& operands, float* sums);

struct BlockKernels {
    static constexpr int FEW = 4;
    BlockKernel few[FEW + 1];  // of bytes, by number of rows, whose sums stay in registers
    BlockKernel many;          // of bytes
    BlockKernel shorts;        // nullptr where no inputs are shorts
#if defined(UMBEL_AMX)
    BlockKernel tiled;  // where tiles are configured
#endif
};

// Of a format of blocks.
const BlockKernels& block_kernels(Format format);

}  // namespace umbel
