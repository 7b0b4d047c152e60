#include "attention_tiled.h"

#include <algorithm>
#include <cmath>

namespace umbel {

#if defined(UMBEL_AMX)

namespace {

constexpr long PAIR = 32;         // two tiles side by side: 32 query vectors, 32 keys, 32 columns
constexpr long MOST_GROUPS = 12;  // of a block of keys: sums of values are loaded and stored once for so many
constexpr long SCORES = MOST_GROUPS * GROUP + 16;   // from row to row: sixteen rows of a tile lie in sixteen lines of
constexpr long WEIGHTS = MOST_GROUPS * GROUP + 32;  // the cache that do not push each other out

constexpr float LOG2_E = 1.44269504088896341f;

// 2^x for x <= 0 to 3 parts in a million, a hundredth of what rounding to bfloat16 changes. Below -126: 0; NaN stays.
UMBEL_INLINE vf power_of_two(vf x) {
    vf clipped = max(splat(-126.0f), x);  // in this order: a NaN is not smaller
    vf shifted = clipped + 12582912.0f;   // 1.5 · 2^23: the fraction is rounded away
    vf r = clipped - (shifted - 12582912.0f);
    vf p = splat(9.5701022e-3f);
    p = p * r + 5.5917863e-2f;
    p = p * r + 2.4024744e-1f;
    p = p * r + 6.9312179e-1f;
    p = p * r + 9.9999928e-1f;
    vf result = bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
    return select(x < splat(-126.0f), vf{}, result);
}

class TiledItem {
  public:
    TiledItem(const Job& job, long item, long head)
        : job_(job), item_(item), head_(head), vectors_(job.vectors_of(item)), head_dim_(job.shape.head_dim),
          value_dim_(job.shape.value_dim), pairs_(whole(vectors_, PAIR) / PAIR), query_stride_(head_dim_ + 32),
          value_stride_(value_dim_ + 16) {
        long rows = pairs_ * PAIR;
        static thread_local Buffer buffer;
        float* at = buffer.take<float>(rows * (query_stride_ / 2 + value_stride_ + SCORES + WEIGHTS / 2 + 4) +
                                       MOST_GROUPS * words_of_group());
        auto part = [&](long count) { return at += count, at - count; };
        words_ = part(MOST_GROUPS * words_of_group());
        values_ = part(rows * value_stride_);
        scores_ = part(rows * SCORES);
        queries_ = (bf16*)part(rows * query_stride_ / 2);
        weights_ = (bf16*)part(rows * WEIGHTS / 2);
        maximum_ = part(rows);
        sum_ = part(rows);
        low_ = (int32_t*)part(rows);
        high_ = (int32_t*)part(rows);
    }

    void run(const CommonWords& common) {
        Tiles configured;
        take_rows();
        const AttentionPlan& plan = job_.plan;
        long begin = plan.item_pos[item_] / GROUP * GROUP, end = end_;
        long groups = (end - begin + GROUP - 1) / GROUP, blocks = (groups + MOST_GROUPS - 1) / MOST_GROUPS;
        for (long block = 0; block < blocks; block++) {
            long first = block * groups / blocks;
            position_ = begin + first * GROUP;
            groups_ = (block + 1) * groups / blocks - first;
            first_ = block == 0;
            take_words(common);
            run_block();
        }
        give_results(job_, item_, head_, {values_, value_stride_, maximum_, sum_});
    }

  private:
    long words_of_group() const { return group_words(head_dim_) + group_words(value_dim_); }

    void take_rows() {
        const AttentionPlan& plan = job_.plan;
        long group = job_.group(), m = 0, begin = plan.item_pos[item_];
        end_ = begin + plan.item_kv[2 * item_ + 1] - plan.item_kv[2 * item_];
        for (long slot = plan.item_q[item_]; slot < plan.item_q[item_ + 1]; slot++) {
            long row = plan.q_rows[slot];
            const float* from = job_.queries + row * job_.query_stride + head_ * group * head_dim_;
            for (long i = 0; i < group; i++, m++, from += head_dim_) {
                low_[m] = std::max<long>(plan.row_lo[row], begin);
                high_[m] = std::min<long>(plan.row_hi[row], end_);
                maximum_[m] = NEVER;
                sum_[m] = 0;
                bf16* to = queries_ + m * query_stride_;
                for (long d = 0; d < head_dim_; d += VL) store(to + d, load(from + d) * job_.shape.scale);
            }
        }
    }

    // The block's groups from those that items share, or laid out here.
    void take_words(const CommonWords& common) {
        const AttentionPlan& plan = job_.plan;
        long keys = group_words(head_dim_), origin = plan.item_kv[2 * item_] - plan.item_pos[item_];
        for (long g = 0; g < groups_; g++) {
            long position = position_ + g * GROUP;
            group_[g] = common.group(plan, item_, head_, position);
            if (group_[g].keys) continue;
            float* own = words_ + g * words_of_group();
            pack_group(job_.pool, job_.shape, head_, plan.kv_idx + origin + position, end_ - position, own, own + keys);
            group_[g] = {own, own + keys};
        }
    }

    // Products of 32 query vectors after one another: scores of all, then values. The softmax of one takes place beside
    // the product that comes next.
    void run_block() {
        for (long pair = 0; pair < pairs_; pair++) {
            Softmax softmax(*this, pair - 1);
            score(pair, [&](long step) { softmax.advance(step); });
            softmax.finish();
        }
        Softmax softmax(*this, pairs_ - 1);
        if (pairs_ == 1) softmax.finish();
        value(0, [&](long step) { softmax.advance(step); });
        softmax.finish();
        for (long pair = 1; pair < pairs_; pair++) value(pair, [](long) {});
    }

    // scores[32, keys of the block] of a pair
    template <class Beside>
    void score(long pair, Beside&& beside) {
        const bf16 *upper = queries_ + pair * PAIR * query_stride_, *lower = upper + 16 * query_stride_;
        long from = query_stride_ * 2, to = SCORES * 4, step = 0;
        for (long g = 0; g < groups_; g++) {
            const float *left = group_[g].keys, *right = left + 16 * head_dim_ / 2;
            tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
            for (long d = 0; d < head_dim_; d += PAIR, left += 256, right += 256) {
                tile_load<4>(upper + d, from);
                tile_load_passing<6>(left, TILE_BYTES);
                tile_load_passing<7>(right, TILE_BYTES);
                tile_load<5>(lower + d, from);
                tile_multiply_bf16<0, 4, 6>(), tile_multiply_bf16<1, 4, 7>();
                tile_multiply_bf16<2, 5, 6>(), tile_multiply_bf16<3, 5, 7>();
                beside(step++);
            }
            float* out = scores_ + pair * PAIR * SCORES + g * GROUP;
            tile_store<0>(out, to), tile_store<1>(out + 16, to);
            tile_store<2>(out + 16 * SCORES, to), tile_store<3>(out + 16 * SCORES + 16, to);
        }
    }

    // values[32, value_dim] of a pair, added to what earlier blocks have summed
    template <class Beside>
    void value(long pair, Beside&& beside) {
        const bf16 *upper = weights_ + pair * PAIR * WEIGHTS, *lower = upper + 16 * WEIGHTS;
        long from = WEIGHTS * 2, to = value_stride_ * 4, step = 0;
        for (long d = 0; d < value_dim_; d += PAIR) {
            float *high = values_ + pair * PAIR * value_stride_ + d, *low = high + 16 * value_stride_;
            if (first_) {
                tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
            } else {
                tile_load<0>(high, to), tile_load<1>(high + 16, to);
                tile_load<2>(low, to), tile_load<3>(low + 16, to);
            }
            for (long g = 0; g < groups_; g++) {
                const float* left = group_[g].values + d / 16 * 256;
                tile_load<4>(upper + g * GROUP, from);
                tile_load_passing<6>(left, TILE_BYTES);
                tile_load_passing<7>(left + 256, TILE_BYTES);
                tile_load<5>(lower + g * GROUP, from);
                tile_multiply_bf16<0, 4, 6>(), tile_multiply_bf16<1, 4, 7>();
                tile_multiply_bf16<2, 5, 6>(), tile_multiply_bf16<3, 5, 7>();
                beside(step++);
            }
            tile_store<0>(high, to), tile_store<1>(high + 16, to);
            tile_store<2>(low, to), tile_store<3>(low + 16, to);
        }
    }

    // Scores of a pair become weights in bfloat16, in about as many steps as a product takes. Pair −1: there is nothing
    // to do.
    class Softmax {
      public:
        Softmax(TiledItem& item, long pair) : item_(item) {
            at_ = pair < 0 ? 0 : pair * PAIR;
            end_ = pair < 0 ? 0 : std::min(at_ + PAIR, item.vectors_);
            steps_ = item.groups_ * std::min(item.head_dim_, item.value_dim_) / PAIR;
            rows_ = end_ - at_;
            begin_ = at_;
        }
        UMBEL_INLINE void advance(long step) {
            if (at_ < end_ && (at_ - begin_) * steps_ <= step * rows_) item_.soften(at_++);
        }
        void finish() {
            while (at_ < end_) item_.soften(at_++);
        }

      private:
        TiledItem& item_;
        long at_, end_, steps_, rows_, begin_;
    };

    void soften(long m) {
        float* score = scores_ + m * SCORES;
        bf16* weight = weights_ + m * WEIGHTS;
        long keys = groups_ * GROUP, low = low_[m] - position_, high = high_[m] - position_;
        float softcap = job_.shape.softcap;
        if (softcap != 0)
            for (long k = 0; k < keys; k += VL) store(score + k, tanh(load(score + k) / softcap) * softcap);
        if (low > 0 || high < keys) hide(score, keys, low, high);
        vf highest[2] = {spread(maximum_[m]), spread(maximum_[m])};
        for (long k = 0; k < keys; k += PAIR)
            UMBEL_UNROLL for (int i = 0; i < PAIR / VL; i++)
                highest[i % 2] = max(highest[i % 2], load(score + k + i * VL));
        float now = across(max(highest[0], highest[1]), [](vf a, vf b) { return max(a, b); });
        if (now == NEVER) {  // nothing seen yet, of this block nor before
            for (long k = 0; k < keys; k += VL) store(weight + k, vf{});
            return;
        }
        vf total[2] = {};
        float shift = now * LOG2_E;
        for (long k = 0; k < keys; k += PAIR)
            UMBEL_UNROLL for (int i = 0; i < PAIR / VL; i++) {
                vf e = power_of_two(load(score + k + i * VL) * LOG2_E - shift);
                store(weight + k + i * VL, e);
                total[i % 2] += e;
            }
        float rescale = std::exp(maximum_[m] - now);  // 0 at first
        sum_[m] = sum_[m] * rescale + across(total[0] + total[1], [](vf a, vf b) { return a + b; });
        maximum_[m] = now;
        if (first_ || rescale == 1) return;
        float* values = values_ + m * value_stride_;
        for (long d = 0; d < value_dim_; d += VL) store(values + d, load(values + d) * rescale);
    }

    // Keys outside [low, high) are not seen.
    static void hide(float* score, long keys, long low, long high) {
        vi lane;
        for (int i = 0; i < VL; i++) lane[i] = i;
        for (long k = 0; k < keys; k += VL) {
            if (k >= low && k + VL <= high) continue;
            vi key = lane + (int32_t)k;
            store(score + k, select((key >= splat_int(low)) & (key < splat_int(high)), load(score + k), splat(NEVER)));
        }
    }

    const Job& job_;
    long item_, head_, vectors_, head_dim_, value_dim_, pairs_, query_stride_, value_stride_;
    long end_ = 0, position_ = 0, groups_ = 0;  // where the item ends; of the block: its first position, its groups
    bool first_ = true;                         // of the blocks
    float *words_, *values_, *scores_, *maximum_, *sum_;
    bf16 *queries_, *weights_;
    int32_t *low_, *high_;  // what each vector sees
    GroupWords group_[MOST_GROUPS];
};

}  // namespace

void run_tiled_item(const Job& job, long item, long head, const CommonWords& common) {
    TiledItem(job, item, head).run(common);
}

#endif

}  // namespace umbel
