// Small products, attention and choices against plain loops: run once after compiling. An instruction set that is wrong
// on a machine, for whatever reason, is found here and not in somebody's text.
#pragma once

namespace umbel {

bool linears_work();
bool attention_works();
bool heads_work();

}  // namespace umbel
