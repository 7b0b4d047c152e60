// Float linears by vectors: every instruction set, F32, BF16 and F16 weights, float32 sums.
//
// The sum of one output is a single chain over k, always from the front, one fused multiply-add for each input. So no
// blocking below changes a bit of it: blocks of k continue from the float32 sum that the block before has stored.
#include <type_traits>

#include "linear_float.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr int WIDE = PANEL / VL;                        // vectors of a panel
constexpr int SUMS = VL == 16 ? 24 : VL == 8 ? 12 : 8;  // vectors of sums that registers hold beside what feeds them
constexpr int ROWS = VL == 16 ? 12 : SUMS / WIDE;       // rows of one tile, most
constexpr int PANELS = 4;                               // panels of one tile, most
constexpr long BLOCK_K = 1024;                          // inputs of one block, most: panel and rows of it stay near
constexpr long BLOCK_ROWS = 96;                         // rows of one block, most: the second cache holds their inputs
constexpr long CHUNK_PANELS = 64;                       // most: a thread that loses its core delays a loop little
constexpr long AHEAD = 2048;                            // bytes of a panel that are asked for before their use

// Panels of a tile of that many rows: enough sums to hide the latency of an addition, and few enough for registers.
constexpr int panels_for(int rows) {
    int panels = PANELS;
    while (panels > 1 && rows * panels * WIDE > (VL == 16 ? SUMS : 8)) panels /= 2;
    return panels;
}

UMBEL_INLINE vu load_lanes(const void* p) {
    vu v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// sum += a · b, rounded once. The compiler is not left to see to that: where a tile has a single sum, GCC 13 takes two
// instructions. With 16 registers it is told, too, which of the three operands is overwritten: left alone it takes the
// input's register for the new sum as often as not, and the sums of BF16 wander over the stack.
UMBEL_INLINE void multiply_add(vf& sum, vf a, vf b) {
#if defined(__AVX512F__)
    sum = (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
    sum += a * b;
#endif
}

// Adds x[r, at] · w[at, all outputs of the tile] to the sums.
template <int R, int V>
UMBEL_INLINE void add_products(vf (&sums)[R][V], const vf (&weights)[V], const float* x, long x_stride) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        vf input = splat(x[r * x_stride]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) multiply_add(sums[r][v], input, weights[v]);
    }
}

// Memory that is asked for while a tile is computed: `step` bytes further at every step.
struct Ahead {
    const char* begin;
    long step;
};

// One float for each output of the tile, out of a line of 64 bytes of each panel: a line of F32 holds one input of each
// output, one of BF16 two next to each other, one of F16 all outputs of one input and then of the next.
template <class Weight, bool SECOND, int V>
UMBEL_INLINE void read_weights(vf (&weights)[V], const char* panel, long panel_bytes) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
        const char* line = panel + v / WIDE * panel_bytes;
        if constexpr (std::is_same_v<Weight, f16>) {
            weights[v] = load((const f16*)line + SECOND * PANEL + v % WIDE * VL);
        } else {
            vu lanes = load_lanes(line + v % WIDE * (VL * 4));
            if constexpr (sizeof(Weight) == 2) lanes = SECOND ? lanes & 0xffff0000u : lanes << 16;
            weights[v] = (vf)lanes;
        }
    }
}

// One tile: tile[r, p, 0:16] (+)= x[r, 0:k] · panel p. `panel_bytes` from panel to panel.
template <class Weight, int R, int P>
void multiply(const char* panel, long panel_bytes, const float* x, long x_stride, long k, Ahead ahead, bool first,
              float* tile, long tile_stride) {
    constexpr int V = P * WIDE;
    constexpr bool PAIRS = sizeof(Weight) == 2;
    constexpr long STEP = PAIRS ? 2 : 1;      // inputs of one line
    constexpr bool ASKS = VL == 16 || R > 2;  // AVX2, one or two rows: 5 % faster left to the machine (Zen 3)
    vf sums[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = first ? vf{} : load(tile + r * tile_stride + v * VL);
    vf weights[V];
    long at = 0;
    for (; at + STEP <= k; at += STEP) {
        if constexpr (ASKS) {
#pragma GCC unroll 4
            for (int p = 0; p < P; p++) prefetch(ahead.begin + p * panel_bytes);
            ahead.begin += ahead.step;
        }
        read_weights<Weight, false>(weights, panel, panel_bytes);
        add_products(sums, weights, x + at, x_stride);
        if constexpr (PAIRS) {
            read_weights<Weight, true>(weights, panel, panel_bytes);
            add_products(sums, weights, x + at + 1, x_stride);
        }
        panel += PANEL * 4;
    }
    if (at < k) {  // an odd k: the upper half of the last lane is padding
        read_weights<Weight, false>(weights, panel, panel_bytes);
        add_products(sums, weights, x + at, x_stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(tile + r * tile_stride + v * VL, sums[r][v]);
}

typedef void (*Multiply)(const char*, long, const float*, long, long, Ahead, bool, float*, long);

struct Kernels {
    Multiply by[ROWS + 1][PANELS + 1] = {};
};

template <class Weight, int R, int P>
constexpr void enter(Kernels& kernels) {
    if constexpr (P <= panels_for(R)) kernels.by[R][P] = multiply<Weight, R, P>;
    if constexpr (P > 1) enter<Weight, R, P / 2>(kernels);
    else if constexpr (R > 1) enter<Weight, R - 1, PANELS>(kernels);
}

template <class Weight>
constexpr Kernels all_kernels() {
    Kernels kernels;
    enter<Weight, ROWS, PANELS>(kernels);
    return kernels;
}

constexpr Kernels F32_KERNELS = all_kernels<float>();
constexpr Kernels BF16_KERNELS = all_kernels<bf16>();
constexpr Kernels F16_KERNELS = all_kernels<f16>();

struct Call {
    const MatrixPart& weight;
    const Kernels& kernels;
    const float* x;
    long x_stride;
    const float* bias;
    float* out;
    long out_stride;

    long panel_bytes() const { return weight.panel_bytes; }
    long line_inputs() const { return weight.format == Format::F32 ? 1 : 2; }
};

const char* weights_at(const Call& call, long panel, long at) {
    return call.weight.panel(panel) + at / call.line_inputs() * PANEL * 4;
}

// Rows [row, row + rows) and panels [panel, panel + panels) of one tile, inputs [at, at + k).
void compute_tile(const Call& call, long row, long rows, long panel, long panels, long at, long k, Ahead ahead) {
    Multiply multiply = call.kernels.by[rows][panels];
    const char* weights = weights_at(call, panel, at);
    const float* x = call.x + row * call.x_stride + at;
    float* out = call.out + row * call.out_stride + panel * PANEL;
    long width = call.weight.n - panel * PANEL;
    bool last = at + k == call.weight.k;
    if (width >= panels * PANEL) {
        width = panels * PANEL;
        multiply(weights, call.panel_bytes(), x, call.x_stride, k, ahead, at == 0, out, call.out_stride);
    } else {  // the outputs of the last panel end inside it
        alignas(64) float tile[ROWS * PANELS * PANEL];
        long stride = panels * PANEL;
        if (at > 0)
            for (long r = 0; r < rows; r++) std::memcpy(tile + r * stride, out + r * call.out_stride, width * 4);
        multiply(weights, call.panel_bytes(), x, call.x_stride, k, ahead, at == 0, tile, stride);
        for (long r = 0; r < rows; r++) std::memcpy(out + r * call.out_stride, tile + r * stride, width * 4);
    }
    if (last && call.bias)
        for (long r = 0; r < rows; r++)
            for (long o = 0; o < width; o++) out[r * call.out_stride + o] += call.bias[panel * PANEL + o];
}

// What tile `t` of `tiles` asks for: the only tile its own panels some steps before it needs them, one of several its
// share of the panels that come next, while these here are computed with.
Ahead look_ahead(const Call& call, long panel, long panels, long at, long k, long t, long tiles) {
    const char* begin = weights_at(call, panel, at);
    if (tiles == 1) return {begin + AHEAD, 64};
    long lines = k / call.line_inputs();
    return {begin + panels * call.panel_bytes() + t * lines / tiles * 64, 64 / tiles + 1};
}

// A block of rows and a range of panels, by one thread. Rows are spread evenly over tiles.
void compute_block(const Call& call, long row, long rows, long first_panel, long end_panel) {
    long tiles = (rows + ROWS - 1) / ROWS;
    long most = (rows + tiles - 1) / tiles;
    long together = panels_for((int)most);
    long blocks = tiles == 1 ? 1 : (call.weight.k + BLOCK_K - 1) / BLOCK_K;
    long block_k = ((call.weight.k + blocks - 1) / blocks + 1) / 2 * 2;  // a line may hold two
    for (long at = 0; at < call.weight.k; at += block_k) {
        long k = call.weight.k - at < block_k ? call.weight.k - at : block_k;
        for (long panel = first_panel; panel < end_panel;) {
            long panels = together;
            while (panels > end_panel - panel) panels /= 2;
            for (long t = 0; t < tiles; t++) {
                Ahead ahead = look_ahead(call, panel, panels, at, k, t, tiles);
                long begin = t * rows / tiles, end = (t + 1) * rows / tiles;
                compute_tile(call, row + begin, end - begin, panel, panels, at, k, ahead);
            }
            panel += panels;
        }
    }
}

const Kernels& kernels_of(const MatrixPart& weight) {
    switch (weight.format) {
        case Format::BF16: return BF16_KERNELS;
        case Format::F16: return F16_KERNELS;
        default: return F32_KERNELS;
    }
}

// Blocks that rows are spread over: few panels and many threads want more of them.
long count_row_blocks(long rows, long panels) {
    long blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    while (blocks * panels < 4 * team_size() && rows / blocks > 2 * ROWS) blocks++;
    return blocks;
}

}  // namespace

void linear_vectors(const MatrixPart& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                    long out_stride) {
    Call call{weight, kernels_of(weight), x, x_stride, bias, out, out_stride};
    long row_blocks = count_row_blocks(rows, weight.panels);
    long group = even_grain(weight.panels * row_blocks, 8, panels_for(rows < ROWS ? (int)rows : ROWS));
    if (group > CHUNK_PANELS) group = CHUNK_PANELS;
    long groups = (weight.panels + group - 1) / group;
    parallel(groups * row_blocks, 1, [&](long begin, long end) {  // neighbours share panels
        for (long chunk = begin; chunk < end; chunk++) {
            long block = chunk % row_blocks, panel = chunk / row_blocks * group;
            long row = block * rows / row_blocks, row_end = (block + 1) * rows / row_blocks;
            long panel_end = panel + group < weight.panels ? panel + group : weight.panels;
            compute_block(call, row, row_end - row, panel, panel_end);
        }
    });
}

void linear_panel_vectors(const MatrixPart& weight, const float* x, long rows, long x_stride, long panel, float* tile) {
    const Kernels& kernels = kernels_of(weight);
    const char* weights = weight.panel(panel);
    for (long row = 0; row < rows; row += ROWS) {
        long count = rows - row < ROWS ? rows - row : ROWS;
        kernels.by[count][1](weights, 0, x + row * x_stride, x_stride, weight.k, Ahead{weights + AHEAD, 64}, true,
                             tile + row * PANEL, PANEL);
    }
}

}  // namespace umbel
