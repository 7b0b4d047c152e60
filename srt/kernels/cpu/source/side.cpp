#include "side.h"

#include <cstring>

#include "activations.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long ROW_GRAIN = 4;
constexpr float HALF_ROOT = 0.70710678f;  // of the sum of two parts

// x[i] = activation(x[i]) · factor[i]
void activate_times(Activation activation, float* x, const float* factor, long size) {
    with_activation(activation, [&](auto function) {
        long i = 0;
        for (; i + VL <= size; i += VL) store(x + i, function(load(x + i)) * load(factor + i));
        for (; i < size; i++) x[i] = function(splat(x[i]))[0] * factor[i];
    });
}

}  // namespace

bool SideEmbeddings::make(const Side& side, const int64_t* tokens, const float* x, long rows, long hidden,
                          float epsilon) {
    width_ = side.width;
    layers_ = side.layers;
    long total = width();
    values_ = embedded_.take<float>(rows * total);
    float* mapped = mapped_.take<float>(rows * total);
    int64_t* known = known_.take<int64_t>(rows);
    if (!values_ || !mapped || !known) return false;
    for (long row = 0; row < rows; row++) known[row] = tokens[row] < side.vocabulary ? tokens[row] : 0;
    embed(side.embedding, (Format)side.embedding_format, side.embedding_row_bytes, known, side.embedding_scale, values_,
          rows, total);
    linear(*side.map, x, rows, hidden, nullptr, mapped, total);
    parallel(rows, ROW_GRAIN, [&](long begin, long end) {
        for (long i = begin * total; i < end * total; i++) mapped[i] *= side.map_scale;
    });
    rms_norm(mapped, side.norm, mapped, rows * layers_, width_, epsilon);
    parallel(rows, ROW_GRAIN, [&](long begin, long end) {
        for (long i = begin * total; i < end * total; i++) values_[i] = (values_[i] + mapped[i]) * HALF_ROOT;
    });
    return true;
}

bool SideEmbeddings::apply(const SideLayer& layer, long index, Activation activation, const float* x, long rows,
                           long hidden, float* update) {
    float* narrow = narrow_.take<float>(rows * width_);
    if (!narrow) return false;
    linear(*layer.gate, x, rows, hidden, nullptr, narrow, width_);
    parallel(rows, ROW_GRAIN, [&](long begin, long end) {
        for (long row = begin; row < end; row++)
            activate_times(activation, narrow + row * width_, values_ + row * width() + index * width_, width_);
    });
    linear(*layer.output, narrow, rows, width_, nullptr, update, hidden);
    return true;
}

}  // namespace umbel
