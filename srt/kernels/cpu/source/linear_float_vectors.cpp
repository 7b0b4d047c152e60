// Float linears by vectors: every instruction set, F32, BF16 and F16 weights and codes, float32 sums.
//
// The sum of one output is a single chain over k, always from the front, one fused multiply-add for each input. So no
// blocking below changes a bit of it: blocks of k continue from the float32 sum that the block before has stored.
//
// With AVX512-BF16 (the machine is asked once) a BF16 matrix that is not `exact` takes inputs rounded to bfloat16, two in a
// lane: one instruction multiplies both with their weights and adds the products to the sum. Its panels are read as those
// of an F32 matrix with half as many inputs.
//
// Codes become floats, times the scale of their group: the float32 numbers that a reader of the file has, so that products
// have the bits of those with F32 weights. One tile of rows takes them in registers; for several, a block of a panel is
// widened once, into the caches, and multiplied as F32.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "linear_float.h"
#include "memory.h"
#include "threads.h"

#if defined(UMBEL_PAIRS)
#include <cpuid.h>
#endif

namespace umbel {
namespace {

constexpr int WIDE = PANEL / VL;                        // vectors of a panel
constexpr int SUMS = VL == 16 ? 24 : VL == 8 ? 12 : 8;  // vectors of sums that registers hold beside what feeds them
constexpr int ROWS = VL == 16 ? 12 : SUMS / WIDE;       // rows of one tile, most
constexpr int PANELS = 4;                               // panels of one tile, most
constexpr long BLOCK_K = 1024;                          // inputs of one block, most: panel and rows of it stay near
constexpr long WIDENED_K = 512;                         // the same of codes that are widened: F32 takes more bytes
constexpr long WIDENED_PANELS = 2;                      // of a tile of codes that are widened, most
constexpr long BLOCK_ROWS = 96;                         // rows of one block, most: the second cache holds their inputs
constexpr long CHUNK_PANELS = 64;                       // most: a thread that loses its core delays a loop little
constexpr long AHEAD = 2048;                            // bytes of a panel that are asked for before their use

// Panels of a tile of that many rows: enough sums to hide the latency of an addition, and few enough for registers, of
// which AVX2 needs some more to decode with.
constexpr int panels_for(int rows, bool coded) {
    int panels = PANELS;
    while (panels > 1 && rows * panels * WIDE > (VL == 16 ? SUMS : VL == 8 && coded ? 4 : 8)) panels /= 2;
    return panels;
}

// Rows that take several tiles are more than half of ROWS in the largest.
static_assert(panels_for(ROWS / 2 + 1, false) <= WIDENED_PANELS);

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

// sum += both products of a lane. Named in the assembler's text, because the rest of the library runs without it.
UMBEL_INLINE void multiply_add_pairs([[maybe_unused]] vf& sum, [[maybe_unused]] vf a, [[maybe_unused]] vf b) {
#if defined(UMBEL_PAIRS)
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#endif
}

// The 32 bits of x in all lanes, whatever they are.
UMBEL_INLINE vf splat_lane(const float* x) {
    int32_t lane;
    std::memcpy(&lane, x, sizeof lane);
    return (vf)splat_int(lane);
}

// Adds x[r, at] · w[at, all outputs of the tile] to the sums. PAIRS: both are pairs of bfloat16.
template <bool PAIRS, int R, int V>
UMBEL_INLINE void add_products(vf (&sums)[R][V], const vf (&weights)[V], const float* x, long x_stride) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        vf input = PAIRS ? splat_lane(x + r * x_stride) : splat(x[r * x_stride]);
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
            PAIRS ? multiply_add_pairs(sums[r][v], input, weights[v]) : multiply_add(sums[r][v], input, weights[v]);
    }
}

// Memory that is asked for while a tile is computed: `step` bytes further at every step.
struct Ahead {
    const char* begin;
    long step;
};

struct Float8;  // e4m3
struct Nibble;  // one of 16 numbers
struct Pair;    // two of bfloat16 in a lane, times two inputs in a lane: counted as one
template <class Weight>
constexpr bool CODED = std::is_same_v<Weight, Float8> || std::is_same_v<Weight, Nibble>;

// Inputs of a line, the 64 bytes of a panel that are read at a time.
template <class Weight>
constexpr long LINE = std::is_same_v<Weight, Float8> ? 4 : std::is_same_v<Weight, Nibble> ? 8 : 2;
template <>
constexpr long LINE<float> = 1;
template <>
constexpr long LINE<Pair> = 1;

// The weights of a tile, from some input on.
struct TileWeights {
    const char* lines;   // of the first panel
    long panel_bytes;    // from panel to panel
    const float* scales; // of codes: of the group of the first input, 16 floats for each group
    long panel_scales;   // floats from panel to panel
    long group, left;    // inputs of a group, and those that are left of the first one
    const float* table;  // [16], of nibbles
};

// The lower or upper bytes of VL pairs of e4m3 numbers, divided by 256: the difference of the biases of their exponents
// and those of float16, whose bits they have but for the lower ones. The codes that are no numbers become 480 / 256.
template <bool UPPER>
UMBEL_INLINE vf from_float8(const char* pairs) {
    typedef int16_t vshorts __attribute__((vector_size(VL * 2)));
    vh bits;
    std::memcpy(&bits, pairs, sizeof bits);
    if constexpr (!UPPER) bits <<= 8;
    return from_halves((vh)((vshorts)bits >> 1) & 0xbf80);  // of two bits of sign one is taken away
}

// table[lowest 4 bits of a lane]
UMBEL_INLINE vf look_up(const float* table, vu lanes) {
#if defined(__AVX512F__)
    return (vf)_mm512_permutexvar_ps((__m512i)lanes, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)lanes);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), (__m256i)lanes);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(lanes << 28));
#elif defined(__aarch64__)
    vu bytes = (lanes & 15) * 0x04040404u + 0x03020100u;
    return (vf)vqtbl4q_u8(vld1q_u8_x4((const uint8_t*)table), (uint8x16_t)bytes);
#else
    vf values;
    for (int i = 0; i < VL; i++) values[i] = table[lanes[i] & 15];
    return values;
#endif
}

// VL outputs and input I of a line, which starts at the bytes of these outputs: of F32 it holds one input of each output,
// of BF16 two next to each other, of F16 all outputs of one input and then of the next, of FLOAT8 of two next to each
// other and then of the next two, of nibbles eight next to each other.
template <class Weight, int I>
UMBEL_INLINE vf read_weights(const char* line, vf scale, const float* table) {
    if constexpr (std::is_same_v<Weight, f16>) return load((const f16*)line + I * PANEL);
    if constexpr (std::is_same_v<Weight, Float8>) return from_float8<I % 2 == 1>(line + I / 2 * PANEL * 2) * scale;
    vu lanes = load_lanes(line);
    if constexpr (std::is_same_v<Weight, Nibble>) return look_up(table, lanes >> 4 * I) * scale;
    if constexpr (std::is_same_v<Weight, bf16>) lanes = I == 1 ? lanes & 0xffff0000u : lanes << 16;
    return (vf)lanes;
}

// The scale of VL outputs: what their codes are multiplied with.
template <class Weight>
UMBEL_INLINE vf load_scale(const float* scales) {
    return load(scales) * (std::is_same_v<Weight, Float8> ? 256.0f : 1.0f);
}

// Bytes of a line that VL outputs take.
template <class Weight>
constexpr long VECTOR_BYTES = std::is_same_v<Weight, f16> || std::is_same_v<Weight, Float8> ? VL * 2 : VL * 4;

// Adds x[r, 0 and I...] · w[0 and I..., all outputs of the tile] to the sums, out of one line of each panel. With
// few registers codes are taken vector by vector, so that fewer words of codes are held.
template <class Weight, int R, int V, int... I>
UMBEL_INLINE void add_line(vf (&sums)[R][V], const char* lines, const TileWeights& from, const vf (&scales)[V],
                           const float* x, long x_stride, std::integer_sequence<int, I...>) {
    auto line = [&](int v) { return lines + v / WIDE * from.panel_bytes + v % WIDE * VECTOR_BYTES<Weight>; };
    auto add_input = [&]<int INPUT>() __attribute__((always_inline)) {
        vf weights[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) weights[v] = read_weights<Weight, INPUT>(line(v), scales[v], from.table);
        add_products<std::is_same_v<Weight, Pair>>(sums, weights, x + INPUT, x_stride);
    };
    auto add_coded = [&]<int INPUT>(int v) __attribute__((always_inline)) {
        vf weights = read_weights<Weight, INPUT>(line(v), scales[v], from.table);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) multiply_add(sums[r][v], splat(x[r * x_stride + INPUT]), weights);
    };
    if constexpr (CODED<Weight> && VL < 16) {
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) (add_coded.template operator()<I>(v), ...);
    } else {
        (add_input.template operator()<I>(), ...);
    }
}

// One tile: tile[r, p, 0:16] (+)= x[r, 0:k] · panel p.
template <class Weight, int R, int P>
void multiply(const TileWeights& from, const float* x, long x_stride, long k, Ahead ahead, bool first, float* tile,
              long tile_stride) {
    constexpr int V = P * WIDE;
    constexpr long STEP = LINE<Weight>;
    constexpr bool ASKS = VL == 16 || R > 2;  // AVX2, one or two rows: 5 % faster left to the machine (Zen 3)
    vf sums[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[r][v] = first ? vf{} : load(tile + r * tile_stride + v * VL);
    vf scales[V]{};
    const char* lines = from.lines;
    const float* group_scales = from.scales;
    long at = 0, end = CODED<Weight> ? std::min(from.left, k) : k;
    for (;;) {
        if constexpr (CODED<Weight>) {
#pragma GCC unroll 8
            for (int v = 0; v < V; v++)
                scales[v] = load_scale<Weight>(group_scales + v / WIDE * from.panel_scales + v % WIDE * VL);
        }
        for (; at + STEP <= end; at += STEP) {
            if constexpr (ASKS) {
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) prefetch(ahead.begin + p * from.panel_bytes);
                ahead.begin += ahead.step;
            }
            add_line<Weight>(sums, lines, from, scales, x + at, x_stride, std::make_integer_sequence<int, STEP>{});
            lines += PANEL * 4;
        }
        if (!CODED<Weight> || at == k) break;
        end = std::min(end + from.group, k);
        group_scales += PANEL;
    }
    if (at < k)  // an odd k: the rest of the last lane is padding
        add_line<Weight>(sums, lines, from, scales, x + at, x_stride, std::integer_sequence<int, 0>{});
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) store(tile + r * tile_stride + v * VL, sums[r][v]);
}

// The float32 numbers of one line of codes, [input][16].
template <class Weight, int... I>
UMBEL_INLINE void widen_line(const TileWeights& from, const vf (&scales)[WIDE], float* out,
                             std::integer_sequence<int, I...>) {
#pragma GCC unroll 4
    for (int v = 0; v < WIDE; v++) {
        const char* line = from.lines + v * VECTOR_BYTES<Weight>;
        (store(out + I * PANEL + v * VL, read_weights<Weight, I>(line, scales[v], from.table)), ...);
    }
}

// The float32 numbers of k inputs of the first panel, [input][16].
template <class Weight>
void widen(TileWeights from, long k, float* out) {
    constexpr long STEP = LINE<Weight>;
    for (long at = 0, end; at < k; from.left = from.group, from.scales += PANEL) {
        vf scales[WIDE];
        for (int v = 0; v < WIDE; v++) scales[v] = load_scale<Weight>(from.scales + v * VL);
        for (end = std::min(at + from.left, k); at < end; at += STEP, from.lines += PANEL * 4, out += STEP * PANEL) {
            prefetch(from.lines + AHEAD);
            widen_line<Weight>(from, scales, out, std::make_integer_sequence<int, STEP>{});
        }
    }
}

typedef void (*Multiply)(const TileWeights&, const float*, long, long, Ahead, bool, float*, long);

struct Kernels {
    Multiply by[ROWS + 1][PANELS + 1] = {};
};

template <class Weight, int R, int P>
constexpr void enter(Kernels& kernels) {
    if constexpr (P <= panels_for(R, CODED<Weight>)) kernels.by[R][P] = multiply<Weight, R, P>;
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
constexpr Kernels FLOAT8_KERNELS = all_kernels<Float8>();
constexpr Kernels NIBBLE_KERNELS = all_kernels<Nibble>();
#if defined(UMBEL_PAIRS)
constexpr Kernels PAIR_KERNELS = all_kernels<Pair>();
#endif

struct Call {
    const MatrixPart& weight;
    const Kernels& kernels;
    const float* x;
    long x_stride;
    const float* bias;
    float* out;
    long out_stride;
};

// Some panels, and inputs [at, at + k) of them.
struct Span {
    long panel, panels, at, k;
};

long line_inputs(Format format) {
    switch (format) {
        case Format::F32: return LINE<float>;
        case Format::BF16:
        case Format::F16: return LINE<f16>;
        case Format::FLOAT8: return LINE<Float8>;
        default: return LINE<Nibble>;
    }
}

TileWeights weights_at(const MatrixPart& weight, long panel, long at) {
    TileWeights from{weight.panel(panel) + at / line_inputs(weight.format) * PANEL * 4, weight.panel_bytes};
    if (!is_coded(weight.format)) return from;
    from.panel_scales = weight.k / weight.group * PANEL;
    from.scales = weight.scales + panel * from.panel_scales + at / weight.group * PANEL;
    from.group = weight.group;
    from.left = weight.group - at % weight.group;
    from.table = weight.table;
    return from;
}

// Rows [row, row + rows) of a span.
void compute_tile(const Call& call, const Kernels& kernels, const TileWeights& weights, const Span& span, long row,
                  long rows, Ahead ahead) {
    Multiply multiply = kernels.by[rows][span.panels];
    const float* x = call.x + row * call.x_stride + span.at;
    const long first = span.panel * PANEL, left = call.weight.n - first, stride = span.panels * PANEL;
    const long width = left < stride ? left : stride;
    float* out = call.out + row * call.out_stride + first;
    if (width == stride) {
        multiply(weights, x, call.x_stride, span.k, ahead, span.at == 0, out, call.out_stride);
    } else {  // the outputs of the last panel end inside it
        alignas(64) float tile[ROWS * PANELS * PANEL];
        if (span.at > 0)
            for (long r = 0; r < rows; r++) std::memcpy(tile + r * stride, out + r * call.out_stride, width * 4);
        multiply(weights, x, call.x_stride, span.k, ahead, span.at == 0, tile, stride);
        for (long r = 0; r < rows; r++) std::memcpy(out + r * call.out_stride, tile + r * stride, width * 4);
    }
    if (call.bias && span.at + span.k == call.weight.k)
        for (long r = 0; r < rows; r++)
            for (long o = 0; o < width; o++) out[r * call.out_stride + o] += call.bias[first + o];
}

// What tile `t` of `tiles` asks for: the only tile its own panels some steps before it needs them, one of several its
// share of the panels that come next, while these here are computed with.
Ahead look_ahead(const Call& call, const TileWeights& weights, const Span& span, long t, long tiles) {
    if (tiles == 1) return {weights.lines + AHEAD, 64};
    long lines = span.k / line_inputs(call.weight.format);
    return {weights.lines + span.panels * weights.panel_bytes + t * lines / tiles * 64, 64 / tiles + 1};
}

// The rows of a span, spread evenly over tiles.
void compute_span(const Call& call, const Span& span, long row, long rows, long tiles) {
    TileWeights weights = weights_at(call.weight, span.panel, span.at);
    for (long t = 0; t < tiles; t++) {
        long begin = t * rows / tiles, end = (t + 1) * rows / tiles;
        compute_tile(call, call.kernels, weights, span, row + begin, end - begin,
                     look_ahead(call, weights, span, t, tiles));
    }
}

// The same of codes that are widened.
void compute_widened(const Call& call, const Span& span, long row, long rows, long tiles) {
    alignas(64) float numbers[WIDENED_PANELS * WIDENED_K * PANEL];
    auto widen = call.weight.format == Format::FLOAT8 ? umbel::widen<Float8> : umbel::widen<Nibble>;
    for (long p = 0; p < span.panels; p++)
        widen(weights_at(call.weight, span.panel + p, span.at), span.k, numbers + p * span.k * PANEL);
    TileWeights weights{(const char*)numbers, span.k * PANEL * (long)sizeof(float)};
    for (long t = 0; t < tiles; t++) {
        long begin = t * rows / tiles, end = (t + 1) * rows / tiles;
        compute_tile(call, F32_KERNELS, weights, span, row + begin, end - begin, {weights.lines + AHEAD, 64});
    }
}

// A block of rows and a range of panels, by one thread.
void compute_block(const Call& call, long row, long rows, long first_panel, long end_panel) {
    const bool coded = is_coded(call.weight.format);
    const long tiles = (rows + ROWS - 1) / ROWS, most = (rows + tiles - 1) / tiles, k = call.weight.k;
    const bool widens = coded && tiles > 1;
    const long together = panels_for((int)most, coded && !widens), limit = widens ? WIDENED_K : BLOCK_K;
    const long blocks = tiles == 1 ? 1 : (k + limit - 1) / limit;
    const long block_k = ((k + blocks - 1) / blocks + 7) / 8 * 8;  // a line may hold eight
    for (long at = 0; at < k; at += block_k)
        for (long panel = first_panel, panels; panel < end_panel; panel += panels) {
            panels = together;
            while (panels > end_panel - panel) panels /= 2;
            Span span{panel, panels, at, std::min(k - at, block_k)};
            widens ? compute_widened(call, span, row, rows, tiles) : compute_span(call, span, row, rows, tiles);
        }
}

const Kernels& kernels_of(const MatrixPart& weight) {
    switch (weight.format) {
        case Format::BF16: return BF16_KERNELS;
        case Format::F16: return F16_KERNELS;
        case Format::F32: return F32_KERNELS;
        case Format::FLOAT8: return FLOAT8_KERNELS;
        default: return NIBBLE_KERNELS;
    }
}

// Blocks that rows are spread over: few panels and many threads want more of them.
long count_row_blocks(long rows, long panels) {
    long blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    while (blocks * panels < 4 * team_size() && rows / blocks > 2 * ROWS) blocks++;
    return blocks;
}

void run(const Call& call, long rows) {
    const MatrixPart& weight = call.weight;
    long row_blocks = count_row_blocks(rows, weight.panels);
    long group =
        even_grain(weight.panels * row_blocks, 8, panels_for(rows < ROWS ? (int)rows : ROWS, is_coded(weight.format)));
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

// `call.out` is the tile.
void run_panel(const Call& call, long rows, long panel) {
    TileWeights weights = weights_at(call.weight, panel, 0);
    for (long row = 0; row < rows; row += ROWS) {
        long count = rows - row < ROWS ? rows - row : ROWS;
        call.kernels.by[count][1](weights, call.x + row * call.x_stride, call.x_stride, call.weight.k,
                                  Ahead{weights.lines + AHEAD, 64}, true, call.out + row * PANEL, PANEL);
    }
}

#if defined(UMBEL_PAIRS)

// A BF16 part as an F32 part with an input for each pair.
MatrixPart paired(const MatrixPart& weight) {
    MatrixPart pairs = weight;
    pairs.format = Format::F32;
    pairs.k = (weight.k + 1) / 2;
    return pairs;
}

// Lanes from row to row: with a power of two all rows would share a few sets of the first cache.
long lanes_of(const MatrixPart& pairs) { return pairs.k + 16; }

// A row of k inputs in bfloat16; an odd last one is paired with 0.
void round_row(const float* x, long k, float* lanes) {
    bf16* to = (bf16*)lanes;
    long i = 0;
    for (; i + VL <= k; i += VL) store(to + i, load(x + i));
    for (; i < k; i++) to[i] = to_bf16(x[i]);
    if (k % 2) to[k] = 0;
}

#endif

}  // namespace

#if defined(UMBEL_PAIRS)

bool by_pairs(const MatrixPart& weight) {
    static const bool multiplies = [] {
        unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
        return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);  // AVX512-BF16
    }();
    return multiplies && weight.format == Format::BF16 && !weight.exact;
}

void linear_pairs(const MatrixPart& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                  long out_stride) {
    static Buffer buffer;  // one loop of the team at a time, so one buffer
    MatrixPart pairs = paired(weight);
    long stride = lanes_of(pairs);
    float* rounded = buffer.take<float>(rows * stride);
    if (!rounded) return linear_vectors(weight, x, rows, x_stride, bias, out, out_stride);  // no memory: no copy
    parallel(rows, std::max(even_grain(rows, 4), 1 + (1 << 15) / weight.k), [&](long begin, long end) {
        for (long row = begin; row < end; row++) round_row(x + row * x_stride, weight.k, rounded + row * stride);
    });
    run({pairs, PAIR_KERNELS, rounded, stride, bias, out, out_stride}, rows);
}

void linear_panel_pairs(const MatrixPart& weight, const float* x, long rows, long x_stride, long panel, float* tile) {
    static thread_local Buffer buffer;  // inside a loop of the team every thread has its own rows
    MatrixPart pairs = paired(weight);
    long stride = lanes_of(pairs);
    float* rounded = buffer.take<float>(rows * stride);
    if (!rounded) return linear_panel_vectors(weight, x, rows, x_stride, panel, tile);
    for (long row = 0; row < rows; row++) round_row(x + row * x_stride, weight.k, rounded + row * stride);
    run_panel({pairs, PAIR_KERNELS, rounded, stride, nullptr, tile, PANEL}, rows, panel);
}

#endif

void linear_vectors(const MatrixPart& weight, const float* x, long rows, long x_stride, const float* bias, float* out,
                    long out_stride) {
    run({weight, kernels_of(weight), x, x_stride, bias, out, out_stride}, rows);
}

void linear_panel_vectors(const MatrixPart& weight, const float* x, long rows, long x_stride, long panel, float* tile) {
    run_panel({weight, kernels_of(weight), x, x_stride, nullptr, tile, PANEL}, rows, panel);
}

}  // namespace umbel
