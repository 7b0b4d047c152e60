// Attention of one item: M = rows × group query vectors of one KV head against a run of keys, block by block, with an
// online softmax in float32 (running maximum, running sum). Two ways through a block:
//
//   streamed   few query vectors: the keys are what costs. Each key and value row is read once, where it lies.
//   packed     many: keys (transposed) and values are laid out as panels of two vectors, so that both products run
//              out of registers and the first-level cache.
//
// What an item computes depends on no other item, and parts are merged in the order of the plan: the result is the
// same, bit by bit, however many threads there are.
#include "attention.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "memory.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr int BLOCK = 64;                   // keys at a time: one block of keys and values stays in the L2 cache
constexpr int PANEL = 2 * VL;               // columns of a panel
constexpr int TILE = VL == 16 ? 12 : 6;     // rows of a product that accumulate in registers, times two vectors
constexpr int STREAMED = 16;                // up to so many query vectors of an item are streamed
constexpr int AHEAD = 8;                    // keys between a row that is streamed and the one that is fetched
constexpr float NEVER = -__builtin_inff();  // the score of a key that is not seen

#define UMBEL_UNROLL _Pragma("GCC unroll 16")

// ------------------------------------------------------------------------------------------------ vectors of VL

template <int... Lane>
UMBEL_INLINE vf pick(vf a, vf b, std::integer_sequence<int, Lane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Lane...);
#else
    return __builtin_shuffle(a, b, vi{Lane...});
#endif
}

// Which lane of the pair (a, b) comes to lane j, for the four exchanges between vectors whose index differs in `bit`.
template <int BIT, int... J>
constexpr auto own_lanes(std::integer_sequence<int, J...>) {  // a[j] and b[j]
    return std::integer_sequence<int, ((J & BIT) ? VL + J : J)...>{};
}
template <int BIT, int... J>
constexpr auto other_lanes(std::integer_sequence<int, J...>) {  // a[j ^ bit] and b[j ^ bit]
    return std::integer_sequence<int, ((J & BIT) ? VL + (J ^ BIT) : (J ^ BIT))...>{};
}
template <int BIT, int... J>
constexpr auto first_lanes(std::integer_sequence<int, J...>) {  // a[j] and b[j - bit]
    return std::integer_sequence<int, ((J & BIT) ? VL + J - BIT : J)...>{};
}
template <int BIT, int... J>
constexpr auto second_lanes(std::integer_sequence<int, J...>) {  // a[j + bit] and b[j]
    return std::integer_sequence<int, ((J & BIT) ? VL + J : J + BIT)...>{};
}
using Lanes = std::make_integer_sequence<int, VL>;

// Lane i of the result is the sum of v[i].
template <int BIT = VL / 2>
UMBEL_INLINE vf sums(vf (&v)[VL]) {
    if constexpr (BIT == 0) {
        return v[0];
    } else {
        UMBEL_UNROLL for (int i = 0; i < BIT; i++) {
            vf own = pick(v[i], v[i + BIT], own_lanes<BIT>(Lanes{}));
            v[i] = own + pick(v[i], v[i + BIT], other_lanes<BIT>(Lanes{}));
        }
        return sums<BIT / 2>(v);
    }
}

template <int BIT = VL / 2>
UMBEL_INLINE void transpose(vf (&v)[VL]) {
    if constexpr (BIT > 0) {
        UMBEL_UNROLL for (int i = 0; i < VL; i++) {
            if (i & BIT) continue;
            vf a = v[i], b = v[i + BIT];
            v[i] = pick(a, b, first_lanes<BIT>(Lanes{}));
            v[i + BIT] = pick(a, b, second_lanes<BIT>(Lanes{}));
        }
        transpose<BIT / 2>(v);
    }
}

UMBEL_INLINE vf spread(float x) { return x - vf{}; }  // one broadcast: x - 0 is x, where 0 + x is an addition

inline void prefetch_row(const void* row, long bytes) {
    for (long at = 0; at < bytes; at += 64) prefetch((const char*)row + at);
}

// ------------------------------------------------------------------------------------------------ one item

struct Job {
    const AttentionPlan& plan;
    const AttentionShape& shape;
    const LayerPool& pool;
    const float* queries;
    long query_stride;
    float* out;
    long out_stride;
    float* part_out;      // [S, heads, head_dim] sums of values, not yet divided
    float* part_maximum;  // [S, heads]
    float* part_sum;      // [S, heads]

    long group() const { return shape.heads / shape.kv_heads; }
    bool is_split(long row) const { return plan.merge_ptr[row + 1] - plan.merge_ptr[row] > 1; }
};

// The memory of one thread for one item.
struct Scratch {
    float* query;    // [M, head_dim], scaled
    float* result;   // [M, columns], sums of values
    float* score;    // [M, BLOCK], then their exponentials
    float* maximum;  // [M] of all scores so far
    float* sum;      // [M] of all exponentials so far
    float* rescale;  // [M] what this block's maximum makes of earlier sums
    float* key_panels;
    float* value_panels;
};

constexpr long whole(long count, long unit) { return (count + unit - 1) / unit * unit; }

Scratch take_scratch(long vectors, long head_dim, long columns) {
    static thread_local Buffer buffer;
    long each = whole(vectors, 16);
    float* at = buffer.take<float>(each * (head_dim + columns + BLOCK + 3) + BLOCK * (head_dim + columns));
    Scratch scratch;
    auto part = [&](float*& field, long count) {
        field = at;
        at += count;
    };
    part(scratch.query, each * head_dim);
    part(scratch.result, each * columns);
    part(scratch.score, each * BLOCK);
    part(scratch.maximum, each);
    part(scratch.sum, each);
    part(scratch.rescale, each);
    part(scratch.key_panels, BLOCK * head_dim);
    part(scratch.value_panels, BLOCK * columns);
    return scratch;
}

// ------------------------------------------------------------------------------------------------ streamed

// score[q, k] for QUERIES queries and KEYS keys whose accumulators fill one vector of sums.
constexpr int KEYS = VL / 4;
constexpr int VALUES = 4;  // value rows at a time: a result is loaded and stored once for so many
constexpr int LINE = 16;   // elements between prefetches; head_dim is a multiple of it

// COUNT rows of a run of keys or values. Behind its end the last is repeated.
template <int COUNT, class Element>
struct Rows {
    const Element* row[COUNT];

    Rows(const Element* base, long row_stride, const int32_t* slots, long k, long count) {
        UMBEL_UNROLL for (int i = 0; i < COUNT; i++)
            row[i] = base + slots[k + i < count ? k + i : count - 1] * row_stride;
    }
};

// Fetches such rows a few lines at a time while others are computed, one row after the other: what the machine fetches
// by itself follows runs of lines. Several rows at once, or all lines at once, cost a third of the read speed.
template <int COUNT, class Element>
class Fetcher {
  public:
    Fetcher(const Rows<COUNT, Element>& rows, long head_dim) : rows_(rows), row_bytes_(head_dim * sizeof(Element)) {}

    UMBEL_INLINE void fetch_lines() {  // as many as LINE elements of every row take
        UMBEL_UNROLL for (long i = 0; i < (COUNT * LINE * (long)sizeof(Element) + 63) / 64; i++) {
            if (row_ == COUNT) return;
            prefetch((const char*)rows_.row[row_] + at_);
            at_ += 64;
            if (at_ >= row_bytes_) at_ = 0, row_++;
        }
    }

  private:
    const Rows<COUNT, Element>& rows_;
    long row_bytes_, at_ = 0;
    int row_ = 0;
};

template <int QUERIES, bool FETCH, class Element>
UMBEL_INLINE void dot_products(const float* query, long head_dim, const Rows<KEYS, Element>& keys,
                               const Rows<KEYS, Element>& next, float* score) {
    vf total[VL] = {};
    Fetcher<KEYS, Element> fetcher(next, head_dim);
    for (long line = 0; line < head_dim; line += LINE) {
        if (FETCH) fetcher.fetch_lines();
        UMBEL_UNROLL for (long d = line; d < line + LINE; d += VL) {
            UMBEL_UNROLL for (int k = 0; k < KEYS; k++) {
                vf x = load(keys.row[k] + d);
                UMBEL_UNROLL for (int i = 0; i < QUERIES; i++) total[i * KEYS + k] += load(query + i * head_dim + d) * x;
            }
        }
    }
    vf sum = sums(total);
    UMBEL_UNROLL for (int i = 0; i < QUERIES; i++) std::memcpy(score + i * BLOCK, (const float*)&sum + i * KEYS, KEYS * 4);
}

template <bool FETCH, class Element>
UMBEL_INLINE void dot_products_of(const float* query, long vectors, long head_dim, const Rows<KEYS, Element>& keys,
                                  const Rows<KEYS, Element>& next, float* score) {
    switch (vectors) {
        case 1:
            return dot_products<1, FETCH>(query, head_dim, keys, next, score);
        case 2:
            return dot_products<2, FETCH>(query, head_dim, keys, next, score);
        case 3:
            return dot_products<3, FETCH>(query, head_dim, keys, next, score);
        default:
            return dot_products<4, FETCH>(query, head_dim, keys, next, score);
    }
}

// `slots`: of `known` keys, the first `count` of which are computed now.
template <class Element>
void stream_scores(const float* query, long vectors, long head_dim, const Element* keys, long row_stride,
                   const int32_t* slots, long count, long known, float* score) {
    for (long k = 0; k < count; k += KEYS) {
        Rows<KEYS, Element> now(keys, row_stride, slots, k, count), next(keys, row_stride, slots, k + AHEAD, known);
        dot_products_of<true>(query, vectors, head_dim, now, next, score + k);
        for (long m = 4; m < vectors; m += 4)
            dot_products_of<false>(query + m * head_dim, vectors - m, head_dim, now, next, score + m * BLOCK + k);
    }
}

// result[q] += Σ weight[q, k] · value[k], for QUERIES rows and VALUES keys: each value is loaded once.
template <int QUERIES, bool FETCH, class Element>
UMBEL_INLINE void add_values(const float* weight, const Rows<VALUES, Element>& values,
                             const Rows<VALUES, Element>& next, long head_dim, float* result, long columns) {
    vf w[QUERIES][VALUES];
    UMBEL_UNROLL for (int i = 0; i < QUERIES; i++)
        UMBEL_UNROLL for (int k = 0; k < VALUES; k++) w[i][k] = spread(weight[i * BLOCK + k]);
    Fetcher<VALUES, Element> fetcher(next, head_dim);
    for (long line = 0; line < head_dim; line += LINE) {
        if (FETCH) fetcher.fetch_lines();
        UMBEL_UNROLL for (long d = line; d < line + LINE; d += VL) {
            vf v[VALUES];
            UMBEL_UNROLL for (int k = 0; k < VALUES; k++) v[k] = load(values.row[k] + d);
            UMBEL_UNROLL for (int i = 0; i < QUERIES; i++) {
                float* to = result + i * columns + d;
                vf total = load(to);
                UMBEL_UNROLL for (int k = 0; k < VALUES; k++) total += w[i][k] * v[k];
                store(to, total);
            }
        }
    }
}

// `slots` as above. Weights behind the last key are 0: rows of scores are BLOCK long.
template <class Element>
void stream_values(const float* weight, long vectors, long head_dim, const Element* values, long row_stride,
                   const int32_t* slots, long count, long known, float* result, long columns) {
    for (long k = 0; k < count; k += VALUES, weight += VALUES) {
        Rows<VALUES, Element> now(values, row_stride, slots, k, count);
        Rows<VALUES, Element> next(values, row_stride, slots, k + AHEAD, known);
        if (vectors > 1)
            add_values<2, true>(weight, now, next, head_dim, result, columns);
        else
            add_values<1, true>(weight, now, next, head_dim, result, columns);
        long m = 2;
        for (; m + 2 <= vectors; m += 2)
            add_values<2, false>(weight + m * BLOCK, now, next, head_dim, result + m * columns, columns);
        if (m < vectors)
            add_values<1, false>(weight + m * BLOCK, now, next, head_dim, result + m * columns, columns);
    }
}

// ------------------------------------------------------------------------------------------------ packed

// Keys as panels [BLOCK / PANEL][head_dim][PANEL]: column j of panel p is key p · PANEL + j. Behind the last key it is
// repeated.
template <class Element>
void pack_keys(const Element* keys, long row_stride, const int32_t* slots, long count, long known, long head_dim,
               float* panels) {
    for (long first = 0; first < whole(count, PANEL); first += VL) {
        float* to = panels + first / PANEL * PANEL * head_dim + first % PANEL;
        Rows<VL, Element> now(keys, row_stride, slots, first, count), next(keys, row_stride, slots, first + VL, known);
        Fetcher<VL, Element> fetcher(next, head_dim);
        for (long line = 0; line < head_dim; line += LINE) {
            fetcher.fetch_lines();
            for (long d = line; d < line + LINE; d += VL) {
                vf block[VL];
                UMBEL_UNROLL for (int i = 0; i < VL; i++) block[i] = load(now.row[i] + d);
                transpose(block);
                UMBEL_UNROLL for (int i = 0; i < VL; i++) store(to + (d + i) * PANEL, block[i]);
            }
        }
    }
}

// Values as panels [columns / PANEL][BLOCK][PANEL]: zeros behind the last column of head_dim.
template <class Element>
void pack_values(const Element* values, long row_stride, const int32_t* slots, long count, long known, long head_dim,
                 long columns, float* panels) {
    for (long k = 0; k < count; k++) {
        if (k + AHEAD < known) prefetch_row(values + slots[k + AHEAD] * row_stride, head_dim * sizeof(Element));
        const Element* value = values + slots[k] * row_stride;
        for (long d = 0; d < columns; d += VL)
            store(panels + (d / PANEL * BLOCK + k) * PANEL + d % PANEL, d < head_dim ? load(value + d) : vf{});
    }
}

// c[ROWS, PANEL] = a[ROWS, depth] · panel[depth, PANEL], added to rescale · c when there is a rescale.
template <int ROWS>
UMBEL_INLINE void product(const float* a, long a_stride, const float* panel, long depth, const float* rescale, float* c,
                          long c_stride) {
    vf low[ROWS], high[ROWS];
    UMBEL_UNROLL for (int i = 0; i < ROWS; i++) {
        vf factor = rescale ? spread(rescale[i]) : vf{};
        low[i] = rescale ? load(c + i * c_stride) * factor : vf{};
        high[i] = rescale ? load(c + i * c_stride + VL) * factor : vf{};
    }
    for (long k = 0; k < depth; k++) {
        vf b0 = load(panel + k * PANEL), b1 = load(panel + k * PANEL + VL);
        UMBEL_UNROLL for (int i = 0; i < ROWS; i++) {
            vf x = spread(a[i * a_stride + k]);
            low[i] += x * b0;
            high[i] += x * b1;
        }
    }
    UMBEL_UNROLL for (int i = 0; i < ROWS; i++) {
        store(c + i * c_stride, low[i]);
        store(c + i * c_stride + VL, high[i]);
    }
}

template <int ROWS>
void last_product(long rows, const float* a, long a_stride, const float* panel, long depth, const float* rescale,
                  float* c, long c_stride) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS)
            product<ROWS>(a, a_stride, panel, depth, rescale, c, c_stride);
        else
            last_product<ROWS - 1>(rows, a, a_stride, panel, depth, rescale, c, c_stride);
    }
}

// c[rows, panels · PANEL] from a[rows, depth] and the panels, which lie panel_stride apart.
void multiply(const float* a, long rows, long a_stride, const float* panel, long panels, long panel_stride, long depth,
              const float* rescale, float* c, long c_stride) {
    for (long p = 0; p < panels; p++, panel += panel_stride, c += PANEL) {
        long m = 0;
        for (; m + TILE <= rows; m += TILE)
            product<TILE>(a + m * a_stride, a_stride, panel, depth, rescale ? rescale + m : nullptr, c + m * c_stride,
                          c_stride);
        last_product<TILE - 1>(rows - m, a + m * a_stride, a_stride, panel, depth, rescale ? rescale + m : nullptr,
                               c + m * c_stride, c_stride);
    }
}

// ------------------------------------------------------------------------------------------------ softmax

// Scores [0, count) of one query vector become exponentials; those outside [begin, end) become 0.
void soften(float* score, long count, long begin, long end, float softcap, float& maximum, float& sum, float& rescale) {
    long padded = whole(count, VL);
    if (softcap != 0)
        for (long k = 0; k < padded; k += VL) store(score + k, tanh(load(score + k) / softcap) * softcap);
    for (long k = 0; k < begin; k++) score[k] = NEVER;
    for (long k = end; k < padded; k++) score[k] = NEVER;

    vf highest = spread(maximum);
    for (long k = 0; k < padded; k += VL) highest = max(highest, load(score + k));
    float now = max_of(highest);
    if (now == NEVER) {  // nothing seen yet, of this block nor before
        for (long k = 0; k < padded; k++) score[k] = 0;
        rescale = 1;
        return;
    }
    vf total = {};
    for (long k = 0; k < padded; k += VL) {
        vf x = load(score + k) - now;
        vf e = select(x == x, exp(x), x);  // a NaN stays one
        store(score + k, e);
        total += e;
    }
    rescale = std::exp(maximum - now);  // 0 at first
    float here[VL];
    store(here, total);
    for (int half = VL / 2; half; half /= 2)
        for (int i = 0; i < half; i++) here[i] += here[i + half];
    sum = sum * rescale + here[0];
    maximum = now;
}

// ------------------------------------------------------------------------------------------------ the item

void take_queries(const Job& job, long item, long head, const Scratch& scratch) {
    long head_dim = job.shape.head_dim, group = job.group();
    float* to = scratch.query;
    for (long slot = job.plan.item_q[item]; slot < job.plan.item_q[item + 1]; slot++) {
        const float* from = job.queries + job.plan.q_rows[slot] * job.query_stride + head * group * head_dim;
        for (long d = 0; d < group * head_dim; d += VL) store(to + d, load(from + d) * job.shape.scale);
        to += group * head_dim;
    }
}

void give_results(const Job& job, long item, long head, const Scratch& scratch, long columns) {
    long head_dim = job.shape.head_dim, group = job.group(), m = 0;
    for (long slot = job.plan.item_q[item]; slot < job.plan.item_q[item + 1]; slot++) {
        long row = job.plan.q_rows[slot];
        bool split = job.is_split(row);
        for (long i = 0; i < group; i++, m++) {
            long at = slot * job.shape.heads + head * group + i;
            float* to = split ? job.part_out + at * head_dim
                              : job.out + row * job.out_stride + (head * group + i) * head_dim;
            float factor = split ? 1.0f : 1.0f / scratch.sum[m];
            const float* from = scratch.result + m * columns;
            for (long d = 0; d < head_dim; d += VL) store(to + d, load(from + d) * factor);
            if (split) {
                job.part_maximum[at] = scratch.maximum[m];
                job.part_sum[at] = scratch.sum[m];
            }
        }
    }
}

template <class Element>
void run_item(const Job& job, long item, long head) {
    const AttentionPlan& plan = job.plan;
    long head_dim = job.shape.head_dim, group = job.group();
    long first_slot = plan.item_q[item], rows = plan.item_q[item + 1] - first_slot, vectors = rows * group;
    long columns = whole(head_dim, PANEL);
    bool streamed = vectors <= STREAMED;
    Scratch scratch = take_scratch(vectors, head_dim, columns);
    take_queries(job, item, head, scratch);
    std::memset(scratch.result, 0, vectors * columns * sizeof(float));
    for (long m = 0; m < vectors; m++) {
        scratch.maximum[m] = NEVER;
        scratch.sum[m] = 0;
    }

    long row_stride = job.shape.kv_heads * head_dim;
    const Element* keys = (const Element*)job.pool.keys + head * head_dim;
    const Element* values = (const Element*)job.pool.values + head * head_dim;
    long begin = plan.item_kv[2 * item], end = plan.item_kv[2 * item + 1];
    for (long at = begin; at < end; at += BLOCK) {
        long count = end - at < BLOCK ? end - at : BLOCK;
        const int32_t* slots = plan.kv_idx + at;
        if (streamed) {
            stream_scores(scratch.query, vectors, head_dim, keys, row_stride, slots, count, end - at, scratch.score);
        } else {
            pack_keys(keys, row_stride, slots, count, end - at, head_dim, scratch.key_panels);
            multiply(scratch.query, vectors, head_dim, scratch.key_panels, whole(count, PANEL) / PANEL,
                     PANEL * head_dim, head_dim, nullptr, scratch.score, BLOCK);
        }
        long position = plan.item_pos[item] + (at - begin);
        for (long r = 0, m = 0; r < rows; r++) {
            long lo = 0, hi = count;
            if (!plan.item_full[item]) {
                long row = plan.q_rows[first_slot + r];
                lo = plan.row_lo[row] - position;
                hi = plan.row_hi[row] - position;
                lo = lo < 0 ? 0 : lo > count ? count : lo;
                hi = hi > count ? count : hi < lo ? lo : hi;
            }
            for (long i = 0; i < group; i++, m++)
                soften(scratch.score + m * BLOCK, count, lo, hi, job.shape.softcap, scratch.maximum[m], scratch.sum[m],
                       scratch.rescale[m]);
        }
        if (streamed) {
            for (long m = 0; m < vectors; m++)
                if (scratch.rescale[m] != 1)
                    for (long d = 0; d < head_dim; d += VL) {
                        float* to = scratch.result + m * columns + d;
                        store(to, load(to) * scratch.rescale[m]);
                    }
            stream_values(scratch.score, vectors, head_dim, values, row_stride, slots, count, end - at, scratch.result, columns);
        } else {
            pack_values(values, row_stride, slots, count, end - at, head_dim, columns, scratch.value_panels);
            multiply(scratch.score, vectors, BLOCK, scratch.value_panels, columns / PANEL, PANEL * BLOCK, count,
                     scratch.rescale, scratch.result, columns);
        }
    }
    give_results(job, item, head, scratch, columns);
}

// ------------------------------------------------------------------------------------------------ merge

// A row with several parts: their sums, brought to one maximum, divided once.
void merge_row(const Job& job, long row) {
    const AttentionPlan& plan = job.plan;
    long head_dim = job.shape.head_dim;
    const int32_t *part = plan.merge_slot + plan.merge_ptr[row], *end = plan.merge_slot + plan.merge_ptr[row + 1];
    for (long head = 0; head < job.shape.heads; head++) {
        float maximum = NEVER, sum = 0;
        for (const int32_t* p = part; p < end; p++) {
            float m = job.part_maximum[*p * job.shape.heads + head];
            maximum = m > maximum ? m : maximum;
        }
        for (const int32_t* p = part; p < end; p++) {
            long at = *p * job.shape.heads + head;
            sum += std::exp(job.part_maximum[at] - maximum) * job.part_sum[at];
        }
        float* to = job.out + row * job.out_stride + head * head_dim;
        for (const int32_t* p = part; p < end; p++) {
            long at = *p * job.shape.heads + head;
            const float* from = job.part_out + at * head_dim;
            float weight = std::exp(job.part_maximum[at] - maximum) / sum;
            for (long d = 0; d < head_dim; d += VL)
                store(to + d, p == part ? load(from + d) * weight : load(to + d) + load(from + d) * weight);
        }
    }
}

template <class Element>
void write_rows(const float* from, long stride, const int64_t* slots, long begin, long end, long width, Element* pool) {
    for (long row = begin; row < end; row++)
        if (slots[row])
            for (long d = 0; d < width; d += VL) store(pool + slots[row] * width + d, load(from + row * stride + d));
}

}  // namespace

void attend(const AttentionPlan& plan, const AttentionShape& shape, const LayerPool& pool, const float* queries,
            long query_stride, float* out, long out_stride) {
    static Buffer workspace;
    long places = plan.partials > plan.rows ? plan.partials * shape.heads : 0;
    float* part = workspace.take<float>(places * (shape.head_dim + 2));
    Job job{plan,       shape,          pool, queries, query_stride, out, out_stride, part, part + places * shape.head_dim,
            part + places * (shape.head_dim + 1)};
    parallel(plan.items * shape.kv_heads, 1, [&](long begin, long end) {
        for (long at = begin; at < end; at++) {
            if (pool.is_bf16)
                run_item<bf16>(job, at / shape.kv_heads, at % shape.kv_heads);
            else
                run_item<float>(job, at / shape.kv_heads, at % shape.kv_heads);
        }
    });
    if (!places) return;
    parallel(plan.rows, even_grain(plan.rows, 2), [&](long begin, long end) {
        for (long row = begin; row < end; row++)
            if (job.is_split(row)) merge_row(job, row);
    });
}

void store(const AttentionShape& shape, const LayerPool& pool, const float* keys, long key_stride, const float* values,
           long value_stride, const int64_t* slots, long rows) {
    long width = shape.kv_heads * shape.head_dim;
    parallel(rows, even_grain(rows, 1, 16), [&](long begin, long end) {
        if (pool.is_bf16) {
            write_rows(keys, key_stride, slots, begin, end, width, (bf16*)pool.keys);
            write_rows(values, value_stride, slots, begin, end, width, (bf16*)pool.values);
        } else {
            write_rows(keys, key_stride, slots, begin, end, width, (float*)pool.keys);
            write_rows(values, value_stride, slots, begin, end, width, (float*)pool.values);
        }
    });
}

}  // namespace umbel

extern "C" {

void umbel_attend(const umbel::AttentionPlan* plan, const umbel::AttentionShape* shape, const umbel::LayerPool* pool,
                  const float* queries, long query_stride, float* out, long out_stride) {
    umbel::attend(*plan, *shape, *pool, queries, query_stride, out, out_stride);
}

void umbel_store(const umbel::AttentionShape* shape, const umbel::LayerPool* pool, const float* keys, long key_stride,
                 const float* values, long value_stride, const int64_t* slots, long rows) {
    umbel::store(*shape, *pool, keys, key_stride, values, value_stride, slots, rows);
}

}  // extern "C"
