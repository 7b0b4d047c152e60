// Rounds weights to 4 bits: code - 8 in [-8, 7] times a float16 scale for each group of 32 inputs.
//
// The scale minimises the weighted squared error over a search: candidates put the largest weight of a group at -8 and a
// little to both sides of it, codes are rounded for each, and the scale that fits these codes best (least squares) is
// compared. Large weights count more: the weight of a square is x² + mean x².
#include <cmath>

#include "linear.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long GROUP = 32;
constexpr int VECTORS = GROUP / VL;
constexpr int CANDIDATES = 16;
constexpr float SHIFT = 12582912.0f;  // 1.5 · 2^23: the fraction is rounded away

UMBEL_INLINE vf rounded_codes(vf x) { return max(min((x + SHIFT) - SHIFT, splat(7.0f)), splat(-8.0f)); }

UMBEL_INLINE void load_group(const void* row, Source source, long at, float* group) {
    for (long i = 0; i < GROUP; i += VL) {
        switch (source) {
            case Source::F32: store(group + i, load((const float*)row + at + i)); break;
            case Source::BF16: store(group + i, load((const bf16*)row + at + i)); break;
            case Source::F16: store(group + i, load((const f16*)row + at + i)); break;
        }
    }
}

// The scale of a group with this largest weight, by magnitude, which is not 0. Every lane tries a candidate.
float best_scale(const float* group, float largest) {
    float mean = 0;
    for (long i = 0; i < GROUP; i++) mean += group[i] * group[i] / GROUP;
    float best = -1.0f, scale = 0.0f;
    for (int first = 0; first < CANDIDATES; first += VL) {
        vf inverses, products{}, norms{};
        for (int lane = 0; lane < VL; lane++) inverses[lane] = -(7.1f + 0.12f * (first + lane)) / largest;
        for (long i = 0; i < GROUP; i++) {
            float x = group[i], weight = x * x + mean;
            vf code = rounded_codes(inverses * x), weighed = code * weight;
            products += weighed * x;
            norms += weighed * code;
        }
        vf merits = products * products / norms;  // the error is Σ w x² less it; no number where all codes are 0
        for (int lane = 0; lane < VL; lane++) {
            if (!(merits[lane] > best)) continue;
            best = merits[lane];
            scale = products[lane] / norms[lane];
        }
    }
    return scale;
}

void quantise_group(const float* group, uint8_t* codes, f16* scale) {
    float largest = 0, total = 0;
    for (long i = 0; i < GROUP; i++) {
        if (std::fabs(group[i]) > std::fabs(largest)) largest = group[i];
        total += std::fabs(group[i]);
    }
    if (!std::isfinite(total)) {
        *scale = to_f16(std::nanf(""));  // the model's logits then say that its weights are no numbers
        std::memset(codes, 0x88, GROUP / 2);
        return;
    }
    *scale = to_f16(largest != 0 ? best_scale(group, largest) : 0.0f);
    float step = from_f16(*scale), inverse = step != 0 ? 1.0f / step : 0.0f;
    if (!std::isfinite(inverse)) inverse = 0;
    float numbers[GROUP];
    for (int v = 0; v < VECTORS; v++) store(numbers + v * VL, rounded_codes(load(group + v * VL) * inverse) + 8.0f);
    for (long i = 0; i < GROUP; i += 2) codes[i / 2] = (uint8_t)((int)numbers[i] | (int)numbers[i + 1] << 4);
}

}  // namespace
}  // namespace umbel

using namespace umbel;

// source [n, k], rows `row_stride` elements apart → codes [n, k / 2], the even input in the low half, and scales
// [n, k / 32]. k is a multiple of 32. Uses the whole team.
extern "C" void umbel_quantise_int4(const void* source, int kind, long n, long k, long row_stride, uint8_t* codes,
                                    f16* scales) {
    parallel(n, even_grain(n, 8), [&](long begin, long end) {
        float group[GROUP];
        for (long row = begin; row < end; row++) {
            const char* weights = (const char*)source + row * row_stride * source_bytes((Source)kind);
            for (long at = 0; at < k; at += GROUP) {
                load_group(weights, (Source)kind, at, group);
                quantise_group(group, codes + (row * k + at) / 2, scales + (row * k + at) / GROUP);
            }
        }
    });
}
