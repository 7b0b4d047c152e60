// Keys and values of a bfloat16 pool as AMX tiles multiply them: words of two elements, 32 positions together.
//
//   keys    [2][head_dim / 2][16 keys]: word d of a key is its elements 2d and 2d + 1
//   values  [value_dim / 16][16][16 columns]: word k of a column is its values at positions 2k and 2k + 1
#pragma once

#include <vector>

#include "attention_job.h"
#include "memory.h"
#include "tiles.h"

#if defined(UMBEL_AMX)

namespace umbel {

constexpr long GROUP = 32;  // positions; a group begins at a multiple of it

constexpr long group_words(long head_dim) { return GROUP * head_dim / 2; }

struct GroupWords {
    const float* keys;
    const float* values;
};

// Lays out one group of one head from the pool: positions of `slots`, the last of which is repeated from `count` on.
void pack_group(const LayerPool& pool, const AttentionShape& shape, long head, const int32_t* slots, long count,
                float* keys, float* values);

// The groups that items of one call have in common, laid out once for all of them. Rows of a prompt see nearly the same
// keys as those beside them, and laying keys out costs what multiplying them with a hundred query vectors does.
class CommonWords {
  public:
    // Lays out what `takes(item)` says of, unless hardly any group is read twice. Uses the whole team.
    template <class Takes>
    void reset(const Job& job, Takes&& takes) {
        items_.clear();
        for (long item = 0; item < job.plan.items; item++)
            if (takes(item)) items_.push_back({origin(job.plan, item), item});
        lay_out(job);
    }

    // The group that begins at `position` of an item's sequence; null pointers: it has to lay it out itself.
    GroupWords group(const AttentionPlan& plan, long item, long head, long position) const;

  private:
    struct Entry {
        long origin, item;  // where position 0 of the item's sequence is in kv_idx
    };
    struct Run {  // of groups that follow each other
        long origin, first, end;  // positions
        long place;               // of the first group
    };

    static long origin(const AttentionPlan& plan, long item) { return plan.item_kv[2 * item] - plan.item_pos[item]; }
    void find_runs(const AttentionPlan& plan);
    void lay_out(const Job& job);
    float* words(long place, long head) const { return words_ + (place * heads_ + head) * size_; }

    Buffer memory_;
    float* words_ = nullptr;
    long heads_ = 0, key_words_ = 0, size_ = 0, groups_ = 0;  // size_: words of a group, its values included
    std::vector<Entry> items_;
    std::vector<Run> runs_;
    std::vector<long> run_of_;  // by item, −1: none
};

}  // namespace umbel

#endif
