// Many query vectors and a pool of bfloat16, on AMX: both products in tiles of bfloat16 with sums in float32. Queries and
// the weights of values are rounded to bfloat16, as keys and values are already.
#pragma once

#include "attention_words.h"

#if defined(UMBEL_AMX)

namespace umbel {

// One item and one KV head; its sizes are multiples of 32. `common` may have none of its groups.
void run_tiled_item(const Job& job, long item, long head, const CommonWords& common);

}  // namespace umbel

#endif
