#include "elementwise.h"

#include <cmath>

#include "activations.h"
#include "blocks.h"
#include "threads.h"

namespace umbel {
namespace {

constexpr long FLOATS_PER_CHUNK = 1 << 14;  // below, a second thread costs more than it saves

long row_grain(long rows, long size) {
    long least = FLOATS_PER_CHUNK / (size > 0 ? size : 1) + 1;
    long even = even_grain(rows, 4);
    return even > least ? even : least;
}

// out = x / rms(x) · weight, or x where there is no weight.
void norm_row(const float* x, const float* weight, float* out, long size, float epsilon) {
    if (!weight) {
        std::memcpy(out, x, size * sizeof(float));
        return;
    }
    float factor = inverse_rms(x, size, epsilon);
    long i = 0;
    for (; i + VL <= size; i += VL) store(out + i, load(x + i) * factor * load(weight + i));
    for (; i < size; i++) out[i] = x[i] * factor * weight[i];
}

void add_scaled(float* x, const float* update, float factor, const float* weight, long size) {
    long i = 0;
    for (; i + VL <= size; i += VL) store(x + i, load(x + i) + load(update + i) * factor * load(weight + i));
    for (; i < size; i++) x[i] += update[i] * factor * weight[i];
}

void add(float* x, const float* update, float scale, long size) {
    long i = 0;
    for (; i + VL <= size; i += VL) store(x + i, load(x + i) + load(update + i) * scale);
    for (; i < size; i++) x[i] += update[i] * scale;
}

// Dimension i turns with dimension i + half.
void turn_halves(const float* x, float factor, const float* weight, const float* cosines, const float* sines,
                 float* out, long half) {
    long i = 0;
    for (; i + VL <= half; i += VL) {
        vf low = load(x + i) * factor, high = load(x + half + i) * factor;
        if (weight) {
            low *= load(weight + i);
            high *= load(weight + half + i);
        }
        vf c = load(cosines + i), s = load(sines + i);
        store(out + i, low * c - high * s);
        store(out + half + i, high * c + low * s);
    }
    for (; i < half; i++) {
        float low = x[i] * factor, high = x[half + i] * factor;
        if (weight) {
            low *= weight[i];
            high *= weight[half + i];
        }
        out[i] = low * cosines[i] - high * sines[i];
        out[half + i] = high * cosines[i] + low * sines[i];
    }
}

// Dimension 2i turns with dimension 2i + 1.
void turn_neighbours(const float* x, float factor, const float* weight, const float* cosines, const float* sines,
                     float* out, long pairs) {
    for (long i = 0; i < pairs; i++) {
        float low = x[2 * i] * factor, high = x[2 * i + 1] * factor;
        if (weight) {
            low *= weight[2 * i];
            high *= weight[2 * i + 1];
        }
        out[2 * i] = low * cosines[i] - high * sines[i];
        out[2 * i + 1] = high * cosines[i] + low * sines[i];
    }
}

// `factor` and `weight` are the norm of the head; `angles` are those of the row.
void turn_head(const HeadTurn& turn, const float* x, float factor, const float* weight, const float* angles,
               float* out) {
    const float *cosines = angles, *sines = angles + turn.head_dim / 2;
    if (turn.interleaved)
        turn_neighbours(x, factor, weight, cosines, sines, out, turn.rotated / 2);
    else
        turn_halves(x, factor, weight, cosines, sines, out, turn.rotated / 2);
    for (long i = turn.rotated; i < turn.head_dim; i++) out[i] = x[i] * factor * (weight ? weight[i] : 1.0f);
}

void put(const float* x, bf16* out, long size) {
    long i = 0;
    for (; i + VL <= size; i += VL) store(out + i, load(x + i));
    for (; i < size; i++) out[i] = to_bf16(x[i]);
}
void put(const float* x, float* out, long size) { std::memcpy(out, x, size * sizeof(float)); }

// The heads of a row's queries, or of its keys, in place.
void turn_heads(const HeadTurn& turn, long heads, const float* norm, const float* angles, float* rows) {
    long size = turn.head_dim;
    float whole = norm && turn.whole_norm ? inverse_rms(rows, heads * size, turn.epsilon) : 1.0f;
    for (long head = 0; head < heads; head++) {
        float* x = rows + head * size;
        const float* weight = norm && turn.whole_norm ? norm + head * size : norm;
        float factor = norm && !turn.whole_norm ? inverse_rms(x, size, turn.epsilon) : whole;
        turn_head(turn, x, factor, weight, angles, x);
    }
}

template <class T>
void turn_rows(const HeadTurn& turn, float* qkv, const int64_t* positions, const int64_t* slots, T* keys, T* values,
               long begin, long end) {
    long size = turn.head_dim, width = (turn.heads + 2 * turn.kv_heads) * size;
    for (long row = begin; row < end; row++) {
        float* queries = qkv + row * width;
        float* key = queries + turn.heads * size;
        float* value = key + turn.kv_heads * size;
        const float* angles = turn.angles + positions[row] * size;
        turn_heads(turn, turn.heads, turn.query_norm, angles, queries);
        turn_heads(turn, turn.kv_heads, turn.key_norm, angles, key);
        for (long head = 0; turn.value_norm && head < turn.kv_heads; head++)
            norm_row(value + head * size, turn.value_norm, value + head * size, size, turn.epsilon);
        if (turn.query_beta != 0) {
            float steps = (float)((positions[row] + turn.query_offset) / turn.query_length);
            float scale = 1.0f + turn.query_beta * std::log1p(steps);
            for (long i = 0; i < turn.heads * size; i++) queries[i] *= scale;
        }
        long place = slots[row] * turn.kv_heads * size;
        put(key, keys + place, turn.kv_heads * size);
        put(value, values + place, turn.kv_heads * size);
    }
}

// Rows that are float32 where they lie: `Inputs` for those who want to read them.
struct Plain {
    float* rows;
    long size;
    float* begin_row(long row) { return rows + row * size; }
    void end_row(long) {}
};

template <class Rows>
void norm_rows(const float* x, const float* weight, Rows& out, long rows, long size, float epsilon) {
    parallel(rows, row_grain(rows, size), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const float* from = x + row * size;
            norm_row(from, weight, out.begin_row(row), size, epsilon);
            out.end_row(row);
        }
    });
}

template <class Rows>
void add_and_norm_rows(float* x, const float* update, const float* after, float scale, const float* next, Rows& normed,
                       long rows, long size, float epsilon) {
    parallel(rows, row_grain(rows, size), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            float* into = x + row * size;
            const float* from = update + row * size;
            if (after)
                add_scaled(into, from, inverse_rms(from, size, epsilon) * scale, after, size);
            else
                add(into, from, scale, size);
            norm_row(into, next, normed.begin_row(row), size, epsilon);
            normed.end_row(row);
        }
    });
}

template <class Rows>
void activate_all(const float* x, Rows& out, long rows, long size, Activation activation) {
    parallel(rows, row_grain(rows, 4 * size), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            activate_values(activation, x + row * size, out.begin_row(row), size);
            out.end_row(row);
        }
    });
}

// out[i] = activation(gate[i]) · up[i]
void activate_row(Activation activation, const float* gate, const float* up, float* out, long size) {
    with_activation(activation, [&](auto function) {
        long i = 0;
        for (; i + VL <= size; i += VL) store(out + i, function(load(gate + i)) * load(up + i));
        for (; i < size; i++) out[i] = function(splat(gate[i]))[0] * up[i];
    });
}

template <class Rows>
void activate_rows(const float* gate_up, Rows& out, long rows, long size, Activation activation) {
    parallel(rows, row_grain(rows, 4 * size), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const float* gate = gate_up + row * 2 * size;
            activate_row(activation, gate, gate + size, out.begin_row(row), size);
            out.end_row(row);
        }
    });
}

}  // namespace

float inverse_rms(const float* x, long size, float epsilon) {
    vf total[4] = {};
    long i = 0;
    for (; i + 4 * VL <= size; i += 4 * VL)
        for (int j = 0; j < 4; j++) {
            vf v = load(x + i + j * VL);
            total[j] += v * v;
        }
    float rest = sum((total[0] + total[1]) + (total[2] + total[3]));
    for (; i < size; i++) rest += x[i] * x[i];
    return 1.0f / std::sqrt(rest / (float)size + epsilon);
}

void rms_norm(const float* x, const float* weight, float* out, long rows, long size, float epsilon) {
    Plain to{out, size};
    norm_rows(x, weight, to, rows, size, epsilon);
}
void rms_norm(const float* x, const float* weight, Inputs& out, long rows, long size, float epsilon) {
    norm_rows(x, weight, out, rows, size, epsilon);
}

void add_and_norm(float* x, const float* update, const float* after, float scale, const float* next, float* normed,
                  long rows, long size, float epsilon) {
    Plain to{normed, size};
    add_and_norm_rows(x, update, after, scale, next, to, rows, size, epsilon);
}
void add_and_norm(float* x, const float* update, const float* after, float scale, const float* next, Inputs& normed,
                  long rows, long size, float epsilon) {
    add_and_norm_rows(x, update, after, scale, next, normed, rows, size, epsilon);
}

void activate(const float* gate_up, float* out, long rows, long size, Activation activation) {
    Plain to{out, size};
    activate_rows(gate_up, to, rows, size, activation);
}
void activate(const float* gate_up, Inputs& out, long rows, long size, Activation activation) {
    activate_rows(gate_up, out, rows, size, activation);
}

void keep_highest(float* x, long rows, long size, long stride, float deviations) {
    parallel(rows, row_grain(rows, size), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            float* values = x + row * stride;
            vf total{}, squares{};
            long i = 0;
            for (; i + VL <= size; i += VL) total += load(values + i);
            float mean = sum(total);
            for (; i < size; i++) mean += values[i];
            mean /= (float)size;
            for (i = 0; i + VL <= size; i += VL) squares += (load(values + i) - mean) * (load(values + i) - mean);
            float square = sum(squares);
            for (; i < size; i++) square += (values[i] - mean) * (values[i] - mean);
            float least = mean + deviations * std::sqrt(square / (float)size);
            for (i = 0; i < size; i++) {
                float above = values[i] - least;
                values[i] = above < 0 ? 0.0f : above;  // what is no number stays none
            }
        }
    });
}

void activate_values(Activation activation, const float* x, float* out, long size) {
    with_activation(activation, [&](auto function) {
        long i = 0;
        for (; i + VL <= size; i += VL) store(out + i, function(load(x + i)));
        for (; i < size; i++) out[i] = function(splat(x[i]))[0];
    });
}

void activate_alone(const float* x, float* out, long rows, long size, Activation activation) {
    Plain to{out, size};
    activate_all(x, to, rows, size, activation);
}
void activate_alone(const float* x, Inputs& out, long rows, long size, Activation activation) {
    activate_all(x, out, rows, size, activation);
}

void multiply_by_sigmoid(const float* gates, float* x, long rows, long size) {
    parallel(rows, row_grain(rows, 4 * size), [&](long begin, long end) {
        long i = begin * size, last = end * size;
        for (; i + VL <= last; i += VL) store(x + i, load(x + i) * reciprocal(exp(-load(gates + i)) + 1.0f));
        for (; i < last; i++) x[i] *= (reciprocal(exp(splat(-gates[i])) + 1.0f))[0];
    });
}

void turn_and_store(const HeadTurn& turn, float* qkv, const int64_t* positions, const int64_t* slots, long rows,
                    void* keys, void* values, bool pool_is_bf16) {
    long width = (turn.heads + 2 * turn.kv_heads) * turn.head_dim;
    parallel(rows, row_grain(rows, 2 * width), [&](long begin, long end) {
        if (pool_is_bf16)
            turn_rows(turn, qkv, positions, slots, (bf16*)keys, (bf16*)values, begin, end);
        else
            turn_rows(turn, qkv, positions, slots, (float*)keys, (float*)values, begin, end);
    });
}

void embed(const void* embedding, Format format, long row_bytes, const int64_t* tokens, float scale, float* out,
           long rows, long size) {
    parallel(rows, row_grain(rows, size), [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            float* to = out + row * size;
            dequantise_row(format, (const uint8_t*)embedding + tokens[row] * row_bytes, size, to);
            for (long i = 0; i < size; i++) to[i] *= scale;
        }
    });
}

}  // namespace umbel

using namespace umbel;

extern "C" {

void umbel_rms_norm(const float* x, const float* weight, float* out, long rows, long size, float epsilon) {
    rms_norm(x, weight, out, rows, size, epsilon);
}
void umbel_add_and_norm(float* x, const float* update, const float* after, float scale, const float* next,
                        float* normed, long rows, long size, float epsilon) {
    add_and_norm(x, update, after, scale, next, normed, rows, size, epsilon);
}
void umbel_activate(const float* gate_up, float* out, long rows, long size, int activation) {
    activate(gate_up, out, rows, size, (Activation)activation);
}
void umbel_turn_and_store(const HeadTurn* turn, float* qkv, const int64_t* positions, const int64_t* slots, long rows,
                          void* keys, void* values, int pool_is_bf16) {
    turn_and_store(*turn, qkv, positions, slots, rows, keys, values, pool_is_bf16 != 0);
}
void umbel_embed(const void* embedding, int format, long row_bytes, const int64_t* tokens, float scale, float* out,
                 long rows, long size) {
    embed(embedding, (Format)format, row_bytes, tokens, scale, out, rows, size);
}

}  // extern "C"
