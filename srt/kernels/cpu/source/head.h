// The head of a model: hidden states → tokens, mostly without their logits.
//
// Who wants only the best token of a row, or one that is drawn, needs few of 262,144 logits. A copy of the matrix in
// INT8 gives every logit to within a bound that is proven (head_screen.h), in one pass over a half of the bytes; the few
// tokens that can still be chosen get their exact logits. What is chosen is what the exact logits choose, bit by bit. A
// matrix in INT8 needs no copy, nor does one in blocks of Q8_0 where inputs of 7 bits are the faster ones.
#pragma once

#include "linear.h"
#include "memory.h"

namespace umbel {

// What is chosen in each row: the most likely token, of equal ones the first, or a draw as srt/sampling/sampler.py defines it. The
// arrays are those of `batch.Picks`; what stands beside a row that is not SAMPLE is not read.
enum class Pick : uint8_t { BEST = 1, SAMPLE = 2 };

struct Picks {
    const uint8_t* kinds;                // [rows]; nullptr: all BEST
    const double* inverse_temperatures;  // [rows]
    const uint64_t* keys;                // [rows]
    const int32_t* top_k;                // [rows] 0 = all; tokens that tie with the k-th stay
    const double* min_p;                 // [rows] 0 = none
    const uint32_t* const* masks;        // [rows] bit t % 32 of word t / 32: token t may be chosen; nullptr: every one
};

// Cumulative.
struct HeadCounters {
    long rows;        // that were asked for a token
    long candidates;  // tokens that the screen left over
    long exact;       // logits computed one by one; none where estimates are the logits
    long fallbacks;   // rows that took all logits although there is a screen
};

struct Head {
    const Matrix* matrix = nullptr;      // of the caller
    const MatrixPart* exact = nullptr;   // its only part; nullptr: of several, or in other blocks, and there is no screen
    const MatrixPart* screen = nullptr;  // INT8 or Q8_0; `exact` itself where that is so; nullptr: rows take all logits
    MatrixPart copy{};                   // what of it is ours
    float* radii = nullptr;          // [panels · 16], see head_screen.h
    int32_t* offsets = nullptr;      // [panels · 16], see coarse_rows.h
    float* block_offsets = nullptr;  // the same of blocks
    bool coarse = false;             // whether many rows are estimated from 7 bits
    float norm_ratio = 0;            // largest |stored bytes| of an output
    float largest_stored = 0;        // largest |scale × stored bytes| of an output
    float largest_norm = 0;          // largest |weights| of an output
    HeadCounters counters{};
    Buffer lists, states, gathered, logits;
};

// The caller keeps `matrix` as long as the head. nullptr when there is no memory. `coarse` lets many rows be estimated
// from inputs of 7 bits where that is faster (coarse_rows.h).
Head* create_head(const Matrix& matrix, bool screen, bool coarse = true);
void free_head(Head* head);

// tokens[r] and logits[r], the token's logit, by `picks`. A row with logits that are not finite gives token −1: nothing
// is chosen in silence. Uses the whole team.
void choose_tokens(Head& head, const float* x, long rows, long x_stride, const Picks& picks, int32_t* tokens,
                   float* logits);

// out[r, i] = the logit of token ids[i], bit by bit that of `linear`; rows of out are `count` apart. Ascending ids are
// the fastest. Uses the whole team.
void logits_of(Head& head, const float* x, long rows, long x_stride, const int32_t* ids, long count, float* out);

}  // namespace umbel
