// BF16 linears by AMX tiles: x is rounded to bfloat16 in tiles of 16 rows × 32 inputs, 16 lanes of a panel are one tile
// of weights as they lie in memory, sums are float32.
//
// An output is summed tile by tile from the front of k, whatever the number of rows: blocks of k continue from the
// float32 sum that the block before has stored.
#include "linear_float.h"

#include <utility>

#include "memory.h"
#include "threads.h"
#include "tiles.h"

namespace umbel {

#if defined(UMBEL_AMX)

namespace {

constexpr long TILE_SIZE = TILE_ROWS * TILE_BYTES;  // bytes, of x and of weights
constexpr long BLOCK_K = 20;                        // tiles of one block, at most: two panels stay in the first cache
constexpr long BLOCK_ROWS = 8;                      // tiles of rows that share a visit of a panel
constexpr long CHUNK_PANELS = 64;                   // most: a thread that loses its core delays a loop little
constexpr long AHEAD = 2048;                        // bytes of a panel that are asked for before their use

struct Call {
    const Matrix& weight;
    const TiledRows& x;
    const float* bias;
    float* out;
    long out_stride;

    long panel_bytes() const { return weight.k_padded * PANEL * (long)sizeof(bf16); }
    long x_bytes() const { return x.k_tiles * TILE_SIZE; }  // of a tile of rows
    const char* x_tile(long tile) const { return (const char*)x.data + tile * x_bytes(); }
    const char* panel(long index) const { return (const char*)weight.data + index * panel_bytes(); }
};

// R tiles of rows times P panels over `k_tiles` tiles: sums are tiles R·P at most 4, inputs 4 and 5, weights 6 and 7.
// sums[r · P + p] is where a tile of sums begins, `strides` its bytes from row to row.
template <int R, int P>
void multiply(const char* x, long x_bytes, const char* panel, long panel_bytes, long k_tiles, bool first, bool streamed,
              float* const* sums, const long* strides) {
    auto each = [&]<int... S>(std::integer_sequence<int, S...>, auto&& body) {
        (body.template operator()<S>(), ...);
    };
    constexpr auto ALL = std::make_integer_sequence<int, R * P>{};
    each(ALL, [&]<int S>() {
        if (first)
            tile_zero<S>();
        else
            tile_load<S>(sums[S], strides[S]);
    });
    for (long t = 0; t < k_tiles; t++) {
        tile_load_passing<4>(x + t * TILE_SIZE, TILE_BYTES);
        if constexpr (R == 2) tile_load_passing<5>(x + x_bytes + t * TILE_SIZE, TILE_BYTES);
        each(std::make_integer_sequence<int, P>{}, [&]<int V>() {
            const char* weights = panel + V * panel_bytes + t * TILE_SIZE;
            if (streamed)
                for (long line = 0; line < TILE_SIZE; line += 64) prefetch(weights + AHEAD + line);
            tile_load<6 + V % 2>(weights, TILE_BYTES);
            tile_multiply_bf16<V, 4, 6 + V % 2>();
            if constexpr (R == 2) tile_multiply_bf16<P + V, 5, 6 + V % 2>();
        });
    }
    each(ALL, [&]<int S>() { tile_store<S>(sums[S], strides[S]); });
}

typedef void (*Multiply)(const char*, long, const char*, long, long, bool, bool, float* const*, const long*);
constexpr Multiply KERNELS[3][5] = {
    {},
    {nullptr, multiply<1, 1>, multiply<1, 2>, nullptr, multiply<1, 4>},
    {nullptr, multiply<2, 1>, multiply<2, 2>, nullptr, nullptr},
};

// Copies the part of a tile of sums that exists, row by row.
void copy_rows(const float* from, long from_stride, float* to, long to_stride, long rows, long width) {
    for (long r = 0; r < rows; r++) std::memcpy(to + r * to_stride, from + r * from_stride, width * sizeof(float));
}

// Where one tile of sums belongs, and how much of it exists.
struct Place {
    float* out;
    long rows, width;
    const float* bias;  // of its first output, or nullptr

    bool whole() const { return rows == TILE_ROWS && width == PANEL; }
};

Place place_of(const Call& call, long tile, long panel) {
    long rows = call.x.rows - tile * TILE_ROWS, width = call.weight.n - panel * PANEL;
    return {call.out + tile * TILE_ROWS * call.out_stride + panel * PANEL, rows < TILE_ROWS ? rows : TILE_ROWS,
            width < PANEL ? width : PANEL, call.bias ? call.bias + panel * PANEL : nullptr};
}

// `tiles` tiles of rows from `tile` on, `panels` panels from `panel` on, `k_tiles` of k from `at` on. Whole tiles of
// sums live in `out`; those that the end of rows or outputs cuts go through memory of their own.
void compute_tiles(const Call& call, long tile, long tiles, long panel, long panels, long at, long k_tiles,
                   bool streamed) {
    alignas(64) float edges[4][TILE_ROWS * PANEL];
    Place places[4];
    float* sums[4];
    long strides[4];
    for (long s = 0; s < tiles * panels; s++) {
        const Place& place = places[s] = place_of(call, tile + s / panels, panel + s % panels);
        sums[s] = place.whole() ? place.out : edges[s];
        strides[s] = (place.whole() ? call.out_stride : PANEL) * (long)sizeof(float);
        if (!place.whole() && at > 0)
            copy_rows(place.out, call.out_stride, edges[s], PANEL, place.rows, place.width);
    }
    KERNELS[tiles][panels](call.x_tile(tile) + at * TILE_SIZE, call.x_bytes(), call.panel(panel) + at * TILE_SIZE,
                           call.panel_bytes(), k_tiles, at == 0, streamed, sums, strides);
    bool last = at + k_tiles == call.x.k_tiles;
    for (long s = 0; s < tiles * panels; s++) {
        const Place& place = places[s];
        if (!place.whole()) copy_rows(edges[s], PANEL, place.out, call.out_stride, place.rows, place.width);
        if (last && place.bias)
            for (long row = 0; row < place.rows; row++)
                for (long o = 0; o < place.width; o++) place.out[row * call.out_stride + o] += place.bias[o];
    }
}

void compute_block(const Call& call, long first_tile, long end_tile, long first_panel, long end_panel) {
    Tiles configured;
    bool single = end_tile - first_tile == 1;  // of rows: weights are read once, so panels go side by side
    long together = single ? 4 : 2;
    long blocks = single ? 1 : (call.x.k_tiles + BLOCK_K - 1) / BLOCK_K;
    long block_k = (call.x.k_tiles + blocks - 1) / blocks;
    for (long at = 0; at < call.x.k_tiles; at += block_k) {
        long k_tiles = call.x.k_tiles - at < block_k ? call.x.k_tiles - at : block_k;
        for (long panel = first_panel; panel < end_panel;) {
            long panels = together;
            while (panels > end_panel - panel) panels /= 2;
            for (long tile = first_tile; tile < end_tile; tile += 2) {
                long tiles = end_tile - tile < 2 ? 1 : 2;
                compute_tiles(call, tile, tiles, panel, panels, at, k_tiles, tile == first_tile);
            }
            panel += panels;
        }
    }
}

// Blocks that tiles of rows are spread over: few panels and many threads want more of them.
long count_row_blocks(long row_tiles, long panels) {
    long blocks = (row_tiles + BLOCK_ROWS - 1) / BLOCK_ROWS;
    while (blocks * panels < 4 * team_size() && row_tiles / blocks > 2) blocks++;
    return blocks;
}

// body(first tile of rows, end, first panel, end) in chunks that are spread over the team.
template <class Body>
void parallel_blocks(const TiledRows& x, long panels, Body&& body) {
    long row_tiles = x.row_tiles(), blocks = count_row_blocks(row_tiles, panels);
    long group = even_grain(panels * blocks, 8, 4);
    if (group > CHUNK_PANELS) group = CHUNK_PANELS;
    long groups = (panels + group - 1) / group;
    parallel(groups * blocks, 1, [&](long begin, long end) {  // neighbours share panels
        for (long chunk = begin; chunk < end; chunk++) {
            long block = chunk % blocks, panel = chunk / blocks * group;
            long panel_end = panel + group < panels ? panel + group : panels;
            body(block * row_tiles / blocks, (block + 1) * row_tiles / blocks, panel, panel_end);
        }
    });
}

// One tile of rows: gate and up, [16, 16] each, to 16 inputs of the next product.
void gate_rows(const float* gate, const float* up, const Call& call, long panel, Activation activation,
               const TiledRows& out, long tile) {
    static_assert(PANEL % VL == 0);
    long size = out.k, half = panel % 2 * PANEL;
    alignas(64) float gated[PANEL], biased[2][PANEL];
    for (long r = 0; r < TILE_ROWS && tile * TILE_ROWS + r < out.rows; r++, gate += PANEL, up += PANEL) {
        const float *left = gate, *right = up;
        if (call.bias) {
            for (long o = 0; o < PANEL; o++) {
                biased[0][o] = gate[o] + call.bias[panel * PANEL + o];
                biased[1][o] = up[o] + call.bias[size + panel * PANEL + o];
            }
            left = biased[0], right = biased[1];
        }
        activate_row(activation, left, right, gated, PANEL);
        bf16* line = out.line(tile * TILE_ROWS + r, panel / 2) + half;
        for (long o = 0; o < PANEL; o += VL) store(line + o, load(gated + o));
    }
}

// Panels of gate and those of up with the same number side by side, over all of k.
void gate_block(const Call& call, long first_tile, long end_tile, long first_panel, long end_panel,
                Activation activation, const TiledRows& out) {
    Tiles configured;
    alignas(64) float memory[4][TILE_ROWS * PANEL];
    float* sums[4] = {memory[0], memory[1], memory[2], memory[3]};
    long strides[4], panels = call.weight.n / 2 / PANEL;
    for (long& stride : strides) stride = PANEL * (long)sizeof(float);
    for (long panel = first_panel; panel < end_panel; panel++)
        for (long tile = first_tile; tile < end_tile; tile += 2) {
            long tiles = end_tile - tile < 2 ? 1 : 2;
            KERNELS[tiles][2](call.x_tile(tile), call.x_bytes(), call.panel(panel), panels * call.panel_bytes(),
                              call.x.k_tiles, true, tile == first_tile, sums, strides);
            for (long t = 0; t < tiles; t++)
                gate_rows(memory[2 * t], memory[2 * t + 1], call, panel, activation, out, tile + t);
        }
}

}  // namespace

void linear_tiled(const Matrix& weight, const TiledRows& x, const float* bias, float* out, long out_stride) {
    Call call{weight, x, bias, out, out_stride};
    parallel_blocks(x, weight.panels, [&](long first_tile, long end_tile, long first_panel, long end_panel) {
        compute_block(call, first_tile, end_tile, first_panel, end_panel);
    });
}

void gated_tiled(const Matrix& weight, const TiledRows& x, const float* bias, Activation activation,
                 const TiledRows& out) {
    Call call{weight, x, bias, nullptr, 0};
    parallel_blocks(x, out.k / PANEL, [&](long first_tile, long end_tile, long first_panel, long end_panel) {
        gate_block(call, first_tile, end_tile, first_panel, end_panel, activation, out);
    });
}

void linear_tiles(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                  long out_stride) {
    static Buffer buffer;  // one loop of the team at a time, so one buffer
    TiledRows rounded(nullptr, rows, weight.k);
    rounded.data = buffer.take<bf16>(rounded.elements());
    if (!rounded.data) return linear_vectors(weight, x, rows, x_stride, bias, out, out_stride);  // no memory: no copy
    parallel(rows, 2 * TILE_ROWS, [&](long begin, long end) {
        for (long row = begin; row < end; row++) rounded.put_row(row, x + row * x_stride);
    });
    linear_tiled(weight, rounded, bias, out, out_stride);
}

void linear_panel_tiles(const Matrix& weight, const float* x, long rows, long x_stride, long panel, float* tile) {
    static thread_local Buffer buffer;  // inside a loop of the team every thread has its own rows
    TiledRows rounded(nullptr, TILE_ROWS, weight.k);
    rounded.data = buffer.take<bf16>(rounded.elements());
    if (!rounded.data) return linear_panel_vectors(weight, x, rows, x_stride, panel, tile);
    Call call{weight, rounded, nullptr, nullptr, PANEL};
    Tiles configured;
    for (long row = 0; row < rows; row += TILE_ROWS) {
        long count = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
        alignas(64) float sums[TILE_ROWS * PANEL];
        float* target = sums;
        long stride = PANEL * (long)sizeof(float);
        for (long r = 0; r < count; r++) rounded.put_row(r, x + (row + r) * x_stride);
        multiply<1, 1>(call.x_tile(0), 0, call.panel(panel), 0, rounded.k_tiles, true, true, &target, &stride);
        std::memcpy(tile + row * PANEL, sums, count * PANEL * sizeof(float));
    }
}

#endif

}  // namespace umbel
