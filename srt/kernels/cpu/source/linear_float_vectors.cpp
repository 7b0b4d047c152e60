// Float linears by vectors: every instruction set, F32 and BF16 weights, float32 sums.
//
// The sum of one output is a single chain over k, always from the front, one fused multiply-add for each input. So no
// blocking below changes a bit of it: blocks of k continue from the float32 sum that the block before has stored.
#include "linear_float.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr int WIDE = PANEL / VL;                          // vectors of a panel
constexpr int SUMS = VL == 16 ? 24 : VL == 8 ? 12 : 8;    // vectors of sums in registers
constexpr int ROWS = SUMS / (VL == 16 ? 2 : WIDE);        // rows of one tile, most
constexpr int PANELS = 4;                                 // panels of one tile, most
constexpr long BLOCK_K = 512;                             // inputs of one block: a panel of them stays near
constexpr long BLOCK_ROWS = 96;                           // rows of one block: their inputs stay in the second cache
constexpr long CHUNK_PANELS = 64;                         // so that a thread which lost its core delays a loop little

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

// sum += a · b. With 16 registers the compiler is told which of the three operands is overwritten: left alone it takes
// the input's register for the new sum as often as not, and the sums of BF16 wander over the stack.
UMBEL_INLINE void multiply_add(vf& sum, vf a, vf b) {
#if defined(__FMA__) && !defined(__AVX512F__)
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

// One tile: tile[r, p, 0:16] (+)= x[r, 0:k] · panel p. `panel_bytes` from panel to panel.
template <class Weight, int R, int P>
void multiply(const char* panel, long panel_bytes, const float* x, long x_stride, long k, bool first, float* tile,
              long tile_stride) {
    constexpr int V = P * WIDE;
    constexpr long STEP = 4 / sizeof(Weight);  // inputs of one lane
    vf sums[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = first ? vf{} : load(tile + r * tile_stride + v * VL);
    long at = 0;
    for (; at + STEP <= k; at += STEP) {
        vf weights[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) {
            vu lanes = load_lanes(panel + v / WIDE * panel_bytes + v % WIDE * (VL * 4));
            weights[v] = (vf)(STEP == 2 ? lanes << 16 : lanes);
        }
        add_products(sums, weights, x + at, x_stride);
        if constexpr (STEP == 2) {
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
                weights[v] = (vf)(load_lanes(panel + v / WIDE * panel_bytes + v % WIDE * (VL * 4)) & 0xffff0000u);
            add_products(sums, weights, x + at + 1, x_stride);
        }
        panel += PANEL * 4;
    }
    if (at < k) {  // BF16 and an odd k: the other half of the lane is padding
        vf weights[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
            weights[v] = (vf)(load_lanes(panel + v / WIDE * panel_bytes + v % WIDE * (VL * 4)) << 16);
        add_products(sums, weights, x + at, x_stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(tile + r * tile_stride + v * VL, sums[r][v]);
}

typedef void (*Multiply)(const char*, long, const float*, long, long, bool, float*, long);

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

struct Call {
    const Matrix& weight;
    const Kernels& kernels;
    const float* x;
    long x_stride;
    const float* bias;
    float* out;
    long out_stride;

    long panel_bytes() const { return weight.data_bytes / weight.panels; }
    long lane_inputs() const { return weight.format == Format::BF16 ? 2 : 1; }
};

// Rows [row, row + rows) and panels [panel, panel + panels) of one tile, inputs [at, at + k).
void compute_tile(const Call& call, long row, long rows, long panel, long panels, long at, long k) {
    Multiply multiply = call.kernels.by[rows][panels];
    const char* weights = (const char*)call.weight.data + panel * call.panel_bytes() + at / call.lane_inputs() * PANEL * 4;
    const float* x = call.x + row * call.x_stride + at;
    float* out = call.out + row * call.out_stride + panel * PANEL;
    long width = call.weight.n - panel * PANEL;
    bool last = at + k == call.weight.k;
    if (width >= panels * PANEL) {
        width = panels * PANEL;
        multiply(weights, call.panel_bytes(), x, call.x_stride, k, at == 0, out, call.out_stride);
    } else {  // the outputs of the last panel end inside it
        alignas(64) float tile[ROWS * PANELS * PANEL];
        long stride = panels * PANEL;
        if (at > 0)
            for (long r = 0; r < rows; r++) std::memcpy(tile + r * stride, out + r * call.out_stride, width * 4);
        multiply(weights, call.panel_bytes(), x, call.x_stride, k, at == 0, tile, stride);
        for (long r = 0; r < rows; r++) std::memcpy(out + r * call.out_stride, tile + r * stride, width * 4);
    }
    if (last && call.bias)
        for (long r = 0; r < rows; r++)
            for (long o = 0; o < width; o++) out[r * call.out_stride + o] += call.bias[panel * PANEL + o];
}

// A block of rows and a range of panels, by one thread. Rows are spread evenly over tiles.
void compute_block(const Call& call, long row, long rows, long first_panel, long end_panel) {
    long tiles = (rows + ROWS - 1) / ROWS;
    long most = (rows + tiles - 1) / tiles;
    long together = panels_for((int)most);
    long block_k = tiles == 1 ? call.weight.k : BLOCK_K;
    for (long at = 0; at < call.weight.k; at += block_k) {
        long k = call.weight.k - at < block_k ? call.weight.k - at : block_k;
        for (long panel = first_panel; panel < end_panel;) {
            long panels = together;
            while (panels > end_panel - panel) panels /= 2;
            for (long t = 0; t < tiles; t++) {
                long begin = t * rows / tiles, end = (t + 1) * rows / tiles;
                compute_tile(call, row + begin, end - begin, panel, panels, at, k);
            }
            panel += panels;
        }
    }
}

Call describe(const Matrix& weight, const float* x, long x_stride, const float* bias, float* out, long out_stride) {
    const Kernels& kernels = weight.format == Format::BF16 ? BF16_KERNELS : F32_KERNELS;
    return {weight, kernels, x, x_stride, bias, out, out_stride};
}

}  // namespace

void linear_vectors(const Matrix& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                    long out_stride) {
    Call call = describe(weight, x, x_stride, bias, out, out_stride);
    long row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    long group = even_grain(weight.panels * row_blocks, 8, PANELS);
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

void linear_panel_vectors(const Matrix& weight, const float* x, long rows, long x_stride, long panel, float* tile) {
    // The tile is as wide as the panel: what lies past n is padding, and padding is 0.
    const Kernels& kernels = weight.format == Format::BF16 ? BF16_KERNELS : F32_KERNELS;
    const char* weights = (const char*)weight.data + panel * (weight.data_bytes / weight.panels);
    for (long row = 0; row < rows; row += ROWS) {
        long count = rows - row < ROWS ? rows - row : ROWS;
        kernels.by[count][1](weights, 0, x + row * x_stride, x_stride, weight.k, true, tile + row * PANEL, PANEL);
    }
}

}  // namespace umbel
