#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "threads.h"

namespace umbel {
namespace {

constexpr long ROW_GRAIN = 4;  // rows of one chunk: choosing, gathering and adding cost little
constexpr float NEVER = -__builtin_inff();

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The places of the `wanted` largest of `count` values, the first of equal ones first. `taken` [count] is scratch.
void largest(const float* values, long count, long wanted, uint8_t* taken, int32_t* places) {
    std::fill(taken, taken + count, 0);
    for (long k = 0; k < wanted; k++) {
        long best = -1;
        for (long i = 0; i < count; i++)
            if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
        taken[best] = 1;
        places[k] = (int32_t)best;
    }
}

// Chooses the experts of rows, one at a time.
class Router {
  public:
    explicit Router(const Experts& experts)
        : e_(experts), scores_(experts.count), ranked_(experts.count), groups_(experts.groups), taken_(experts.count),
          places_(experts.groups) {}

    // [chosen] experts in ascending order, and their weights. Logits that are not numbers choose the first experts, and
    // their weights are not numbers either.
    void choose(const float* logits, int32_t* experts, float* weights) {
        score(logits);
        for (long i = 0; i < e_.count; i++) ranked_[i] = scores_[i] + (e_.correction ? e_.correction[i] : 0.0f);
        if (e_.groups > e_.chosen_groups) keep_best_groups();
        largest(ranked_.data(), e_.count, e_.chosen, taken_.data(), experts);
        std::sort(experts, experts + e_.chosen);
        float total = 0;
        for (long k = 0; k < e_.chosen; k++) total += scores_[experts[k]];
        float factor = e_.scale / (e_.renormalise ? total + 1e-20f : 1.0f);
        for (long k = 0; k < e_.chosen; k++) weights[k] = scores_[experts[k]] * factor;
    }

  private:
    void score(const float* logits) {
        if (e_.sigmoid) {
            for (long i = 0; i < e_.count; i++) scores_[i] = sigmoid(logits[i]);
            return;
        }
        float highest = *std::max_element(logits, logits + e_.count), sum = 0;
        for (long i = 0; i < e_.count; i++) sum += scores_[i] = std::exp(logits[i] - highest);
        for (long i = 0; i < e_.count; i++) scores_[i] /= sum;
    }

    // A group is as good as its two best experts together.
    void keep_best_groups() {
        long size = e_.count / e_.groups;
        for (long group = 0; group < e_.groups; group++) {
            float first = NEVER, second = NEVER;
            for (long i = group * size; i < (group + 1) * size; i++) {
                if (ranked_[i] > first) {
                    second = first;
                    first = ranked_[i];
                } else {
                    second = std::max(second, ranked_[i]);
                }
            }
            groups_[group] = first + second;
        }
        largest(groups_.data(), e_.groups, e_.chosen_groups, taken_.data(), places_.data());
        for (long group = 0; group < e_.groups; group++)
            if (!taken_[group]) std::fill_n(&ranked_[group * size], size, NEVER);
    }

    const Experts& e_;
    std::vector<float> scores_, ranked_, groups_;
    std::vector<uint8_t> taken_;  // scratch of `largest`
    std::vector<int32_t> places_;
};

// out = (up + 1) · gate · sigmoid(alpha · gate), where gate is at most `limit` and up within ±limit.
void clamped(const float* gate_up, float* out, long rows, long size, float limit, float alpha) {
    parallel(rows, even_grain(rows, 4), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const float *gates = gate_up + row * 2 * size, *ups = gates + size;
            for (long i = 0; i < size; i++) {
                float gate = gates[i] > limit ? limit : gates[i];  // in this order a NaN stays one
                float up = ups[i] > limit ? limit : ups[i] < -limit ? -limit : ups[i];
                out[row * size + i] = (up + 1.0f) * gate * sigmoid(alpha * gate);
            }
        }
    });
}

// What a map in gave, activated: [rows, width].
void narrow(const Experts& e, Activation activation, const float* wide, float* out, long rows, long width) {
    if (e.gated)
        activate(wide, out, rows, width, activation);
    else
        activate_alone(wide, out, rows, width, activation);
}

}  // namespace

bool Mixture::shared(const Experts& e, Activation activation, const float* x, long rows, long hidden, float* out) {
    float* wide = wide_.take<float>(rows * e.shared_wide());
    float* middle = middle_.take<float>(rows * e.shared_width);
    float* share = result_.take<float>(rows);
    if (!wide || !middle || !share) return false;
    linear(*e.shared_gate_up, x, rows, hidden, nullptr, wide, e.shared_wide());
    narrow(e, activation, wide, middle, rows, e.shared_width);
    linear(*e.shared_down, middle, rows, e.shared_width, nullptr, out, hidden);
    if (!e.shared_gate) return true;
    linear(*e.shared_gate, x, rows, hidden, nullptr, share, 1);
    parallel(rows, ROW_GRAIN, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            float factor = sigmoid(share[row]);
            for (long i = 0; i < hidden; i++) out[row * hidden + i] *= factor;
        }
    });
    return true;
}

bool Mixture::run(const Experts& e, Activation activation, const float* x, long rows, long hidden, float* out) {
    long pairs = rows * e.chosen;
    float* logits = logits_.take<float>(rows * e.count);
    float* weights = choices_.take<float>(2 * pairs);  // and as many numbers of experts
    int32_t* lists = lists_.take<int32_t>(pairs + e.count + 1);
    if (!logits || !weights || !lists) return false;
    int32_t* chosen = (int32_t*)(weights + pairs);
    linear(*e.router, x, rows, hidden, e.router_bias, logits, e.count);
    parallel(rows, even_grain(rows, 4), [&](long begin, long end) {
        Router router(e);
        for (long row = begin; row < end; row++)
            router.choose(logits + row * e.count, chosen + row * e.chosen, weights + row * e.chosen);
    });

    //   starts [count + 1]   where the pairs of an expert begin        listed [pairs]   row · chosen + choice
    int32_t *starts = lists, *listed = lists + e.count + 1;
    std::fill(starts, starts + e.count + 1, 0);
    for (long pair = 0; pair < pairs; pair++) starts[chosen[pair] + 1]++;
    long most = *std::max_element(starts, starts + e.count + 1);
    for (long i = 0; i < e.count; i++) starts[i + 1] += starts[i];
    for (long pair = pairs - 1; pair >= 0; pair--) listed[--starts[chosen[pair] + 1]] = (int32_t)pair;
    // Each start has moved by its expert's pairs: starts[i + 1] is where those of expert i begin.

    if (e.shared_gate_up) {
        if (!shared(e, activation, x, rows, hidden, out)) return false;
    } else {
        std::memset(out, 0, rows * hidden * sizeof(float));
    }
    float* taken = taken_.take<float>(most * hidden);
    float* wide = wide_.take<float>(most * e.wide());
    float* middle = middle_.take<float>(most * e.width);
    float* result = result_.take<float>(most * hidden);
    if (!taken || !wide || !middle || !result) return false;
    for (long expert = 0; expert < e.count; expert++) {
        const int32_t* own = listed + starts[expert + 1];
        long count = (expert + 1 < e.count ? starts[expert + 2] : pairs) - starts[expert + 1];
        if (!count) continue;
        parallel(count, ROW_GRAIN, [&](long begin, long end) {
            for (long i = begin; i < end; i++) {
                const float* from = x + own[i] / e.chosen * hidden;
                float factor = e.weigh_input ? weights[own[i]] : 1.0f;
                for (long d = 0; d < hidden; d++) taken[i * hidden + d] = from[d] * factor;
            }
        });
        const float* bias = e.gate_up_bias ? e.gate_up_bias + expert * e.wide() : nullptr;
        linear(*e.gate_up[expert], taken, count, hidden, bias, wide, e.wide());
        if (e.limit > 0)
            clamped(wide, middle, count, e.width, e.limit, e.alpha);
        else
            narrow(e, activation, wide, middle, count, e.width);
        bias = e.down_bias ? e.down_bias + expert * hidden : nullptr;
        linear(*e.down[expert], middle, count, e.width, bias, result, hidden);
        parallel(count, ROW_GRAIN, [&](long begin, long end) {
            for (long i = begin; i < end; i++) {
                float* to = out + own[i] / e.chosen * hidden;
                float factor = e.weigh_input ? 1.0f : weights[own[i]];
                for (long d = 0; d < hidden; d++) to[d] += result[i * hidden + d] * factor;
            }
        });
    }
    return true;
}

}  // namespace umbel

extern "C" {

// One mixture on its own, for tests. False: there is no memory.
int umbel_mixture(const umbel::Experts* experts, int activation, const float* x, long rows, long hidden, float* out) {
    return umbel::Mixture().run(*experts, (umbel::Activation)activation, x, rows, hidden, out);
}

}  // extern "C"
