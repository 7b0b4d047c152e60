// What lies between the matrix products of a decoder: norms, residual sums, activations, the turn of queries and keys.
// Everything is float32; rows are spread over the team.
#pragma once

#include "inputs.h"

namespace umbel {

enum class Activation : int { SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3, RELU_SQUARED = 4 };

// out[r] = x[r] / rms(x[r]) · weight; x[r] as it is where there is no weight.
void rms_norm(const float* x, const float* weight, float* out, long rows, long size, float epsilon);

void rms_norm(const float* x, const float* weight, Inputs& out, long rows, long size, float epsilon);

// x[r] += scale · (after ? rms_norm(update[r], after) : update[r]); then normed[r] = next ? rms_norm(x[r], next) : x[r].
// The residual sum and both norms around it in one pass over a row.
void add_and_norm(float* x, const float* update, const float* after, float scale, const float* next, float* normed,
                  long rows, long size, float epsilon);
void add_and_norm(float* x, const float* update, const float* after, float scale, const float* next, Inputs& normed,
                  long rows, long size, float epsilon);

// out[r, i] = activation(gate_up[r, i]) · gate_up[r, size + i]
void activate(const float* gate_up, float* out, long rows, long size, Activation activation);
void activate(const float* gate_up, Inputs& out, long rows, long size, Activation activation);

// x[r, i] = what it is above mean + deviations · standard deviation of x[r, 0:size], or 0. Rows are `stride` apart.
void keep_highest(float* x, long rows, long size, long stride, float deviations);

// out[i] = activation(x[i]); x and out may be the same. Runs on the calling thread.
void activate_values(Activation activation, const float* x, float* out, long size);

// out[r, i] = activation(x[r, i])
void activate_alone(const float* x, float* out, long rows, long size, Activation activation);
void activate_alone(const float* x, Inputs& out, long rows, long size, Activation activation);

// x[r, i] *= sigmoid(gates[r, i])
void multiply_by_sigmoid(const float* gates, float* x, long rows, long size);

// 1 / sqrt(mean of x² + epsilon)
float inverse_rms(const float* x, long size, float epsilon);

// What happens to the product [rows, heads + 2 kv_heads, head_dim] of queries, keys and values before attention.
struct HeadTurn {
    long heads, kv_heads, head_dim;
    const float* query_norm;  // [head_dim], or nullptr: queries are not normalised
    const float* key_norm;
    const float* value_norm;
    int whole_norm;  // all queries of a row are normalised as one, and all its keys: [heads · head_dim], [kv_heads · ...]
    float epsilon;
    const float* angles;  // [positions, head_dim]: head_dim/2 cosines, then as many sines
    long rotated;         // dimensions of a head that turn, its first ones
    int interleaved;      // dimension 2i turns with 2i + 1; else i with i + rotated/2
    float query_beta;     // queries are multiplied by 1 + beta · log(1 + (position + offset) / length), rounded down
    long query_length, query_offset;
};

// Queries in place; keys and values go to their slots. `keys` and `values` are [slots, kv_heads, head_dim].
void turn_and_store(const HeadTurn& turn, float* qkv, const int64_t* positions, const int64_t* slots, long rows,
                    void* keys, void* values, bool pool_is_bf16);

// out[r] = embedding[tokens[r]] · scale, of a matrix as a file stores it, in any format of GGUF files
void embed(const void* embedding, Format format, long row_bytes, const int64_t* tokens, float scale, float* out,
           long rows, long size);

}  // namespace umbel
