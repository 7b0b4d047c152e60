// Many query vectors: keys (transposed) and values are laid out as panels of two vectors, so that both products run out
// of registers and the first-level cache.
#pragma once

#include "attention_rows.h"

namespace umbel {

constexpr int PANEL = 2 * VL;            // columns of a panel
constexpr int TILE = VL == 16 ? 12 : 6;  // rows of a product that accumulate in registers, times two vectors

// Keys as panels [BLOCK / PANEL][head_dim][PANEL]: column j of panel p is key p · PANEL + j. Behind the last key it is
// repeated.
template <class Element>
void pack_keys(const Element* keys, long row_stride, const int32_t* slots, long count, long known, long head_dim,
               float* panels) {
    for (long first = 0; first < whole(count, PANEL); first += VL) {
        float* to = panels + first / PANEL * PANEL * head_dim + first % PANEL;
        Rows<VL, Element> now(keys, row_stride, slots, first, count), next(keys, row_stride, slots, first + VL, known);
        Fetcher<VL, Element> fetcher(next, head_dim);
        for (long line = 0; line < head_dim; line += LINE) {
            fetcher.fetch_lines();
            for (long d = line; d < line + LINE; d += VL) {
                vf block[VL];
                UMBEL_UNROLL for (int i = 0; i < VL; i++) block[i] = load(now.row[i] + d);
                transpose(block);
                UMBEL_UNROLL for (int i = 0; i < VL; i++) store(to + (d + i) * PANEL, block[i]);
            }
        }
    }
}

// Values as panels [columns / PANEL][BLOCK][PANEL]: zeros after the last of their `size` numbers.
template <class Element>
void pack_values(const Element* values, long row_stride, const int32_t* slots, long count, long known, long head_dim,
                 long columns, float* panels) {
    for (long k = 0; k < count; k++) {
        if (k + AHEAD < known) prefetch_row(values + slots[k + AHEAD] * row_stride, head_dim * sizeof(Element));
        const Element* value = values + slots[k] * row_stride;
        for (long d = 0; d < columns; d += VL)
            store(panels + (d / PANEL * BLOCK + k) * PANEL + d % PANEL, d < head_dim ? load(value + d) : vf{});
    }
}

// c[ROWS, PANEL] = a[ROWS, depth] · panel[depth, PANEL], added to rescale · c when there is a rescale.
template <int ROWS>
UMBEL_INLINE void product(const float* a, long a_stride, const float* panel, long depth, const float* rescale, float* c,
                          long c_stride) {
    vf low[ROWS], high[ROWS];
    UMBEL_UNROLL for (int i = 0; i < ROWS; i++) {
        vf factor = rescale ? spread(rescale[i]) : vf{};
        low[i] = rescale ? load(c + i * c_stride) * factor : vf{};
        high[i] = rescale ? load(c + i * c_stride + VL) * factor : vf{};
    }
    for (long k = 0; k < depth; k++) {
        vf b0 = load(panel + k * PANEL), b1 = load(panel + k * PANEL + VL);
        UMBEL_UNROLL for (int i = 0; i < ROWS; i++) {
            vf x = spread(a[i * a_stride + k]);
            low[i] += x * b0;
            high[i] += x * b1;
        }
    }
    UMBEL_UNROLL for (int i = 0; i < ROWS; i++) {
        store(c + i * c_stride, low[i]);
        store(c + i * c_stride + VL, high[i]);
    }
}

template <int ROWS>
void product_of(long rows, const float* a, long a_stride, const float* panel, long depth, const float* rescale, float* c,
                long c_stride) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            product<ROWS>(a, a_stride, panel, depth, rescale, c, c_stride);
        else
            product_of<ROWS - 1>(rows, a, a_stride, panel, depth, rescale, c, c_stride);
    }
}

// c[rows, panels · PANEL] from a[rows, depth] and the panels, which lie panel_stride apart. Rows are dealt out evenly: a
// last product of few rows would wait for its own sums.
inline void multiply(const float* a, long rows, long a_stride, const float* panel, long panels, long panel_stride,
                     long depth, const float* rescale, float* c, long c_stride) {
    long products = (rows + TILE - 1) / TILE;
    for (long p = 0; p < panels; p++, panel += panel_stride, c += PANEL)
        for (long i = 0; i < products; i++) {
            long m = rows * i / products, count = rows * (i + 1) / products - m;
            product_of<TILE>(count, a + m * a_stride, a_stride, panel, depth, rescale ? rescale + m : nullptr,
                             c + m * c_stride, c_stride);
        }
}

}  // namespace umbel
