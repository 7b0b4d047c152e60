// One call of `attend`, as its items see it.
#pragma once

#include <cmath>

#include "attention.h"
#include "attention_rows.h"

namespace umbel {

constexpr float NEVER = -__builtin_inff();  // the score of a key that is not seen

struct Job {
    const AttentionPlan& plan;
    const AttentionShape& shape;
    const LayerPool& pool;
    const float* queries;
    long query_stride;
    float* out;
    long out_stride;
    float* part_out;      // [S, heads, value_dim] sums of values, not yet divided
    float* part_maximum;  // [S, heads]
    float* part_sum;      // [S, heads]

    long group() const { return shape.heads / shape.kv_heads; }
    long vectors_of(long item) const { return (plan.item_q[item + 1] - plan.item_q[item]) * group(); }
    bool is_split(long row) const { return plan.merge_ptr[row + 1] - plan.merge_ptr[row] > 1; }
};

// What an item knows of its query vectors when it has seen all its keys.
struct Sums {
    const float* values;   // rows `stride` apart, not yet divided
    long stride;
    const float* maximum;  // of the scores
    const float* sum;      // of their exponentials
};

// What a query vector's values are multiplied with at last: one over the sum of exponentials, its sink included.
inline float final_factor(const Job& job, long head, float maximum, float sum) {
    if (!job.shape.sinks) return 1.0f / sum;
    float sink = job.shape.sinks[head];
    if (sink <= maximum) return 1.0f / (sum + std::exp(sink - maximum));
    float shrink = std::exp(maximum - sink);
    return shrink / (sum * shrink + 1.0f);
}

inline void give_results(const Job& job, long item, long head, const Sums& sums) {
    long size = job.shape.value_dim, group = job.group(), m = 0;
    for (long slot = job.plan.item_q[item]; slot < job.plan.item_q[item + 1]; slot++) {
        long row = job.plan.q_rows[slot];
        bool split = job.is_split(row);
        for (long i = 0; i < group; i++, m++) {
            long at = slot * job.shape.heads + head * group + i;
            float* to = split ? job.part_out + at * size : job.out + row * job.out_stride + (head * group + i) * size;
            float factor = split ? 1.0f : final_factor(job, head * group + i, sums.maximum[m], sums.sum[m]);
            const float* from = sums.values + m * sums.stride;
            for (long d = 0; d < size; d += VL) store(to + d, load(from + d) * factor);
            if (split) {
                job.part_maximum[at] = sums.maximum[m];
                job.part_sum[at] = sums.sum[m];
            }
        }
    }
}

}  // namespace umbel
