// Attention over the paged pool: one list of work items for every kind of step (see srt/attention/plan.py).
#pragma once

#include "simd.h"

namespace umbel {

// The arrays of AttentionPlan. R rows, I items, S partial slots, T keys.
struct AttentionPlan {
    long rows, items, partials, keys;
    const int32_t* row_lo;      // [R]
    const int32_t* row_hi;      // [R]
    const int32_t* item_q;      // [I+1]
    const int32_t* q_rows;      // [S]
    const int32_t* item_kv;     // [I, 2]
    const int32_t* item_pos;    // [I]
    const uint8_t* item_full;   // [I]
    const int32_t* kv_idx;      // [T]
    const int32_t* merge_ptr;   // [R+1]
    const int32_t* merge_slot;  // [S]
    const int32_t* item_queue;  // [I] of a plan with queues; nullptr: there are none
};

// Keys and values of one layer, float32 or bfloat16: [slots, kv_heads, head_dim] and [slots, kv_heads, value_dim].
// Values may lie in their keys: then value_stride, elements from slot to slot, is that of the keys.
struct LayerPool {
    void* keys;
    void* values;
    long value_stride;
    int is_bf16;
};

struct AttentionShape {
    long heads, kv_heads, head_dim, value_dim;  // sizes: multiples of 16
    float scale, softcap;                       // softcap 0: none
    const float* sinks;  // [heads] logits of a key that every row sees, whose value is zero; or nullptr

    long key_stride() const { return kv_heads * head_dim; }  // from slot to slot
};

// out[R, heads, value_dim] = attention of queries [R, heads, head_dim] (row strides in elements) to the pool.
// Uses the whole team; the workspace for partial results is kept between calls.
void attend(const AttentionPlan& plan, const AttentionShape& shape, const LayerPool& pool, const float* queries,
            long query_stride, float* out, long out_stride);

// Writes keys and values (row strides in elements) to their slots, rounded to what the pool holds. values: nullptr where
// they lie in their keys. Slot 0 is nowhere: rows whose key is in the pool already are sent there.
void store(const AttentionShape& shape, const LayerPool& pool, const float* keys, long key_stride, const float* values,
           long value_stride, const int64_t* slots, long rows);

}  // namespace umbel
