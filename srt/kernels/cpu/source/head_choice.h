// A choice among tokens whose logits are known.
#pragma once

#include <vector>

#include "head.h"

namespace umbel {

// What one row is asked for.
struct Choice {
    Pick kind;
    double inverse_temperature;
    uint64_t key;
    long top_k;    // 0: all
    double min_p;  // 0: none
    const uint32_t* mask;  // of the tokens that may be chosen, the only ones that top_k and min_p see; nullptr: all

    bool allows(int32_t token) const { return !mask || mask[token >> 5] >> (token & 31) & 1; }
};

Choice choice_of(const Picks& picks, long row);

struct Known {
    int32_t token;  // −1: a logit was not finite
    float logit;
};

// The chosen one of `tokens`, which the mask allows, in any order: among them is every token that can be chosen.
Known choose(const Choice& choice, std::vector<Known>& tokens);

// The chosen one of all logits.
Known choose_from_all(const Choice& choice, const float* logits, long count);

}  // namespace umbel
