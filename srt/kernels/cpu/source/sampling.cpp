// Tokens and log-probabilities from full rows of logits. The reference is srt/sampling/sampler.py. Threads
// share the rows of a call; a row is one thread's: half a row is less work than waking another thread costs.
#include <atomic>
#include <cmath>

#include "memory.h"
#include "sampling_row.h"
#include "threads.h"

using namespace umbel;
using namespace umbel::sampling;

namespace {

constexpr int NO_MEMORY = -1;

// Memory of a row, one for each thread of the team.
class Workspace {
  public:
    explicit Workspace(long vocab) : blocks_(Row::blocks(vocab)), chunks_(Row::chunks(vocab)) {
        static Buffer maxima, masses;
        maxima_ = maxima.take<float>(team_size() * blocks_);
        masses_ = masses.take<double>(team_size() * 2 * chunks_);
    }
    bool exists() const { return maxima_ && masses_; }
    float* maxima() const { return maxima_ + team_rank() * blocks_; }
    double* masses() const { return masses_ + team_rank() * 2 * chunks_; }

  private:
    long blocks_, chunks_;
    float* maxima_;
    double* masses_;
};

bool read_row(Row& row, long vocab, double inverse_temperature) {
    for (long chunk = 0; chunk < Row::chunks(vocab); chunk++) row.summarise(chunk, inverse_temperature);
    return row.find_best();
}

}  // namespace

extern "C" {

// tokens[i] = the token chosen from row rows[i] of logits [_, vocab]. inverse_temperature 0 takes the most likely one.
// masks: nullptr, or for each row a pointer to its allowed tokens (nullptr: all).
// Returns 0, 1 + the index of a row that has a NaN or no token with a finite logit, or −1: no memory.
int umbel_sample(const float* logits, long stride, long vocab, long count, const int64_t* rows,
                 const double* inverse_temperatures, const uint64_t* keys, const int32_t* top_k, const double* top_p,
                 const double* min_p, const uint32_t* const* masks, int64_t* tokens) {
    Workspace workspace(vocab);
    if (!workspace.exists()) return NO_MEMORY;
    std::atomic<long> bad{-1};  // any one of the bad rows
    parallel(count, 1, [&](long begin, long end) {
        for (long i = begin; i < end; i++) {
            Wish wish{inverse_temperatures[i], keys[i], top_k[i], top_p[i], min_p[i]};
            Row row(logits + rows[i] * stride, masks ? masks[i] : nullptr, vocab, workspace.maxima(),
                    workspace.masses());
            if (read_row(row, vocab, wish.top_p < 1 ? wish.inverse_temperature : 0.0))
                tokens[i] = wish.inverse_temperature > 0 ? row.race(wish) : row.best_token();
            else
                bad = i;
        }
    });
    return bad >= 0 ? 1 + (int)bad : 0;
}

// normalisers[i] = log of the sum of exponentials of row rows[i]. top_tokens and top_logits [count, top]: its largest
// logits, best first, ties by token, −1 where there are no more. Returns as umbel_sample does.
int umbel_log_normalisers(const float* logits, long stride, long vocab, long count, const int64_t* rows, long top,
                          double* normalisers, int32_t* top_tokens, float* top_logits) {
    Workspace workspace(vocab);
    if (!workspace.exists()) return NO_MEMORY;
    std::atomic<long> bad{-1};
    parallel(count, 1, [&](long begin, long end) {
        for (long i = begin; i < end; i++) {
            Row row(logits + rows[i] * stride, nullptr, vocab, workspace.maxima(), workspace.masses());
            if (!read_row(row, vocab, 1.0)) {
                bad = i;
                continue;
            }
            normalisers[i] = row.best() + std::log(row.mass(1.0));
            if (top) row.largest(top, top_tokens + i * top, top_logits + i * top);
        }
    });
    return bad >= 0 ? 1 + (int)bad : 0;
}

}  // extern "C"
