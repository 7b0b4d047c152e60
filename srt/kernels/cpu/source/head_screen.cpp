#include "head_screen.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <limits>

#include "noise.h"
#include "threads.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace umbel {
namespace {

constexpr long CHUNK_PANELS = 64;  // so that a thread which lost its core delays a loop little
constexpr long SAMPLE_STRIDE = 32; // panels
constexpr long SAMPLED_FROM = 512;  // panels: fewer tokens than shortlists hold need no sample
constexpr float LOWEST = std::numeric_limits<float>::lowest();  // padding, at minus infinity, is below it
constexpr double ROUNDING = 0x1p-24;     // relative error of one float32 rounding
constexpr float UNDERFLOW_NORM = 1e-16f;  // at most, of weights whose squares are no float32 numbers
alignas(64) constexpr float ONES[PANEL] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

#if defined(UMBEL_COARSE_ROWS)
constexpr long SUM_OFFSET = COARSE_OFFSET;
#else
constexpr long SUM_OFFSET = 0;
#endif

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

// Which of VL tokens from `token` on a mask allows.
UMBEL_INLINE vi allowed_lanes(const uint32_t* mask, long token) {
    vi bit{};
    for (int i = 0; i < VL; i++) bit[i] = 1 << i;
    return (bit & (int)(mask[token >> 5] >> (token & 31))) != 0;
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

// Input k of VL outputs from `output` on.
template <Format F>
UMBEL_INLINE vf weights_at(const MatrixPart& matrix, long panel, int output, long k) {
    const char* data = matrix.panel(panel);
    if constexpr (F == Format::F32) return load((const float*)data + k * PANEL + output);
    if constexpr (F == Format::F16) return load((const f16*)data + k * PANEL + output);
    vu lanes;
    if constexpr (F == Format::BF16) {
        std::memcpy(&lanes, data + (k / 2 * PANEL + output) * 4, sizeof lanes);
        return (vf)(k % 2 ? lanes & 0xffff0000u : lanes << 16);
    }
    std::memcpy(&lanes, data + (k / 4 * PANEL + output) * 4, sizeof lanes);
    vi byte = (vi)(lanes << (24 - 8 * (k % 4))) >> 24;
    return __builtin_convertvector(byte, vf) * load(matrix.scales + panel * PANEL + output);
}

struct Norms {  // of VL outputs
    vf weights, stored, difference;  // squares: of w, of the stored bytes, of w − scale · stored
    vi sum;                          // of the stored bytes
    bool finite;
};

// Stores VL outputs as bytes, as pack_int8 does, or reads what an INT8 matrix has stored.
template <Format F>
Norms screen_outputs(const MatrixPart& exact, MatrixPart* copy, long panel, int output) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 · 2^23: the fraction is rounded away, the integer is in the low bits
    float* scales = F == Format::INT8 ? exact.scales : copy->scales;
    vf scale;
    if constexpr (F == Format::INT8) {
        scale = load(scales + panel * PANEL + output);
    } else {
        vi most{};
        for (long k = 0; k < exact.k; k++) {
            vi bits = float_to_bits(weights_at<F>(exact, panel, output, k)) & 0x7fffffff;
            most = most > bits ? most : bits;
        }
        scale = bits_to_float(most) / 127.0f;
        store(scales + panel * PANEL + output, scale);
    }
    vi usable = scale >= splat(SMALLEST_SCALE);
    vf divisor = select(usable, scale, splat(1.0f));
    Norms norms{};
    for (long group = 0; group < exact.k; group += 4) {
        vi bytes{};
        for (long k = group; k < group + 4 && k < exact.k; k++) {
            vf weight = weights_at<F>(exact, panel, output, k);
            vi integer = (float_to_bits(weight / divisor + SHIFT) - 0x4b400000) & usable;
            vf stored = __builtin_convertvector(integer, vf), difference = weight - stored * scale;
            bytes |= (integer & 0xff) << (8 * (int)(k - group));
            norms.sum += integer;
            norms.weights += weight * weight;
            norms.stored += stored * stored;
            norms.difference += difference * difference;
        }
        if constexpr (F != Format::INT8) {
            char* out = (char*)copy->data + panel * copy->k_padded * PANEL;
            std::memcpy(out + group * PANEL + output * 4, &bytes, sizeof bytes);
        }
    }
    norms.finite = !any(~((scale <= splat(1e30f)) & (norms.weights <= splat(1e30f))));
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
    const float* scales = head.screen->scales ? head.screen->scales + panel * PANEL : ONES;  // blocks have theirs inside
    const float* radii = head.radii + panel * PANEL;
    for (long r = 0; r < count; r++) {
        const ScreenedRow& row = rows[r];
        Shortlist& list = lists[r];
        for (int o = 0; o < PANEL; o += VL) {
            vf scale = load(scales + o);
            vf estimate = load(sums + r * PANEL + o) * scale;
            vf bound = load(radii + o) * row.norm + min(scale * row.error, splat(row.largest_error));
            vf upper = estimate + bound, reached = upper;
            if (row.rule == Rule::NOISE) {
                vu tokens{};
                for (int i = 0; i < VL; i++) tokens[i] = (uint32_t)(panel * PANEL + o + i);
                reached = upper * (float)row.inverse_temperature + noise_above(token_hash(row.key, tokens));
            }
            vi mask = reached >= list.reach;
            if (row.mask) mask &= allowed_lanes(row.mask, panel * PANEL + o);
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
    const MatrixPart& exact = *head.exact;
    const double summed = 1 + (double)(exact.k + 8) * 2 * ROUNDING;  // what float32 sums of squares may lose
    const double lost = (double)(exact.k + (exact.k + INT8_BLOCK - 1) / INT8_BLOCK + 32) * ROUNDING;
    std::atomic<float> ratio{0}, stored_norm{0}, largest{0};
    std::atomic<bool> finite{true};
    parallel(exact.panels, even_grain(exact.panels, 16), [&](long begin, long end) {
        for (long panel = begin; panel < end; panel++)
            for (int o = 0; o < PANEL; o += VL) {
                Norms norms = screen_outputs<F>(exact, &head.copy, panel, o);
                if (!norms.finite) finite = false;
                for (int lane = 0; lane < VL; lane++) {
                    long output = panel * PANEL + o + lane;
                    if (output >= exact.n) break;
                    double norm = std::sqrt(norms.weights[lane]) * summed;
                    double stored = std::sqrt(norms.stored[lane]) * summed;
                    double difference = std::sqrt(norms.difference[lane]) * summed + 4 * ROUNDING * norm;
                    head.radii[output] = rounded_up(difference + 1.02 * lost * (norm + difference)) + UNDERFLOW_NORM;
                    head.offsets[output] = (int32_t)(norms.sum[lane] * SUM_OFFSET);
                    store_larger(ratio, rounded_up(stored));
                    store_larger(stored_norm, rounded_up(stored * head.screen->scales[output]));
                    store_larger(largest, rounded_up(norm));
                }
            }
    });
    head.norm_ratio = ratio;
    head.largest_stored = stored_norm;
    head.largest_norm = largest;
    return finite;
}

#if defined(UMBEL_COARSE_ROWS)

bool fill_blocks(Head& head) {
    const MatrixPart& exact = *head.exact;
    std::atomic<float> largest{0};
    parallel(exact.panels, even_grain(exact.panels, 16), [&](long begin, long end) {
        for (long panel = begin; panel < end; panel++) {
            alignas(64) float norms[PANEL];
            measure_blocks(exact, panel, norms, head.block_offsets + panel * PANEL);
            for (long o = 0; o < PANEL && panel * PANEL + o < exact.n; o++) {
                head.radii[panel * PANEL + o] = norms[o] + UNDERFLOW_NORM;
                store_larger(largest, norms[o] <= 1e30f ? norms[o] : std::numeric_limits<float>::infinity());
            }
        }
    });
    head.largest_norm = largest;
    return std::isfinite(head.largest_norm);
}

#endif

// The shortlists get what can be chosen of every `stride`-th panel. `products` makes what computes a tile of rows times
// a panel, for one chunk of the loop.
template <class Rows, class MakeProducts>
void visit(const Head& head, const Rows& x, const ScreenedRow* rows, Shortlist* lists, long stride,
           MakeProducts&& products) {
    long visits = (head.screen->panels + stride - 1) / stride, grain = even_grain(visits, 8);
    parallel(visits, grain < CHUNK_PANELS ? grain : CHUNK_PANELS, [&](long begin, long end) {
        auto kernel = products();
        Shortlist* own = lists + team_rank() * x.rows;
        for (long visit = begin; visit < end; visit++)
            for (long tile = 0; tile < x.tiles; tile++) {
                alignas(64) float sums[Int8Products::MOST_ROWS * PANEL];
                long panel = visit * stride;
                kernel.compute(tile, panel, tile, x.tiles, sums);
                long first = x.first_row(tile), last = std::min(x.first_row(tile + 1), x.rows);
                screen_tile(head, rows + first, last - first, panel, sums, own + first);
            }
    });
}

// What a sample has shown to be out of reach is so for every thread, and the lists are empty again.
void share_reach(const ScreenedRow* rows, long count, Shortlist* lists) {
    for (long row = 0; row < count; row++) {
        if (rows[row].skipped) continue;
        float reach = LOWEST;
        for (long thread = 0; thread < team_size(); thread++) {
            Shortlist& list = lists[thread * count + row];
            if (list.overflowed) continue;
            list.tighten(rows[row]);
            reach = std::max(reach, list.reach);
        }
        for (long thread = 0; thread < team_size(); thread++) lists[thread * count + row].clear(reach);
    }
}

// A sample goes first: vocabularies have thousands of tokens that nobody uses and that are all alike. Whoever meets
// them before anything better would have to keep them.
template <class Rows, class MakeProducts>
void screen(const Head& head, const Rows& x, const ScreenedRow* rows, Shortlist* lists, MakeProducts&& products) {
    for (long i = 0; i < team_size() * x.rows; i++)
        lists[i].clear(rows[i % x.rows].skipped ? std::numeric_limits<float>::infinity() : LOWEST);
    if (head.screen->panels >= SAMPLED_FROM) {
        visit(head, x, rows, lists, SAMPLE_STRIDE, products);
        share_reach(rows, x.rows, lists);
    }
    visit(head, x, rows, lists, 1, products);
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
        case Rule::LARGEST: reach = std::max(reach, candidate.lower - row.slack); break;
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
    screen(head, x, rows, lists, [&] { return Int8Products(*head.screen, x); });
}

#if defined(UMBEL_COARSE_ROWS)
void screen_rows(const Head& head, const CoarseRows& x, const ScreenedRow* rows, Shortlist* lists) {
    CoarseOffsets offsets{head.offsets, head.block_offsets};
    screen(head, x, rows, lists, [&] { return CoarseProducts(*head.screen, x, offsets); });
}

float block_error_above(const Head& head, const CoarseRows& x, const BlockInputs& exact, long row, float norm) {
    const MatrixPart& weight = *head.exact;
    double square = 0;
    for (long block = 0; block < weight.k / 32; block++) {
        double step = 0.51 * exact.of(weight.format).scale(row, block);
        square += step * step * 32;
    }
    double lost = (double)(weight.k / 32 + 8) * ROUNDING * 1.02 * norm;  // by the sums of the logit
    return rounded_up(x.errors[row] + std::sqrt(square) + lost + lost_by_blocks(weight, x, row));
}
#endif

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
        case Format::F16: return fill<Format::F16>(head);
        case Format::INT8: return fill<Format::INT8>(head);
#if defined(UMBEL_COARSE_ROWS)
        case Format::Q8_0: return fill_blocks(head);
#endif
        default: return false;
    }
    return false;
}

}  // namespace umbel
