#include "head.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <vector>

#include "head_choice.h"
#include "head_screen.h"
#include "noise.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long SCREENED_ROWS = 64;  // of one pass over the screen; shortlists are kept for so many
constexpr long FULL_ROWS = 16;      // whose logits are in memory at once
constexpr long MOST_TOP = 256;      // a larger top_k leaves too many tokens for a shortlist
constexpr double LARGEST_SCORE = 1e30;

// The inputs as `linear` reads them: by AMX tiles a BF16 matrix gets them in bfloat16.
const float* inputs_of(Head& head, const float* x, long rows, long& x_stride) {
#if defined(UMBEL_AMX)
    if (head.exact->format == Format::BF16) {
        long k = head.exact->k;
        float* rounded = head.rounded.take<float>(rows * k);
        for (long row = 0; row < rows; row++)
            for (long i = 0; i < k; i++) rounded[row * k + i] = from_bf16(to_bf16(x[row * x_stride + i]));
        x_stride = k;
        return rounded;
    }
#else
    (void)head, (void)rows, (void)x_stride;
#endif
    return x;
}

ScreenedRow describe(const Head& head, const Choice& choice, const float* x, const Int8Rows& inputs, long row) {
    ScreenedRow result{};
    result.norm = norm_above(x, head.exact->k);
    result.error = rounded_up((double)input_error_above(inputs, row) * head.norm_ratio);
    double largest = (double)result.norm * head.largest_norm;
    if (choice.kind == Pick::SAMPLE) {
        result.inverse_temperature = choice.inverse_temperature;
        result.key = choice.key;
        result.top = choice.top_k < head.exact->n ? choice.top_k : 0;
        result.rule = Rule::NOISE;
        largest *= std::max(1.0, choice.inverse_temperature);
        if (choice.min_p > 0) {
            result.rule = Rule::LARGEST;
            result.slack = rounded_up(-std::log(choice.min_p) / choice.inverse_temperature + 1e-5);
        } else if (result.top > 0) {
            result.rule = Rule::TOP;
        }
    }
    bool too_many = result.rule == Rule::TOP && result.top > MOST_TOP;
    result.skipped = too_many || !(largest < LARGEST_SCORE) || result.norm < 1e-15f || !std::isfinite(result.error);
    return result;
}

// Exact logits of tokens of one row, by the calling thread.
class ExactLogits {
  public:
    ExactLogits(const Matrix& weight, const float* x, const Int8Rows& inputs, long row)
        : weight_(weight), x_(x), inputs_(inputs), row_(row) {
        while (inputs.first_row(tile_ + 1) <= row) tile_++;
    }

    float of(int32_t token) const {
        long panel = token / PANEL;
        alignas(64) float sums[Int8Products::MOST_ROWS * PANEL];
        if (weight_.format != Format::INT8) {
            linear_panel(weight_, x_, 1, weight_.k, panel, sums);
            return sums[token % PANEL];
        }
        Int8Products(weight_, inputs_).compute(tile_, panel, false, sums);
        return sums[(row_ - inputs_.first_row(tile_)) * PANEL + token % PANEL] * weight_.scales[token];
    }

  private:
    const Matrix& weight_;
    const float* x_;
    const Int8Rows& inputs_;
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
    for (const Candidate& candidate : merged) {
        if (candidate.upper < bar.value()) break;
        known.push_back({candidate.token, exact.of(candidate.token)});
        bar.raise(known.back());
    }
    candidates += (long)merged.size();
    computed += (long)known.size();
    return {choose(choice, known), false};
}

// Rows `which` of x by all their logits.
void choose_by_all_logits(Head& head, const float* x, long x_stride, const Picks& picks, const std::vector<long>& which,
                          int32_t* tokens, float* logits) {
    long k = head.exact->k, n = head.exact->n;
    for (long first = 0; first < (long)which.size(); first += FULL_ROWS) {
        long count = std::min(FULL_ROWS, (long)which.size() - first);
        float* gathered = head.gathered.take<float>(FULL_ROWS * k);
        float* all = head.logits.take<float>(FULL_ROWS * n);
        for (long i = 0; i < count; i++) std::memcpy(gathered + i * k, x + which[first + i] * x_stride, k * sizeof(float));
        linear(*head.exact, gathered, count, k, nullptr, all, n);
        parallel(count, 1, [&](long begin, long end) {
            for (long i = begin; i < end; i++) {
                long row = which[first + i];
                Known known = choose_from_all(choice_of(picks, row), all + i * n, n);
                tokens[row] = known.token;
                logits[row] = known.logit;
            }
        });
    }
}

// Rows [first, first + count): chosen, or put on the list of those that need all logits.
void choose_by_screen(Head& head, const float* x, long x_stride, const Picks& picks, long first, long count,
                      std::vector<long>& fallbacks, int32_t* tokens, float* logits) {
    Shortlist* lists = head.lists.take<Shortlist>(team_size() * count);
    ScreenedRow* rows = head.states.take<ScreenedRow>(count);
    const float* block = x + first * x_stride;
    Int8Rows inputs = quantize_rows(*head.screen, block, count, x_stride);
    for (long row = 0; row < count; row++)
        rows[row] = describe(head, choice_of(picks, first + row), block + row * x_stride, inputs, row);
    screen_rows(head, inputs, rows, lists);
    std::atomic<long> candidates{0}, computed{0};
    std::vector<uint8_t> failed(count);
    parallel(count, 1, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            ExactLogits exact(*head.exact, block + row * x_stride, inputs, row);
            Finished finished = finish_row(rows[row], choice_of(picks, first + row), exact, lists + row, count,
                                           candidates, computed);
            failed[row] = finished.fallback;
            tokens[first + row] = finished.known.token;
            logits[first + row] = finished.known.logit;
        }
    });
    for (long row = 0; row < count; row++)
        if (failed[row]) fallbacks.push_back(first + row);
    head.counters.candidates += candidates;
    head.counters.exact += computed;
}

}  // namespace

Head* create_head(const Matrix& exact, bool screen) {
    Head* head = new (std::nothrow) Head{};
    if (!head) return nullptr;
    head->exact = &exact;
    if (!screen) return head;
    head->radii = new (std::nothrow) float[exact.panels * PANEL]{};
    if (exact.format == Format::INT8) {
        head->screen = &exact;
    } else {
        head->copy = create_matrix(Format::INT8, exact.n, exact.k);
        head->screen = head->copy;
    }
    if (!head->radii || !head->screen) {
        free_head(head);
        return nullptr;
    }
    if (!fill_screen(*head)) head->screen = nullptr;  // weights that are not finite: all logits will say so
    return head;
}

void free_head(Head* head) {
    if (!head) return;
    free_matrix(head->copy);
    delete[] head->radii;
    delete head;
}

void choose_tokens(Head& head, const float* x, long rows, long x_stride, const Picks& picks, int32_t* tokens,
                   float* logits) {
    if (rows <= 0) return;
    std::vector<long> fallbacks;
    if (head.screen) {
        const float* inputs = inputs_of(head, x, rows, x_stride);
        x = inputs;
        for (long first = 0; first < rows; first += SCREENED_ROWS)
            choose_by_screen(head, x, x_stride, picks, first, std::min(SCREENED_ROWS, rows - first), fallbacks, tokens,
                             logits);
        head.counters.fallbacks += (long)fallbacks.size();
    } else {
        for (long row = 0; row < rows; row++) fallbacks.push_back(row);
    }
    choose_by_all_logits(head, x, x_stride, picks, fallbacks, tokens, logits);
    head.counters.rows += rows;
}

void logits_of(Head& head, const float* x, long rows, long x_stride, const int32_t* ids, long count, float* out) {
    if (rows <= 0 || count <= 0) return;
    const Matrix& weight = *head.exact;
    Int8Rows inputs{};
    if (weight.format == Format::INT8) inputs = quantize_rows(weight, x, rows, x_stride);
    float* tiles = head.gathered.take<float>(team_size() * std::max(rows, (long)Int8Products::MOST_ROWS) * PANEL);
    parallel(count, even_grain(count, 4), [&](long begin, long end) {
        float* tile = tiles + team_rank() * std::max(rows, (long)Int8Products::MOST_ROWS) * PANEL;
        long held = -1;  // the panel whose logits are in `tile`
        for (long i = begin; i < end; i++) {
            long panel = ids[i] / PANEL;
            if (weight.format != Format::INT8) {
                if (panel != held) linear_panel(weight, x, rows, x_stride, panel, tile);
                for (long row = 0; row < rows; row++) out[row * count + i] = tile[row * PANEL + ids[i] % PANEL];
            } else {
                Int8Products products(weight, inputs);
                for (long t = 0; t < inputs.tiles; t++) {
                    products.compute(t, panel, true, tile);
                    long last = std::min(inputs.first_row(t + 1), rows);
                    for (long row = inputs.first_row(t); row < last; row++)
                        out[row * count + i] =
                            tile[(row - inputs.first_row(t)) * PANEL + ids[i] % PANEL] * weight.scales[ids[i]];
                }
            }
            held = panel;
        }
    });
}

}  // namespace umbel

extern "C" {

void* umbel_head_create(const void* matrix, int screen) {
    return umbel::create_head(*(const umbel::Matrix*)matrix, screen != 0);
}

void umbel_head_free(void* head) { umbel::free_head((umbel::Head*)head); }

// Of the copy and the radii: the exact matrix is the caller's.
long umbel_head_bytes(const void* head) {
    const umbel::Head& it = *(const umbel::Head*)head;
    long outputs = it.exact->panels * umbel::PANEL * (long)sizeof(float);
    return (it.radii ? outputs : 0) + (it.copy ? it.copy->data_bytes + outputs : 0);
}

int umbel_head_screens(const void* head) { return ((const umbel::Head*)head)->screen != nullptr; }

void umbel_head_choose(void* head, const float* x, long rows, long x_stride, const uint8_t* kinds,
                       const double* inverse_temperatures, const uint64_t* keys, const int32_t* top_k,
                       const double* min_p, int32_t* tokens, float* logits) {
    umbel::Picks picks{kinds, inverse_temperatures, keys, top_k, min_p};
    umbel::choose_tokens(*(umbel::Head*)head, x, rows, x_stride, picks, tokens, logits);
}

void umbel_head_rows(void* head, const float* x, long rows, long x_stride, const int32_t* ids, long count, float* out) {
    umbel::logits_of(*(umbel::Head*)head, x, rows, x_stride, ids, count, out);
}

void umbel_head_all(void* head, const float* x, long rows, long x_stride, float* out, long out_stride) {
    umbel::linear(*((umbel::Head*)head)->exact, x, rows, x_stride, nullptr, out, out_stride);
}

void umbel_head_counters(const void* head, long* counters) {
    const umbel::HeadCounters& it = ((const umbel::Head*)head)->counters;
    counters[0] = it.rows;
    counters[1] = it.candidates;
    counters[2] = it.exact;
    counters[3] = it.fallbacks;
}

}  // extern "C"
