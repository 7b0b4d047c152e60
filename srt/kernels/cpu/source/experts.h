// Mixtures of experts: MLPs of which each row uses the few that a router chooses for it.
#pragma once

#include "elementwise.h"
#include "linear.h"
#include "memory.h"

namespace umbel {

struct Experts {
    long count, chosen, width;
    long groups, chosen_groups;  // experts lie in groups of equal size; a row chooses among those of its best groups
    int sigmoid;                 // scores are sigmoids of the router's logits, else their softmax
    int renormalise;             // the weights of a row's experts sum to one
    int weigh_input;             // weights multiply what goes into an expert, else what comes out
    int gated;                   // maps in give gates, then what they multiply; else the latter alone
    float scale;                 // multiplies the weights
    float limit, alpha;          // of a clamped gate, see experts.cpp; limit 0: the gate is that of dense MLPs
    const Matrix* router;
    const float *router_bias, *correction;     // [count] or nullptr; corrections count in the choice only
    const Matrix* const* gate_up;              // [count]
    const Matrix* const* down;                 // [count]
    const float *gate_up_bias, *down_bias;     // [count, wide()], [count, hidden], or nullptr
    const Matrix *shared_gate_up, *shared_down;  // an MLP that every row uses, or nullptr
    const Matrix* shared_gate;                 // a row's share of it is the sigmoid of this map; nullptr: all of it
    long shared_width;

    // Outputs of a map in, of an expert and of the MLP that every row uses.
    long wide() const { return (1 + gated) * width; }
    long shared_wide() const { return (1 + gated) * shared_width; }
};

// Computes mixtures, in memory of its own that only grows. Uses the whole team.
class Mixture {
  public:
    // out[rows, hidden] of x[rows, hidden]. A row gives the same bits alone and in a batch: its experts are added in
    // ascending order. False: there is no memory.
    bool run(const Experts& experts, Activation activation, const float* x, long rows, long hidden, float* out);

  private:
    bool shared(const Experts& experts, Activation activation, const float* x, long rows, long hidden, float* out);

    Buffer logits_, choices_, lists_, taken_, wide_, middle_, result_;
};

}  // namespace umbel
