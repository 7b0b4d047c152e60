// Latent attention between its first map and its output: what is cached of a token is a latent and one rotated key.
// See LatentConfig in srt/models/decoder_config.py.
#pragma once

#include "attention.h"
#include "linear.h"
#include "memory.h"

namespace umbel {

struct Latent {
    long query_rank, rank, plain, rotated, value_dim;
    int interleaved;                   // dimension 2i rotates with 2i + 1, else i with i + rotated / 2
    float epsilon;
    const Matrix* query;               // query latent → queries [heads, plain + rotated]; nullptr: the first map's
    const Matrix* const* into_latents; // [heads] plain numbers of a query → rank
    const Matrix* const* to_values;    // [heads] what attention gives → value_dim
    const float *query_norm, *norm;    // [query_rank] or nullptr, [rank]

    long query_dim() const { return plain + rotated; }
    long key_dim() const { return rank + rotated; }
    long first_width(long heads) const { return (query_rank ? query_rank : heads * query_dim()) + key_dim(); }
};

class LatentHeads {
  public:
    // From the first map [rows, first_width]: keys go to the pool; queries [rows, heads, rank + rotated] are returned,
    // valid until the next call. angles: [positions, rotated]. nullptr: there is no memory.
    const float* queries(const Latent& latent, long heads, const float* first, long rows, const int64_t* positions,
                         const int64_t* slots, const float* angles, const LayerPool& pool);

  private:
    Buffer narrow_, wide_, latents_, keys_, queries_;
};

// out[rows, heads, value_dim] from what attention gives, [rows, heads, rank].
void to_values(const Latent& latent, long heads, const float* attended, long rows, float* out);

}  // namespace umbel
