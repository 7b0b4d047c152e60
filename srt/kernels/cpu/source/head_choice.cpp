#include "head_choice.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "noise.h"

namespace umbel {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// The k-th largest logit.
float kth_largest(std::vector<float>& logits, long k) {
    std::nth_element(logits.begin(), logits.begin() + (k - 1), logits.end(), std::greater<float>());
    return logits[k - 1];
}

// Draws among tokens: those that top_k and min_p leave, by their noise.
class Race {
  public:
    Race(const Choice& choice, float largest, float kth)
        : choice_(choice),
          largest_(largest),
          kth_(kth),
          floor_(choice.min_p > 0 ? std::log(choice.min_p) : -HUGE_VAL) {}

    void enter(int32_t token, float logit) {
        double scaled = logit * choice_.inverse_temperature;
        if (scaled + LARGEST_NOISE < score_ || logit < kth_) return;
        if (((double)logit - largest_) * choice_.inverse_temperature < floor_) return;
        double score = scaled + gumbel(token_hash(choice_.key, (uint32_t)token));
        if (score > score_ || (score == score_ && token < winner_.token)) {
            score_ = score;
            winner_ = {token, logit};
        }
    }
    Known winner() const { return winner_; }

  private:
    const Choice& choice_;
    float largest_, kth_;
    double floor_;
    double score_ = -HUGE_VAL;
    Known winner_{std::numeric_limits<int32_t>::max(), 0};
};

}  // namespace

Choice choice_of(const Picks& picks, long row) {
    Choice choice{};
    choice.kind = picks.kinds ? (Pick)picks.kinds[row] : Pick::BEST;
    if (choice.kind == Pick::SAMPLE) {
        choice.inverse_temperature = picks.inverse_temperatures[row];
        choice.key = picks.keys[row];
        choice.top_k = picks.top_k[row];
        choice.min_p = picks.min_p[row];
    }
    choice.mask = picks.masks ? picks.masks[row] : nullptr;
    return choice;
}

Known choose(const Choice& choice, std::vector<Known>& tokens) {
    Known best{-1, -INFINITE};
    for (const Known& known : tokens) {
        if (!(std::fabs(known.logit) < INFINITE)) return {-1, known.logit};
        if (best.token < 0 || known.logit > best.logit || (known.logit == best.logit && known.token < best.token))
            best = known;
    }
    if (choice.kind == Pick::BEST || best.token < 0) return best;
    float kth = -INFINITE;
    if (choice.top_k > 0 && choice.top_k < (long)tokens.size()) {
        std::vector<float> logits(tokens.size());
        std::transform(tokens.begin(), tokens.end(), logits.begin(), [](const Known& known) { return known.logit; });
        kth = kth_largest(logits, choice.top_k);
    }
    Race race(choice, best.logit, kth);
    race.enter(best.token, best.logit);
    for (const Known& known : tokens)
        if (known.token != best.token) race.enter(known.token, known.logit);
    return race.winner();
}

Known choose_from_all(const Choice& choice, const float* logits, long count) {
    Known best{-1, -INFINITE};
    float spread = 0;  // NaN when a logit is not finite
    for (long token = 0; token < count; token++) {
        spread += logits[token] * 0.0f;
        if (logits[token] > best.logit && choice.allows((int32_t)token)) best = {(int32_t)token, logits[token]};
    }
    if (!(spread == 0)) return {-1, std::numeric_limits<float>::quiet_NaN()};
    if (choice.kind == Pick::BEST || best.token < 0) return best;
    float kth = -INFINITE;
    if (choice.top_k > 0 && choice.top_k < count) {
        std::vector<float> allowed;
        for (long token = 0; token < count; token++)
            if (choice.allows((int32_t)token)) allowed.push_back(logits[token]);
        if (choice.top_k < (long)allowed.size()) kth = kth_largest(allowed, choice.top_k);
    }
    Race race(choice, best.logit, kth);
    race.enter(best.token, best.logit);
    for (long token = 0; token < count; token++)
        if (token != best.token && choice.allows((int32_t)token)) race.enter((int32_t)token, logits[token]);
    return race.winner();
}

}  // namespace umbel
