// The first half of an MLP by AMX tiles: gate and up with the same number side by side, and the activation between two
// products. It computes with vectors what the tiles have multiplied just before, while they multiply what comes next.
#include "activations.h"
#include "linear_float.h"
#include "linear_tiles.h"

namespace umbel {

#if defined(UMBEL_AMX)

namespace {

static_assert(PANEL % VL == 0);

// Sums of up to two tiles of rows, gate and up in turns, each [16, 16], and where their 16 inputs of the next product
// belong.
struct Gates {
    alignas(64) float sums[4][TILE_ROWS * PANEL];
    long tile, panel, rows = 0;  // rows 0: nothing is left to do
};

// Biases are null where there are none.
template <class Function>
UMBEL_INLINE void gate_row(const Gates& gates, long row, const float* gate_bias, const float* up_bias,
                           const Function& function, const TiledRows& out) {
    const float* gate = gates.sums[row / TILE_ROWS * 2] + row % TILE_ROWS * PANEL;
    const float* up = gate + TILE_ROWS * PANEL;
    bf16* line = out.line(gates.tile * TILE_ROWS + row, gates.panel / 2) + gates.panel % 2 * PANEL;
    for (long o = 0; o < PANEL; o += VL) {
        vf left = load(gate + o), right = load(up + o);
        if (gate_bias) {
            left += load(gate_bias + gates.panel * PANEL + o);
            right += load(up_bias + gates.panel * PANEL + o);
        }
        store(line + o, function(left) * right);
    }
}

template <class Function>
void gate_chunk(const Call& call, const Chunk& chunk, const Function& function, const TiledRows& out) {
    Tiles configured;
    Gates gates[2];
    Ahead next_gate, next_up;
    long panels = call.weight.n / 2 / PANEL, number = 0;
    const float *gate_bias = call.bias, *up_bias = call.bias ? call.bias + out.k : nullptr;
    auto finish = [&](const Gates& left, long begin, long end) {
        for (long row = begin; row < end; row++) gate_row(left, row, gate_bias, up_bias, function, out);
    };
    auto product = [&]<int R>(std::integral_constant<int, R>, long tile, long panel) {
        Gates &now = gates[number % 2], &before = gates[(number + 1) % 2];
        number++;
        long each = (before.rows + call.x.k_tiles - 1) / call.x.k_tiles, done = 0;
        multiply<R, 2>(call.x_tile(tile), call.x_bytes(), call.panel(panel), panels * call.panel_bytes(),
                       call.x.k_tiles, true, tile == chunk.first_tile, now.sums, [&](long) {
                           long end = done + each < before.rows ? done + each : before.rows;
                           finish(before, done, end);
                           done = end;
                           next_gate.fetch();
                           next_up.fetch();
                       });
        long rows = call.x.rows - tile * TILE_ROWS;
        now.tile = tile, now.panel = panel, now.rows = rows < R * TILE_ROWS ? rows : R * TILE_ROWS;
    };
    for (long panel = chunk.first_panel; panel < chunk.end_panel; panel++) {
        long next = chunk.after(panel, 1), steps = chunk.pairs() * call.x.k_tiles;
        if (next >= 0) next_gate = Ahead(call, next, 1, steps), next_up = Ahead(call, panels + next, 1, steps);
        for (long tile = chunk.first_tile; tile < chunk.end_tile; tile += 2)
            if (chunk.end_tile - tile < 2)
                product(std::integral_constant<int, 1>{}, tile, panel);
            else
                product(std::integral_constant<int, 2>{}, tile, panel);
    }
    const Gates& last = gates[(number + 1) % 2];
    finish(last, 0, last.rows);
}

}  // namespace

void gated_tiled(const MatrixPart& weight, const TiledRows& x, const float* bias, Activation activation,
                 const TiledRows& out) {
    Call call{weight, x, bias, nullptr, 0};
    with_activation(activation, [&](auto function) {
        parallel_blocks(x, out.k / PANEL, [&](const Chunk& chunk) { gate_chunk(call, chunk, function, out); });
    });
}

#endif

}  // namespace umbel
