// Attention of one item: M = rows × group query vectors of one KV head against a run of keys, block by block, with an
// online softmax in float32 (running maximum, running sum). There are three ways through a block: attention_stream.h
// for few query vectors, attention_panels.h for many, attention_tiled.h for many where there are AMX tiles.
//
// What an item computes depends on no other item, and parts are merged in the order of the plan: the result is the
// same, bit by bit, however many threads there are.
#include "attention.h"

#include <cmath>
#include <cstring>

#include "attention_job.h"
#include "attention_panels.h"
#include "attention_stream.h"
#include "attention_tiled.h"
#include "memory.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr int STREAMED = 16;  // up to so many query vectors of an item are streamed

// ------------------------------------------------------------------------------------------------ one item

// The memory of one thread for one item.
struct Scratch {
    float* query;    // [M, head_dim], scaled
    float* result;   // [M, columns], sums of values
    float* score;    // [M, BLOCK], then their exponentials
    float* maximum;  // [M] of all scores so far
    float* sum;      // [M] of all exponentials so far
    float* rescale;  // [M] what this block's maximum makes of earlier sums
    float* key_panels;
    float* value_panels;
};

Scratch take_scratch(long vectors, long head_dim, long columns) {
    static thread_local Buffer buffer;
    long each = whole(vectors, 32);
    float* at = buffer.take<float>(each * (head_dim + columns + BLOCK + 3) + BLOCK * (head_dim + columns));
    Scratch scratch;
    auto part = [&](float*& field, long count) {
        field = at;
        at += count;
    };
    part(scratch.query, each * head_dim);
    part(scratch.result, each * columns);
    part(scratch.score, each * BLOCK);
    part(scratch.maximum, each);
    part(scratch.sum, each);
    part(scratch.rescale, each);
    part(scratch.key_panels, BLOCK * head_dim);
    part(scratch.value_panels, BLOCK * columns);
    return scratch;
}

// ------------------------------------------------------------------------------------------------ softmax

// Scores [0, count) of one query vector become exponentials; those outside [begin, end) become 0.
void soften(float* score, long count, long begin, long end, float softcap, float& maximum, float& sum, float& rescale) {
    long padded = whole(count, VL);
    if (softcap != 0)
        for (long k = 0; k < padded; k += VL) store(score + k, tanh(load(score + k) / softcap) * softcap);
    for (long k = 0; k < begin; k++) score[k] = NEVER;
    for (long k = end; k < padded; k++) score[k] = NEVER;

    vf highest = spread(maximum);
    for (long k = 0; k < padded; k += VL) highest = max(highest, load(score + k));
    float now = max_of(highest);
    if (now == NEVER) {  // nothing seen yet, of this block nor before
        for (long k = 0; k < padded; k++) score[k] = 0;
        rescale = 1;
        return;
    }
    vf total = {};
    for (long k = 0; k < padded; k += VL) {
        vf x = load(score + k) - now;
        vf e = select(x == x, exp(x), x);  // a NaN stays one
        store(score + k, e);
        total += e;
    }
    rescale = std::exp(maximum - now);  // 0 at first
    float here[VL];
    store(here, total);
    for (int half = VL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) here[i] += here[i + half];
    sum = sum * rescale + here[0];
    maximum = now;
}

// ------------------------------------------------------------------------------------------------ the item

void take_queries(const Job& job, long item, long head, const Scratch& scratch) {
    long head_dim = job.shape.head_dim, group = job.group();
    float* to = scratch.query;
    for (long slot = job.plan.item_q[item]; slot < job.plan.item_q[item + 1]; slot++) {
        const float* from = job.queries + job.plan.q_rows[slot] * job.query_stride + head * group * head_dim;
        for (long d = 0; d < group * head_dim; d += VL) store(to + d, load(from + d) * job.shape.scale);
        to += group * head_dim;
    }
}

// A run of keys and values of one KV head, block by block.
template <class Element>
struct Run {
    const Element* keys;
    const Element* values;
    long key_stride, value_stride, head_dim, value_dim, columns, vectors;
    const int32_t* slots;  // of the block
    long count, known;     // keys of the block, and of all that is left
};

template <class Element>
void scores_of(const Run<Element>& run, const Scratch& scratch) {
    long count = run.count, head_dim = run.head_dim;
    if (run.vectors <= STREAMED)
        return stream_scores(scratch.query, run.vectors, head_dim, run.keys, run.key_stride, run.slots, count,
                             run.known, scratch.score);
    pack_keys(run.keys, run.key_stride, run.slots, count, run.known, head_dim, scratch.key_panels);
    multiply(scratch.query, run.vectors, head_dim, scratch.key_panels, whole(count, PANEL) / PANEL, PANEL * head_dim,
             head_dim, nullptr, scratch.score, BLOCK);
}

void rescale_results(const Scratch& scratch, long vectors, long columns) {
    for (long m = 0; m < vectors; m++) {
        if (scratch.rescale[m] == 1) continue;
        float* result = scratch.result + m * columns;
        for (long d = 0; d < columns; d += VL) store(result + d, load(result + d) * scratch.rescale[m]);
    }
}

template <class Element>
void values_of(const Run<Element>& run, const Scratch& scratch) {
    long count = run.count, size = run.value_dim, columns = run.columns;
    if (run.vectors > STREAMED) {
        pack_values(run.values, run.value_stride, run.slots, count, run.known, size, columns, scratch.value_panels);
        return multiply(scratch.score, run.vectors, BLOCK, scratch.value_panels, columns / PANEL, PANEL * BLOCK, count,
                        scratch.rescale, scratch.result, columns);
    }
    rescale_results(scratch, run.vectors, columns);
    stream_values(scratch.score, run.vectors, size, run.values, run.value_stride, run.slots, count, run.known,
                  scratch.result, columns);
}

// Softmax of the block's scores, each row of the item within what it sees of the keys from `position` on.
void soften_rows(const Job& job, long item, long position, long count, const Scratch& scratch) {
    const AttentionPlan& plan = job.plan;
    long m = 0;
    for (long slot = plan.item_q[item]; slot < plan.item_q[item + 1]; slot++) {
        long lo = 0, hi = count;
        if (!plan.item_full[item]) {
            long row = plan.q_rows[slot];
            lo = plan.row_lo[row] - position;
            hi = plan.row_hi[row] - position;
            lo = lo < 0 ? 0 : lo > count ? count : lo;
            hi = hi > count ? count : hi < lo ? lo : hi;
        }
        for (long i = 0; i < job.group(); i++, m++)
            soften(scratch.score + m * BLOCK, count, lo, hi, job.shape.softcap, scratch.maximum[m], scratch.sum[m],
                   scratch.rescale[m]);
    }
}

template <class Element>
void run_item(const Job& job, long item, long head) {
    const AttentionPlan& plan = job.plan;
    long head_dim = job.shape.head_dim, value_dim = job.shape.value_dim, columns = whole(value_dim, PANEL);
    long vectors = job.vectors_of(item);
    Scratch scratch = take_scratch(vectors, head_dim, columns);
    take_queries(job, item, head, scratch);
    std::memset(scratch.result, 0, vectors * columns * sizeof(float));
    for (long m = 0; m < vectors; m++) {
        scratch.maximum[m] = NEVER;
        scratch.sum[m] = 0;
    }
    Run<Element> run{(const Element*)job.pool.keys + head * head_dim,
                     (const Element*)job.pool.values + head * value_dim,
                     job.shape.key_stride(),
                     job.pool.value_stride,
                     head_dim,
                     value_dim,
                     columns,
                     vectors,
                     nullptr,
                     0,
                     0};
    long begin = plan.item_kv[2 * item], end = plan.item_kv[2 * item + 1];
    for (long at = begin; at < end; at += BLOCK) {
        run.slots = plan.kv_idx + at;
        run.known = end - at;
        run.count = run.known < BLOCK ? run.known : BLOCK;
        scores_of(run, scratch);
        soften_rows(job, item, plan.item_pos[item] + (at - begin), run.count, scratch);
        values_of(run, scratch);
    }
    give_results(job, item, head, {scratch.result, columns, scratch.maximum, scratch.sum});
}

// ------------------------------------------------------------------------------------------------ merge

// A row with several parts: their sums, brought to one maximum, divided once.
void merge_row(const Job& job, long row) {
    const AttentionPlan& plan = job.plan;
    long size = job.shape.value_dim;
    const int32_t *part = plan.merge_slot + plan.merge_ptr[row], *end = plan.merge_slot + plan.merge_ptr[row + 1];
    for (long head = 0; head < job.shape.heads; head++) {
        float maximum = NEVER, sum = 0;
        for (const int32_t* p = part; p < end; p++) {
            float m = job.part_maximum[*p * job.shape.heads + head];
            maximum = m > maximum ? m : maximum;
        }
        for (const int32_t* p = part; p < end; p++) {
            long at = *p * job.shape.heads + head;
            sum += std::exp(job.part_maximum[at] - maximum) * job.part_sum[at];
        }
        float factor = final_factor(job, head, maximum, sum);
        float* to = job.out + row * job.out_stride + head * size;
        for (const int32_t* p = part; p < end; p++) {
            long at = *p * job.shape.heads + head;
            const float* from = job.part_out + at * size;
            float weight = std::exp(job.part_maximum[at] - maximum) * factor;
            for (long d = 0; d < size; d += VL)
                store(to + d, p == part ? load(from + d) * weight : load(to + d) + load(from + d) * weight);
        }
    }
}

template <class Element>
void write_rows(const float* from, long stride, const int64_t* slots, long begin, long end, long width, Element* pool) {
    if (!from) return;
    for (long row = begin; row < end; row++)
        if (slots[row])
            for (long d = 0; d < width; d += VL) store(pool + slots[row] * width + d, load(from + row * stride + d));
}

}  // namespace

void attend(const AttentionPlan& plan, const AttentionShape& shape, const LayerPool& pool, const float* queries,
            long query_stride, float* out, long out_stride) {
    static Buffer workspace;
    long places = plan.partials > plan.rows ? plan.partials * shape.heads : 0;
    float* part = workspace.take<float>(places * (shape.value_dim + 2));
    float* maximum = part + places * shape.value_dim;
    Job job{plan, shape, pool, queries, query_stride, out, out_stride, part, maximum, maximum + places};
#if defined(UMBEL_AMX)
    static CommonWords common;
    bool tiles = pool.is_bf16 && shape.head_dim % 32 == 0 && shape.value_dim % 32 == 0 && tiles_allowed();
    auto is_tiled = [&](long item) { return tiles && job.vectors_of(item) > STREAMED; };
    common.reset(job, is_tiled);
#endif
    parallel(plan.items * shape.kv_heads, 1, [&](long begin, long end) {
        for (long at = begin; at < end; at++) {
            long item = at / shape.kv_heads, head = at % shape.kv_heads;
#if defined(UMBEL_AMX)
            if (is_tiled(item)) {
                run_tiled_item(job, item, head, common);
                continue;
            }
#endif
            if (pool.is_bf16)
                run_item<bf16>(job, item, head);
            else
                run_item<float>(job, item, head);
        }
    });
    if (!places) return;
    parallel(plan.rows, even_grain(plan.rows, 2), [&](long begin, long end) {
        for (long row = begin; row < end; row++)
            if (job.is_split(row)) merge_row(job, row);
    });
}

void store(const AttentionShape& shape, const LayerPool& pool, const float* keys, long key_stride, const float* values,
           long value_stride, const int64_t* slots, long rows) {
    long key_width = shape.key_stride(), value_width = shape.kv_heads * shape.value_dim;
    parallel(rows, even_grain(rows, 1, 16), [&](long begin, long end) {
        if (pool.is_bf16) {
            write_rows(keys, key_stride, slots, begin, end, key_width, (bf16*)pool.keys);
            write_rows(values, value_stride, slots, begin, end, value_width, (bf16*)pool.values);
        } else {
            write_rows(keys, key_stride, slots, begin, end, key_width, (float*)pool.keys);
            write_rows(values, value_stride, slots, begin, end, value_width, (float*)pool.values);
        }
    });
}

}  // namespace umbel

extern "C" {

void umbel_attend(const umbel::AttentionPlan* plan, const umbel::AttentionShape* shape, const umbel::LayerPool* pool,
                  const float* queries, long query_stride, float* out, long out_stride) {
    umbel::attend(*plan, *shape, *pool, queries, query_stride, out, out_stride);
}

void umbel_store(const umbel::AttentionShape* shape, const umbel::LayerPool* pool, const float* keys, long key_stride,
                 const float* values, long value_stride, const int64_t* slots, long rows) {
    umbel::store(*shape, *pool, keys, key_stride, values, value_stride, slots, rows);
}

}  // extern "C"
