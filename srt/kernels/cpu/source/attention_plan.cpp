// The planner of attention: the same cuts as srt/attention/plan.py, array by array, in microseconds.
// A step of decoding takes few milliseconds and needs a plan for every window class. For a GPU the plan is packed as
// `pack` in srt/kernels/triton/attention_backend.py does it.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "attention.h"

namespace umbel {
namespace {

// Those of the Python reference, which says what they mean.
constexpr long ITEMS_PER_WORKER = 4, GRAIN = 32, TOLERANCE = 16, RUN_OF_PART = 2;

struct Step {  // of a radix path
    int64_t node, first, length;

    bool operator==(const Step& other) const {
        return node == other.node && first == other.first && length == other.length;
    }
    bool operator<(const Step& other) const {
        if (node != other.node) return node < other.node;
        return first != other.first ? first < other.first : length < other.length;
    }
    int64_t end() const { return first + length; }
};

// A batch and how to cut it, see `Cut`. B sequences; 0 stands for "none" in window, split and single_run.
struct PlanRequest {
    long sequences, keys;
    const int32_t* query_lengths;   // [B]
    const int32_t* prefix_lengths;  // [B]
    const int64_t* path_ptr;        // [B+1] ranges in path; nullptr: keys are not shared
    const Step* path;
    const int32_t* kv_idx;    // [T] the slots of all sequences
    const int32_t* kv_start;  // [B] where those of each begin; nullptr: one after the other
    long window, block_rows, split, workers, merge_keys, load_cost, shortest_run, run_per_row, single_run;
    long queues, start_keys, part_keys;
    const int32_t *row_lo, *row_hi;  // [R] what each row sees; nullptr: all that is before it and in its window
};

struct PlanResult {
    AttentionPlan plan;
    long keys_read, keys_saved;
};

struct Tile {
    int32_t first, rows;  // in the list of rows
    int32_t lo, hi;       // positions
    int32_t offset;       // position → index in kv_idx
};

struct Item {
    int32_t tile, position, end;
    int32_t queue = 0;
};

// The first rounds up; the second down, below 0, too.
long pieces(long length, long size) { return (length + size - 1) / size; }
long rounded_down(long length, long size) { return length < 0 ? -pieces(-length, size) : length / size; }

class Planner : public PlanResult {
  public:
    explicit Planner(const PlanRequest& request) : PlanResult{}, request_(request) {
        list_rows();
        if (request.path_ptr) share();
        own_tiles();
        long own = tiles_.size();
        tiles_.insert(tiles_.end(), shared_tiles_.begin(), shared_tiles_.end());
        if (shared_tiles_.size() && request.queues)
            balance(own);
        else
            cut_tiles();
        assemble();
        plan = {(long)row_lo_.size(), (long)item_pos_.size(), (long)q_rows_.size(), request.keys, row_lo_.data(),
                row_hi_.data(), item_q_.data(), q_rows_.data(), item_kv_.data(), item_pos_.data(), item_full_.data(),
                request.kv_idx, merge_ptr_.data(), merge_slot_.data(), balanced_ ? item_queue_.data() : nullptr};
    }

  private:
    void list_rows() {
        long start = 0;
        for (long i = 0; i < request_.sequences; i++) {
            first_row_.push_back(row_lo_.size());
            kv_start_.push_back(request_.kv_start ? request_.kv_start[i] : start);
            long total = request_.prefix_lengths[i] + request_.query_lengths[i];
            start += total;
            for (long position = request_.prefix_lengths[i]; position < total; position++) {
                row_lo_.push_back(request_.window ? std::max(position - (request_.window - 1), 0L) : 0);
                row_hi_.push_back(position + 1);
            }
        }
        if (request_.row_lo) {
            std::copy_n(request_.row_lo, row_lo_.size(), row_lo_.begin());
            std::copy_n(request_.row_hi, row_hi_.size(), row_hi_.begin());
        }
        rows_.resize(row_lo_.size());
        std::iota(rows_.begin(), rows_.end(), 0);
        alone_from_.assign(request_.sequences, 0);
    }

    // ------------------------------------------------------------------------------------------------ sharing

    struct Group {
        std::vector<int32_t> sequences;
        long depth, covered;
    };

    long steps_of(long i) const { return request_.path_ptr[i + 1] - request_.path_ptr[i]; }
    const Step& step(long i, long depth) const { return request_.path[request_.path_ptr[i] + depth]; }
    long visible(long i) const { return row_lo_[first_row_[i]]; }

    void share() {
        std::vector<int32_t> all(request_.sequences);
        std::iota(all.begin(), all.end(), 0);
        std::vector<Group> todo{{all, 0, 0}};
        while (!todo.empty()) {
            Group group = std::move(todo.back());
            todo.pop_back();
            for (std::vector<int32_t>& sequences : by_step(group)) {
                long below = common_depth(sequences, group.depth);
                long end = step(sequences[0], below - 1).end();
                long covered = group.covered;
                if (take_run(sequences, covered, end)) {
                    covered = end;
                    for (int32_t i : sequences) alone_from_[i] = end;
                }
                todo.push_back({std::move(sequences), below, covered});
            }
        }
    }

    std::vector<std::vector<int32_t>> by_step(const Group& group) const {
        std::vector<int32_t> going;
        for (int32_t i : group.sequences)
            if (group.depth < steps_of(i)) going.push_back(i);
        std::stable_sort(going.begin(), going.end(),
                         [&](int32_t a, int32_t b) { return step(a, group.depth) < step(b, group.depth); });
        std::vector<std::vector<int32_t>> found;
        for (size_t at = 0, end; at < going.size(); at = end) {
            for (end = at + 1; end < going.size(); end++)
                if (!(step(going[end], group.depth) == step(going[at], group.depth))) break;
            if (end - at > 1) found.emplace_back(going.begin() + at, going.begin() + end);
        }
        std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a[0] < b[0]; });
        return found;
    }

    long common_depth(const std::vector<int32_t>& sequences, long depth) const {
        for (long below = depth + 1;; below++)
            for (int32_t i : sequences)
                if (below >= steps_of(i) || !(step(i, below) == step(sequences[0], below))) return below;
    }

    // Positions [covered, end) as tiles of all sequences that see some of them, if that pays.
    bool take_run(const std::vector<int32_t>& sequences, long covered, long end) {
        long rows = 0, apart = 0, first = end;
        for (int32_t i : sequences) {
            if (visible(i) >= end) continue;
            long from = std::max(covered, visible(i));
            rows += request_.query_lengths[i];
            apart += pieces(request_.query_lengths[i], request_.block_rows) * (end - from);
            first = std::min(first, from);
        }
        long saved = apart - pieces(rows, request_.block_rows) * (end - first);
        if (saved <= 0 || saved < request_.merge_keys * rows) return false;
        keys_saved += saved;
        long start = rows_.size(), offset = -1;
        for (int32_t i : sequences) {
            if (visible(i) >= end) continue;
            if (offset < 0) offset = kv_start_[i];
            for (long r = 0; r < request_.query_lengths[i]; r++) rows_.push_back(first_row_[i] + r);
        }
        for (long stop = rows_.size(); start < stop; start += request_.block_rows) {
            long count = std::min(request_.block_rows, stop - start);
            long lo = end, hi = first;
            for (long r = start; r < start + count; r++) {
                lo = std::min<long>(lo, row_lo_[rows_[r]]);
                hi = std::max<long>(hi, row_hi_[rows_[r]]);
            }
            lo = std::max(lo, first);
            hi = std::min(hi, end);
            if (lo < hi)
                shared_tiles_.push_back({(int32_t)start, (int32_t)count, (int32_t)lo, (int32_t)hi, (int32_t)offset});
        }
        return true;
    }

    // ------------------------------------------------------------------------------------------------ tiles

    void own_tiles() {
        for (long i = 0; i < request_.sequences; i++)
            for (long r = 0; r < request_.query_lengths[i]; r += request_.block_rows) {
                int32_t first = first_row_[i] + r;
                int32_t count = std::min<long>(request_.block_rows, request_.query_lengths[i] - r);
                int32_t lo = std::max(row_lo_[first], alone_from_[i]), hi = row_hi_[first + count - 1];
                if (lo < hi) tiles_.push_back({first, count, lo, hi, kv_start_[i]});
            }
    }

    void cut_tiles() {
        int64_t work = 0;
        auto row_cost = [&](const Tile& tile) { return request_.load_cost + tile.rows; };
        auto alone = [&](const Tile& tile) { return tile.rows == 1 && request_.single_run; };
        for (const Tile& tile : tiles_)
            if (!alone(tile)) work += (tile.hi - tile.lo) * row_cost(tile);
        int64_t share = work / (request_.workers * ITEMS_PER_WORKER);
        for (size_t t = 0; t < tiles_.size(); t++) {
            const Tile& tile = tiles_[t];
            long span = tile.hi - tile.lo, longest = span;
            if (request_.workers > 1) {
                long least = std::max(request_.shortest_run, request_.run_per_row * tile.rows);
                longest = alone(tile) ? request_.single_run : std::max<long>(share / row_cost(tile), least);
            }
            if (request_.split) longest = std::min(longest, request_.split);
            long run = pieces(span, pieces(span, longest));
            for (long position = tile.lo; position < tile.hi; position += run)
                items_.push_back({(int32_t)t, (int32_t)position, (int32_t)std::min<long>(position + run, tile.hi)});
        }
        auto cost = [&](const Item& item) { return (item.end - item.position) * row_cost(tiles_[item.tile]); };
        std::stable_sort(items_.begin(), items_.end(),
                         [&](const Item& a, const Item& b) { return cost(a) < cost(b); });
    }

    // Cuts tiles for queues of equal cost: `_balanced` of the Python reference. The last queue comes first.
    void balance(long own) {
        auto per_key = [&](const Tile& tile) { return request_.load_cost + tile.rows; };
        auto once = [&](const Tile& tile) {
            return request_.load_cost * (request_.start_keys + tile.rows * request_.part_keys);
        };
        long left = 0, queue = 0, used = 0, share = 0, count = tiles_.size();
        for (const Tile& tile : tiles_) left += once(tile) + (tile.hi - tile.lo) * per_key(tile);
        for (long number = 0; number < count; number++) {
            long t = (number + own) % count;
            const Tile& tile = tiles_[t];
            const long start = once(tile), each = per_key(tile);
            const long least = std::max(GRAIN, tile.rows * request_.part_keys * RUN_OF_PART);
            for (long position = tile.lo; position < tile.hi;) {
                long keys = tile.hi - position, queues = request_.queues - queue;
                if (!used) {
                    long even = pieces(left + (queues - 1) * request_.load_cost * request_.start_keys, queues);
                    share = std::max(even, start + request_.shortest_run * each);
                }
                long room = share - used;
                if (queues > 1 && start + keys * each > room + share / TOLERANCE) {
                    long fit = rounded_down(room - start + GRAIN * each / 2, GRAIN * each) * GRAIN;
                    if (fit < least && used) {
                        queue++;
                        used = 0;
                        continue;
                    }
                    fit = std::max(fit, least);
                    if (keys - fit >= GRAIN) {
                        keys = fit;
                        left += start;
                    }
                }
                long cost = start + keys * each;
                items_.push_back({(int32_t)t, (int32_t)position, (int32_t)(position + keys), (int32_t)queue});
                position += keys;
                used += cost;
                left -= cost;
                if (used >= share && queues > 1) {
                    queue++;
                    used = 0;
                }
            }
        }
        std::reverse(items_.begin(), items_.end());
        balanced_ = true;
    }

    void assemble() {
        merge_ptr_.assign(row_lo_.size() + 1, 0);
        item_q_.push_back(0);
        for (const Item& item : items_) {
            const Tile& tile = tiles_[item.tile];
            bool full = true;
            for (long r = tile.first; r < tile.first + tile.rows; r++) {
                int32_t row = rows_[r];
                if (row_lo_[row] >= item.end || row_hi_[row] <= item.position) continue;
                full = full && row_lo_[row] <= item.position && row_hi_[row] >= item.end;
                q_rows_.push_back(row);
                merge_ptr_[row + 1]++;
            }
            if ((size_t)item_q_.back() == q_rows_.size()) continue;  // rows of several sequences may leave gaps
            item_q_.push_back(q_rows_.size());
            item_kv_.push_back(item.position + tile.offset);
            item_kv_.push_back(item.end + tile.offset);
            item_pos_.push_back(item.position);
            item_full_.push_back(full);
            if (balanced_) item_queue_.push_back(item.queue);
            keys_read += item.end - item.position;
        }
        std::partial_sum(merge_ptr_.begin(), merge_ptr_.end(), merge_ptr_.begin());
        std::vector<int32_t> next(merge_ptr_.begin(), merge_ptr_.end() - 1);
        merge_slot_.resize(q_rows_.size());
        for (size_t slot = 0; slot < q_rows_.size(); slot++) merge_slot_[next[q_rows_[slot]]++] = slot;
    }

    const PlanRequest& request_;  // read while planning only
    std::vector<int32_t> first_row_, kv_start_, alone_from_, rows_;
    std::vector<Tile> tiles_, shared_tiles_;
    std::vector<Item> items_;
    std::vector<int32_t> row_lo_, row_hi_, item_q_, q_rows_, item_kv_, item_pos_, merge_ptr_, merge_slot_;
    std::vector<int32_t> item_queue_;
    bool balanced_ = false;
    std::vector<uint8_t> item_full_;
};

struct PackedSizes {
    long few, items, slots, merged, places;
};

long rows_of(const AttentionPlan& plan, long item) { return plan.item_q[item + 1] - plan.item_q[item]; }
long parts_of(const AttentionPlan& plan, long row) { return plan.merge_ptr[row + 1] - plan.merge_ptr[row]; }

PackedSizes packed_sizes(const AttentionPlan& plan, long few_rows) {
    PackedSizes sizes{0, plan.items, plan.partials, 0, 0};
    for (long item = 0; item < plan.items; item++) sizes.few += rows_of(plan, item) <= few_rows;
    for (long row = 0; row < plan.rows; row++)
        if (parts_of(plan, row) > 1) {
            sizes.merged++;
            sizes.places += parts_of(plan, row);
        }
    return sizes;
}

// items [I, 5], slots [S, 5], merges [M, 3], ends [2, Q+1]: see TritonPlan. Items of few rows come first, both kinds with
// falling cost or by their queues.
void pack(
    const AttentionPlan& plan, long few_rows, long queues, int32_t* items, int32_t* slots, int32_t* merges,
    int32_t* ends) {
    for (bool few : {true, false}) {
        int32_t queue = 0, before = 0;
        for (long item = plan.items - 1; item >= 0; item--) {
            long rows = rows_of(plan, item);
            if ((rows <= few_rows) != few) continue;
            if (plan.item_queue)
                for (; queue <= plan.item_queue[item]; queue++) *ends++ = before;
            before++;
            const int32_t* keys = plan.item_kv + 2 * item;
            int32_t packed[] = {plan.item_q[item], (int32_t)rows, keys[0], keys[1] - keys[0], plan.item_pos[item]};
            items = std::copy(std::begin(packed), std::end(packed), items);
        }
        if (plan.item_queue)
            for (; queue <= queues; queue++) *ends++ = before;
    }
    for (long slot = 0; slot < plan.partials; slot++) {
        int32_t row = plan.q_rows[slot];
        int32_t packed[] = {row, -1, plan.row_lo[row], plan.row_hi[row], -1};
        std::copy(std::begin(packed), std::end(packed), slots + 5 * slot);
    }
    int32_t place = 0, merge = 0;
    for (long row = 0; row < plan.rows; row++) {
        int32_t parts = parts_of(plan, row);
        if (parts < 2) continue;
        int32_t packed[] = {(int32_t)row, place, parts};
        merges = std::copy(std::begin(packed), std::end(packed), merges);
        for (long at = plan.merge_ptr[row]; at < plan.merge_ptr[row + 1]; at++) {
            int32_t* slot = slots + 5 * plan.merge_slot[at];
            slot[1] = place++;
            slot[4] = merge;
        }
        merge++;
    }
}

}  // namespace
}  // namespace umbel

extern "C" {

// A plan that reads kv_idx of the request; everything else it owns. nullptr when there is no memory.
umbel::PlanResult* umbel_plan_attention(const umbel::PlanRequest* request) {
    try {
        return new umbel::Planner(*request);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void umbel_free_attention_plan(umbel::PlanResult* plan) { delete static_cast<umbel::Planner*>(plan); }

void umbel_packed_sizes(const umbel::AttentionPlan* plan, long few_rows, umbel::PackedSizes* sizes) {
    *sizes = umbel::packed_sizes(*plan, few_rows);
}

void umbel_pack_plan(
    const umbel::AttentionPlan* plan, long few_rows, long queues, int32_t* items, int32_t* slots, int32_t* merges,
    int32_t* ends) {
    umbel::pack(*plan, few_rows, queues, items, slots, merges, ends);
}

}  // extern "C"
