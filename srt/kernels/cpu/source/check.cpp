// Run once after compiling, in a process of its own: does this machine execute what the library is made of?
#include <atomic>
#include <cmath>

#include "check_kernels.h"
#include "simd.h"
#include "threads.h"
#include "tiles.h"

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

// Row r of A picks input r: C is that row of B, unpacked.
bool tiles_work() {
#if defined(UMBEL_AMX)
    if (!tiles_allowed()) return true;  // the kernels go without them
    bf16 rows[TILE_ROWS][32] = {}, weights[16][16][2];
    float sums[TILE_ROWS][16];
    for (int r = 0; r < TILE_ROWS; r++) rows[r][r] = to_bf16(1.0f);
    for (int k = 0; k < 32; k++)
        for (int o = 0; o < 16; o++) weights[k / 2][o][k % 2] = to_bf16((float)(k * 16 + o) / 4);
    {
        Tiles configured;
        tile_zero<0>();
        tile_load<4>(rows, TILE_BYTES);
        tile_load<6>(weights, TILE_BYTES);
        tile_multiply_bf16<0, 4, 6>();
        tile_store<0>(sums, TILE_BYTES);
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int o = 0; o < 16; o++)
            if (sums[r][o] != from_bf16(weights[r / 2][o][r % 2])) return false;
#endif
    return true;
}

}  // namespace

extern "C" void umbel_set_threads(int count);

extern "C" const char* umbel_isa() { return UMBEL_ISA; }

extern "C" int umbel_self_check() {
    if (!vectors_work()) return 1;
    if (!tiles_work()) return 3;
    umbel_set_threads(2);
    std::atomic<long> total{0};
    for (int round = 0; round < 100; round++)
        parallel(1000, 7, [&](long begin, long end) { total += end - begin; });
    bool kernels = linears_work() && attention_works() && heads_work();
    umbel_set_threads(1);
    return total != 100000 ? 2 : kernels ? 0 : 4;
}
