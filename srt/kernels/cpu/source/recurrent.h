// Layers with a recurrent state, between their first map and their output map: short convolutions, gated delta nets and
// Mamba 2. See srt/models/recurrent_config.py. States are float32. A sequence gives the same bits alone and in a batch,
// with one thread and with many, and however it is cut into steps: tokens enter a memory one by one.
#pragma once

#include "elementwise.h"
#include "memory.h"

namespace umbel {

enum class RecurrentKind : int { SHORT_CONVOLUTION = 0, DELTA_NET = 1, MAMBA = 2 };

// Columns [column, column + count) of the first map are `count` channels of the convolution from `channel` on.
struct ChannelColumns {
    int64_t column, channel, count;
};

struct Recurrent {
    int kind;                   // RecurrentKind
    long first_width, width;    // outputs of the first map, inputs of the output map
    long channels, kernel;      // of the convolution, which sees a token and the kernel − 1 before it
    const float* taps;          // [kernel, channels], that of the token itself last
    const float* bias;          // [channels] or nullptr
    const ChannelColumns* columns;
    long column_count;
    // Short convolutions have no more: their first map gives factors before, factors after, and values.
    int activation;             // of what the convolution gives
    long heads, groups;         // heads share queries and keys in groups,
    int tiled;                  // every `groups`-th one; else consecutive ones
    long key_dim, value_dim;    // of a head's memory, [key_dim, value_dim]
    long queries, keys, values; // the channels where they begin
    const int64_t* gates;       // [heads] this and the following: columns of the first map
    const int64_t* steps;       // [heads]
    const int64_t* strengths;   // [heads] of a delta net
    const float* step_bias;     // [heads]
    const float* decay;         // [heads] a memory decays by exp(decay · step)
    const float* through;       // [heads] Mamba: the share of the values in the output
    float least_step, most_step;
    const float* norm;          // of a delta net [value_dim], of Mamba [width]
};

// The states of one layer in the pool: [slots, kernel − 1, channels], and [slots, heads, key_dim, value_dim] or nullptr.
struct LayerStates {
    float *window, *memory;
};

// Rows of a step through states: run i takes rows [first[i], first[i] + rows[i]) from the state in slot source[i] to
// that in target[i]. Runs of a group take effect in their order; groups do not touch what others write.
struct StateRuns {
    long groups;
    const int64_t* starts;  // [groups + 1] runs of a group
    const int64_t *first, *rows, *source, *target;
};

class RecurrentScan {
  public:
    // out[rows, width] of the first map's outputs [rows, first_width], which are overwritten. Uses the whole team.
    // False: there is no memory.
    bool run(const Recurrent& layer, const StateRuns& runs, const LayerStates& states, float* first, long rows,
             float epsilon, float* out);

  private:
    Buffer mixed_;   // [rows, channels] what the convolution gave
    Buffer rates_;   // [rows, heads] what is left of a memory, and how much is added to it
    Buffer panels_;  // a part of a memory for each thread
};

}  // namespace umbel
