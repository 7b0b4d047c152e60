// With many rows an item of the team's loop is a block of rows of one adapter, from x to out. With few rows there are two
// loops: an item of the first takes some rows of A, of the second a run of outputs. Either way every number is summed
// within one item, in one order.
#include "low_rank.h"

#include <vector>

#include "threads.h"

namespace umbel {
namespace {

constexpr long BLOCK = 2;     // rows of an item: they read a weight once
constexpr long TOGETHER = 4;  // rows of A whose numbers alternate
constexpr long WIDE = 16;     // numbers of a row of A that stand together
constexpr long RANKS = 16;    // rows of A in an item
constexpr long COLUMNS = 32;  // outputs of a panel of B
constexpr long PANELS = 4;    // panels of B in an item
constexpr long AHEAD = 4096;  // bytes that are read ahead
constexpr int CHAINS = VL == 16 ? 4 : 1;  // sums that an output has, one after the other: they hide each other's latency

static_assert(WIDE % VL == 0 && COLUMNS % VL == 0 && RANKS % TOGETHER == 0 && TOGETHER % CHAINS == 0);

struct Item {
    const LowRankPart* part;
    const int64_t* rows;
    long count;       // of the rows
    float* between;   // of the first row and the part's first rank; rows `stride` apart
    long stride;
    long begin, end;  // of the ranks, or of the panels
};

// The sum of a vector in four lanes first: A has as many of these sums as ranks, and each is over few products.
UMBEL_INLINE float folded(vf v) {
    typedef float v4 __attribute__((vector_size(16)));
    v4 parts[VL / 4];
    std::memcpy(parts, &v, sizeof v);
    for (int i = 1; i < VL / 4; i++) parts[0] += parts[i];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

using umbel::load;
UMBEL_INLINE vf load(const int16_t* p) {
    typedef int16_t vshorts __attribute__((vector_size(VL * 2)));
    vshorts numbers;
    std::memcpy(&numbers, p, sizeof numbers);
    return __builtin_convertvector(__builtin_convertvector(numbers, vi), vf);
}

UMBEL_INLINE float as_float(float number) { return number; }
UMBEL_INLINE float as_float(bf16 number) { return from_bf16(number); }
UMBEL_INLINE float as_float(int16_t number) { return number; }

// Reads what comes next from memory: matrices lie in the order in which they are read, each once in a step.
template <class T>
UMBEL_INLINE void prefetch(const T* weight) {
    __builtin_prefetch((const char*)weight + AHEAD);
}

// Products of rows [begin, end) of A with ROWS rows of x: four of A at a time, whose numbers alternate. A product is
// summed in the same order whatever stands next to it.
template <int ROWS, class T>
void down_rows(const Item& item, const float* const* x, long k) {
    constexpr int PARTS = WIDE / VL;
    long granules = (k + WIDE - 1) / WIDE, whole = k / WIDE;
    for (long rank = item.begin; rank < item.end; rank += TOGETHER) {
        const T* weight = (const T*)item.part->down + rank * granules * WIDE;
        vf sums[TOGETHER][ROWS][PARTS] = {};
        for (long i = 0; i < whole; i++, weight += TOGETHER * WIDE)
            for (int t = 0; t < TOGETHER; t++)
                for (int j = 0; j < PARTS; j++) {
                    if ((t * WIDE + j * VL) * sizeof(T) % 64 == 0) prefetch(weight + t * WIDE + j * VL);
                    vf w = load(weight + t * WIDE + j * VL);
                    for (int r = 0; r < ROWS; r++) sums[t][r][j] += w * load(x[r] + i * WIDE + j * VL);
                }
        for (int t = 0; t < TOGETHER; t++)
            for (int r = 0; r < ROWS; r++) {
                vf sum = sums[t][r][0];
                for (int j = 1; j < PARTS; j++) sum += sums[t][r][j];
                float total = folded(sum);
                for (long i = whole * WIDE; i < k; i++) total += as_float(weight[t * WIDE + i - whole * WIDE]) * x[r][i];
                item.between[r * item.stride + rank + t] = total * item.part->scales[rank + t];
            }
    }
}

template <class T, class Row>
void down(const Item& item, long k, const Row& row_of) {
    const float* x[BLOCK];
    for (long r = 0; r < item.count; r++) x[r] = row_of(item.rows[r], r);
    if (item.count == BLOCK)
        down_rows<BLOCK, T>(item, x, k);
    else
        down_rows<1, T>(item, x, k);
}

// Outputs of panels [begin, end) of B, each CHAINS sums over the ranks in their order.
template <int ROWS, class T>
void up_rows(const Item& item, float* out, long out_stride) {
    constexpr int PARTS = COLUMNS / VL;
    const LowRankPart& part = *item.part;
    for (long panel = item.begin; panel < item.end; panel++) {
        const T* weight = (const T*)part.up + panel * part.rank * COLUMNS;
        vf chains[CHAINS][ROWS][PARTS] = {};
        for (long rank = 0; rank < part.rank; rank += CHAINS)
            for (int c = 0; c < CHAINS; c++, weight += COLUMNS)
                for (int j = 0; j < PARTS; j++) {
                    if (j * VL * sizeof(T) % 64 == 0) prefetch(weight + j * VL);
                    vf w = load(weight + j * VL);
                    for (int r = 0; r < ROWS; r++)
                        chains[c][r][j] += w * splat(item.between[r * item.stride + rank + c]);
                }
        vf(&sums)[ROWS][PARTS] = chains[0];
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < PARTS; j++)
                for (int c = 1; c < CHAINS; c++) sums[r][j] += chains[c][r][j];
        long left = part.width - panel * COLUMNS;
        for (int r = 0; r < ROWS; r++) {
            float* to = out + item.rows[r] * out_stride + part.first + panel * COLUMNS;
            if (left >= COLUMNS)
                for (int j = 0; j < PARTS; j++) store(to + j * VL, load(to + j * VL) + sums[r][j]);
            else
                for (long i = 0; i < left; i++) to[i] += sums[r][i / VL][i % VL];
        }
    }
}

template <class T>
void up(const Item& item, float* out, long out_stride) {
    if (item.count == BLOCK)
        up_rows<BLOCK, T>(item, out, out_stride);
    else
        up_rows<1, T>(item, out, out_stride);
}

long panels_of(const LowRankPart& part) { return (part.width + COLUMNS - 1) / COLUMNS; }

// Some rows of one adapter, and what lies between its A and B for them.
struct Block {
    const LowRankChange* change;
    const int64_t* rows;
    long count;
    float* between;

    // Calls function(the part, the place of its first rank).
    template <class Function>
    void each_part(const Function& function) const {
        for (long p = 0, rank = 0; p < change->count; rank += change->parts[p++].rank) function(change->parts[p], rank);
    }
};

std::vector<Block> blocks_of(LowRankChanges changes, const AdapterGroups& groups, float* between, long stride) {
    std::vector<Block> blocks;
    for (long g = 0; g < groups.count; g++)
        for (long first = groups.starts[g]; first < groups.starts[g + 1]; first += BLOCK) {
            long left = groups.starts[g + 1] - first;
            blocks.push_back({&changes[groups.adapters[g]], groups.rows + first, left < BLOCK ? left : BLOCK,
                              between + first * stride});
        }
    return blocks;
}

// The items of one loop over the blocks' ranks or panels, of which an item takes `step`.
template <class Length>
std::vector<Item> items_of(const std::vector<Block>& blocks, long stride, long step, const Length& length) {
    std::vector<Item> items;
    for (const Block& block : blocks)
        block.each_part([&](const LowRankPart& part, long rank) {
            for (long begin = 0; begin < length(part); begin += step) {
                long end = begin + step < length(part) ? begin + step : length(part);
                items.push_back({&part, block.rows, block.count, block.between + rank, stride, begin, end});
            }
        });
    return items;
}

template <class Row>
void run_down(const Item& item, long k, const Row& row_of) {
    switch (item.part->numbers) {
        case LowRankNumbers::F32: return down<float>(item, k, row_of);
        case LowRankNumbers::BF16: return down<bf16>(item, k, row_of);
        case LowRankNumbers::INT16: return down<int16_t>(item, k, row_of);
    }
}

void run_up(const Item& item, float* out, long out_stride) {
    switch (item.part->numbers) {
        case LowRankNumbers::F32: return up<float>(item, out, out_stride);
        case LowRankNumbers::BF16: return up<bf16>(item, out, out_stride);
        case LowRankNumbers::INT16: return up<int16_t>(item, out, out_stride);
    }
}

template <class Row>
bool add_to(Buffer& memory, LowRankChanges changes, const AdapterGroups& groups, long k, const Row& row_of, float* out,
            long out_stride) {
    if (!changes || !groups.count) return true;
    long stride = 0;  // ranks of the widest change
    for (long g = 0; g < groups.count; g++) {
        long own = 0;
        for (long p = 0; p < changes[groups.adapters[g]].count; p++) own += changes[groups.adapters[g]].parts[p].rank;
        stride = own > stride ? own : stride;
    }
    if (!stride) return true;
    float* between = memory.take<float>(groups.starts[groups.count] * stride);
    if (!between) return false;
    std::vector<Block> blocks = blocks_of(changes, groups, between, stride);
    if ((long)blocks.size() >= 2 * team_size()) {
        parallel((long)blocks.size(), even_grain((long)blocks.size(), 4), [&](long begin, long end) {
            for (long i = begin; i < end; i++) {
                const Block& block = blocks[i];
                block.each_part([&](const LowRankPart& part, long rank) {
                    run_down({&part, block.rows, block.count, block.between + rank, stride, 0, part.rank}, k, row_of);
                });
                block.each_part([&](const LowRankPart& part, long rank) {
                    run_up({&part, block.rows, block.count, block.between + rank, stride, 0, panels_of(part)}, out,
                           out_stride);
                });
            }
        });
        return true;
    }
    auto of_a = items_of(blocks, stride, RANKS, [](const LowRankPart& part) { return part.rank; });
    parallel((long)of_a.size(), 1, [&](long begin, long end) {
        for (long i = begin; i < end; i++) run_down(of_a[i], k, row_of);
    });
    auto of_b = items_of(blocks, stride, PANELS, panels_of);
    parallel((long)of_b.size(), even_grain((long)of_b.size(), 8), [&](long begin, long end) {
        for (long i = begin; i < end; i++) run_up(of_b[i], out, out_stride);
    });
    return true;
}

}  // namespace

bool LowRankProducts::add(LowRankChanges changes, const AdapterGroups& groups, const Inputs& x, float* out,
                          long out_stride) {
    auto row_of = [&](long row, long place) {
        thread_local Buffer scratch[BLOCK];
        return x.read_row(row, scratch[place]);
    };
    return add_to(between_, changes, groups, x.width(), row_of, out, out_stride);
}

bool LowRankProducts::add(LowRankChanges changes, const AdapterGroups& groups, const float* x, long k, float* out,
                          long out_stride) {
    return add_to(between_, changes, groups, k, [&](long row, long) { return x + row * k; }, out, out_stride);
}

}  // namespace umbel
