// Per-layer embeddings: what each layer adds of an embedding of its own. See SideConfig in srt/models/decoder_config.py.
#pragma once

#include "elementwise.h"
#include "linear.h"
#include "memory.h"

namespace umbel {

struct Side {
    long width, layers;
    long vocabulary;        // tokens from it on have the embedding of token 0
    const void* embedding;  // [vocabulary, layers, width] as a file stores it
    int embedding_format;   // Format
    long embedding_row_bytes;
    float embedding_scale, map_scale;
    const Matrix* map;  // hidden → layers · width
    const float* norm;  // [width]
};

struct SideLayer {
    const Matrix *gate, *output;  // hidden → width → hidden
    const float* norm;            // [hidden]
};

class SideEmbeddings {
  public:
    // Side embeddings [rows, layers, width] of tokens whose embeddings are x[rows, hidden]. False: there is no memory.
    bool make(const Side& side, const int64_t* tokens, const float* x, long rows, long hidden, float epsilon);

    // update[rows, hidden] = what a layer makes of its side embeddings, before its norm.
    bool apply(const SideLayer& layer, long index, Activation activation, const float* x, long rows, long hidden,
               float* update);

    float* rows() { return values_; }
    long width() const { return layers_ * width_; }

  private:
    Buffer embedded_, mapped_, narrow_, known_;
    float* values_ = nullptr;
    long width_ = 0, layers_ = 0;
};

}  // namespace umbel
