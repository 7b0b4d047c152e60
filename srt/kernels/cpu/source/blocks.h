// Weights in ggml's blocks, times inputs of 8 bits.
//
// A part keeps the numbers of its file, to the bit, in another order: 16 outputs side by side, so that one vector holds
// several outputs × 4 inputs and products need no horizontal sums.
//
//   panel = units of 256 inputs, so that memory is read from the front; the last may have fewer
//   unit = [scales][codes of its blocks of 32 inputs], the scales padded to a multiple of 32 bytes
//   codes of 32 inputs (8 groups of 4) = lines of 64 bytes, byte 4 · output + input of the group:
//     nibbles    4 lines: line l has group l in its lower and group l + 4 in its upper half bytes
//     two bits   2 lines: line l has group 4 · l + j in bits 2j and 2j + 1
//     one bit    1 line: group g in bit g
//     bytes      8 lines: a group each
//   4 bits are nibbles, 5 bits nibbles and one bit, 6 nibbles and two, 3 two and one, 2 two, 8 bytes
//
// Codes are unsigned; those of 8 bits, and what IQ4 looks up, are signed where SIGNED_BYTES. A weight is
// scale × (code − zero) or scale × code − min; IQ4 and MXFP4 look up what stands for `code − zero`. Scales keep the form
// of the file (see `Scaling`), which is what makes the bytes no more than 4 % above those of the file (6-bit scales
// become bytes).
#pragma once

#include "linear.h"

namespace umbel {

enum class Scaling {
    HALF,         // float16 for 32 inputs
    HALF_MIN,     // float16 scale and minimum (added) for 32 inputs
    EXPONENT,     // a power of two for 32 inputs: MXFP4's byte
    BYTES,        // float16 for 256 inputs, times a signed byte for each sub-block
    BYTES_MIN,    // float16 scale and minimum for 256 inputs, times a byte each for each sub-block
    NIBBLES_MIN,  // the same, both 4 bits of one byte
    GROUPS,       // INT4 and INT8_GROUPS: float16 scale and byte zero for 32 << group_shift inputs
};

// Whether codes of 8 bits are 128 less than otherwise, because instructions of this machine want them signed.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool SIGNED_BYTES = true;
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool SIGNED_BYTES = true;
#else
constexpr bool SIGNED_BYTES = false;
#endif

// Whether 16 bits of an input are one integer instead of two bytes: where signed bytes are multiplied by detours, pairs of
// 16-bit integers cost less. Codes of 8 bits get such inputs always then.
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__) && !defined(UMBEL_AMX)
#define UMBEL_SHORT_INPUTS
constexpr bool SHORT_INPUTS = true;
#else
constexpr bool SHORT_INPUTS = false;
#endif

struct BlockFormat {
    long inputs, bytes;  // of a block of the file
    int bits;            // of a code
    int sub;             // inputs of a sub-block, which has a scale of its own: 32 or 16
    int zero;            // a code that stands for 0; of looked-up codes: of the table's bytes
    int largest;         // code, or byte of the table
    Scaling scaling;
    bool looked_up;

    constexpr bool has_min() const {
        return scaling == Scaling::HALF_MIN || scaling == Scaling::BYTES_MIN || scaling == Scaling::NIBBLES_MIN;
    }
    constexpr bool is_signed() const { return largest == 255 && SIGNED_BYTES; }
    constexpr long code_bytes() const { return bits * 64; }  // of 32 inputs and 16 outputs
};

constexpr BlockFormat block_format(Format format) {
    switch (format) {
        case Format::Q4_0: return {32, 18, 4, 32, 8, 15, Scaling::HALF, false};
        case Format::Q4_1: return {32, 20, 4, 32, 0, 15, Scaling::HALF_MIN, false};
        case Format::Q5_0: return {32, 22, 5, 32, 16, 31, Scaling::HALF, false};
        case Format::Q5_1: return {32, 24, 5, 32, 0, 31, Scaling::HALF_MIN, false};
        case Format::Q8_0: return {32, 34, 8, 32, 128, 255, Scaling::HALF, false};
        case Format::Q2_K: return {256, 84, 2, 16, 0, 3, Scaling::NIBBLES_MIN, false};
        case Format::Q3_K: return {256, 110, 3, 16, 4, 7, Scaling::BYTES, false};
        case Format::Q4_K: return {256, 144, 4, 32, 0, 15, Scaling::BYTES_MIN, false};
        case Format::Q5_K: return {256, 176, 5, 32, 0, 31, Scaling::BYTES_MIN, false};
        case Format::Q6_K: return {256, 210, 6, 16, 32, 63, Scaling::BYTES, false};
        case Format::IQ4_NL: return {32, 18, 4, 32, 128, 255, Scaling::HALF, true};
        case Format::IQ4_XS: return {256, 136, 4, 32, 128, 255, Scaling::BYTES, true};
        case Format::MXFP4: return {32, 17, 4, 32, 16, 31, Scaling::EXPONENT, true};
        case Format::INT4: return {32, 0, 4, 32, 0, 15, Scaling::GROUPS, false};
        case Format::INT8_GROUPS: return {32, 0, 8, 32, 0, 255, Scaling::GROUPS, false};
        default: return {};
    }
}

constexpr long UNIT = 8;  // blocks of 32 inputs

// Bytes of the scales of a unit of so many blocks. Groups of more inputs than a unit has are repeated in each.
constexpr long unit_scale_bytes(BlockFormat f, int group_shift, long blocks) {
    long bytes = 0;
    switch (f.scaling) {
        case Scaling::HALF: bytes = blocks * 32; break;
        case Scaling::HALF_MIN: bytes = blocks * 64; break;
        case Scaling::EXPONENT: bytes = blocks * 16; break;
        case Scaling::BYTES: bytes = 32 + 256 / f.sub * 16; break;
        case Scaling::BYTES_MIN:
        case Scaling::NIBBLES_MIN: bytes = 320; break;
        case Scaling::GROUPS: bytes = (((blocks - 1) >> group_shift) + 1) * 48; break;
    }
    return (bytes + 31) / 32 * 32;
}

constexpr long unit_bytes(BlockFormat f, int group_shift, long blocks = UNIT) {
    return unit_scale_bytes(f, group_shift, blocks) + blocks * f.code_bytes();
}

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

// Bytes of one panel.
long block_panel_bytes(const MatrixPart& part);

// Fills outputs [first, first + count) from rows of a file, `row_bytes` apart. `head_rows` > 0: each so many rows are in
// llama.cpp's order (row 2j belongs at j, row 2j + 1 at head_rows / 2 + j); `first` and `count` are multiples of it then.
// Uses the whole team.
void pack_blocks(MatrixPart& part, long first, long count, const uint8_t* rows, long row_bytes, long head_rows);

// Fills outputs of a part with zero points or, without `zeros`, of Q4_0 or Q8_0, whose zero is 8 or 128. codes: of 4 bits
// [count, k / 2], input 2i in the lower half of byte i; of 8 [count, k]. scales and zeros: [count, k / group]. Uses the
// whole team.
void pack_integers(MatrixPart& part, long first, long count, const uint8_t* codes, const f16* scales, const uint8_t* zeros);

// One row of k weights of a file as float32: what gguf-py computes, but for the last bit where a machine rounds a
// product and a sum at once. Any format of blocks but those with zero points, and F32, F16 and BF16.
void dequantise_row(Format format, const uint8_t* row, long k, float* out);

// Rows of inputs as integers with a float32 scale for each 32 of them: input = scale × integer. They are signed bytes, or
// signed 16-bit integers whose groups of four have inputs 0, 2, 1 and 3. With two terms a row of inputs is the sum of two
// rows of bytes next to each other, of which the second has what rounding has taken from the first, with scales of its
// own: 16 bits. Rows are in tiles of 64, each [k / 32][rows of the tile][32]; in the last, AMX has its rows padded to a
// multiple of 16.
struct BlockRows {
    static constexpr long TILE = 64;

    long rows, k;  // rows of integers
    int terms;     // of these for each row of inputs: 1 or 2
    const int8_t* bytes;    // one of the two is nullptr
    const int16_t* shorts;
    const float* factors;  // like the integers, of 4 floats: the scale, the sum of the integers, and of either half of them

    long tiles() const { return (rows + TILE - 1) / TILE; }
    long tile_rows(long tile) const { return rows - tile * TILE < TILE ? rows - tile * TILE : TILE; }
    long lanes(long tile) const {  // rows, with padding
#if defined(UMBEL_AMX)
        return (tile_rows(tile) + 15) / 16 * 16;
#else
        return tile_rows(tile);
#endif
    }
    // Where the integers of a block of inputs are, in units of 32 of them.
    long place(long row, long block) const {
        long tile = row / TILE, first = tile * TILE;
        return first * (k / 32) + block * lanes(tile) + (row - first);
    }
    float scale(long row, long block) const { return factors[place(row, block) * 4]; }
};

// Whether inputs of 8 bits, or 16 where `fine`, are shorts for a part in this format.
constexpr bool takes_shorts(Format format, bool fine) {
    return SHORT_INPUTS && (fine || block_format(format).bits == 8);
}

// Rows of inputs in the forms that the parts of a matrix are multiplied with; a form that no part takes is empty.
struct BlockInputs {
    bool fine;
    BlockRows bytes, shorts;

    const BlockRows& of(Format format) const { return takes_shorts(format, fine) ? shorts : bytes; }
};

// Rounds rows of inputs [rows, k] for `weight`, into memory of the calling thread, which the next call overwrites. Rows
// that are not of numbers get scales that are none. Uses the whole team.
BlockInputs round_rows(const Matrix& weight, const float* x, long rows, long x_stride);

// The parts of `linear` that are blocks, with inputs that are rounded once.
void linear_blocks(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                   long out_stride);

// All rows of inputs times one panel: tile[r, 0:16], without bias. Runs on the calling thread.
void multiply_panel(const MatrixPart& part, const BlockInputs& x, long panel, float* tile);

// One row of shorts times one panel, with the same bits.
void multiply_panel_row(const MatrixPart& part, const BlockInputs& x, long row, long panel, float* sums);

}  // namespace umbel
