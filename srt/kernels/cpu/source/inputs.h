// What linears read: rows of float32, or the same rows rounded to bfloat16 and laid out as AMX tiles, so that what
// computes a row (a norm, an activation) hands it over in the form in which it is read, while it is in the first cache.
#pragma once

#include "linear.h"
#include "memory.h"

namespace umbel {

#if defined(UMBEL_AMX)
// [tiles of 16 rows, tiles of 32 inputs, 16, 32]. Inputs past k are zeros; rows past the last mean nothing.
struct TiledRows {
    static constexpr long ROWS = 16, K = 32;

    bf16* data;
    long rows, k, k_tiles;

    TiledRows(bf16* data, long rows, long k) : data(data), rows(rows), k(k), k_tiles((k + K - 1) / K) {}
    long row_tiles() const { return (rows + ROWS - 1) / ROWS; }
    long elements() const { return row_tiles() * tile_elements(); }
    long tile_elements() const { return k_tiles * ROWS * K; }
    // Where inputs [32 · t, 32 · t + 32) of a row lie.
    bf16* line(long row, long t) const {
        return data + row / ROWS * tile_elements() + (t * ROWS + row % ROWS) * K;
    }
    void put_row(long row, const float* x) const;
    void read_row(long row, float* x) const;
};
#endif

class Inputs {
  public:
    // `rows` rows, still to be written, for linears by `weight`. False: there is no memory.
    bool reset(const Matrix& weight, long rows);

    // A row is written at what `begin_row` gives, and ready after `end_row`. Threads of the team may write different
    // rows at the same time.
    float* begin_row(long row);
    void end_row(long row);

    long width() const { return k_; }
    // The inputs of a row, as they are multiplied; in `scratch` where they do not lie in memory as floats.
    const float* read_row(long row, Buffer& scratch) const;

    // linear(weight, these rows). Uses the whole team.
    void multiply(const Matrix& weight, const float* bias, float* out, long out_stride) const;

#if defined(UMBEL_AMX)
    // nullptr: the rows are float32.
    const TiledRows* tiled() const { return is_tiled_ ? &tiled_ : nullptr; }
#endif

  private:
    Buffer memory_;
    float* floats_ = nullptr;
    long rows_ = 0, k_ = 0;
#if defined(UMBEL_AMX)
    bool is_tiled_ = false;
    TiledRows tiled_{nullptr, 0, 0};
#endif
};

}  // namespace umbel
