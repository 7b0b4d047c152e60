#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "activations.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long SMALL = 1 << 14;  // numbers below which a second thread costs more than it saves
constexpr int VECTORS = 4;       // of a panel
constexpr long PANEL_WIDTH = VECTORS * VL;

long grain_of(long units, long numbers) { return numbers < SMALL ? units : even_grain(units, 4); }

// ---------------------------------------------------------------------------------------------- convolutions

// The convolution of some channels over the rows of one run, and their window after it. in: the columns' inputs.
void convolve(const Recurrent& r, const ChannelColumns& c, const float* before, float* after, const float* in,
              long rows, float* out, long out_stride) {
    long kept = r.kernel - 1, count = c.count;
    // Input `place` of the run; those before its first row are in the window.
    auto input = [&](long place) { return place < 0 ? before + (place + kept) * r.channels : in + place * r.first_width; };
    for (long row = 0; row < rows; row++) {
        float* to = out + row * out_stride;
        if (r.bias)
            std::memcpy(to, r.bias + c.channel, count * sizeof(float));
        else
            std::fill_n(to, count, 0.0f);
        for (long tap = 0; tap < r.kernel; tap++) {
            const float *x = input(row - kept + tap), *weight = r.taps + tap * r.channels + c.channel;
            for (long i = 0; i < count; i++) to[i] += x[i] * weight[i];
        }
    }
    // Ascending, so that a window is not overwritten before it is read where both are one.
    for (long place = 0; place < kept; place++)
        std::memmove(after + place * r.channels, input(rows - kept + place), count * sizeof(float));
}

// LFM2's gates around the convolution: out = factor · convolution(factor · value).
void convolve_between_gates(const Recurrent& r, const ChannelColumns& c, const float* before, float* after,
                            float* first, long rows, float* out) {
    long size = r.channels;
    for (long row = 0; row < rows; row++) {
        float* x = first + row * r.first_width;
        for (long i = 0; i < c.count; i++) x[i] *= x[2 * size + i];
    }
    convolve(r, c, before, after, first, rows, out, r.width);
    for (long row = 0; row < rows; row++) {
        const float* factor = first + row * r.first_width + size;
        for (long i = 0; i < c.count; i++) out[row * r.width + i] *= factor[i];
    }
}

void convolve_runs(const Recurrent& r, const ChannelColumns& c, const StateRuns& runs, long group, float* window,
                   float* first, float* out, long out_stride) {
    long slot = (r.kernel - 1) * r.channels;
    for (long run = runs.starts[group]; run < runs.starts[group + 1]; run++) {
        const float* before = window + runs.source[run] * slot + c.channel;
        float* after = window + runs.target[run] * slot + c.channel;
        float* in = first + runs.first[run] * r.first_width + c.column;
        float* to = out + runs.first[run] * out_stride + c.channel;
        if ((RecurrentKind)r.kind == RecurrentKind::SHORT_CONVOLUTION) {
            convolve_between_gates(r, c, before, after, in, runs.rows[run], to);
            continue;
        }
        convolve(r, c, before, after, in, runs.rows[run], to, out_stride);
        for (long row = 0; row < runs.rows[run]; row++)
            activate_values((Activation)r.activation, to + row * out_stride, to + row * out_stride, c.count);
    }
}

// ---------------------------------------------------------------------------------------------- memories

// What a token does to the memory of a head.
struct Rate {
    float left;   // of what was there
    float added;  // Mamba: the factor of what is added; delta net: how far it is moved
};

Rate rate_of(const Recurrent& r, const float* first, long head) {
    float step = first[r.steps[head]] + r.step_bias[head];
    step = step > 20.0f ? step : std::log1p(std::exp(step));
    if ((RecurrentKind)r.kind == RecurrentKind::DELTA_NET)
        return {std::exp(r.decay[head] * step), 1.0f / (1.0f + std::exp(-first[r.strengths[head]]))};
    step = std::min(std::max(step, r.least_step), r.most_step);
    return {std::exp(r.decay[head] * step), step};
}

// 1 / sqrt(sum of x² + 1e-6)
float inverse_length(const float* x, long size) {
    vf total{};
    long i = 0;
    for (; i + VL <= size; i += VL) total = fma(load(x + i), load(x + i), total);
    float rest = sum(total);
    for (; i < size; i++) rest += x[i] * x[i];
    return 1.0f / std::sqrt(rest + 1e-6f);
}

// PANEL_WIDTH columns of a memory: its rows lie `stride` apart.
struct Panel {
    float* data;
    long stride;
    float* row(long index) const { return data + index * stride; }
};

// key · memory
void read_panel(const Panel& memory, const float* key, long keys, float* out) {
    vf even[VECTORS] = {}, odd[VECTORS] = {};
    const float* row = memory.data;
    long i = 0, stride = memory.stride;
    for (; i + 2 <= keys; i += 2, row += 2 * stride) {
        vf first = splat(key[i]), second = splat(key[i + 1]);
        for (int v = 0; v < VECTORS; v++) even[v] = fma(load(row + v * VL), first, even[v]);
        for (int v = 0; v < VECTORS; v++) odd[v] = fma(load(row + stride + v * VL), second, odd[v]);
    }
    if (i < keys)
        for (int v = 0; v < VECTORS; v++) even[v] = fma(load(row + v * VL), splat(key[i]), even[v]);
    for (int v = 0; v < VECTORS; v++) store(out + v * VL, even[v] + odd[v]);
}

// to = left · from + keyᵀ added; out = query · to
void move_panel(const Panel& from, const Panel& to, const float* key, const float* query, long keys, float left,
                const float* added, float* out) {
    vf total[VECTORS] = {}, fresh[VECTORS], kept = splat(left);
    for (int v = 0; v < VECTORS; v++) fresh[v] = load(added + v * VL);
    const float* before = from.data;
    float* after = to.data;
    long before_stride = from.stride, after_stride = to.stride;
    for (long i = 0; i < keys; i++, before += before_stride, after += after_stride) {
        vf k = splat(key[i]), q = splat(query[i]);
        for (int v = 0; v < VECTORS; v++) {
            vf value = fma(fresh[v], k, load(before + v * VL) * kept);
            store(after + v * VL, value);
            total[v] = fma(value, q, total[v]);
        }
    }
    for (int v = 0; v < VECTORS; v++) store(out + v * VL, total[v]);
}

// Some columns of the memory of one head, and what its tokens read there.
class Column {
  public:
    // scratch: [key_dim, PANEL_WIDTH]
    Column(const Recurrent& r, long head, long first, float* scratch)
        : r_(r), head_(head), first_(first), count_(std::min(PANEL_WIDTH, r.value_dim - first)),
          scratch_{scratch, PANEL_WIDTH}, root_(1.0f / std::sqrt((float)r.key_dim)) {}

    // Takes rows of a run from one state to another: mixed [rows, channels], rates [rows, heads], out [rows, width].
    void run(const float* source, float* target, const float* mixed, const Rate* rates, long rows, float* out) {
        Panel from{(float*)source + first_, r_.value_dim}, to{target + first_, r_.value_dim};
        bool cut = count_ < PANEL_WIDTH;
        if (cut) {
            std::memset(scratch_.data, 0, r_.key_dim * PANEL_WIDTH * sizeof(float));
            copy(from, scratch_);
        }
        for (long row = 0; row < rows; row++) {
            const Panel& before = row || cut ? scratch_ : from;
            const Panel& after = row + 1 < rows || cut ? scratch_ : to;
            token(before, after, mixed + row * r_.channels, rates[row * r_.heads + head_],
                  out + row * r_.width + head_ * r_.value_dim + first_);
        }
        if (cut) copy(scratch_, to);
    }

  private:
    void copy(const Panel& from, const Panel& to) const {
        for (long i = 0; i < r_.key_dim; i++) std::memcpy(to.row(i), from.row(i), count_ * sizeof(float));
    }

    void token(const Panel& before, const Panel& after, const float* mixed, const Rate& rate, float* out) const {
        long group = r_.tiled ? head_ % r_.groups : head_ / (r_.heads / r_.groups);
        const float *key = mixed + r_.keys + group * r_.key_dim, *query = mixed + r_.queries + group * r_.key_dim;
        float values[PANEL_WIDTH] = {}, added[PANEL_WIDTH], read[PANEL_WIDTH];
        std::memcpy(values, mixed + r_.values + head_ * r_.value_dim + first_, count_ * sizeof(float));
        if ((RecurrentKind)r_.kind == RecurrentKind::MAMBA) {
            for (long i = 0; i < PANEL_WIDTH; i++) added[i] = values[i] * rate.added;
            move_panel(before, after, key, query, r_.key_dim, rate.left, added, read);
            for (long i = 0; i < count_; i++) out[i] = read[i] + values[i] * r_.through[head_];
            return;
        }
        float shorter = inverse_length(key, r_.key_dim);
        float scale = inverse_length(query, r_.key_dim) * root_;
        read_panel(before, key, r_.key_dim, read);
        for (long i = 0; i < PANEL_WIDTH; i++)
            added[i] = (values[i] - read[i] * (shorter * rate.left)) * (rate.added * shorter);
        move_panel(before, after, key, query, r_.key_dim, rate.left, added, read);
        for (long i = 0; i < count_; i++) out[i] = read[i] * scale;
    }

    const Recurrent& r_;
    long head_, first_, count_;
    Panel scratch_;
    float root_;
};

// x[i] *= silu(gates[i])
void multiply_by_silu(const float* gates, float* x, long size) {
    long i = 0;
    for (; i + VL <= size; i += VL) store(x + i, load(x + i) * silu(load(gates + i)));
    for (; i < size; i++) x[i] *= silu(splat(gates[i]))[0];
}

void norm_values(const float* weight, float* x, long size, float epsilon) {
    float factor = inverse_rms(x, size, epsilon);
    for (long i = 0; i < size; i++) x[i] *= factor * weight[i];
}

// The norm and the gates of one row's outputs: a delta net norms heads before their gates, Mamba groups after them.
void finish_row(const Recurrent& r, const float* first, float* out, float epsilon) {
    bool mamba = (RecurrentKind)r.kind == RecurrentKind::MAMBA;
    for (long head = 0; head < r.heads; head++) {
        float* x = out + head * r.value_dim;
        if (!mamba) norm_values(r.norm, x, r.value_dim, epsilon);
        multiply_by_silu(first + r.gates[head], x, r.value_dim);
    }
    long size = r.width / r.groups;
    for (long group = 0; mamba && group < r.groups; group++)
        norm_values(r.norm + group * size, out + group * size, size, epsilon);
}

}  // namespace

bool RecurrentScan::run(const Recurrent& r, const StateRuns& runs, const LayerStates& states, float* first, long rows,
                        float epsilon, float* out) {
    long pieces = runs.groups * r.column_count;
    if ((RecurrentKind)r.kind == RecurrentKind::SHORT_CONVOLUTION) {
        parallel(pieces, grain_of(pieces, rows * r.channels), [&](long begin, long end) {
            for (long i = begin; i < end; i++)
                convolve_runs(r, r.columns[i % r.column_count], runs, i / r.column_count, states.window, first, out,
                              r.width);
        });
        return true;
    }
    float* mixed = mixed_.take<float>(rows * r.channels);
    Rate* rates = rates_.take<Rate>(rows * r.heads);
    long panel_size = r.key_dim * PANEL_WIDTH;
    float* scratch = panels_.take<float>(team_size() * panel_size);
    if (!mixed || !rates || !scratch) return false;
    parallel(pieces + rows, grain_of(pieces + rows, rows * r.channels), [&](long begin, long end) {
        for (long i = begin; i < end; i++) {
            if (i < pieces) {
                convolve_runs(r, r.columns[i % r.column_count], runs, i / r.column_count, states.window, first, mixed,
                              r.channels);
                continue;
            }
            long row = i - pieces;
            for (long head = 0; head < r.heads; head++)
                rates[row * r.heads + head] = rate_of(r, first + row * r.first_width, head);
        }
    });
    long panels = (r.value_dim + PANEL_WIDTH - 1) / PANEL_WIDTH, memory = r.key_dim * r.value_dim;
    long units = runs.groups * r.heads * panels;
    parallel(units, grain_of(units, rows * r.heads * memory), [&](long begin, long end) {
        for (long i = begin; i < end; i++) {
            long group = i / (r.heads * panels), head = i / panels % r.heads;
            Column column(r, head, i % panels * PANEL_WIDTH, scratch + team_rank() * panel_size);
            for (long run = runs.starts[group]; run < runs.starts[group + 1]; run++) {
                long row = runs.first[run];
                column.run(states.memory + (runs.source[run] * r.heads + head) * memory,
                           states.memory + (runs.target[run] * r.heads + head) * memory, mixed + row * r.channels,
                           rates + row * r.heads, runs.rows[run], out + row * r.width);
            }
        }
    });
    parallel(rows, grain_of(rows, rows * r.width), [&](long begin, long end) {
        for (long row = begin; row < end; row++)
            finish_row(r, first + row * r.first_width, out + row * r.width, epsilon);
    });
    return true;
}

}  // namespace umbel

extern "C" {

// One layer's scan on its own, for tests. False: there is no memory.
int umbel_recurrent_scan(const umbel::Recurrent* layer, const umbel::StateRuns* runs, const umbel::LayerStates* states,
                         float* first, long rows, float epsilon, float* out) {
    return umbel::RecurrentScan().run(*layer, *runs, *states, first, rows, epsilon, out);
}

}  // extern "C"
