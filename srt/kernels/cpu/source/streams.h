// Residual streams in parallel, of which a layer reads and updates one. See StreamsConfig in
// srt/models/decoder_config.py. Streams lie one after another: [count, rows, hidden].
#pragma once

#include "elementwise.h"
#include "linear.h"
#include "memory.h"

namespace umbel {

constexpr long MOST_STREAMS = 16;

struct Streams {
    long count, active;
    const Matrix* const* into;    // [count - 1] maps of an embedding to its further streams
    const Matrix* const* out_of;  // [count - 1] and back
};

struct LayerStreams {
    const float* router;   // [count, hidden], times the weight of its norm and 1 / hidden
    const float* predict;  // [count, count, count]
    const float* correct;  // [count, count]
    const float* scale;    // [hidden] of the stream by which per-layer embeddings are gated
    const Matrix *down, *up;     // of low rank, next to attention: hidden → rank → hidden
    long rank;
    const float* residual_norm;  // [hidden]
};

class ParallelStreams {
  public:
    // Makes the streams of the embeddings x[rows, hidden]. False: there is no memory.
    bool enter(const Streams& streams, const float* x, long rows, long hidden, float epsilon);

    // Streams as they are expected after a layer; x[rows, hidden] = the one that the layer reads.
    void predict(const LayerStreams& layer, float* x, long rows);

    // x = (x + norm(attended) + n + norm(map of low rank of n)) / √2 with n = rms_norm(x, before). `after`: the weight of
    // the norm of what attention gave, which is overwritten. False: there is no memory.
    bool join(const LayerStreams& layer, const float* before, float* attended, const float* after, float* x, long rows);

    // Adds to each stream its factor times what the layer changed, of the result x of the layer; then x = the active
    // stream · scale.
    void correct(const LayerStreams& layer, float* x, long rows);

    // Adds rms_norm(update, norm) to all streams but the first.
    void add(const float* update, const float* norm, long rows);

    // x = the mean of all streams, the further ones mapped back. False: there is no memory.
    bool leave(const Streams& streams, float* x, long rows);

    long count() const { return count_; }
    float* stream(long index) { return data_ + index * size_; }

  private:
    Buffer memory_, narrow_, wide_;
    float* data_ = nullptr;
    long count_ = 0, active_ = 0, hidden_ = 0;
    long size_ = 0;  // numbers of a stream
    float epsilon_ = 0;
};

}  // namespace umbel
