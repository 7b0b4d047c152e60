// Where the race of a row begins: the floors of top_k, top_p and min_p, and the largest logits.
#include <algorithm>
#include <cmath>
#include <functional>

#include "sampling_row.h"

namespace umbel::sampling {
namespace {

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

}  // namespace umbel::sampling
