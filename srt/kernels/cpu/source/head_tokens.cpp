// The ways to a row's token: from coarse estimates, from finer ones, or from all logits.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "head_choice.h"
#include "head_screen.h"
#include "linear_float.h"
#include "noise.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long SCREENED_ROWS = 64;  // of one pass over the screen; shortlists are kept for so many
constexpr long FULL_ROWS = 16;      // whose logits are in memory at once
constexpr long MOST_TOP = 256;      // a larger top_k leaves too many tokens for a shortlist
constexpr double LARGEST_SCORE = 1e30;
#if defined(UMBEL_COARSE_ROWS)
constexpr long FEW_ROWS = 4;  // which memory is slower than
constexpr long FEWEST_BLOCK_ROWS = 3;  // without a draw: fewer wait for memory, whichever way they take
#endif

// Rows `which` of x one after the other, as `linear` reads them.
const float* gather(Head& head, const float* x, long x_stride, const long* which, long count) {
    long k = head.matrix->k;
    float* gathered = head.gathered.take<float>(count * k);
    bool rounds = head.exact && rounds_inputs(*head.exact);
    for (long i = 0; i < count; i++) {
        const float* row = x + which[i] * x_stride;
        if (!rounds)
            std::memcpy(gathered + i * k, row, k * sizeof(float));
        else
            for (long at = 0; at < k; at++) gathered[i * k + at] = from_bf16(to_bf16(row[at]));
    }
    return gathered;
}

// `error` is |x − x^|, rounded up; 0: estimates are the logits.
ScreenedRow describe(const Head& head, const Choice& choice, const float* x, float error) {
    ScreenedRow result{};
    result.mask = choice.mask;
    result.norm = norm_above(x, head.exact->k);
    result.error = rounded_up((double)error * head.norm_ratio);
    result.largest_error = rounded_up((double)error * head.largest_stored);
    double largest = (double)result.norm * head.largest_norm;
    if (choice.kind == Pick::SAMPLE) {
        result.inverse_temperature = choice.inverse_temperature;
        result.key = choice.key;
        result.top = choice.top_k < head.exact->n ? choice.top_k : 0;
        result.rule = Rule::NOISE;
        largest *= std::max(1.0, choice.inverse_temperature);
        if (choice.min_p > 0) {
            result.rule = Rule::LARGEST;
            double slack = -std::log(choice.min_p) / choice.inverse_temperature;
            result.slack = rounded_up(slack + 1e-5 + 1e-6 * (double)result.norm * head.largest_norm);
        } else if (result.top > 0) {
            result.rule = Rule::TOP;
        }
    }
    result.skipped = !(largest < LARGEST_SCORE) || result.norm < 1e-15f || !std::isfinite(result.error);
    if (error == 0) result.norm = 0;
    return result;
}

// The gathered rows in the forms that exact logits are computed from.
struct GatheredRows {
    const float* x;
    Int8Rows integers;
    BlockInputs blocks;
};

// Exact logits of tokens of one row, by the calling thread.
class ExactLogits {
  public:
    ExactLogits(const MatrixPart& weight, const GatheredRows& rows, long row)
        : weight_(weight), x_(rows.x + row * weight.k), inputs_(rows.integers), blocks_(rows.blocks), row_(row) {
        while (inputs_.rows && inputs_.first_row(tile_ + 1) <= row) tile_++;
    }

    float of(int32_t token) const {
        long panel = token / PANEL;
        alignas(64) float sums[Int8Products::MOST_ROWS * PANEL];
        if (is_blocks(weight_.format)) {
            multiply_panel_row(weight_, blocks_, row_, panel, sums);
            return sums[token % PANEL];
        }
        if (weight_.format != Format::INT8) {
            linear_panel(weight_, x_, 1, weight_.k, panel, sums);
            return sums[token % PANEL];
        }
        Int8Products(weight_, inputs_).compute(tile_, panel, 0, 1, sums);
        return sums[(row_ - inputs_.first_row(tile_)) * PANEL + token % PANEL] * weight_.scales[token];
    }

  private:
    const MatrixPart& weight_;
    const float* x_;
    const Int8Rows& inputs_;
    const BlockInputs& blocks_;
    long row_, tile_ = 0;
};

// The shortlists of all threads as one, the most promising first. False when one of them overflowed.
bool merge(const ScreenedRow& row, const Shortlist* lists, long stride, std::vector<Candidate>& merged) {
    merged.clear();
    float reach = -__builtin_inff();
    for (int thread = 0; thread < team_size(); thread++) {
        const Shortlist& list = lists[thread * stride];
        if (list.overflowed) return false;
        reach = std::max(reach, list.reach);
        merged.insert(merged.end(), list.candidates, list.candidates + list.count);
    }
    if (row.rule == Rule::TOP && (long)merged.size() >= row.top) {
        auto kth = merged.begin() + (row.top - 1);
        std::nth_element(merged.begin(), kth, merged.end(),
                         [](const Candidate& a, const Candidate& b) { return a.lower > b.lower; });
        reach = std::max(reach, kth->lower);
    }
    std::erase_if(merged, [&](const Candidate& candidate) { return candidate.upper < reach; });
    std::sort(merged.begin(), merged.end(), [](const Candidate& a, const Candidate& b) { return a.upper > b.upper; });
    return true;
}

// Below which upper bound no token can be chosen any more, from the exact logits so far.
class Bar {
  public:
    Bar(const ScreenedRow& row, const Choice& choice) : row_(row), choice_(choice) {}

    void raise(const Known& known) {
        switch (row_.rule) {
            case Rule::LARGEST: value_ = std::max(value_, (double)known.logit - row_.slack); break;
            case Rule::NOISE: {
                double score = known.logit * choice_.inverse_temperature +
                               gumbel(token_hash(choice_.key, (uint32_t)known.token));
                value_ = std::max(value_, score);
                break;
            }
            case Rule::TOP:
                top_.push_back(-known.logit);
                std::push_heap(top_.begin(), top_.end());
                if ((long)top_.size() > row_.top) {
                    std::pop_heap(top_.begin(), top_.end());
                    top_.pop_back();
                }
                if ((long)top_.size() == row_.top) value_ = -top_.front();
        }
    }
    double value() const { return value_; }

  private:
    const ScreenedRow& row_;
    const Choice& choice_;
    double value_ = -HUGE_VAL;
    std::vector<float> top_;  // negated: the smallest of the largest is in front
};

struct Finished {
    Known known;
    bool fallback;
};

Finished finish_row(const ScreenedRow& row, const Choice& choice, const ExactLogits& exact,
                    const Shortlist* lists, long stride, std::atomic<long>& candidates, std::atomic<long>& computed) {
    thread_local std::vector<Candidate> merged;
    thread_local std::vector<Known> known;
    if (row.skipped || !merge(row, lists, stride, merged) || merged.empty()) return {{-1, 0}, true};
    known.clear();
    Bar bar(row, choice);
    bool estimates_are_exact = row.norm == 0 && row.rule != Rule::NOISE;
    for (const Candidate& candidate : merged) {
        if (candidate.upper < bar.value()) break;
        known.push_back({candidate.token, estimates_are_exact ? candidate.upper : exact.of(candidate.token)});
        bar.raise(known.back());
    }
    candidates += (long)merged.size();
    computed += estimates_are_exact ? 0 : (long)known.size();
    return {choose(choice, known), false};
}

struct Answers {
    int32_t* tokens;
    float* logits;

    void set(long row, Known known) const {
        tokens[row] = known.token;
        logits[row] = known.logit;
    }
};

void choose_by_all_logits(Head& head, const float* x, long x_stride, const Picks& picks, const std::vector<long>& which,
                          const Answers& answers) {
    long n = head.matrix->n;
    for (long first = 0; first < (long)which.size(); first += FULL_ROWS) {
        long count = std::min(FULL_ROWS, (long)which.size() - first);
        float* all = head.logits.take<float>(FULL_ROWS * n);
        linear(*head.matrix, gather(head, x, x_stride, &which[first], count), count, head.matrix->k, nullptr, all, n);
        parallel(count, 1, [&](long begin, long end) {
            for (long i = begin; i < end; i++) {
                long row = which[first + i];
                answers.set(row, choose_from_all(choice_of(picks, row), all + i * n, n));
            }
        });
    }
}

// Shortlists of the gathered rows, from inputs of 7 or of 16 bits. Where the matrix is INT8, 16 bits are the logits.
void estimate(Head& head, bool coarse, const GatheredRows& gathered, const std::vector<Choice>& choices,
              ScreenedRow* rows, Shortlist* lists) {
    long k = head.exact->k, count = (long)choices.size();
    auto describe_all = [&](auto&& error) {
        for (long row = 0; row < count; row++)
            rows[row] = describe(head, choices[row], gathered.x + row * k, error(row));
    };
#if defined(UMBEL_COARSE_ROWS)
    if (coarse) {
        CoarseRows inputs = quantize_coarsely(*head.screen, gathered.x, count, k);
        describe_all([&](long row) { return inputs.errors[row]; });
        for (long row = 0; is_blocks(head.screen->format) && row < count; row++) {
            rows[row].norm = block_error_above(head, inputs, gathered.blocks, row, rows[row].norm);
            rows[row].error = rows[row].largest_error = 0;
        }
        return screen_rows(head, inputs, rows, lists);
    }
#else
    (void)coarse;
#endif
    bool exact = head.screen == head.exact;
    describe_all([&](long row) { return exact ? 0 : input_error_above(gathered.integers, row); });
    screen_rows(head, gathered.integers, rows, lists);
}

// Answers rows `which`, but for those that it returns.
std::vector<long> choose_by_screen(Head& head, bool coarse, const float* x, long x_stride, const Picks& picks,
                                   const std::vector<long>& which, const Answers& answers) {
    std::vector<long> left;
    for (long first = 0; first < (long)which.size(); first += SCREENED_ROWS) {
        long count = std::min(SCREENED_ROWS, (long)which.size() - first), k = head.exact->k;
        Shortlist* lists = head.lists.take<Shortlist>(team_size() * count);
        ScreenedRow* rows = head.states.take<ScreenedRow>(count);
        std::vector<Choice> choices(count);
        for (long i = 0; i < count; i++) choices[i] = choice_of(picks, which[first + i]);
        GatheredRows gathered{gather(head, x, x_stride, &which[first], count), {}, {}};
        if (is_blocks(head.screen->format))
            gathered.blocks = round_rows(*head.matrix, gathered.x, count, k);
        else
            gathered.integers = quantize_rows(*head.screen, gathered.x, count, k);
        estimate(head, coarse, gathered, choices, rows, lists);
        std::vector<uint8_t> failed(count);
        std::atomic<long> candidates{0}, computed{0};
        parallel(count, 1, [&](long begin, long end) {
            for (long i = begin; i < end; i++) {
                ExactLogits exact(*head.exact, gathered, i);
                Finished finished = finish_row(rows[i], choices[i], exact, lists + i, count, candidates, computed);
                failed[i] = finished.fallback;
                answers.set(which[first + i], finished.known);
            }
        });
        for (long i = 0; i < count; i++)
            if (failed[i]) left.push_back(which[first + i]);
        head.counters.candidates += candidates;
        head.counters.exact += computed;
    }
    return left;
}

// The ways of a call's rows, each the next one's fallback.
struct Ways {
    std::vector<long> coarse, wide, all;
};

Ways plan(const Head& head, const Picks& picks, long rows) {
    Ways ways;
    bool blocks = head.screen && is_blocks(head.screen->format), draws = false;
    for (long row = 0; row < rows; row++) {
        Choice choice = choice_of(picks, row);
        bool top = choice.top_k > 0 && choice.top_k < head.matrix->n;
        draws = draws || choice.kind == Pick::SAMPLE;
        if (!head.screen || (top && choice.top_k > MOST_TOP && choice.min_p == 0))
            ways.all.push_back(row);
        else if (!blocks && (top || choice.min_p > 0))  // many tokens within reach: coarse bounds rule too few of them out
            ways.wide.push_back(row);
        else
            ways.coarse.push_back(row);
    }
    bool coarse = false;
#if defined(UMBEL_COARSE_ROWS)
    if (blocks)
        coarse = draws || (long)ways.coarse.size() >= FEWEST_BLOCK_ROWS;
    else
        coarse = head.coarse && (long)ways.coarse.size() > FEW_ROWS;
#endif
    if (!coarse) {
        ways.wide.insert(ways.wide.end(), ways.coarse.begin(), ways.coarse.end());
        ways.coarse.clear();
    }
    return ways;
}

}  // namespace

void choose_tokens(Head& head, const float* x, long rows, long x_stride, const Picks& picks, int32_t* tokens,
                   float* logits) {
    Answers answers{tokens, logits};
    Ways ways = plan(head, picks, rows);
    std::vector<long> left = choose_by_screen(head, true, x, x_stride, picks, ways.coarse, answers);
    ways.wide.insert(ways.wide.end(), left.begin(), left.end());
    bool blocks = head.screen && is_blocks(head.screen->format);  // which have no estimates from 16 bits
    left = blocks ? ways.wide : choose_by_screen(head, false, x, x_stride, picks, ways.wide, answers);
    ways.all.insert(ways.all.end(), left.begin(), left.end());
    choose_by_all_logits(head, x, x_stride, picks, ways.all, answers);
    head.counters.rows += rows;
    if (head.screen) head.counters.fallbacks += (long)ways.all.size();
}

}  // namespace umbel
