#include "latent.h"

#include <cstring>

#include "elementwise.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long ROW_GRAIN = 4;

// Rotates `size` numbers. Of interleaved ones those with even places come first then.
void turn(const float* x, bool interleaved, const float* angles, float* out, long size) {
    long half = size / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : half;
    for (long i = 0; i < half; i++) {
        float low = x[i * step], high = x[i * step + apart], cosine = angles[i], sine = angles[half + i];
        out[i] = low * cosine - high * sine;
        out[half + i] = high * cosine + low * sine;
    }
}

// out[rows, width] from columns [first, first + width) of x, normed.
void norm_columns(const float* x, long stride, long first, long rows, long width, const float* weight, float epsilon,
                  float* out) {
    parallel(rows, ROW_GRAIN, [&](long begin, long end) {
        for (long row = begin; row < end; row++)
            std::memcpy(out + row * width, x + row * stride + first, width * sizeof(float));
    });
    rms_norm(out, weight, out, rows, width, epsilon);
}

}  // namespace

const float* LatentHeads::queries(const Latent& l, long heads, const float* first, long rows, const int64_t* positions,
                                  const int64_t* slots, const float* angles, const LayerPool& pool) {
    long stride = l.first_width(heads), made = heads * l.query_dim(), width = heads * l.key_dim();
    float* narrow = narrow_.take<float>(rows * l.query_rank);
    float* wide = wide_.take<float>(l.query ? rows * made : 0);
    float* latents = latents_.take<float>(rows * l.rank);
    float* keys = keys_.take<float>(rows * l.key_dim());
    float* queries = queries_.take<float>(rows * width);
    if ((l.query && (!narrow || !wide)) || !latents || !keys || !queries) return nullptr;

    const float* from = first;
    long from_stride = stride;
    if (l.query) {
        norm_columns(first, stride, 0, rows, l.query_rank, l.query_norm, l.epsilon, narrow);
        linear(*l.query, narrow, rows, l.query_rank, nullptr, wide, made);
        from = wide;
        from_stride = made;
    }
    for (long head = 0; head < heads; head++)
        linear(*l.into_latents[head], from + head * l.query_dim(), rows, from_stride, nullptr,
               queries + head * l.key_dim(), width);
    norm_columns(first, stride, stride - l.key_dim(), rows, l.rank, l.norm, l.epsilon, latents);
    parallel(rows, ROW_GRAIN, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const float* turned = angles + positions[row] * l.rotated;
            for (long head = 0; head < heads; head++)
                turn(from + row * from_stride + head * l.query_dim() + l.plain, l.interleaved, turned,
                     queries + row * width + head * l.key_dim() + l.rank, l.rotated);
            float* key = keys + row * l.key_dim();
            std::memcpy(key, latents + row * l.rank, l.rank * sizeof(float));
            turn(first + (row + 1) * stride - l.rotated, l.interleaved, turned, key + l.rank, l.rotated);
        }
    });
    AttentionShape shape{heads, 1, l.key_dim(), l.rank, 1.0f, 0.0f, nullptr};
    store(shape, pool, keys, l.key_dim(), nullptr, 0, slots, rows);
    return queries;
}

void to_values(const Latent& l, long heads, const float* attended, long rows, float* out) {
    for (long head = 0; head < heads; head++)
        linear(*l.to_values[head], attended + head * l.rank, rows, heads * l.rank, nullptr, out + head * l.value_dim,
               heads * l.value_dim);
}

}  // namespace umbel
