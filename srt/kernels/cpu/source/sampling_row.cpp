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

// Candidates from the best one down until their weight reaches `wanted`: the logit of the last of them. Halves, of
// which one is left alone, until so few are left that they are sorted.
bool end_of_mass(std::vector<Candidate>& candidates, float best, double inverse_temperature, double wanted,
                 float& end) {
    auto first = candidates.begin(), last = candidates.end();
    double mass = 0;
    while (last - first > 256) {
        auto middle = first + (last - first) / 2;
        std::nth_element(first, middle, last, better);
        double upper = 0;
        for (auto it = first; it < middle; it++) upper += weight(it->logit, best, inverse_temperature);
        if (mass + upper >= wanted) {
            last = middle;
        } else {
            mass += upper;
            first = middle;
        }
    }
    std::sort(first, last, better);
    for (auto it = first; it < last; it++) {
        mass += weight(it->logit, best, inverse_temperature);
        end = it->logit;
        if (mass >= wanted) return true;
    }
    return false;
}

// Leading bits of logits, ordered like the logits: sign, exponent and 7 bits of the fraction.
constexpr long BINS = 1 << 16;

UMBEL_INLINE vi bin_of(vf logits) {
    vi bits = (vi)logits;
    return ((bits ^ ((bits >> 31) & 0x7fffffff)) >> 16) + (int32_t)(BINS / 2);
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
    long before = 0;
    if (4 * k <= blocks(vocab_))
        collect(kth_maximum(k), candidates);
    else
        before = (long)collect_decisive(NEVER, (double)k, [](vf) { return splat(1.0f); }, candidates);
    if (before + (long)candidates.size() < k) return NEVER;
    auto kth = candidates.begin() + (k - before - 1);
    std::nth_element(candidates.begin(), kth, candidates.end(), better);
    return kth->logit;
}

void Row::largest(long count, int32_t* tokens, float* logits) const {
    std::vector<Candidate>& candidates = scratch_candidates();
    collect(count <= blocks(vocab_) ? kth_maximum(count) : NEVER, candidates);
    long there = std::min(count, (long)candidates.size());
    std::partial_sort(candidates.begin(), candidates.begin() + there, candidates.end(), better);
    for (long i = 0; i < count; i++) {
        tokens[i] = i < there ? candidates[i].token : -1;
        logits[i] = i < there ? candidates[i].logit : NEVER;
    }
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
    double wanted = -1;  // of what is at or above the floor: not known yet
    if (floor == NEVER) {
        wanted = share * mass(inverse);
        for (long count : {64L, 512L}) {
            if (count > blocks(vocab_)) break;
            std::vector<Candidate>& candidates = scratch_candidates();
            collect(kth_maximum(count), candidates);
            if (end_of_mass(candidates, best_.logit, inverse, wanted, end)) return end;
        }
    }
    float best = best_.logit, scale = (float)inverse;
    auto weigh = [best, scale](vf logits) { return exp((logits - best) * scale); };
    std::vector<Candidate>& candidates = scratch_candidates();
    double before = collect_decisive(floor, wanted < 0 ? -share : wanted, weigh, candidates, &wanted);
    end = NEVER;
    end_of_mass(candidates, best_.logit, inverse, wanted - before, end);
    return end;
}

template <class Weigh>
double Row::collect_decisive(float floor, double wanted, Weigh&& weigh, std::vector<Candidate>& out,
                             double* total_wanted) const {
    static thread_local std::vector<double> bins;
    bins.assign(BINS, 0.0);
    floor = std::max(floor, std::numeric_limits<float>::lowest());
    alignas(64) float scratch[BLOCK], weights[VL];
    alignas(64) int32_t places[VL];
    for (long b = 0; b < blocks(vocab_); b++) {
        if (!(maxima_[b] >= floor)) continue;
        const float* x = block(b, scratch);
        for (long v = 0; v < VECTORS; v++) {
            vf logits = load(x + v * VL);
            vf kept = select(logits >= floor, weigh(logits), vf{});
            vi bin = bin_of(logits);
            std::memcpy(weights, &kept, sizeof kept);
            std::memcpy(places, &bin, sizeof bin);
            for (int i = 0; i < VL; i++) bins[places[i]] += weights[i];
        }
    }
    if (wanted < 0) {
        double total = 0;
        for (double bin : bins) total += bin;
        wanted *= -total;
    }
    if (total_wanted) *total_wanted = wanted;
    double before = 0;
    long decisive = BINS - 1;
    while (decisive > 0 && before + bins[decisive] < wanted) before += bins[decisive--];
    for (long b = 0; b < blocks(vocab_); b++) {
        if (!(maxima_[b] >= floor)) continue;
        const float* x = block(b, scratch);
        for (long v = 0; v < VECTORS; v++) {
            vf logits = load(x + v * VL);
            vi there = (bin_of(logits) == (int32_t)decisive) & (logits >= floor);
            for (uint32_t hits = lanes(there); hits; hits &= hits - 1) {
                long at = v * VL + __builtin_ctz(hits);
                out.push_back({x[at], (int32_t)(b * BLOCK + at)});
            }
        }
    }
    return before;
}

int32_t Row::race(const Wish& wish) const {
    int32_t winner = best_.token;
    double best = score(best_.logit, wish.inverse_temperature, token_hash(wish.key, (uint32_t)winner));
    float floor = std::max(this->floor(wish), std::numeric_limits<float>::lowest());
    alignas(64) float scratch[BLOCK];
    vi numbers = lane_numbers();
    for (long b = 0; b < blocks(vocab_); b++) {
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
    return winner;
}

}  // namespace umbel::sampling
