// Tokens and log-probabilities from full rows of logits. See srt/kernels/cpu/sampling.py for the torch twins.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "memory.h"
#include "sampling_row.h"
#include "threads.h"

using namespace umbel;
using namespace umbel::sampling;

namespace {

// Rows of a call with their memory. Every thread takes whole rows where there are enough of them, else pieces of rows.
class Rows {
  public:
    Rows(const float* logits, long stride, long vocab, long count, const int64_t* rows, const uint32_t* const* masks)
        : vocab_(vocab), count_(count) {
        static Buffer maxima_memory, masses_memory;
        float* maxima = maxima_memory.take<float>(count * Row::blocks(vocab));
        double* masses = masses_memory.take<double>(2 * count * Row::chunks(vocab));
        if (!maxima || !masses) return;
        rows_.reserve(count);
        for (long i = 0; i < count; i++)
            rows_.emplace_back(logits + rows[i] * stride, masks ? masks[i] : nullptr, vocab,
                               maxima + i * Row::blocks(vocab), masses + 2 * i * Row::chunks(vocab));
    }

    bool has_memory() const { return (long)rows_.size() == count_; }
    Row& operator[](long i) { return rows_[i]; }

    // body(row, chunk) for all chunks of all rows; then(row) when those of a row are done.
    template <class Body, class Then>
    void run(Body&& body, Then&& then) {
        long chunks = Row::chunks(vocab_);
        if (count_ >= 2 * team_size()) {
            parallel(count_, 1, [&](long begin, long end) {
                for (long row = begin; row < end; row++) {
                    for (long chunk = 0; chunk < chunks; chunk++) body(row, chunk);
                    then(row);
                }
            });
            return;
        }
        parallel(count_ * chunks, 1, [&](long begin, long end) {
            for (long i = begin; i < end; i++) body(i / chunks, i % chunks);
        });
        parallel(count_, 1, [&](long begin, long end) {
            for (long row = begin; row < end; row++) then(row);
        });
    }

  private:
    long vocab_, count_;
    std::vector<Row> rows_;
};

struct Finalist {
    double score;
    int32_t token;
};

constexpr int NO_MEMORY = -1;

}  // namespace

extern "C" {

// tokens[i] = the token chosen from row rows[i] of logits [_, vocab]. inverse_temperature 0 takes the most likely one.
// masks: nullptr, or for each row a pointer to its allowed tokens (nullptr: all).
// Returns 0, 1 + the index of a row that has a NaN or no token with a finite logit, or −1: no memory.
int umbel_sample(const float* logits, long stride, long vocab, long count, const int64_t* rows,
                 const double* inverse_temperatures, const uint64_t* keys, const int32_t* top_k, const double* top_p,
                 const double* min_p, const uint32_t* const* masks, int64_t* tokens) {
    Rows all(logits, stride, vocab, count, rows, masks);
    if (!all.has_memory()) return NO_MEMORY;
    long chunks = Row::chunks(vocab);
    static Buffer memory;
    float* floors = memory.take<float>(count);
    static Buffer finalist_memory;
    Finalist* finalists = finalist_memory.take<Finalist>(count * chunks);
    if (!floors || !finalists) return NO_MEMORY;
    std::atomic<long> bad{-1};  // any one of the bad rows
    auto wish = [&](long row) {
        return Wish{inverse_temperatures[row], keys[row], top_k[row], top_p[row], min_p[row]};
    };
    all.run(
        [&](long row, long chunk) {
            double inverse_temperature = top_p[row] < 1 ? inverse_temperatures[row] : 0.0;
            all[row].summarise(chunk, inverse_temperature);
        },
        [&](long row) {
            if (!all[row].find_best()) {
                bad = row;
                return;
            }
            tokens[row] = all[row].best_token();
            if (inverse_temperatures[row] == 0) return;
            Wish own = wish(row);
            floors[row] = all[row].floor(own);
            for (long chunk = 0; chunk < chunks; chunk++)
                finalists[row * chunks + chunk] = {all[row].first_score(own), all[row].best_token()};
        });
    if (bad >= 0) return 1 + (int)bad;
    all.run(
        [&](long row, long chunk) {
            if (inverse_temperatures[row] == 0) return;
            Finalist& own = finalists[row * chunks + chunk];
            all[row].race(chunk, wish(row), floors[row], own.token, own.score);
        },
        [&](long row) {
            if (inverse_temperatures[row] == 0) return;
            Finalist best = finalists[row * chunks];
            for (long chunk = 1; chunk < chunks; chunk++) {
                Finalist own = finalists[row * chunks + chunk];
                if (own.score > best.score || (own.score == best.score && own.token < best.token)) best = own;
            }
            tokens[row] = best.token;
        });
    return 0;
}

// normalisers[i] = log of the sum of exponentials of row rows[i]. top_tokens and top_logits [count, top]: its largest
// logits, best first, ties by token, −1 where the vocabulary has no more. Returns as umbel_sample does.
int umbel_log_normalisers(const float* logits, long stride, long vocab, long count, const int64_t* rows, long top,
                          double* normalisers, int32_t* top_tokens, float* top_logits) {
    Rows all(logits, stride, vocab, count, rows, nullptr);
    if (!all.has_memory()) return NO_MEMORY;
    std::atomic<long> bad{-1};
    all.run(
        [&](long row, long chunk) { all[row].summarise(chunk, 1.0); },
        [&](long row) {
            if (!all[row].find_best()) {
                bad = row;
                return;
            }
            normalisers[row] = all[row].best() + std::log(all[row].mass(1.0));
            if (!top) return;
            static thread_local std::vector<Candidate> found;
            found.clear();
            all[row].largest(top, found);
            for (long i = 0; i < top; i++) {
                bool there = i < (long)found.size();
                top_tokens[row * top + i] = there ? found[i].token : -1;
                top_logits[row * top + i] = there ? found[i].logit : 0;
            }
        });
    return bad >= 0 ? 1 + (int)bad : 0;
}

}  // extern "C"
