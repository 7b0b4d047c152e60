#include "streams.h"

#include <cmath>
#include <cstring>

#include "threads.h"

namespace umbel {
namespace {

constexpr long NUMBERS = 1 << 14;  // of a chunk at least
constexpr float HALF_ROOT = 0.70710678f;
constexpr float LEAST_SQUARE = 1e-5f;  // of a stream's numbers in the mean, below which it is not made longer

long row_grain(long rows, long hidden) { return even_grain(rows, 4, 1 + NUMBERS / hidden); }

float dot(const float* a, const float* b, long size) {
    vf total[4] = {};
    long i = 0;
    for (; i + 4 * VL <= size; i += 4 * VL)
        for (int j = 0; j < 4; j++) total[j] += load(a + i + j * VL) * load(b + i + j * VL);
    float rest = sum((total[0] + total[1]) + (total[2] + total[3]));
    for (; i < size; i++) rest += a[i] * b[i];
    return rest;
}

// weights[i] = tanh(the norm of x times a row of the router)
void route(const LayerStreams& layer, const float* x, long count, long hidden, float epsilon, float* weights) {
    float factor = inverse_rms(x, hidden, epsilon);
    for (long i = 0; i < count; i++) weights[i] = std::tanh(dot(x, layer.router + i * hidden, hidden) * factor);
}

// to = from, as long as `wanted`, the mean square of another row.
void put_as_long(const float* from, float wanted, float* to, long size) {
    float own = dot(from, from, size) / (float)size;
    float factor = std::sqrt(wanted) / std::sqrt(own > LEAST_SQUARE ? own : LEAST_SQUARE);
    long i = 0;
    for (; i + VL <= size; i += VL) store(to + i, load(from + i) * factor);
    for (; i < size; i++) to[i] = from[i] * factor;
}

}  // namespace

bool ParallelStreams::enter(const Streams& streams, const float* x, long rows, long hidden, float epsilon) {
    count_ = streams.count, active_ = streams.active, hidden_ = hidden, epsilon_ = epsilon;
    size_ = rows * hidden;
    data_ = memory_.take<float>(count_ * size_);
    if (!data_) return false;
    std::memcpy(data_, x, size_ * sizeof(float));
    for (long index = 1; index < count_; index++) {
        float* to = stream(index);
        linear(*streams.into[index - 1], x, rows, hidden, nullptr, to, hidden);
        parallel(rows, row_grain(rows, hidden), [&](long begin, long end) {
            for (long at = begin * hidden; at < end * hidden; at += hidden)
                put_as_long(to + at, dot(x + at, x + at, hidden) / (float)hidden, to + at, hidden);
        });
    }
    return true;
}

void ParallelStreams::predict(const LayerStreams& layer, float* x, long rows) {
    long count = count_, hidden = hidden_;
    parallel(rows, row_grain(rows, count * hidden), [&](long begin, long end) {
        float weights[MOST_STREAMS], mixed[MOST_STREAMS][MOST_STREAMS];
        for (long row = begin; row < end; row++) {
            float* first = data_ + row * hidden;
            route(layer, first + active_ * size_, count, hidden, epsilon_, weights);
            for (long i = 0; i < count; i++)
                for (long j = 0; j < count; j++) {
                    const float* from = layer.predict + (i * count + j) * count;
                    float total = 0;
                    for (long k = 0; k < count; k++) total += from[k] * weights[k];
                    mixed[i][j] = total;
                }
            vf before[MOST_STREAMS];
            long at = 0;
            for (; at + VL <= hidden; at += VL) {
                for (long j = 0; j < count; j++) before[j] = load(first + j * size_ + at);
                for (long i = 0; i < count; i++) {
                    vf total = before[0] * mixed[i][0];
                    for (long j = 1; j < count; j++) total += before[j] * mixed[i][j];
                    store(first + i * size_ + at, before[i] + total);
                }
            }
            for (; at < hidden; at++) {
                for (long j = 0; j < count; j++) before[j][0] = first[j * size_ + at];
                for (long i = 0; i < count; i++) {
                    float total = before[0][0] * mixed[i][0];
                    for (long j = 1; j < count; j++) total += before[j][0] * mixed[i][j];
                    first[i * size_ + at] = before[i][0] + total;
                }
            }
            std::memcpy(x + row * hidden, first + active_ * size_, hidden * sizeof(float));
        }
    });
}

bool ParallelStreams::join(const LayerStreams& layer, const float* before, float* attended, const float* after, float* x,
                           long rows) {
    long hidden = hidden_;
    float* normed = wide_.take<float>(2 * rows * hidden);
    float* narrow = narrow_.take<float>(rows * layer.rank);
    if (!normed || !narrow) return false;
    float* mapped = normed + rows * hidden;
    rms_norm(x, before, normed, rows, hidden, epsilon_);
    linear(*layer.down, normed, rows, hidden, nullptr, narrow, layer.rank);
    linear(*layer.up, narrow, rows, layer.rank, nullptr, mapped, hidden);
    add_and_norm(x, attended, after, 1.0f, nullptr, attended, rows, hidden, epsilon_);
    add_and_norm(normed, mapped, layer.residual_norm, 1.0f, nullptr, mapped, rows, hidden, epsilon_);
    parallel(rows, row_grain(rows, hidden), [&](long begin, long end) {
        for (long i = begin * hidden; i < end * hidden; i++) x[i] = (x[i] + normed[i]) * HALF_ROOT;
    });
    return true;
}

void ParallelStreams::correct(const LayerStreams& layer, float* x, long rows) {
    long count = count_, hidden = hidden_;
    parallel(rows, row_grain(rows, count * hidden), [&](long begin, long end) {
        float weights[MOST_STREAMS], factors[MOST_STREAMS];
        for (long row = begin; row < end; row++) {
            float *first = data_ + row * hidden, *own = x + row * hidden, *active = first + active_ * size_;
            route(layer, own, count, hidden, epsilon_, weights);
            for (long i = 0; i < count; i++) {
                float total = 1.0f;
                for (long k = 0; k < count; k++) total += layer.correct[i * count + k] * weights[k];
                factors[i] = total;
            }
            for (long at = 0; at < hidden; at++) own[at] -= active[at];
            for (long i = 0; i < count; i++) {
                float *to = first + i * size_, factor = factors[i];
                for (long at = 0; at < hidden; at++) to[at] += own[at] * factor;
            }
            for (long at = 0; at < hidden; at++) own[at] = active[at] * layer.scale[at];
        }
    });
}

void ParallelStreams::add(const float* update, const float* norm, long rows) {
    long hidden = hidden_;
    parallel(rows, row_grain(rows, count_ * hidden), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const float* from = update + row * hidden;
            float factor = inverse_rms(from, hidden, epsilon_);
            for (long i = 1; i < count_; i++) {
                float* to = stream(i) + row * hidden;
                for (long at = 0; at < hidden; at++) to[at] += from[at] * factor * norm[at];
            }
        }
    });
}

bool ParallelStreams::leave(const Streams& streams, float* x, long rows) {
    long hidden = hidden_;
    float* mapped = wide_.take<float>(rows * hidden);
    if (!mapped) return false;
    std::memcpy(x, data_, rows * hidden * sizeof(float));
    for (long index = 1; index < count_; index++) {
        linear(*streams.out_of[index - 1], stream(index), rows, hidden, nullptr, mapped, hidden);
        parallel(rows, row_grain(rows, hidden), [&](long begin, long end) {
            for (long row = begin; row < end; row++) {
                const float* first = data_ + row * hidden;
                float *from = mapped + row * hidden, *to = x + row * hidden;
                put_as_long(from, dot(first, first, hidden) / (float)hidden, from, hidden);
                for (long at = 0; at < hidden; at++) to[at] += from[at];
            }
        });
    }
    float share = 1.0f / (float)count_;
    for (long i = 0; i < rows * hidden; i++) x[i] *= share;
    return true;
}

}  // namespace umbel
