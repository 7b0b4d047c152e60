// What the products of tiles share: the call, the product of a few tiles, and chunks of a product for the team.
#pragma once

#include <utility>

#include "inputs.h"
#include "threads.h"
#include "tiles.h"

#if defined(UMBEL_AMX)

namespace umbel {

constexpr long TILE_SIZE = TILE_ROWS * TILE_BYTES;  // bytes, of x and of weights
constexpr long BLOCK_K = 20;                        // tiles of one block, at most: two panels stay in the first cache
constexpr long BLOCK_TILES = 64;                    // of rows that share a visit of a panel, at most
constexpr long BLOCK_BYTES = 1 << 20;               // of their inputs: they stay in the second cache
constexpr long CHUNK_PANELS = 8;                    // most: a thread that loses its core delays a loop little
constexpr long AHEAD = 2048;                        // bytes of a panel that are asked for before their use

struct Call {
    const MatrixPart& weight;
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
// They lie at sums[r · P + p], and are continued from there unless this is the `first` block of k. beside(t) is called
// where the products of tile t have been issued: what it computes with vectors takes place while they run.
template <int R, int P, class Beside>
UMBEL_INLINE void multiply(const char* x, long x_bytes, const char* panel, long panel_bytes, long k_tiles, bool first,
                           bool streamed, float (*sums)[TILE_ROWS * PANEL], Beside&& beside) {
    auto each = [&]<int... S>(std::integer_sequence<int, S...>, auto&& body) {
        (body.template operator()<S>(), ...);
    };
    constexpr auto ALL = std::make_integer_sequence<int, R * P>{};
    each(ALL, [&]<int S>() {
        if (first)
            tile_zero<S>();
        else
            tile_load<S>(sums[S], TILE_BYTES);
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
        beside(t);
    }
    each(ALL, [&]<int S>() { tile_store<S>(sums[S], TILE_BYTES); });
}

// Fetches panels that come next into the second cache, a few lines beside every product of those before them.
class Ahead {
  public:
    Ahead() = default;
    // `steps`: products until they are needed.
    Ahead(const Call& call, long panel, long panels, long steps)
        : at_(call.panel(panel)), end_(at_ + panels * call.panel_bytes()),
          share_((panels * call.panel_bytes() + steps - 1) / steps) {}

    UMBEL_INLINE void fetch() {
        for (const char* stop = at_ + share_; at_ < stop && at_ < end_; at_ += 64) __builtin_prefetch(at_, 0, 2);
    }

  private:
    const char *at_ = nullptr, *end_ = nullptr;
    long share_ = 0;
};

// Blocks that tiles of rows are spread over: few panels and many threads want more of them.
inline long count_row_blocks(const TiledRows& x, long panels) {
    long row_tiles = x.row_tiles(), tiles = BLOCK_BYTES / (x.k_tiles * TILE_SIZE);
    tiles = tiles < 2 ? 2 : tiles > BLOCK_TILES ? BLOCK_TILES : tiles;
    long blocks = (row_tiles + tiles - 1) / tiles;
    while (blocks * panels < 4 * team_size() && row_tiles / blocks > 2) blocks++;
    return blocks;
}

// Tiles of rows × panels that one thread multiplies.
struct Chunk {
    long first_tile, end_tile, first_panel, end_panel;
    long next_panel;  // where this thread will probably go on, −1: nowhere, or with the same panels

    bool single() const { return end_tile - first_tile == 1; }
    long pairs() const { return (end_tile - first_tile + 1) / 2; }
    // Which panel to fetch while `count` from `panel` on are multiplied, −1: none. Where a panel is multiplied with one
    // pair of tiles only, the next is read at once anyway.
    long after(long panel, long count) const {
        if (pairs() == 1) return -1;
        return panel + count < end_panel ? panel + count : next_panel;
    }
};

// body(chunk) for chunks that are spread over the team.
template <class Body>
void parallel_blocks(const TiledRows& x, long panels, Body&& body) {
    long row_tiles = x.row_tiles(), blocks = count_row_blocks(x, panels);
    long group = even_grain(panels * blocks, 8, 4);
    if (group > CHUNK_PANELS) group = CHUNK_PANELS;
    long groups = (panels + group - 1) / group;
    parallel(groups * blocks, 1, [&](long begin, long end) {  // neighbours share panels
        for (long number = begin; number < end; number++) {
            long block = number % blocks, panel = number / blocks * group;
            long panel_end = panel + group < panels ? panel + group : panels;
            long next = end - begin > 1 ? number + 1 : number - team_size();  // the last are claimed first
            bool known = next >= 0 && next < groups * blocks && next / blocks != number / blocks;
            body(Chunk{block * row_tiles / blocks, (block + 1) * row_tiles / blocks, panel, panel_end,
                       known ? next / blocks * group : -1});
        }
    });
}

}  // namespace umbel

#endif
