#include "head_screen.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "noise.h"
#include "threads.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace umbel {
namespace {

constexpr long CHUNK_PANELS = 64;  // so that a thread which lost its core delays a loop little
constexpr double UNIT = 0x1p-24;   // relative error of one float32 rounding

UMBEL_INLINE bool any(vi mask) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__SSE__)
    return _mm_movemask_ps((__m128)mask) != 0;
#else
    for (int i = 0; i < VL; i++)
        if (mask[i]) return true;
    return false;
#endif
}

// Not less than `gumbel` of the hashes: −log(−log(1 − p)) <= −log p, and the logarithm of a float is at least its
// exponent and fraction, read as one number. At most 0.06 more where the noise is large.
UMBEL_INLINE vf noise_above(vu hash) {
    constexpr float LN2 = 0.69314718f;
    vf half = __builtin_convertvector((vi)(hash >> 1), vf);
    vf log2 = __builtin_convertvector(float_to_bits(half), vf) * (1.0f / 8388608.0f);  // plus 127
    return splat(158.0f * LN2 + 1e-4f) - log2 * LN2;
}

// How far a float32 score of this size may lie from the true one: its own rounding, and that of the noise.
double score_margin(double score) { return (std::fabs(score) + 32) * 0x1p-20; }

// The weights of one output of a panel, from the front.
template <Format F>
void unpack(const Matrix& matrix, long panel, long output, float* weights) {
    if constexpr (F == Format::F32) {
        const float* data = (const float*)matrix.data + panel * matrix.k_padded * PANEL;
        for (long i = 0; i < matrix.k; i++) weights[i] = data[i * PANEL + output];
    } else {
        const bf16* data = (const bf16*)matrix.data + panel * matrix.k_padded * PANEL;
        for (long i = 0; i < matrix.k; i++) weights[i] = from_bf16(data[i / 2 * 2 * PANEL + output * 2 + i % 2]);
    }
}

struct Norms {
    double weights, stored, difference;  // squares: of w, of the stored bytes, of w − scale · stored
};

Norms norms_of(const Matrix& copy, long output, const float* weights) {
    const int8_t* bytes = (const int8_t*)copy.data + output / PANEL * copy.k_padded * PANEL + output % PANEL * 4;
    double scale = copy.scales[output];
    Norms norms{};
    for (long at = 0; at < copy.k; at++) {
        double stored = bytes[at / 4 * 4 * PANEL + at % 4], weight = weights[at], difference = weight - scale * stored;
        norms.weights += weight * weight;
        norms.stored += stored * stored;
        norms.difference += difference * difference;
    }
    return norms;
}

void store_larger(std::atomic<float>& most, float value) {
    float now = most.load(std::memory_order_relaxed);
    while (value > now && !most.compare_exchange_weak(now, value)) {
    }
}

// All rows of one tile against one panel: what can still be chosen goes to the shortlists.
UMBEL_INLINE void screen_tile(const Head& head, const ScreenedRow* rows, long count, long panel, const float* sums,
                              Shortlist* lists) {
    const float* scales = head.screen->scales + panel * PANEL;
    const float* radii = head.radii + panel * PANEL;
    for (long r = 0; r < count; r++) {
        const ScreenedRow& row = rows[r];
        Shortlist& list = lists[r];
        for (int o = 0; o < PANEL; o += VL) {
            vf scale = load(scales + o);
            vf estimate = load(sums + r * PANEL + o) * scale;
            vf bound = load(radii + o) * row.norm + scale * row.error;
            vf upper = estimate + bound, reached = upper;
            if (row.rule == Rule::NOISE) {
                vu tokens;
                for (int i = 0; i < VL; i++) tokens[i] = (uint32_t)(panel * PANEL + o + i);
                reached = upper * (float)row.inverse_temperature + noise_above(token_hash(row.key, tokens));
            }
            vi mask = reached >= list.reach;
            if (__builtin_expect(any(mask), 0)) {
                vf lower = estimate - bound;
                for (int i = 0; i < VL; i++)
                    if (mask[i]) list.add(row, {(int32_t)(panel * PANEL + o + i), upper[i], lower[i]});
            }
        }
    }
}

template <Format F>
bool fill(Head& head) {
    const Matrix& exact = *head.exact;
    Matrix& copy = *head.copy;
    double lost = (double)(exact.k + (exact.k + INT8_BLOCK - 1) / INT8_BLOCK + 24) * UNIT;
    std::atomic<float> ratio{0}, largest{0};
    std::atomic<bool> finite{true};
    parallel(exact.panels, even_grain(exact.panels, 16), [&](long begin, long end) {
        Buffer memory;
        float* weights = memory.take<float>(exact.k);
        for (long output = begin * PANEL; output < end * PANEL && output < exact.n; output++) {
            unpack<F>(exact, output / PANEL, output % PANEL, weights);
            pack_int8_output(copy, output, weights, false);
            Norms norms = norms_of(copy, output, weights);
            double norm = std::sqrt(norms.weights), difference = std::sqrt(norms.difference);
            if (!(norm < 1e30)) finite = false;
            head.radii[output] = rounded_up(difference + 1.02 * lost * (norm + difference)) + 1e-30f;
            store_larger(ratio, rounded_up(std::sqrt(norms.stored)));
            store_larger(largest, rounded_up(norm));
        }
    });
    head.norm_ratio = ratio;
    head.largest_norm = largest;
    return finite;
}

// An INT8 matrix is its own copy: what it estimates is the logit.
bool fill_from_int8(Head& head) {
    const Matrix& exact = *head.exact;
    for (long output = 0; output < exact.n; output++) {
        float norm = exact.scales[output] * 127.0f * std::sqrt((float)exact.k);
        if (!(norm < 1e30f)) return false;
        head.largest_norm = std::max(head.largest_norm, norm);
    }
    return true;
}

}  // namespace

float rounded_up(double value) { return (float)(value * (1 + 1e-6)); }

void Shortlist::add(const ScreenedRow& row, Candidate candidate) {
    if (overflowed) return;
    if (row.rule == Rule::NOISE) {
        double noise = gumbel(token_hash(row.key, (uint32_t)candidate.token));
        double upper = candidate.upper * row.inverse_temperature + noise;
        double lower = candidate.lower * row.inverse_temperature + noise;
        candidate.upper = (float)(upper + score_margin(upper));
        candidate.lower = (float)(lower - score_margin(lower));
    }
    if (candidate.upper < reach) return;
    if (count == CAPACITY) {
        tighten(row);
        if (count > CAPACITY / 4 * 3) {  // it would be full again at once
            overflowed = true;
            reach = std::numeric_limits<float>::infinity();
            return;
        }
    }
    candidates[count++] = candidate;
    switch (row.rule) {
        case Rule::LARGEST: reach = std::max(reach, row.slack > 0 ? candidate.lower - row.slack : candidate.lower); break;
        case Rule::NOISE: reach = std::max(reach, candidate.lower - (float)score_margin(candidate.lower)); break;
        case Rule::TOP: break;
    }
}

void Shortlist::tighten(const ScreenedRow& row) {
    if (row.rule == Rule::TOP && count >= row.top) {
        float lowers[CAPACITY];
        for (int i = 0; i < count; i++) lowers[i] = candidates[i].lower;
        std::nth_element(lowers, lowers + row.top - 1, lowers + count, std::greater<float>());
        reach = std::max(reach, lowers[row.top - 1]);
    }
    int kept = 0;
    for (int i = 0; i < count; i++)
        if (candidates[i].upper >= reach) candidates[kept++] = candidates[i];
    count = kept;
}

void screen_rows(const Head& head, const Int8Rows& x, const ScreenedRow* rows, Shortlist* lists) {
    const Matrix& screen = *head.screen;
    for (long i = 0; i < team_size() * x.rows; i++) {
        lists[i].clear();
        if (rows[i % x.rows].skipped) lists[i].reach = std::numeric_limits<float>::infinity();
    }
    long grain = even_grain(screen.panels, 8);
    parallel(screen.panels, grain < CHUNK_PANELS ? grain : CHUNK_PANELS, [&](long begin, long end) {
        Int8Products products(screen, x);
        Shortlist* own = lists + team_rank() * x.rows;
        for (long panel = begin; panel < end; panel++)
            for (long tile = 0; tile < x.tiles; tile++) {
                alignas(64) float sums[Int8Products::MOST_ROWS * PANEL];
                products.compute(tile, panel, tile == 0, sums);
                long first = x.first_row(tile), last = std::min(x.first_row(tile + 1), x.rows);
                screen_tile(head, rows + first, last - first, panel, sums, own + first);
            }
    });
}

float norm_above(const float* x, long count) {
    double square = 0;
    for (long i = 0; i < count; i++) square += (double)x[i] * x[i];
    return rounded_up(std::sqrt(square));
}

float input_error_above(const Int8Rows& x, long row) {
    double square = 0;
    for (long block = 0; block < x.blocks; block++) {
        double step = 0.51 * x.scales[row * x.blocks + block];  // a half, and the rounding of the quotient
        double inputs = std::min(INT8_BLOCK, x.k_padded - block * INT8_BLOCK);
        square += step * step * inputs;
    }
    return rounded_up(std::sqrt(square));
}

bool fill_screen(Head& head) {
    for (long output = head.exact->n; output < head.exact->panels * PANEL; output++)
        head.radii[output] = -std::numeric_limits<float>::infinity();  // padding is never chosen
    switch (head.exact->format) {
        case Format::F32: return fill<Format::F32>(head);
        case Format::BF16: return fill<Format::BF16>(head);
        case Format::INT8: return fill_from_int8(head);
    }
    return false;
}

}  // namespace umbel
