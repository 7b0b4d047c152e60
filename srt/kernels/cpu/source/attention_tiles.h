// Many query vectors and a pool of bfloat16, on AMX: both products in tiles of bfloat16 with sums in float32. Queries and
// the weights of values are rounded to bfloat16, as keys and values are already.
#pragma once

#include "attention_rows.h"
#include "tiles.h"

#if defined(UMBEL_AMX)

namespace umbel {

constexpr long PAIR = 32;  // two tiles side by side: 32 rows, and 32 columns

// Keys as panels [BLOCK / 16][head_dim / 2][16 keys] of words: word d of a key is its elements 2d and 2d + 1. Behind
// the last key it is repeated.
inline void pack_key_words(const bf16* keys, long row_stride, const int32_t* slots, long count, long head_dim,
                           float* panels) {
    for (long first = 0; first < whole(count, PAIR); first += VL) {
        float* to = panels + first / 16 * 16 * (head_dim / 2) + first % 16;
        Rows<VL, bf16> now(keys, row_stride, slots, first, count);
        for (long word = 0; word < head_dim / 2; word += VL) {
            vf block[VL];
            UMBEL_UNROLL for (int i = 0; i < VL; i++) block[i] = load((const float*)now.row[i] + word);
            transpose(block);
            UMBEL_UNROLL for (int i = 0; i < VL; i++) store(to + (word + i) * 16, block[i]);
        }
    }
}

// Values as panels [head_dim / 16][BLOCK / 2][16 columns] of words: word k of a column is its values 2k and 2k + 1.
inline void pack_value_words(const bf16* values, long row_stride, const int32_t* slots, long count, long head_dim,
                             float* panels) {
    for (long k = 0; k < whole(count, PAIR); k += 2) {
        Rows<2, bf16> now(values, row_stride, slots, k, count);
        for (long d = 0; d < head_dim; d += VL) {
            vf even = load(now.row[0] + d), odd = load(now.row[1] + d);  // widened: the upper halves of words
            store(panels + (d / 16 * (BLOCK / 2) + k / 2) * 16 + d % 16, (vf)(((vu)even >> 16) | (vu)odd));
        }
    }
}

// Rows of float32 as bfloat16, zeros from `count` to `padded` columns.
inline void narrow_rows(const float* from, long rows, long stride, long count, long padded, bf16* to) {
    for (long m = 0; m < rows; m++)
        for (long k = 0; k < padded; k += VL) {
            vf x = load(from + m * stride + k);
            if (k + VL > count)
                for (int i = 0; i < VL; i++) x[i] = k + i < count ? x[i] : 0;
            store(to + m * stride + k, x);
        }
}

// c[rows, panels · 16] = a[rows, depth] · panels, added to c or not. Rows, panels · 16 and depth are multiples of 32;
// strides of a and c in elements, of panels in words.
template <bool ADD>
void tile_products(const bf16* a, long rows, long a_stride, const float* panel, long panels, long panel_stride,
                   long depth, float* c, long c_stride) {
    long from = a_stride * 2, to = c_stride * 4;
    for (long p = 0; p < panels; p += 2, panel += 2 * panel_stride, c += PAIR)
        for (long m = 0; m < rows; m += PAIR) {
            float *upper = c + m * c_stride, *lower = upper + 16 * c_stride;
            if (ADD) {
                tile_load<0>(upper, to), tile_load<1>(upper + 16, to);
                tile_load<2>(lower, to), tile_load<3>(lower + 16, to);
            } else {
                tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
            }
            for (long k = 0; k < depth; k += 32) {
                tile_load<4>(a + m * a_stride + k, from);
                tile_load<5>(a + (m + 16) * a_stride + k, from);
                tile_load<6>(panel + k / 2 * 16, TILE_BYTES);
                tile_load<7>(panel + panel_stride + k / 2 * 16, TILE_BYTES);
                tile_multiply_bf16<0, 4, 6>(), tile_multiply_bf16<1, 4, 7>();
                tile_multiply_bf16<2, 5, 6>(), tile_multiply_bf16<3, 5, 7>();
            }
            tile_store<0>(upper, to), tile_store<1>(upper + 16, to);
            tile_store<2>(lower, to), tile_store<3>(lower + 16, to);
        }
}

}  // namespace umbel

#endif
