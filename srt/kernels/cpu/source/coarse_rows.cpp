#include "coarse_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "int8_dot.h"
#include "memory.h"
#include "threads.h"

namespace umbel {

#if defined(UMBEL_COARSE_ROWS)

namespace {

constexpr float LARGEST = 63;       // so that two products of a byte with one of 127 fit into 16 bits
constexpr float USUAL = 3.5f;       // root mean squares; what is larger is a large input
constexpr long LARGEST_WIDE = 8191; // of a large input: sums of all of them stay 32-bit integers

float root_mean_square(const float* x, long k) {
    double square = 0;
    for (long i = 0; i < k; i++) square += (double)x[i] * x[i];
    return (float)std::sqrt(square / (double)k);
}

float largest_of(const float* x, long k) {
    float largest = 0;
    for (long i = 0; i < k; i++) largest = std::max(largest, std::fabs(x[i]));
    return largest;
}

// One tile of rows while it is made.
struct Tile {
    const float* x;
    long x_stride, rows, k, k_padded;
    float limits[INT8_ROWS];  // larger inputs of a row are large

    const float* row(long r) const { return x + r * x_stride; }
};

// The groups with a large input in any row; false when they are too many.
bool find_large(const Tile& tile, LargeGroups& large) {
    large.count = 0;
    for (long at = 0; at < tile.k; at += 4) {
        bool found = false;
        for (long r = 0; r < tile.rows; r++)
            for (long i = at; i < at + 4 && i < tile.k; i++) found |= std::fabs(tile.row(r)[i]) > tile.limits[r];
        if (!found) continue;
        if (large.count == LargeGroups::MOST) return false;
        large.groups[large.count++] = (int32_t)(at / 4);
    }
    return true;
}

// The stored inputs of a row, its scale, and what it has lost.
void round_row(const Tile& tile, long r, LargeGroups& large, uint8_t* values, float& scale, float& error) {
    const float* x = tile.row(r);
    scale = tile.limits[r] / LARGEST;
    float inverse = LARGEST / tile.limits[r];
    double lost = 0;
    for (long at = 0; at < tile.k_padded; at += 4) {
        uint8_t* out = values + (at * tile.rows + r * 4);
        for (long i = 0; i < 4; i++) {
            float input = at + i < tile.k ? x[at + i] : 0;
            float stored = std::nearbyint(std::clamp(input * inverse, -LARGEST, LARGEST));
            double difference = (double)input - (double)scale * stored;
            lost += difference * difference;
            out[i] = (uint8_t)((int)stored + COARSE_OFFSET);
        }
    }
    for (int g = 0; g < large.count; g++) {
        long at = (long)large.groups[g] * 4;
        uint8_t* out = values + (at * tile.rows + r * 4);
        for (long i = 0; i < 4; i++) {
            float input = at + i < tile.k ? x[at + i] : 0;
            double before = (double)input - (double)scale * ((int)out[i] - COARSE_OFFSET);
            float limit = (float)LARGEST_WIDE;
            float stored = std::nearbyint(std::clamp(input * inverse, -limit, limit));
            double difference = (double)input - (double)scale * stored;
            lost += difference * difference - before * before;
            large.values[g][r][i] = (int16_t)stored;
            large.numbers[g][r][i] = stored;
            out[i] = COARSE_OFFSET;
        }
    }
    error = (float)(std::sqrt(std::max(lost, 0.0)) * (1 + 1e-6)) + scale * 1e-3f;  // and the rounding of `lost`
}

void quantize_tile(Tile& tile, LargeGroups& large, uint8_t* values, float* scales, float* errors) {
    bool numbers[INT8_ROWS];
    for (long r = 0; r < tile.rows; r++) {
        float usual = root_mean_square(tile.row(r), tile.k);
        numbers[r] = usual < 1e18f;  // false for NaN as well; the caller has no bound for such rows
        tile.limits[r] = numbers[r] ? std::max(usual * USUAL, 1e-18f) : std::numeric_limits<float>::infinity();
    }
    while (!find_large(tile, large))
        for (long r = 0; r < tile.rows; r++)
            tile.limits[r] = std::max(tile.limits[r], std::min(tile.limits[r] * 1.5f, largest_of(tile.row(r), tile.k)));
    for (long r = 0; r < tile.rows; r++) {
        if (numbers[r]) {
            round_row(tile, r, large, values, scales[r], errors[r]);
            continue;
        }
        scales[r] = errors[r] = std::numeric_limits<float>::quiet_NaN();
        for (long at = 0; at < tile.k_padded; at += 4) std::memset(values + at * tile.rows + r * 4, COARSE_OFFSET, 4);
        for (int g = 0; g < large.count; g++) {
            std::memset(large.values[g][r], 0, sizeof large.values[g][r]);
            std::memset(large.numbers[g][r], 0, sizeof large.numbers[g][r]);
        }
    }
}

struct Operands {
    const int8_t* panel;
    const uint8_t* x;
    const float* scales;
    const int32_t* offsets;
    const LargeGroups& large;
    long k_padded;
    const int8_t* next;
    long next_bytes;
};

UMBEL_INLINE vi load_int(const void* p) {
    vi v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// sums += stored weights × stored inputs, four for each output. The empty statement: see int8_dot.h.
UMBEL_INLINE void add_fours(vi& sums, vi weights, vi inputs, __m256i ones) {
    __m256i pairs = _mm256_maddubs_epi16((__m256i)inputs, (__m256i)weights);
    sums += (vi)_mm256_madd_epi16(pairs, ones);
    asm("" : "+x"(sums));
}

// What the large groups add to the sums.
template <int R>
void add_large(const Operands& operands, int32_t (*exact)[PANEL]) {
    for (long column = 0; column < PANEL; column += VL) {
        vi parts[R][2] = {};
        for (int g = 0; g < operands.large.count; g++) {
            const int8_t* weights = operands.panel + (long)operands.large.groups[g] * PANEL * 4 + column * 4;
            vshorts low = widen(weights), high = widen(weights + VL * 2);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                vshorts inputs = repeat4(operands.large.values[g][r]);
                add_pairs(parts[r][0], low, inputs);
                add_pairs(parts[r][1], high, inputs);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vi sum = load_int(&exact[r][column]) + add_neighbours(parts[r][0], parts[r][1]);
            std::memcpy(&exact[r][column], &sum, sizeof sum);
        }
    }
}

template <int R>
void multiply(const Operands& operands, float* sums) {
    alignas(64) int32_t exact[R][PANEL];
    {
        vi parts[R][2] = {};
        __m256i ones = _mm256_set1_epi16(1);
        const int8_t* weights = operands.panel;
        const uint8_t* x = operands.x;
        const int8_t* next = operands.next;
        const long step = operands.next_bytes * 4 / operands.k_padded;
        for (long at = 0; at < operands.k_padded; at += 4) {
            __builtin_prefetch(next, 0, 2);
            next += step;
            vi low = load_int(weights), high = load_int(weights + 32);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                int32_t four;
                std::memcpy(&four, x + r * 4, 4);
                vi inputs = splat_int(four);
                add_fours(parts[r][0], low, inputs, ones);
                add_fours(parts[r][1], high, inputs, ones);
            }
            weights += PANEL * 4;
            x += R * 4;
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                vi sum = parts[r][half] - load_int(operands.offsets + half * VL);
                std::memcpy(&exact[r][half * VL], &sum, sizeof sum);
            }
    }
    if (operands.large.count) add_large<R>(operands, exact);
    for (int r = 0; r < R; r++)
        for (long o = 0; o < PANEL; o += VL)
            store(sums + r * PANEL + o, __builtin_convertvector(load_int(&exact[r][o]), vf) * operands.scales[r]);
}

constexpr BlockFormat Q8 = block_format(Format::Q8_0);

struct BlockPlace {  // of 32 inputs in a panel of Q8_0
    const f16* scales;     // [16]
    const uint8_t* lines;  // [8][64]

    BlockPlace(const MatrixPart& weight, long panel, long block) {
        long unit = block / UNIT, left = weight.k / 32 - unit * UNIT;
        const uint8_t* start = (const uint8_t*)weight.panel(panel) + unit * unit_bytes(Q8, 0);
        scales = (const f16*)(start + block % UNIT * 32);
        lines = start + unit_scale_bytes(Q8, 0, left < UNIT ? left : UNIT) + block % UNIT * Q8.code_bytes();
    }
};

// A panel of Q8_0 times R rows of a tile, in the steps of their integers.
template <int R>
void multiply_blocks(const MatrixPart& weight, long panel, const Operands& operands, float* sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    const long blocks = weight.k / 32, step = operands.next_bytes / (blocks * 8);
    const uint8_t *x = operands.x, *unit = (const uint8_t*)weight.panel(panel);
    const int8_t* next = operands.next;
    for (long first = 0; first < blocks; first += UNIT) {
        const long count = blocks - first < UNIT ? blocks - first : UNIT;
        const uint8_t *scales = unit, *lines = unit + unit_scale_bytes(Q8, 0, count);
        unit += unit_bytes(Q8, 0, count);
        for (; lines < unit; lines += Q8.code_bytes(), scales += 32) {
            vi exact[R][2] = {};
#pragma GCC unroll 8
            for (int g = 0; g < 8; g++) {
                __builtin_prefetch(next, 0, 2);
                next += step;
                vi low = load_int(lines + g * 64), high = load_int(lines + g * 64 + 32);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    int32_t four;
                    std::memcpy(&four, x + (g * R + r) * 4, 4);
                    vi inputs = splat_int(four);
                    add_fours(exact[r][0], low, inputs, ones);
                    add_fours(exact[r][1], high, inputs, ones);
                }
            }
            x += 32 * R;
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                vf scale = load((const f16*)scales + v * VL);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    float* sum = sums + r * PANEL + v * VL;
                    store(sum, fma(__builtin_convertvector(exact[r][v], vf), scale, load(sum)));
                }
            }
            asm("" ::: "memory");  // else sums of floats take the registers of the integers
        }
    }
    for (int g = 0; g < operands.large.count; g++) {
        long group = operands.large.groups[g];
        BlockPlace place(weight, panel, group / 8);
        vf weights[2][4];
        for (int v = 0; v < 2; v++) {
            vi codes = load_int(place.lines + group % 8 * 64 + v * 32);
            vf scale = load(place.scales + v * VL);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                weights[v][i] = __builtin_convertvector((codes << (24 - 8 * i)) >> 24, vf) * scale;
        }
#pragma GCC unroll 1
        for (int r = 0; r < R; r++) {
            float* at = sums + r * PANEL;
            vf low = load(at), high = load(at + VL);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                vf number = splat(operands.large.numbers[g][r][i]);
                low = fma(weights[0][i], number, low);
                high = fma(weights[1][i], number, high);
            }
            store(at, low);
            store(at + VL, high);
        }
    }
}

struct Kernels {  // by the rows of a tile
    void (*integers[INT8_ROWS + 1])(const Operands&, float*) = {};
    void (*blocks[INT8_ROWS + 1])(const MatrixPart&, long, const Operands&, float*) = {};
};

template <int... R>
constexpr Kernels all_kernels(std::integer_sequence<int, R...>) {
    return {{nullptr, multiply<R + 1>...}, {nullptr, multiply_blocks<R + 1>...}};
}
constexpr Kernels KERNELS = all_kernels(std::make_integer_sequence<int, INT8_ROWS>{});

}  // namespace

CoarseRows quantize_coarsely(const MatrixPart& weight, const float* x, long rows, long x_stride) {
    thread_local Buffer values_memory, numbers_memory, large_memory;
    CoarseRows result{};
    result.rows = rows;
    result.k_padded = weight.k_padded;
    result.tiles = (rows + INT8_ROWS - 1) / INT8_ROWS;
    uint8_t* values = values_memory.take<uint8_t>(rows * result.k_padded);
    float* scales = numbers_memory.take<float>(2 * rows);
    LargeGroups* large = large_memory.take<LargeGroups>(result.tiles);
    result.values = values;
    result.scales = scales;
    result.errors = scales + rows;
    result.large = large;
    parallel(result.tiles, 1, [&](long begin, long end) {
        for (long t = begin; t < end; t++) {
            long first = result.first_row(t);
            Tile tile{x + first * x_stride, x_stride, result.first_row(t + 1) - first, weight.k, result.k_padded, {}};
            quantize_tile(tile, large[t], values + first * result.k_padded, scales + first, scales + rows + first);
        }
    });
    return result;
}

void CoarseProducts::compute(long tile, long panel, long turn, long turns, float* sums) const {
    long row = x_.first_row(tile), rows = x_.first_row(tile + 1) - row, share = weight_.panel_bytes / turns;
    bool blocks = is_blocks(weight_.format);
    const int8_t *weights = (const int8_t*)weight_.panel(panel), *following = (const int8_t*)weight_.panel(panel + 1);
    Operands operands{weights,
                      x_.values + row * x_.k_padded,
                      x_.scales + row,
                      blocks ? nullptr : offsets_.integers + panel * PANEL,
                      x_.large[tile],
                      x_.k_padded,
                      following + turn * share,
                      share};
    if (!blocks) return KERNELS.integers[rows](operands, sums);
    std::memset(sums, 0, rows * PANEL * sizeof(float));
    KERNELS.blocks[rows](weight_, panel, operands, sums);
    for (long r = 0; r < rows; r++)
        for (long o = 0; o < PANEL; o += VL) {
            float* sum = sums + r * PANEL + o;
            store(sum, (load(sum) - load(offsets_.blocks + panel * PANEL + o)) * operands.scales[r]);
        }
}

// Each of the additions may lose a unit of what the terms together can be: inputs of at most 127 steps for each weight,
// and the large ones.
float lost_by_blocks(const MatrixPart& weight, const CoarseRows& x, long row) {
    long tile = 0;
    while (x.first_row(tile + 1) <= row) tile++;
    const LargeGroups& large = x.large[tile];
    double most = 127.0 * 127.0 * (double)weight.k;
    for (int g = 0; g < large.count; g++)
        for (float number : large.numbers[g][row - x.first_row(tile)]) most += (double)number * number;
    double additions = (double)(weight.k / 32 + 4 * large.count + 8);
    return (float)(1.01 * additions * 0x1p-24 * std::sqrt(most) * (double)x.scales[row]);
}

void measure_blocks(const MatrixPart& weight, long panel, float* norms, float* offsets) {
    double squares[PANEL] = {}, sums[PANEL] = {};
    for (long block = 0; block < weight.k / 32; block++) {
        BlockPlace place(weight, panel, block);
        int32_t block_squares[PANEL] = {}, block_sums[PANEL] = {};
        for (long g = 0; g < 8; g++)
            for (long o = 0; o < PANEL; o++)
                for (long i = 0; i < 4; i++) {
                    int32_t code = (int8_t)place.lines[g * 64 + o * 4 + i];
                    block_squares[o] += code * code;
                    block_sums[o] += code;
                }
        for (long o = 0; o < PANEL; o++) {
            double scale = from_f16(place.scales[o]);
            squares[o] += scale * scale * block_squares[o];
            sums[o] += scale * block_sums[o];
        }
    }
    for (long o = 0; o < PANEL; o++) {
        norms[o] = (float)(std::sqrt(squares[o]) * (1 + 1e-6));
        offsets[o] = (float)(COARSE_OFFSET * sums[o]);
    }
}

#endif

}  // namespace umbel
