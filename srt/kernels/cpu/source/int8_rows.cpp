#include "int8_rows.h"

#include <limits>

#include "memory.h"
#include "threads.h"
#include "tiles.h"

namespace umbel {
namespace {

constexpr float SMALLEST = 1e-30f;  // below it the inverse of a scale would not be a number; its values count as zeros
constexpr long FEW_ROWS = 4;        // AMX computes 16 rows at once: not worth it for so few

// The largest magnitude; as bits, because then a NaN is larger than all numbers.
float largest_magnitude(const float* x, long count) {
    vi most{};
    long i = 0;
    for (; i + VL <= count; i += VL) {
        vi bits = float_to_bits(load(x + i)) & 0x7fffffff;
        most = most > bits ? most : bits;
    }
    int32_t largest = 0;
    for (int lane = 0; lane < VL; lane++) largest = most[lane] > largest ? most[lane] : largest;
    for (; i < count; i++) {
        int32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float value;
    std::memcpy(&value, &largest, 4);
    return value;
}

// out[i] = x[i] · inverse to nearest, for |x · inverse| < 2^15.
void round_inputs(const float* x, long count, float inverse, int16_t* out) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 · 2^23: the fraction is rounded away, the integer is in the low bits
    long i = 0;
    for (; i + VL <= count; i += VL) {
        typedef int16_t half __attribute__((vector_size(VL * 2)));
        vi bits = float_to_bits(load(x + i) * inverse + SHIFT);
        half low = __builtin_convertvector(bits, half);
        std::memcpy(out + i, &low, sizeof low);
    }
    for (; i < count; i++) {
        float shifted = x[i] * inverse + SHIFT;
        std::memcpy(out + i, &shifted, 2);
    }
}

// One row at its place in its tile, `lanes` rows of which stand side by side.
void scatter(const int16_t* row, long k_padded, int16_t* out, long lanes) {
    for (long at = 0; at < k_padded; at += 4) std::memcpy(out + at * lanes, row + at, 8);
}

void scatter_bytes(const int16_t* row, long k_padded, int8_t* out) {
    for (long at = 0; at < k_padded; at += 64) {
        int8_t* upper = out + at * 32;
        int8_t* lower = upper + 16 * 64;
        for (long i = 0; i < 64; i++) {
            upper[i] = (int8_t)(row[at + i] >> 8);
            lower[i] = (int8_t)row[at + i];
        }
    }
}

// One row into `row`, [k_padded]: its scales, and its integers.
void quantize(const float* x, long k, long k_padded, int16_t* row, float* scales) {
    for (long at = 0; at < k_padded; at += INT8_BLOCK) {
        long count = k_padded - at < INT8_BLOCK ? k_padded - at : INT8_BLOCK;
        long given = k - at < count ? k - at : count;
        float most = largest_magnitude(x + at, given);
        float largest = (float)largest_input(count);
        if (!(most <= std::numeric_limits<float>::max())) {
            std::memset(row + at, 0, count * sizeof(int16_t));
            scales[at / INT8_BLOCK] = std::numeric_limits<float>::quiet_NaN();
            continue;
        }
        if (most < SMALLEST) most = SMALLEST;
        round_inputs(x + at, given, largest / most, row + at);
        std::memset(row + at + given, 0, (count - given) * sizeof(int16_t));
        scales[at / INT8_BLOCK] = most / largest;
    }
}

}  // namespace

Int8Rows quantize_rows(const MatrixPart& weight, const float* x, long rows, long x_stride) {
    thread_local Buffer values_memory, scales_memory, row_memory;
    Int8Rows result{};
    result.rows = rows;
    result.k_padded = weight.k_padded;
    result.blocks = (weight.k_padded + INT8_BLOCK - 1) / INT8_BLOCK;
#if defined(UMBEL_AMX)
    result.by_amx = rows > FEW_ROWS && tiles_allowed();
#else
    (void)FEW_ROWS;
#endif
    result.tiles = result.by_amx ? (rows + 15) / 16 : (rows + INT8_ROWS - 1) / INT8_ROWS;
    long padded_rows = result.by_amx ? result.tiles * 16 : rows;
    int16_t* values = values_memory.take<int16_t>(padded_rows * result.k_padded);
    int16_t* whole = row_memory.take<int16_t>(team_size() * result.k_padded);
    float* scales = scales_memory.take<float>(rows * result.blocks);
    result.values = values;
    result.scales = scales;
    parallel(result.tiles, 1, [&](long begin, long end) {
        int16_t* row = whole + team_rank() * result.k_padded;
        for (long tile = begin; tile < end; tile++) {
            long first = result.first_row(tile), last = result.first_row(tile + 1);
            if (last > rows) last = rows;
            int16_t* out = values + first * result.k_padded;
            for (long r = 0; r < last - first; r++) {
                long source = first + r;
                quantize(x + source * x_stride, weight.k, result.k_padded, row, scales + source * result.blocks);
                if (result.by_amx)
                    scatter_bytes(row, result.k_padded, (int8_t*)out + r * 64);
                else
                    scatter(row, result.k_padded, out + r * 4, last - first);
            }
            for (long r = last - first; result.by_amx && r < 16; r++)
                for (long at = 0; at < result.k_padded / 32; at++) std::memset((int8_t*)out + (at * 16 + r) * 64, 0, 64);
        }
    });
    return result;
}

}  // namespace umbel
