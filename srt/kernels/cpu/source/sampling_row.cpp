#include "sampling_row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace umbel::sampling {
namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr long VECTORS = BLOCK / VL;

// Bit i: lane i of the mask is set.
UMBEL_INLINE uint32_t lanes(vi mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    uint32_t bits = 0;
    for (int i = 0; i < VL; i++) bits |= (uint32_t)(mask[i] & 1) << i;
    return bits;
#endif
}

UMBEL_INLINE vi lane_numbers() {
    vi v{};
    for (int i = 0; i < VL; i++) v[i] = i;
    return v;
}

// The maximum of a block; NaN if one is in it.
UMBEL_INLINE float block_maximum(const float* x) {
    vf a = load(x), b = load(x + VL);
    vi nan = (a != a) | (b != b);
    for (long v = 2; v < VECTORS; v += 2) {
        vf next = load(x + v * VL), after = load(x + (v + 1) * VL);
        nan |= (next != next) | (after != after);
        a = next > a ? next : a;
        b = after > b ? after : b;
    }
    a = a > b ? a : b;
    return lanes(nan) ? std::numeric_limits<float>::quiet_NaN() : max_of(a);
}

UMBEL_INLINE float block_mass(const float* x, float largest, float inverse_temperature) {
    vf total{};
    for (long v = 0; v < VECTORS; v++) total += exp((load(x + v * VL) - largest) * inverse_temperature);
    return sum(total);
}

// largest_hash in steps of 1/16, so that a block costs no exponentials.
class HashLimits {
  public:
    HashLimits() {
        for (int i = 0; i < COUNT; i++) limits_[i] = largest_hash(LOWEST + i / 16.0);
    }
    // Noise of at least `noise` has a hash of at most this. noise <= LARGEST_NOISE.
    uint32_t operator()(double noise) const {
        double step = (noise - LOWEST) * 16.0;
        return step > 0 ? limits_[std::min((int)step, COUNT - 1)] : 0xffffffffu;
    }

  private:
    static constexpr double LOWEST = -3.25;
    static constexpr int COUNT = 420;  // up to 22.9
    uint32_t limits_[COUNT];
};

const HashLimits hash_limits;

bool better(const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

std::vector<Candidate>& scratch_candidates() {
    static thread_local std::vector<Candidate> candidates;
    candidates.clear();
    return candidates;
}

double weight(float logit, float best, double inverse_temperature) {
    return std::exp(((double)logit - best) * inverse_temperature);
}

// Candidates from the best one down until their weight reaches `wanted`: the logit of the last of them.
bool end_of_mass(std::vector<Candidate>& candidates, float best, double inverse_temperature, double wanted,
                 float& end) {
    std::sort(candidates.begin(), candidates.end(), better);
    double mass = 0;
    for (const Candidate& candidate : candidates) {
        mass += weight(candidate.logit, best, inverse_temperature);
        if (mass >= wanted) {
            end = candidate.logit;
            return true;
        }
    }
    return false;
}

// Bins of equal width over 40 units of scaled logits: what lies below the best by more has no weight.
constexpr int BINS = 4096;
constexpr float BINS_PER_UNIT = BINS / 40.0f;

UMBEL_INLINE vf scaled_below(const float* x, float best, float inverse_temperature) {
    return (load(x) - best) * inverse_temperature;
}
UMBEL_INLINE vi bin_of(vf scaled) {
    vf steps = min(scaled * -BINS_PER_UNIT, splat((float)BINS));
    return __builtin_convertvector(steps, vi);
}

}  // namespace

bool Row::ruled_out(long index) const {
    if (!mask_) return false;
    long first = index * (BLOCK / 32), words = (vocab_ + 31) / 32;
    for (long word = first; word < std::min(first + BLOCK / 32, words); word++)
        if (mask_[word]) return false;
    return true;
}

const float* Row::block(long index, float* scratch) const {
    const float* x = logits_ + index * BLOCK;
    long there = std::min(BLOCK, vocab_ - index * BLOCK);
    if (!mask_ && there == BLOCK) return x;
    std::fill(scratch, scratch + BLOCK, NEVER);
    if (!mask_) {
        std::copy(x, x + there, scratch);
        return scratch;
    }
    for (long first = 0; first < there; first += 32) {
        uint32_t bits = mask_[(index * BLOCK + first) / 32];
        if (there - first < 32) bits &= (1u << (there - first)) - 1;
        for (; bits; bits &= bits - 1) {
            int bit = __builtin_ctz(bits);
            scratch[first + bit] = x[first + bit];
        }
    }
    return scratch;
}

void Row::summarise(long chunk, double inverse_temperature) {
    long first = chunk * CHUNK_BLOCKS, last = std::min(first + CHUNK_BLOCKS, blocks(vocab_));
    alignas(64) float scratch[BLOCK];
    float largest = NEVER;
    bool numbers = true;
    for (long b = first; b < last; b++) {
        float maximum = ruled_out(b) ? NEVER : block_maximum(block(b, scratch));
        numbers &= maximum == maximum;
        maxima_[b] = maximum;
        largest = maximum > largest ? maximum : largest;
    }
    double mass = 0;
    if (inverse_temperature > 0 && std::isfinite(largest))
        for (long b = first; b < last; b++)
            if (maxima_[b] > NEVER) mass += block_mass(block(b, scratch), largest, (float)inverse_temperature);
    masses_[2 * chunk] = numbers ? largest : std::numeric_limits<float>::quiet_NaN();
    masses_[2 * chunk + 1] = mass;
}

bool Row::find_best() {
    for (long chunk = 0; chunk < chunks(vocab_); chunk++)
        if (std::isnan(masses_[2 * chunk])) return false;
    long count = blocks(vocab_), at = 0;
    for (long b = 1; b < count; b++)
        if (maxima_[b] > maxima_[at]) at = b;
    if (!std::isfinite(maxima_[at])) return false;
    alignas(64) float scratch[BLOCK];
    const float* x = block(at, scratch);
    long inside = std::find(x, x + BLOCK, maxima_[at]) - x;
    best_ = {maxima_[at], (int32_t)(at * BLOCK + inside)};
    return true;
}

double Row::mass(double inverse_temperature) const {
    double total = 0;
    for (long chunk = 0; chunk < chunks(vocab_); chunk++)
        if (masses_[2 * chunk + 1] > 0)
            total += masses_[2 * chunk + 1] * std::exp((masses_[2 * chunk] - best_.logit) * inverse_temperature);
    return total;
}

float Row::floor(const Wish& wish) const {
    float least = NEVER;
    if (wish.top_k > 0 && wish.top_k < vocab_) least = kth_largest(wish.top_k);
    if (wish.top_p < 1) least = std::max(least, nucleus_end(wish, least));
    if (wish.min_p > 0) least = std::max(least, least_by_min_p(wish));
    return least;
}

// The smallest float that the condition lets pass: computed in one go, then corrected for rounding.
float Row::least_by_min_p(const Wish& wish) const {
    double limit = std::log(wish.min_p);
    auto passes = [&](float logit) { return ((double)logit - best_.logit) * wish.inverse_temperature >= limit; };
    float least = (float)(best_.logit + limit / wish.inverse_temperature);
    while (!passes(least)) least = std::nextafter(least, best_.logit);
    for (float below = std::nextafter(least, NEVER); below > NEVER && passes(below);
         below = std::nextafter(least, NEVER))
        least = below;
    return least;
}

float Row::kth_maximum(long k) const {
    static thread_local std::vector<float> maxima;
    maxima.assign(maxima_, maxima_ + blocks(vocab_));
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
    return maxima[k - 1];
}

// The k largest logits are at least as large as the k-th largest maximum of a block.
float Row::kth_largest(long k) const {
    std::vector<Candidate>& candidates = scratch_candidates();
    collect(k <= blocks(vocab_) ? kth_maximum(k) : NEVER, candidates);
    if ((long)candidates.size() < k) return NEVER;
    std::nth_element(candidates.begin(), candidates.begin() + (k - 1), candidates.end(), better);
    return candidates[k - 1].logit;
}

void Row::largest(long count, std::vector<Candidate>& out) const {
    collect(count <= blocks(vocab_) ? kth_maximum(count) : NEVER, out);
    count = std::min(count, (long)out.size());
    std::partial_sort(out.begin(), out.begin() + count, out.end(), better);
    out.resize(count);
}

// Appends what is at least `least` and not −∞.
void Row::collect(float least, std::vector<Candidate>& out) const {
    least = std::max(least, std::numeric_limits<float>::lowest());
    alignas(64) float scratch[BLOCK];
    for (long b = 0; b < blocks(vocab_); b++) {
        if (!(maxima_[b] >= least)) continue;
        const float* x = block(b, scratch);
        for (long v = 0; v < VECTORS; v++)
            for (uint32_t hits = lanes(load(x + v * VL) >= least); hits; hits &= hits - 1) {
                long at = v * VL + __builtin_ctz(hits);
                out.push_back({x[at], (int32_t)(b * BLOCK + at)});
            }
    }
}

float Row::nucleus_end(const Wish& wish, float floor) const {
    double inverse = wish.inverse_temperature, share = wish.top_p * (1 - ROUNDING);
    float end = NEVER;
    if (floor > NEVER && wish.top_k <= 4096) {  // few candidates (or many that tie): the nucleus is among them
        std::vector<Candidate>& candidates = scratch_candidates();
        collect(floor, candidates);
        double total = 0;
        for (const Candidate& candidate : candidates) total += weight(candidate.logit, best_.logit, inverse);
        end_of_mass(candidates, best_.logit, inverse, share * total, end);
        return end;
    }
    double wanted = floor > NEVER ? -1 : share * mass(inverse);
    if (wanted >= 0)
        for (long count : {64, 1024}) {
            if (count > blocks(vocab_)) break;
            std::vector<Candidate>& candidates = scratch_candidates();
            collect(kth_maximum(count), candidates);
            if (end_of_mass(candidates, best_.logit, inverse, wanted, end)) return end;
        }
    return nucleus_end_by_bins(wish, floor, wanted);
}

// wanted < 0: top_p of the mass at or above the floor.
float Row::nucleus_end_by_bins(const Wish& wish, float floor, double wanted) const {
    static thread_local std::vector<double> bins;
    bins.assign(BINS + 1, 0.0);
    float inverse = (float)wish.inverse_temperature;
    floor = std::max(floor, std::numeric_limits<float>::lowest());
    alignas(64) float scratch[BLOCK], weights[VL];
    alignas(64) int32_t places[VL];
    for (long b = 0; b < blocks(vocab_); b++) {
        if (!(maxima_[b] >= floor)) continue;
        const float* x = block(b, scratch);
        for (long v = 0; v < VECTORS; v++) {
            vf scaled = scaled_below(x + v * VL, best_.logit, inverse);
            vf kept = (load(x + v * VL) >= floor) ? exp(scaled) : vf{};
            vi bin = bin_of(scaled);
            std::memcpy(weights, &kept, sizeof kept);
            std::memcpy(places, &bin, sizeof bin);
            for (int i = 0; i < VL; i++) bins[places[i]] += weights[i];
        }
    }
    double total = 0, mass = 0;
    for (double bin : bins) total += bin;
    if (wanted < 0) wanted = wish.top_p * (1 - ROUNDING) * total;
    int decisive = 0;
    while (decisive < BINS && mass + bins[decisive] < wanted) mass += bins[decisive++];
    std::vector<Candidate>& candidates = scratch_candidates();
    for (long b = 0; b < blocks(vocab_); b++) {
        if (!(maxima_[b] >= floor)) continue;
        const float* x = block(b, scratch);
        for (long v = 0; v < VECTORS; v++) {
            vi there = (bin_of(scaled_below(x + v * VL, best_.logit, inverse)) == decisive) &
                       (load(x + v * VL) >= floor);
            for (uint32_t hits = lanes(there); hits; hits &= hits - 1)
                candidates.push_back({x[v * VL + __builtin_ctz(hits)], 0});
        }
    }
    float end = NEVER;
    if (!end_of_mass(candidates, best_.logit, wish.inverse_temperature, wanted - mass, end) && !candidates.empty())
        end = candidates.back().logit;  // rounding: the whole bin does not reach it
    return end;
}

void Row::race(long chunk, const Wish& wish, float floor, int32_t& winner, double& best) const {
    long first = chunk * CHUNK_BLOCKS, last = std::min(first + CHUNK_BLOCKS, blocks(vocab_));
    floor = std::max(floor, std::numeric_limits<float>::lowest());
    alignas(64) float scratch[BLOCK];
    vi numbers = lane_numbers();
    for (long b = first; b < last; b++) {
        if (!(maxima_[b] >= floor)) continue;
        double needed = best - maxima_[b] * wish.inverse_temperature - std::abs(best) * 0x1p-50;  // less rounding
        if (needed > LARGEST_NOISE) continue;
        uint32_t limit = hash_limits(needed);
        const float* x = block(b, scratch);
        for (long v = 0; v < VECTORS; v++) {
            vu hashes = token_hash(wish.key, (vu)(numbers + (int32_t)(b * BLOCK + v * VL)));
            vi possible = (vi)(hashes <= limit) & (load(x + v * VL) >= floor);
            for (uint32_t hits = lanes(possible); hits; hits &= hits - 1) {
                int lane = __builtin_ctz(hits);
                double own = score(x[v * VL + lane], wish.inverse_temperature, hashes[lane]);
                int32_t token = (int32_t)(b * BLOCK + v * VL + lane);
                if (own > best || (own == best && token < winner)) {
                    best = own;
                    winner = token;
                }
            }
        }
    }
}

}  // namespace umbel::sampling
