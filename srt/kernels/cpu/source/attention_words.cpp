#include "attention_words.h"

#include <algorithm>

#include "threads.h"

namespace umbel {

#if defined(UMBEL_AMX)

void pack_group(const LayerPool& pool, const AttentionShape& shape, long head, const int32_t* slots, long count,
                float* keys, float* values) {
    long head_dim = shape.head_dim, value_dim = shape.value_dim;
    const bf16* from_keys = (const bf16*)pool.keys + head * head_dim;
    const bf16* from_values = (const bf16*)pool.values + head * value_dim;
    for (long first = 0; first < GROUP; first += VL) {
        float* to = keys + first / 16 * 16 * (head_dim / 2) + first % 16;
        Rows<VL, bf16> now(from_keys, shape.key_stride(), slots, first, count);
        for (long word = 0; word < head_dim / 2; word += VL) {
            vf block[VL];
            UMBEL_UNROLL for (int i = 0; i < VL; i++) block[i] = load((const float*)now.row[i] + word);
            transpose(block);
            UMBEL_UNROLL for (int i = 0; i < VL; i++) store(to + (word + i) * 16, block[i]);
        }
    }
    for (long k = 0; k < GROUP; k += 2) {
        Rows<2, bf16> now(from_values, pool.value_stride, slots, k, count);
        for (long d = 0; d < value_dim; d += VL) {
            vf even = load(now.row[0] + d), odd = load(now.row[1] + d);  // widened: the upper halves of words
            store(values + (d / 16 * (GROUP / 2) + k / 2) * 16 + d % 16, (vf)(((vu)even >> 16) | (vu)odd));
        }
    }
}

// Overlapping ranges of one sequence become one run.
void CommonWords::find_runs(const AttentionPlan& plan) {
    auto begins = [&](const Entry& entry) { return plan.item_pos[entry.item] / GROUP * GROUP; };
    std::sort(items_.begin(), items_.end(), [&](const Entry& a, const Entry& b) {
        return a.origin != b.origin ? a.origin < b.origin : plan.item_pos[a.item] < plan.item_pos[b.item];
    });
    runs_.clear();
    run_of_.assign(plan.items, -1);
    for (const Entry& entry : items_) {
        long first = begins(entry), end = plan.item_kv[2 * entry.item + 1] - entry.origin;
        if (runs_.empty() || runs_.back().origin != entry.origin || runs_.back().end < first)
            runs_.push_back({entry.origin, first, end, 0});
        runs_.back().end = std::max(runs_.back().end, end);
        run_of_[entry.item] = (long)runs_.size() - 1;
    }
    groups_ = 0;
    for (Run& run : runs_) {
        run.place = groups_;
        groups_ += (run.end - run.first + GROUP - 1) / GROUP;
    }
}

void CommonWords::lay_out(const Job& job) {
    const AttentionPlan& plan = job.plan;
    find_runs(plan);
    long read = 0;
    for (const Entry& entry : items_)
        read += (plan.item_kv[2 * entry.item + 1] - plan.item_kv[2 * entry.item] + GROUP - 1) / GROUP;
    heads_ = job.shape.kv_heads;
    key_words_ = group_words(job.shape.head_dim);
    size_ = key_words_ + group_words(job.shape.value_dim);
    words_ = read < 2 * groups_ ? nullptr : memory_.take<float>(groups_ * heads_ * size_);
    if (!words_) return;
    for (const Run& run : runs_) {
        long groups = (run.end - run.first + GROUP - 1) / GROUP;
        parallel(groups * heads_, even_grain(groups * heads_, 4), [&](long begin, long end) {
            for (long at = begin; at < end; at++) {
                long position = run.first + at / heads_ * GROUP, head = at % heads_;
                float* to = words(run.place + at / heads_, head);
                pack_group(job.pool, job.shape, head, plan.kv_idx + run.origin + position, run.end - position, to,
                           to + key_words_);
            }
        });
    }
}

GroupWords CommonWords::group(const AttentionPlan& plan, long item, long head, long position) const {
    if (!words_) return {nullptr, nullptr};
    const Run& run = runs_[run_of_[item]];
    // What lies behind the item's end is multiplied with 0, but a NaN stays one. It may do so for those who will see it:
    // rows whose own keys come next. In a group at the end of a prefix, those are keys of one of its sequences.
    long end = plan.item_kv[2 * item + 1] - run.origin;
    bool own = plan.row_hi[plan.q_rows[plan.item_q[item + 1] - 1]] == end;
    if (position + GROUP > end && end < run.end && !own) return {nullptr, nullptr};
    const float* at = words(run.place + (position - run.first) / GROUP, head);
    return {at, at + key_words_};
}

#endif

}  // namespace umbel
