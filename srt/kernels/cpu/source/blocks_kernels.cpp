#include "blocks_kernels.h"

#include "blocks_dot.h"

namespace umbel {
namespace {

constexpr long AHEAD = 6144;  // bytes of a panel that are asked for before their use

#if !defined(UMBEL_PLAIN_DOT)

// Reads memory once, from the front: the panel that comes next follows this one.
template <Format F, int R>
void multiply_few(const BlockOperands& operands, float* sums) {
    constexpr int WIDE = PANEL / VL;
    constexpr long BYTES = block_format(F).code_bytes();
    vf total[R][WIDE];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) total[r][v] = load(sums + r * PANEL + v * VL);
    const uint8_t* lines = operands.codes + operands.begin * BYTES;
    const int8_t* x = operands.values + operands.begin * operands.lanes * 32;
    const float* factors = operands.factors + operands.begin * operands.lanes * 4;
    for (long block = operands.begin; block < operands.end; block++) {
        for (long line = 0; line < BYTES; line += 64) prefetch(lines + AHEAD + line);
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) {
            vcodes codes[8];
            unpack<F>(lines + v * VL * 4, codes);
            Scales scales = load_scales<F>(operands.scales, block, v * VL, operands.group_shift);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                total[r][v] = add_block<F>(total[r][v], codes, scales, x + r * 32, factors + r * 4);
        }
        lines += BYTES;
        x += operands.lanes * 32;
        factors += operands.lanes * 4;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) store(sums + r * PANEL + v * VL, total[r][v]);
}

#endif

// Codes are unpacked once for all rows of the tile; sums are in the first cache.
template <Format F>
void multiply_many(const BlockOperands& operands, float* sums) {
    constexpr long BYTES = block_format(F).code_bytes();
    for (long block = operands.begin; block < operands.end; block++) {
        const int8_t* x = operands.values + block * operands.lanes * 32;
        const float* factors = operands.factors + block * operands.lanes * 4;
        const uint8_t* lines = operands.codes + block * BYTES;
        for (long line = 0; line < BYTES; line += 64) prefetch(lines + AHEAD + line);
        for (int v = 0; v < PANEL; v += VL) {
            vcodes codes[8];
            unpack<F>(lines + v * 4, codes);
            Scales scales = load_scales<F>(operands.scales, block, v, operands.group_shift);
            for (long r = 0; r < operands.rows; r++) {
                float* sum = sums + r * PANEL + v;
                store(sum, add_block<F>(load(sum), codes, scales, x + r * 32, factors + r * 4));
            }
        }
    }
}

#if defined(UMBEL_PLAIN_DOT)
template <Format F>  // nothing to gain, and much to compile
constexpr BlockKernels KERNELS{
    {nullptr, multiply_many<F>, multiply_many<F>, multiply_many<F>, multiply_many<F>}, multiply_many<F>};
#elif defined(__AVX2__) && !defined(__AVX512F__)
template <Format F>  // of 16 registers the codes of a block take 8
constexpr BlockKernels KERNELS{
    {nullptr, multiply_few<F, 1>, multiply_many<F>, multiply_many<F>, multiply_many<F>}, multiply_many<F>};
#else
template <Format F>
constexpr BlockKernels KERNELS{
    {nullptr, multiply_few<F, 1>, multiply_few<F, 2>, multiply_few<F, 3>, multiply_few<F, 4>}, multiply_many<F>};
#endif

}  // namespace

const BlockKernels& block_kernels(Format format) {
    switch (format) {
        case Format::Q4_0: return KERNELS<Format::Q4_0>;
        case Format::Q4_1: return KERNELS<Format::Q4_1>;
        case Format::Q5_0: return KERNELS<Format::Q5_0>;
        case Format::Q5_1: return KERNELS<Format::Q5_1>;
        case Format::Q8_0: return KERNELS<Format::Q8_0>;
        case Format::Q2_K: return KERNELS<Format::Q2_K>;
        case Format::Q3_K: return KERNELS<Format::Q3_K>;
        case Format::Q4_K: return KERNELS<Format::Q4_K>;
        case Format::Q5_K: return KERNELS<Format::Q5_K>;
        case Format::Q6_K: return KERNELS<Format::Q6_K>;
        case Format::IQ4_NL: return KERNELS<Format::IQ4_NL>;
        case Format::IQ4_XS: return KERNELS<Format::IQ4_XS>;
        case Format::MXFP4: return KERNELS<Format::MXFP4>;
        default: return KERNELS<Format::INT4>;
    }
}

}  // namespace umbel
