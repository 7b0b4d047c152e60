#include "sampling_row.h"

#include <algorithm>
#include <cmath>

namespace umbel::sampling {
namespace {

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
    if (there < BLOCK) {
        float* end = std::copy(x, x + there, scratch);
        std::fill(end, scratch + BLOCK, NEVER);
        x = scratch;
    }
    if (!mask_) return x;
    vi bit_of_lane = splat_int(1) << lane_numbers();
    long words = std::min(BLOCK / 32, (there + 31) / 32);
    for (long word = 0; word < words; word++) {
        uint32_t bits = mask_[index * (BLOCK / 32) + word];
        for (long i = word * 32; i < word * 32 + 32; i += VL, bits >>= VL % 32) {
            vi allowed = (splat_int((int32_t)bits) & bit_of_lane) != 0;
            store(scratch + i, select(allowed, load(x + i), splat(NEVER)));
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
