// A whole decoder step in one call: token ids in, normed hidden states of the rows asked for out. The families of
// srt/models/decoder_config.py differ by what is a null pointer here. Arithmetic is float32; what is rounded is what
// is stored: weights, and keys and values when the pool is bfloat16.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "experts.h"
#include "latent.h"
#include "linear.h"
#include "low_rank.h"
#include "recurrent.h"
#include "side.h"
#include "streams.h"

namespace umbel {

struct DecoderShape {
    long hidden, heads, layers;
    float epsilon, attention_scale, attention_softcap, embedding_scale, residual_scale;
    int activation;
    int whole_norm;       // HeadTurn::whole_norm of all layers
    int gated_mlp;        // the first map of a dense MLP gives gates, then what they multiply; else the latter alone
    int gated_attention;  // queries have gates next to them, [heads, 2, head_dim], that multiply what attention gives
    const void* embedding;  // [vocabulary, hidden] as a file stores it
    int embedding_format;   // Format
    long embedding_row_bytes;
    const float* final_norm;  // [hidden]
    const Side* side;         // or nullptr
    const Streams* streams;   // or nullptr: there is one residual
};

// A layer that has no attention and no recurrent state has no `qkv` and no `output`; one without MLP has neither
// `gate_up` nor `experts`.
struct DecoderLayer {
    long pool;                              // which keys and values of a step, or which recurrent states
    long kv_heads, own_kv_heads, head_dim;  // key heads that it reads, and that it computes: as many, or none
    long width;                             // of the dense MLP
    int sparse;        // gates of a row count from `deviations` standard deviations above their mean on
    float deviations;
    const Matrix *qkv, *output, *gate_up, *down;
    const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;      // or nullptr
    const float *before_attention, *after_attention, *before_mlp, *after_mlp;  // or nullptr
    const float *query_norm, *key_norm, *value_norm;                     // or nullptr
    const float* sinks;                                                  // as in AttentionShape
    const Latent* latent;    // its attention is latent; or nullptr
    const Recurrent* recurrent;  // instead of attention, between `qkv` and `output`; or nullptr
    const SideLayer* side;   // or nullptr
    const LayerStreams* streams;  // of a model with streams; or nullptr
    float scale;             // multiplies the residual after the layer
    const Experts* experts;  // instead of the dense MLP, whose fields are null then; or nullptr
    long rope, plan;  // which angles, which attention plan of a step
    long rotated;     // this and the following: as in HeadTurn
    int interleaved;
    float query_beta;
    long query_length, query_offset;
    LowRankChanges qkv_changes, output_changes, gate_up_changes, down_changes;  // or nullptr
};

struct DecoderStep {
    long rows, outputs;
    const int64_t* token_ids;    // [rows]
    const int64_t* positions;    // [rows]
    const int64_t* const* write_slots;  // by DecoderLayer::plan: [rows]
    const int64_t* output_rows;         // [outputs] ascending
    const AttentionPlan* const* plans;  // by DecoderLayer::plan
    const LayerPool* pools;             // by DecoderLayer::pool of layers that attend
    const LayerStates* states;          // by DecoderLayer::pool of recurrent layers
    StateRuns runs;                     // of the step's rows through recurrent states
    const float* const* angles;         // by DecoderLayer::rope: [positions, head_dim]
    float* hidden;                      // [outputs, hidden]
    long given;                         // rows whose embeddings come from elsewhere
    const int64_t* given_rows;          // [given]
    const float* given_values;          // [given, hidden]
    long added;                         // layers, the first ones, that add to those rows after all else
    const float* const* added_values;   // by layer: [given, hidden]
    AdapterGroups adapted;              // the rows that use adapters
    AdapterGroups adapted_outputs;      // the same among the output rows, counted by their place there
};

}  // namespace umbel
