#include "blocks_kernels.h"

#include "blocks_dot.h"
#include "tiles.h"

namespace umbel {
namespace {

constexpr long AHEAD = 6144;  // bytes of a panel that are asked for before their use

// The units that are asked for, one after the other: blocks [first, first + count) of the panel.
template <Format F>
struct Units {
    static constexpr BlockFormat FORM = block_format(F);

    const long end, shift;
    long first, count;
    const uint8_t *scales, *lines;

    explicit Units(const BlockOperands& operands)
        : end(operands.end),
          shift(operands.group_shift),
          first(operands.begin),
          scales(operands.panel + operands.begin / UNIT * unit_bytes(FORM, operands.group_shift)) {
        find_lines();
    }
    bool left() const { return first < end; }
    void next() {
        first += UNIT;
        scales += unit_bytes(FORM, shift);
        find_lines();
    }

  private:
    void find_lines() {
        count = end - first < UNIT ? end - first : UNIT;
        lines = scales + unit_scale_bytes(FORM, shift, count);
    }
};

// Asks for the bytes that a block of a unit takes, its share of the scales among them, AHEAD of them.
template <Format F>
UMBEL_INLINE void fetch_block(const uint8_t* scales, long block) {
    constexpr BlockFormat f = block_format(F);
    constexpr long BYTES = unit_bytes(f, 0) / UNIT;  // of groups somewhat more than they take
    for (long line = 0; line < BYTES; line += 64) prefetch(scales + AHEAD + block * BYTES + line);
}

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
    const int8_t* x = operands.bytes + operands.begin * operands.lanes * 32;
    const float* factors = operands.factors + operands.begin * operands.lanes * 4;
    for (Units<F> units(operands); units.left(); units.next()) {
        UnitScales shared[WIDE];
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) shared[v] = load_unit_scales<F>(units.scales, v * VL);
        const uint8_t* lines = units.lines;
#pragma GCC unroll 1
        for (long block = 0; block < units.count; block++) {
            fetch_block<F>(units.scales, block);
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) {
                vcodes codes[8];
                unpack<F>(lines + v * VL * 4, codes);
                Scales scales = load_scales<F>(units.scales, shared[v], block, v * VL, operands.group_shift);
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    total[r][v] = add_block<F>(total[r][v], codes, scales, x + r * 32, factors + r * 4);
            }
            lines += BYTES;
            x += operands.lanes * 32;
            factors += operands.lanes * 4;
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) store(sums + r * PANEL + v * VL, total[r][v]);
}

#endif

#if defined(UMBEL_SHORT_INPUTS)

// R rows of 16-bit inputs times a block.
template <Format F, int R, class Codes>
UMBEL_INLINE void add_shorts(const Codes& codes, const Scales (&scales)[2], const int16_t* x, const float* factors,
                             float* sums) {
    constexpr BlockFormat f = block_format(F);
    vi first[R][2], second[R][2]{};
    dot_shorts<0, f.sub / 4>(codes, x, first);
    if constexpr (f.sub == 16) dot_shorts<4, 8>(codes, x, second);
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            float* sum = sums + r * PANEL + v * VL;
            vf more = add_products<F, f.is_signed() ? 128 : 0>(load(sum), first[r][v], second[r][v], scales[v], factors + r * 4);
            store(sum, more);
        }
}

// Any number of rows of 16-bit inputs.
template <Format F>
void multiply_shorts(const BlockOperands& operands, float* sums) {
    constexpr long BYTES = block_format(F).code_bytes();
    const long rows = operands.rows;
    for (Units<F> units(operands); units.left(); units.next()) {
        UnitScales shared[2] = {load_unit_scales<F>(units.scales, 0), load_unit_scales<F>(units.scales, VL)};
        for (long block = 0; block < units.count; block++) {
            const int16_t* x = operands.shorts + (units.first + block) * operands.lanes * 32;
            const float* factors = operands.factors + (units.first + block) * operands.lanes * 4;
            fetch_block<F>(units.scales, block);
            Scales scales[2];
            for (int v = 0; v < 2; v++)
                scales[v] = load_scales<F>(units.scales, shared[v], block, v * VL, operands.group_shift);
            auto add_rows = [&](const auto& codes) {
                long r = 0;
                for (; r + 4 <= rows; r += 4)
                    add_shorts<F, 4>(codes, scales, x + r * 32, factors + r * 4, sums + r * PANEL);
                for (; r + 2 <= rows; r += 2)
                    add_shorts<F, 2>(codes, scales, x + r * 32, factors + r * 4, sums + r * PANEL);
                if (r < rows) add_shorts<F, 1>(codes, scales, x + r * 32, factors + r * 4, sums + r * PANEL);
            };
            if (rows <= BlockKernels::FEW)
                add_rows(NarrowCodes<F>(units.lines + block * BYTES));
            else
                add_rows(WideCodes<F>(units.lines + block * BYTES));
        }
    }
}

#endif

// Codes are unpacked once for all rows of the tile; sums are in the first cache.
template <Format F>
void multiply_many(const BlockOperands& operands, float* sums) {
    constexpr long BYTES = block_format(F).code_bytes();
    for (Units<F> units(operands); units.left(); units.next())
        for (long block = 0; block < units.count; block++) {
            const int8_t* x = operands.bytes + (units.first + block) * operands.lanes * 32;
            const float* factors = operands.factors + (units.first + block) * operands.lanes * 4;
            fetch_block<F>(units.scales, block);
            for (int v = 0; v < PANEL; v += VL) {
                vcodes codes[8];
                unpack<F>(units.lines + block * BYTES + v * 4, codes);
                UnitScales shared = load_unit_scales<F>(units.scales, v);
                Scales scales = load_scales<F>(units.scales, shared, block, v, operands.group_shift);
                for (long r = 0; r < operands.rows; r++) {
                    float* sum = sums + r * PANEL + v;
                    store(sum, add_block<F>(load(sum), codes, scales, x + r * 32, factors + r * 4));
                }
            }
        }
}

#if defined(UMBEL_AMX)

// Rows by tiles, 16 together. A tile has 64 inputs for each row, so one of x holds the 32 of the row and the 32 of the
// next one, for which the tile of codes has zeros. Sub-blocks of 16 inputs get a tile of codes each, zeros elsewhere.
// The sums of one block become floats while the tiles multiply the next.
template <Format F>
class TiledPanel {
  public:
    explicit TiledPanel(const BlockOperands& operands) : operands_(operands) {}

    void run(float* sums) {
        Place before{};
        for (Units<F> units(operands_); units.left(); units.next())
            for (long block = 0; block < units.count; block++) {
                Place place{units.scales, units.lines + block * FORM.code_bytes(), units.first, block};
                multiply(place);
                if (before.scales) add(before, sums);
                before = place;
            }
        if (before.scales) add(before, sums);
    }

  private:
    static constexpr BlockFormat FORM = block_format(F);
    static constexpr int SUBS = 32 / FORM.sub;
    static constexpr long MOST_TILES = BlockRows::TILE / TILE_ROWS;

    struct Place {  // a block
        const uint8_t *scales, *lines;  // of its unit, and its own
        long first, block;              // of its unit in the panel, and its own in the unit
    };

    void multiply(const Place& place) {
        fetch_block<F>(place.scales, place.block);
        for (int v = 0; v < PANEL; v += VL) {
            vcodes codes[8];
            unpack<F>(place.lines + v * 4, codes);
            if constexpr (FORM.is_signed())
                for (vcodes& line : codes) line ^= 128;
            for (int g = 0; g < 8; g++) std::memcpy(codes_[SUBS == 1 ? 0 : g / 4][g] + v * 4, &codes[g], sizeof codes[g]);
        }
        tile_load<6>(codes_[0], TILE_BYTES);
        if constexpr (SUBS == 2) tile_load<7>(codes_[1], TILE_BYTES);
        const int8_t* x = operands_.bytes + (place.first + place.block) * operands_.lanes * 32;
        auto& exact = exact_[place.block % 2];
        for (long tile = 0; tile * TILE_ROWS < operands_.rows; tile++) {
            tile_load<4>(x + tile * TILE_ROWS * 32, 32);
            tile_zero<0>();
            tile_multiply_signed_unsigned<0, 4, 6>();
            tile_store<0>(exact[0][tile], TILE_BYTES);
            if constexpr (SUBS == 2) {
                tile_zero<1>();
                tile_multiply_signed_unsigned<1, 4, 7>();
                tile_store<1>(exact[1][tile], TILE_BYTES);
            }
        }
    }

    void add(const Place& place, float* sums) const {
        const float* factors = operands_.factors + (place.first + place.block) * operands_.lanes * 4;
        const auto& exact = exact_[place.block % 2];
        for (int v = 0; v < PANEL; v += VL) {
            UnitScales shared = load_unit_scales<F>(place.scales, v);
            Scales scales = load_scales<F>(place.scales, shared, place.block, v, operands_.group_shift);
            for (long r = 0; r < operands_.rows; r++) {
                vi products[2]{};
                for (int sub = 0; sub < SUBS; sub++)
                    std::memcpy(&products[sub], &exact[sub][r / TILE_ROWS][r % TILE_ROWS * PANEL + v], sizeof(vi));
                float* sum = sums + r * PANEL + v;
                store(sum, add_products<F, 0>(load(sum), products[0], products[1], scales, factors + r * 4));
            }
        }
    }

    const BlockOperands& operands_;
    alignas(64) uint8_t codes_[SUBS][TILE_ROWS][TILE_BYTES]{};
    alignas(64) int32_t exact_[2][SUBS][MOST_TILES][TILE_ROWS * PANEL];
};

template <Format F>
void multiply_tiled(const BlockOperands& operands, float* sums) {
    TiledPanel<F>(operands).run(sums);
}

#endif

template <Format F>
constexpr BlockKernels all_kernels() {
    BlockKernels kernels{};
#if defined(UMBEL_AMX)
    kernels.tiled = multiply_tiled<F>;
#endif
#if defined(UMBEL_SHORT_INPUTS)
    kernels.shorts = multiply_shorts<F>;
    if constexpr (takes_shorts(F, false)) return kernels;
#endif
    kernels.many = multiply_many<F>;
    for (int rows = 1; rows <= BlockKernels::FEW; rows++) kernels.few[rows] = kernels.many;
#if !defined(UMBEL_PLAIN_DOT)  // else nothing to gain, and much to compile
    kernels.few[1] = multiply_few<F, 1>;
#endif
#if defined(__AVX512F__) || defined(__ARM_FEATURE_DOTPROD)  // of 16 registers the codes of a block take 8
    kernels.few[2] = multiply_few<F, 2>;
    kernels.few[3] = multiply_few<F, 3>;
    kernels.few[4] = multiply_few<F, 4>;
#endif
    return kernels;
}

template <Format F>
constexpr BlockKernels KERNELS = all_kernels<F>();

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
        case Format::INT8_GROUPS: return KERNELS<Format::INT8_GROUPS>;
        default: return KERNELS<Format::INT4>;
    }
}

}  // namespace umbel
