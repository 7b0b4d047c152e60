#include "linear_int8.h"

#include "int8_dot.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr int WIDE = PANEL / VL;                  // columns of VL outputs in a panel
constexpr int SUMS = VL == 16 ? 24 : 12;          // vectors of sums in registers
constexpr long CHUNK_PANELS = 64;                 // so that a thread which lost its core delays a loop little
constexpr long CACHED_INPUTS = 192 << 10;         // bytes

// Columns that a tile of so many rows computes at once; each needs two vectors of sums for every row.
constexpr int columns_for(int rows) {
    int columns = WIDE;
    while (columns > 1 && rows * columns * 2 > SUMS) columns /= 2;
    return columns;
}

struct Operands {
    const int8_t* panel;  // [k / 4][16][4]
    const int16_t* x;     // [k / 4][R][4]
    const float* scales;  // [R, blocks]
    long k_padded, blocks;
    const int8_t* next;  // what is asked for meanwhile
    long next_bytes;
};

// sums[r, 0:16] = x[r] · panel: exact sums of a block of k, then float32 over the blocks.
template <int R>
void multiply(const Operands& operands, float* sums) {
    constexpr int COLUMNS = columns_for(R), V = 2 * COLUMNS;
    const int8_t* next = operands.next;
    const long step = operands.next_bytes * COLUMNS / WIDE * 4 / operands.k_padded;
    for (int column = 0; column < WIDE; column += COLUMNS) {
        const int8_t* weights = operands.panel + column * VL * 4;
        const int16_t* x = operands.x;
        for (long block = 0; block < operands.blocks; block++) {
            long left = operands.k_padded - block * INT8_BLOCK;
            long groups = (left < INT8_BLOCK ? left : INT8_BLOCK) / 4;
            vi exact[R][V] = {};
            for (long group = 0; group < groups; group++) {
                __builtin_prefetch(next, 0, 2);  // to the second cache: this panel has the first
                next += step;
                vshorts wide[V];
#pragma GCC unroll 8
                for (int v = 0; v < V; v++) wide[v] = widen(weights + v * VL * 2);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    vshorts inputs = repeat4(x + r * 4);
#pragma GCC unroll 8
                    for (int v = 0; v < V; v++) add_pairs(exact[r][v], wide[v], inputs);
                }
                weights += PANEL * 4;
                x += R * 4;
            }
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++) {
                    float* out = sums + r * PANEL + (column + c) * VL;
                    vf before = block ? load(out) : vf{};
                    vf sum = __builtin_convertvector(add_neighbours(exact[r][2 * c], exact[r][2 * c + 1]), vf);
                    store(out, before + sum * operands.scales[r * operands.blocks + block]);
                }
        }
    }
}

typedef void (*Multiply)(const Operands&, float*);

struct Kernels {
    Multiply by_rows[INT8_ROWS + 1] = {};
};

template <int... R>
constexpr Kernels all_kernels(std::integer_sequence<int, R...>) {
    return {{nullptr, multiply<R + 1>...}};
}
constexpr Kernels KERNELS = all_kernels(std::make_integer_sequence<int, INT8_ROWS>{});

#if defined(UMBEL_AMX)

// 16 rows by tiles: the upper and the lower bytes of x apart, each times the bytes of the weights, and two of both in
// turn, since a product takes longer than two can follow each other. The integers are those of the vectors.
void multiply_tiles(const Operands& operands, long rows, float* sums) {
    constexpr long TILE = TILE_ROWS * TILE_BYTES;
    const int8_t* weights = operands.panel;
    const int8_t* x = (const int8_t*)operands.x;
    const int8_t* next = operands.next;
    const long share = operands.next_bytes * TILE_BYTES / operands.k_padded;
    auto step = [&]<int Upper, int Lower>() {
        for (long line = 0; line < share; line += 64) __builtin_prefetch(next + line, 0, 2);
        next += share;
        tile_load<6>(weights, TILE_BYTES);
        tile_load<4>(x, TILE_BYTES);
        tile_load<5>(x + TILE, TILE_BYTES);
        tile_multiply_signed<Upper, 4, 6>();
        tile_multiply_unsigned_signed<Lower, 5, 6>();
        weights += TILE;
        x += 2 * TILE;
    };
    for (long block = 0; block < operands.blocks; block++) {
        long left = operands.k_padded - block * INT8_BLOCK;
        long steps = (left < INT8_BLOCK ? left : INT8_BLOCK) / TILE_BYTES;
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
        for (long i = 0; i + 1 < steps; i += 2) {
            step.template operator()<0, 1>();
            step.template operator()<2, 3>();
        }
        if (steps % 2) step.template operator()<0, 1>();
        alignas(64) int32_t exact[4][TILE_ROWS][PANEL];
        tile_store<0>(exact[0], TILE_BYTES);
        tile_store<1>(exact[1], TILE_BYTES);
        tile_store<2>(exact[2], TILE_BYTES);
        tile_store<3>(exact[3], TILE_BYTES);
        for (long r = 0; r < rows; r++)
            for (long o = 0; o < PANEL; o += VL) {
                vi upper[2], lower[2];
                std::memcpy(&upper[0], &exact[0][r][o], sizeof(vi));
                std::memcpy(&lower[0], &exact[1][r][o], sizeof(vi));
                std::memcpy(&upper[1], &exact[2][r][o], sizeof(vi));
                std::memcpy(&lower[1], &exact[3][r][o], sizeof(vi));
                vf sum = __builtin_convertvector((upper[0] + upper[1]) * 256 + (lower[0] + lower[1]), vf);
                vf before = block ? load(sums + r * PANEL + o) : vf{};
                store(sums + r * PANEL + o, before + sum * operands.scales[r * operands.blocks + block]);
            }
    }
}

#endif

}  // namespace

void Int8Products::compute(long tile, long panel, long turn, long turns, float* sums) const {
    long row = x_.first_row(tile);
    long end = x_.first_row(tile + 1) < x_.rows ? x_.first_row(tile + 1) : x_.rows;
    long panel_bytes = weight_.k_padded * PANEL;
    const int8_t* weights = (const int8_t*)weight_.data + panel * panel_bytes;
    Operands operands{weights,   x_.tile_values(tile), x_.scales + row * x_.blocks, x_.k_padded,
                      x_.blocks, weights + panel_bytes + turn * panel_bytes / turns, panel_bytes / turns};
#if defined(UMBEL_AMX)
    if (x_.by_amx) return multiply_tiles(operands, end - row, sums);
#endif
    KERNELS.by_rows[end - row](operands, sums);
}

long int8_tiles_together(const Int8Rows& x) {
    long rows = CACHED_INPUTS / (x.k_padded * (long)sizeof(int16_t));
    long tiles = rows / (x.by_amx ? 16 : INT8_ROWS);
    return tiles < 1 ? 1 : tiles;
}

void linear_int8(const MatrixPart& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                 long out_stride) {
    Int8Rows inputs = quantize_rows(weight, x, rows, x_stride);
    long together = int8_tiles_together(inputs);
    long row_blocks = (inputs.tiles + together - 1) / together;
    long group = even_grain(weight.panels * row_blocks, 8);
    if (group > CHUNK_PANELS) group = CHUNK_PANELS;
    long groups = (weight.panels + group - 1) / group;
    parallel(groups * row_blocks, 1, [&](long begin, long end) {  // neighbours share panels
        Int8Products products(weight, inputs);
        for (long chunk = begin; chunk < end; chunk++) {
            long block = chunk % row_blocks, first_panel = chunk / row_blocks * group;
            long end_panel = first_panel + group < weight.panels ? first_panel + group : weight.panels;
            long first_tile = block * inputs.tiles / row_blocks, end_tile = (block + 1) * inputs.tiles / row_blocks;
            for (long panel = first_panel; panel < end_panel; panel++)
                for (long tile = first_tile; tile < end_tile; tile++) {
                    alignas(64) float sums[Int8Products::MOST_ROWS * PANEL];
                    products.compute(tile, panel, tile - first_tile, end_tile - first_tile, sums);
                    long first_row = inputs.first_row(tile), last_row = inputs.first_row(tile + 1);
                    if (last_row > rows) last_row = rows;
                    long width = weight.n - panel * PANEL < PANEL ? weight.n - panel * PANEL : PANEL;
                    for (long row = first_row; row < last_row; row++) {
                        float* sum = sums + (row - first_row) * PANEL;
                        for (long o = 0; o < PANEL; o += VL) store(sum + o, load(sum + o) * load(weight.scales + panel * PANEL + o));
                        float* target = out + row * out_stride + panel * PANEL;
                        std::memcpy(target, sum, width * sizeof(float));
                        for (long o = 0; bias && o < width; o++) target[o] += bias[panel * PANEL + o];
                    }
                }
        }
    });
}

}  // namespace umbel
