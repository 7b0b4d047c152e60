// BF16 linears by AMX tiles: x is rounded to bfloat16 in tiles of 16 rows × 32 inputs, 16 lanes of a panel are one tile
// of weights as they lie in memory, sums are float32.
//
// An output is summed tile by tile from the front of k, whatever the number of rows: blocks of k continue from the
// float32 sum that the block before has stored.
#include "linear_float.h"

#include "linear_tiles.h"
#include "memory.h"

namespace umbel {

#if defined(UMBEL_AMX)

namespace {

// Sums of up to four tiles, tile r · panels + p of them of rows r and panel p, and where they belong.
struct Sums {
    alignas(64) float tiles[4][TILE_ROWS * PANEL];
    long tile, panel, panels, rows;
};

// Rows [begin, end) of some sums into `out`.
UMBEL_INLINE void write_rows(const Call& call, const Sums& from, long begin, long end) {
    long panels = from.panels, first = from.panel * PANEL, stride = call.out_stride;
    float* out = call.out + (from.tile * TILE_ROWS + begin) * stride + first;
    bool plain = !call.bias && first + panels * PANEL <= call.weight.n;
    for (long row = begin; row < end; row++, out += stride) {
        const float* line = from.tiles[row / TILE_ROWS * panels] + row % TILE_ROWS * PANEL;
        if (plain) {
            float* to = out;
            for (long p = 0; p < panels; p++, line += TILE_ROWS * PANEL, to += PANEL)
                for (long o = 0; o < PANEL; o += VL) store(to + o, load(line + o));
            continue;
        }
        for (long p = 0; p < panels; p++, line += TILE_ROWS * PANEL)
            for (long o = p * PANEL; o < (p + 1) * PANEL && first + o < call.weight.n; o++)
                out[o] = line[o - p * PANEL] + (call.bias ? call.bias[first + o] : 0.0f);
    }
}

// Some rows × some panels, a few tiles at a time. What tiles have multiplied is written while they multiply what comes
// next, row by row: tiles of sums stored straight into rows that lie far apart would push panels out of the cache.
class Block {
  public:
    Block(const Call& call, const Chunk& chunk) : call_(call), chunk_(chunk) {
        long k_tiles = call.x.k_tiles, blocks = chunk.pairs() == 1 ? 1 : (k_tiles + BLOCK_K - 1) / BLOCK_K;
        block_k_ = (k_tiles + blocks - 1) / blocks;
    }

    void run() {
        Tiles configured;
        for (long panel = chunk_.first_panel, panels; panel < chunk_.end_panel; panel += panels) {
            long left = chunk_.end_panel - panel;
            panels = left >= 4 && chunk_.single() ? 4 : left >= 2 ? 2 : 1;  // one tile of rows: they go side by side
            long next = chunk_.after(panel, panels);
            ahead_ = next < 0 ? Ahead() : Ahead(call_, next, panels, chunk_.pairs() * call_.x.k_tiles);
            for (long at = 0; at < call_.x.k_tiles; at += block_k_)
                for (long tile = chunk_.first_tile; tile < chunk_.end_tile; tile += 2) choose(tile, panel, panels, at);
        }
        write(0, BLOCK_TILES * TILE_ROWS);
    }

  private:
    void choose(long tile, long panel, long panels, long at) {
        if (chunk_.end_tile - tile >= 2)
            return panels == 2 ? product<2, 2>(tile, panel, at) : product<2, 1>(tile, panel, at);
        if (panels == 4) return product<1, 4>(tile, panel, at);
        panels == 2 ? product<1, 2>(tile, panel, at) : product<1, 1>(tile, panel, at);
    }

    template <int R, int P>
    void product(long tile, long panel, long at) {
        long k_left = call_.x.k_tiles - at, k_tiles = k_left < block_k_ ? k_left : block_k_;
        // Sums that wait for the next block of k have places of their own, others take turns.
        Sums& now = sums_[block_k_ < call_.x.k_tiles ? (tile - chunk_.first_tile) / 2 : turn_++ % 2];
        long rows = call_.x.rows - tile * TILE_ROWS, written = 0;
        long each = waiting_ ? (waiting_->rows + k_tiles - 1) / k_tiles : 0;
        multiply<R, P>(call_.x_tile(tile) + at * TILE_SIZE, call_.x_bytes(), call_.panel(panel) + at * TILE_SIZE,
                       call_.panel_bytes(), k_tiles, at == 0, tile == chunk_.first_tile, now.tiles, [&](long) {
                           if (each) write(written, written + each);
                           written += each;
                           ahead_.fetch();
                       });
        now.tile = tile, now.panel = panel, now.panels = P, now.rows = rows < R * TILE_ROWS ? rows : R * TILE_ROWS;
        waiting_ = k_tiles == k_left ? &now : nullptr;
    }

    // Rows [begin, end) of what waits to be written, as far as there are so many.
    void write(long begin, long end) {
        if (waiting_) write_rows(call_, *waiting_, begin, end < waiting_->rows ? end : waiting_->rows);
    }

    const Call& call_;
    const Chunk chunk_;
    long block_k_, turn_ = 0;
    Ahead ahead_;
    const Sums* waiting_ = nullptr;
    Sums sums_[BLOCK_TILES / 2];
};

}  // namespace

void linear_tiled(const MatrixPart& weight, const TiledRows& x, const float* bias, float* out, long out_stride) {
    Call call{weight, x, bias, out, out_stride};
    parallel_blocks(x, weight.panels, [&](const Chunk& chunk) { Block(call, chunk).run(); });
}

void linear_tiles(const MatrixPart& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
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

void linear_panel_tiles(const MatrixPart& weight, const float* x, long rows, long x_stride, long panel, float* tile) {
    static thread_local Buffer buffer;  // inside a loop of the team every thread has its own rows
    TiledRows rounded(nullptr, TILE_ROWS, weight.k);
    rounded.data = buffer.take<bf16>(rounded.elements());
    if (!rounded.data) return linear_panel_vectors(weight, x, rows, x_stride, panel, tile);
    Call call{weight, rounded, nullptr, nullptr, PANEL};
    Tiles configured;
    for (long row = 0; row < rows; row += TILE_ROWS) {
        long count = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
        alignas(64) float sums[1][TILE_ROWS * PANEL];
        for (long r = 0; r < count; r++) rounded.put_row(r, x + (row + r) * x_stride);
        multiply<1, 1>(call.x_tile(0), 0, call.panel(panel), 0, rounded.k_tiles, true, true, sums, [](long) {});
        std::memcpy(tile + row * PANEL, sums[0], count * PANEL * sizeof(float));
    }
}

#endif

}  // namespace umbel
