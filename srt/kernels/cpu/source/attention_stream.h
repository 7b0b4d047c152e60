// Few query vectors: the keys are what costs. Each row of keys and values is read once, where it lies.
#pragma once

#include "attention_rows.h"

namespace umbel {

// score[q, k] for QUERIES queries and KEYS keys whose accumulators fill one vector of sums.
constexpr int KEYS = VL / 4;
constexpr int VALUES = 4;  // value rows at a time: a result is loaded and stored once for so many

template <int QUERIES, bool FETCH, class Element>
UMBEL_INLINE void dot_products(const float* query, long head_dim, const Rows<KEYS, Element>& keys,
                               const Rows<KEYS, Element>& next, float* score) {
    vf total[VL] = {};
    Fetcher<KEYS, Element> fetcher(next, head_dim);
    for (long line = 0; line < head_dim; line += LINE) {
        if (FETCH) fetcher.fetch_lines();
        UMBEL_UNROLL for (long d = line; d < line + LINE; d += VL) {
            vf q[QUERIES];
            UMBEL_UNROLL for (int i = 0; i < QUERIES; i++) {
                q[i] = load(query + i * head_dim + d);
                hold(q[i]);
            }
            UMBEL_UNROLL for (int k = 0; k < KEYS; k++) {
                vf x = load(keys.row[k] + d);
                UMBEL_UNROLL for (int i = 0; i < QUERIES; i++) total[i * KEYS + k] += q[i] * x;
            }
        }
    }
    vf sum = sums(total);
    UMBEL_UNROLL for (int i = 0; i < QUERIES; i++) std::memcpy(score + i * BLOCK, (const float*)&sum + i * KEYS, KEYS * 4);
}

template <bool FETCH, class Element>
UMBEL_INLINE void dot_products_of(const float* query, long vectors, long head_dim, const Rows<KEYS, Element>& keys,
                                  const Rows<KEYS, Element>& next, float* score) {
    switch (vectors) {
        case 1:
            return dot_products<1, FETCH>(query, head_dim, keys, next, score);
        case 2:
            return dot_products<2, FETCH>(query, head_dim, keys, next, score);
        case 3:
            return dot_products<3, FETCH>(query, head_dim, keys, next, score);
        default:
            return dot_products<4, FETCH>(query, head_dim, keys, next, score);
    }
}

// `slots`: of `known` keys, the first `count` of which are computed now.
template <class Element>
void stream_scores(const float* query, long vectors, long head_dim, const Element* keys, long row_stride,
                   const int32_t* slots, long count, long known, float* score) {
    for (long k = 0; k < count; k += KEYS) {
        Rows<KEYS, Element> now(keys, row_stride, slots, k, count), next(keys, row_stride, slots, k + AHEAD, known);
        dot_products_of<true>(query, vectors, head_dim, now, next, score + k);
        for (long m = 4; m < vectors; m += 4)
            dot_products_of<false>(query + m * head_dim, vectors - m, head_dim, now, next, score + m * BLOCK + k);
    }
}

// result[q] += Σ weight[q, k] · value[k], for QUERIES rows and VALUES keys: each value is loaded once.
template <int QUERIES, bool FETCH, class Element>
UMBEL_INLINE void add_values(const float* weight, const Rows<VALUES, Element>& values,
                             const Rows<VALUES, Element>& next, long head_dim, float* result, long columns) {
    vf w[QUERIES][VALUES];
    UMBEL_UNROLL for (int i = 0; i < QUERIES; i++)
        UMBEL_UNROLL for (int k = 0; k < VALUES; k++) w[i][k] = spread(weight[i * BLOCK + k]);
    Fetcher<VALUES, Element> fetcher(next, head_dim);
    for (long line = 0; line < head_dim; line += LINE) {
        if (FETCH) fetcher.fetch_lines();
        UMBEL_UNROLL for (long d = line; d < line + LINE; d += VL) {
            vf v[VALUES];
            UMBEL_UNROLL for (int k = 0; k < VALUES; k++) v[k] = load(values.row[k] + d);
            UMBEL_UNROLL for (int i = 0; i < QUERIES; i++) {
                float* to = result + i * columns + d;
                vf total = load(to);
                UMBEL_UNROLL for (int k = 0; k < VALUES; k++) total += w[i][k] * v[k];
                store(to, total);
            }
        }
    }
}

// `slots` as above. Weights behind the last key are 0: rows of scores are BLOCK long.
template <class Element>
void stream_values(const float* weight, long vectors, long head_dim, const Element* values, long row_stride,
                   const int32_t* slots, long count, long known, float* result, long columns) {
    for (long k = 0; k < count; k += VALUES, weight += VALUES) {
        Rows<VALUES, Element> now(values, row_stride, slots, k, count);
        Rows<VALUES, Element> next(values, row_stride, slots, k + AHEAD, known);
        if (vectors > 1)
            add_values<2, true>(weight, now, next, head_dim, result, columns);
        else
            add_values<1, true>(weight, now, next, head_dim, result, columns);
        long m = 2;
        for (; m + 2 <= vectors; m += 2)
            add_values<2, false>(weight + m * BLOCK, now, next, head_dim, result + m * columns, columns);
        if (m < vectors)
            add_values<1, false>(weight + m * BLOCK, now, next, head_dim, result + m * columns, columns);
    }
}

}  // namespace umbel
