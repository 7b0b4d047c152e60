// Which tokens of a row can still be chosen, by their logits in INT8 and a bound on what those lack.
//
// For a row x and the weights w of a token, with their INT8 forms x^ and w^:
//
//   |x·w − x^·w^| <= |x| · |w − w^| + |x − x^| · |w^|         (Cauchy and Schwarz)
//
// The radius of a token is |w − w^| plus the share of |w| that float32 sums may lose, rounded up; |w^| is at most its
// scale times `norm_ratio`, and at most `largest_stored`. So, for the logit as `linear` rounds it,
//
//   |logit − estimate| <= |x| · radius + |x − x^| · min(norm_ratio · scale, largest_stored)
//
// Of blocks in Q8_0 the weights are the stored ones: the radius of a token is |w|, and is multiplied with all that the
// inputs of the logit and those of the estimate lack, and what float32 sums of both may lose.
#pragma once

#include "coarse_rows.h"
#include "head.h"
#include "linear_int8.h"

namespace umbel {

struct Candidate {
    int32_t token;
    float upper, lower;  // bounds of its logit, or of its score where the rule is NOISE
};

enum class Rule {
    LARGEST,  // tokens that may have the largest logit, or one `slack` below it
    TOP,      // tokens that may be among the `top` largest
    NOISE,    // tokens that may have the largest logit · inverse temperature + noise
};

// One row: what of it is screened, and by which rule.
struct ScreenedRow {
    Rule rule;
    float norm;           // |x|, rounded up, or what of it blocks leave; 0 where estimates are the logits themselves
    float error;          // |x − x^| · norm_ratio, rounded up
    float largest_error;  // |x − x^| · largest_stored, rounded up
    float slack;
    long top;
    double inverse_temperature;
    uint64_t key;
    const uint32_t* mask;  // nullptr: all tokens
    bool skipped;          // the bounds would not be numbers
};

// The tokens of one row that one thread has not ruled out. When it is full, those that the others rule out are dropped.
struct Shortlist {
    static constexpr long CAPACITY = 4096;

    float reach;  // an upper bound below it cannot be chosen
    int count;
    bool overflowed;
    Candidate candidates[CAPACITY];

    void clear(float reached) {
        reach = reached;
        count = 0;
        overflowed = false;
    }
    void add(const ScreenedRow& row, Candidate candidate);
    void tighten(const ScreenedRow& row);  // `reach` from the candidates, then without those that it rules out
};

// Shortlists of rows: lists[thread][row].
void screen_rows(const Head& head, const Int8Rows& x, const ScreenedRow* rows, Shortlist* lists);
#if defined(UMBEL_COARSE_ROWS)
void screen_rows(const Head& head, const CoarseRows& x, const ScreenedRow* rows, Shortlist* lists);

// Of blocks: what a logit and its estimate may differ by, as a share of the norm of a token's weights, rounded up.
float block_error_above(const Head& head, const CoarseRows& x, const BlockInputs& exact, long row, float norm);
#endif

// The next float32 that is surely not below.
float rounded_up(double value);

// |x|, and |x − x^| for inputs in 16 bits.
float norm_above(const float* x, long count);
float input_error_above(const Int8Rows& x, long row);

// Norms of a matrix and its INT8 copy: the radii, norm_ratio and largest_norm of the head. Uses the whole team. False
// when a weight is not finite.
bool fill_screen(Head& head);

}  // namespace umbel
