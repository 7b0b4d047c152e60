// Run once after compiling, in a process of its own: does this machine execute what the library is made of?
#include "simd.h"
#include "threads.h"

#include <atomic>
#include <cmath>

using namespace umbel;

namespace {

bool vectors_work() {
    float input[VL], output[VL];
    for (int i = 0; i < VL; i++) input[i] = 0.37f * (float)i - 2.0f;
    store(output, exp(load(input)));
    for (int i = 0; i < VL; i++)
        if (!(std::fabs(output[i] / std::exp(input[i]) - 1.0f) < 1e-5f)) return false;
    bf16 half[VL];
    store(half, load(input));
    store(output, load(half));
    for (int i = 0; i < VL; i++)
        if (!(std::fabs(output[i] - input[i]) <= std::fabs(input[i]) / 256)) return false;
    return true;
}

}  // namespace

extern "C" void umbel_set_threads(int count);

extern "C" int umbel_self_check() {
    if (!vectors_work()) return 1;
    umbel_set_threads(2);
    std::atomic<long> total{0};
    for (int round = 0; round < 100; round++)
        parallel(1000, 7, [&](long begin, long end) { total += end - begin; });
    umbel_set_threads(1);
    return total == 100000 ? 0 : 2;
}
