#include "inputs.h"

#include "linear_float.h"

namespace umbel {

#if defined(UMBEL_AMX)

void TiledRows::put_row(long row, const float* x) const {
    for (long t = 0; t < k_tiles; t++) {
        bf16* to = line(row, t);
        const float* from = x + t * K;
        long width = k - t * K < K ? k - t * K : K, i = 0;
        for (; i + VL <= width; i += VL) store(to + i, load(from + i));
        for (; i < width; i++) to[i] = to_bf16(from[i]);
        for (; i < K; i++) to[i] = 0;
    }
}

void TiledRows::read_row(long row, float* x) const {
    for (long t = 0; t < k_tiles; t++) {
        const bf16* from = line(row, t);
        long width = k - t * K < K ? k - t * K : K;
        for (long i = 0; i < width; i++) x[t * K + i] = from_bf16(from[i]);
    }
}

#endif

bool Inputs::reset(const Matrix& weight, long rows) {
    rows_ = rows;
    k_ = weight.k;
#if defined(UMBEL_AMX)
    is_tiled_ = weight.plain() && by_tiles(*weight.plain());
    if (is_tiled_) {
        tiled_ = TiledRows(nullptr, rows, k_);
        tiled_.data = memory_.take<bf16>(tiled_.elements());
        return tiled_.data;
    }
#endif
    floats_ = memory_.take<float>(rows * k_);
    return floats_;
}

float* Inputs::begin_row(long row) {
#if defined(UMBEL_AMX)
    if (is_tiled_) {
        thread_local Buffer scratch;
        return scratch.take<float>(k_);
    }
#endif
    return floats_ + row * k_;
}

void Inputs::end_row(long row) {
#if defined(UMBEL_AMX)
    if (is_tiled_) tiled_.put_row(row, begin_row(row));
#else
    (void)row;
#endif
}

const float* Inputs::read_row(long row, Buffer& scratch) const {
#if defined(UMBEL_AMX)
    if (is_tiled_) {
        float* x = scratch.take<float>(k_);
        tiled_.read_row(row, x);
        return x;
    }
#else
    (void)scratch;
#endif
    return floats_ + row * k_;
}

void Inputs::multiply(const Matrix& weight, const float* bias, float* out, long out_stride) const {
#if defined(UMBEL_AMX)
    if (is_tiled_) return linear_tiled(*weight.plain(), tiled_, bias, out, out_stride);
#endif
    linear(weight, floats_, rows_, k_, bias, out, out_stride);
}

}  // namespace umbel
