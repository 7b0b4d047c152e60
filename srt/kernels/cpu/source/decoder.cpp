#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "linear_float.h"
#include "memory.h"
#include "threads.h"

namespace umbel {
namespace {

class Decoder {
  public:
    explicit Decoder(const DecoderShape& shape) : shape_(shape), layers_(shape.layers) {}

    void set_layer(long index, const DecoderLayer& layer) { layers_[index] = layer; }

    // False when there is no memory for the buffers.
    bool forward(const DecoderStep& step) {
        const DecoderShape& s = shape_;
        long rows = step.rows, widest = 0, most_attended = 0, last = -1;
        for (long index = 0; index < s.layers; index++) {
            const DecoderLayer& layer = layers_[index];
            if (layer.qkv) {
                widest = std::max(widest, first_width_of(layer));
                most_attended = std::max(most_attended, attended_of(layer));
                last = index;
            }
            widest = std::max(widest, (1 + s.gated_mlp) * layer.width);
        }
        float* x = residual_.take<float>(rows * s.hidden);
        float* update = update_.take<float>(rows * s.hidden);
        float* wide = wide_.take<float>(rows * widest);
        float* seen = attended_.take<float>(rows * most_attended);
        if (!x || !update || !wide || !seen) return false;

        embed(s.embedding, (Format)s.embedding_format, s.embedding_row_bytes, step.token_ids, s.embedding_scale, x, rows,
              s.hidden);
        for (long i = 0; i < step.given; i++)
            std::memcpy(x + step.given_rows[i] * s.hidden, step.given_values + i * s.hidden, s.hidden * sizeof(float));
        if (s.side && !sides_.make(*s.side, step.token_ids, x, rows, s.hidden, s.epsilon)) return false;
        if (s.streams && !streams_.enter(*s.streams, x, rows, s.hidden, s.epsilon)) return false;
        const AdapterGroups* adapted = &step.adapted;
        Block block{x, update, false, nullptr};
        for (long index = 0; index < s.layers; index++) {
            const DecoderLayer& layer = layers_[index];
            if (layer.streams) {
                streams_.predict(*layer.streams, x, rows);
                block.pending = false;
            }
            if (layer.qkv) {
                if (!normed_.reset(*layer.qkv, rows)) return false;
                enter(block, layer.before_attention, normed_, rows);
                long width = first_width_of(layer), attended = attended_of(layer);
                normed_.multiply(*layer.qkv, layer.qkv_bias, wide, width);
                if (!low_rank_.add(layer.qkv_changes, *adapted, normed_, wide, width)) return false;
                if (!mix(layer, step, wide, index == last, seen)) return false;
                if (index == last) {  // from here on rows do not see each other: only those that are asked for go on
                    if (!step.outputs) return true;  // keys and states of a chunk inside a prompt are all it is for
                    keep(step, x, s.hidden);
                    if (s.side) keep(step, sides_.rows(), sides_.width());
                    for (long i = 0; s.streams && i < s.streams->count; i++) keep(step, streams_.stream(i), s.hidden);
                    rows = step.outputs;
                    adapted = &step.adapted_outputs;
                }
                linear(*layer.output, seen, rows, attended, layer.output_bias, update, s.hidden);
                if (!low_rank_.add(layer.output_changes, *adapted, seen, attended, update, s.hidden)) return false;
                block.after = layer.after_attention;
                if (layer.streams) {
                    if (!streams_.join(*layer.streams, layer.before_attention, update, block.after, x, rows))
                        return false;
                    block.pending = false;
                }
            }
            if (layer.experts || layer.gate_up) {
                if (!(layer.experts ? mixture(layer, block, rows) : mlp(layer, *adapted, block, rows, wide)))
                    return false;
                block.after = layer.after_mlp;
            }
            if (layer.streams) {
                add_and_norm(x, update, block.after, s.residual_scale, nullptr, update, rows, s.hidden, s.epsilon);
                streams_.correct(*layer.streams, x, rows);
                if (!layer.side) continue;
                if (!sides_.apply(*layer.side, index, (Activation)s.activation, x, rows, s.hidden, update)) return false;
                streams_.add(update, layer.side->norm, rows);
                continue;
            }
            if (layer.side) {
                add_and_norm(x, update, block.after, s.residual_scale, nullptr, update, rows, s.hidden, s.epsilon);
                if (!sides_.apply(*layer.side, index, (Activation)s.activation, x, rows, s.hidden, update)) return false;
                block.after = layer.side->norm;
            }
            if (layer.scale != 1.0f) {  // of the sum, which is made without the next norm then
                add_and_norm(x, update, block.after, s.residual_scale, nullptr, update, rows, s.hidden, s.epsilon);
                scale_rows(x, layer.scale, rows * s.hidden, update);
                block.after = nullptr;
            }
            if (index < step.added) add_given(step, index, x, index >= last, s.hidden);
        }
        if (s.streams) {
            if (!streams_.leave(*s.streams, x, rows)) return false;
            rms_norm(x, s.final_norm, step.hidden, rows, s.hidden, s.epsilon);
            return true;
        }
        add_and_norm(x, update, block.after, s.residual_scale, s.final_norm, step.hidden, rows, s.hidden, s.epsilon);
        return true;
    }

  private:
    // The residual, and what the attention or MLP before gave, which is added where the next one begins.
    struct Block {
        float *x, *update;
        bool pending;        // false: `x` is the embedding
        const float* after;  // the norm of `update`, or nullptr
    };

    // Adds what the block before gave, and norms the inputs of the next one.
    template <class Rows>
    void enter(Block& block, const float* norm, Rows& normed, long rows) {
        const DecoderShape& s = shape_;
        if (block.pending)
            add_and_norm(block.x, block.update, block.after, s.residual_scale, norm, normed, rows, s.hidden, s.epsilon);
        else
            rms_norm(block.x, norm, normed, rows, s.hidden, s.epsilon);
        block.pending = true;
    }

    // Outputs of a layer's first map, and what is left of them without the gates of queries.
    long first_width_of(const DecoderLayer& layer) const {
        if (layer.recurrent) return layer.recurrent->first_width;
        if (layer.latent) return layer.latent->first_width(shape_.heads);
        return turned_of(layer) + (shape_.gated_attention ? shape_.heads * layer.head_dim : 0);
    }
    long turned_of(const DecoderLayer& layer) const {
        return (shape_.heads + 2 * layer.own_kv_heads) * layer.head_dim;
    }
    // Inputs of its output map.
    long attended_of(const DecoderLayer& layer) const {
        if (layer.recurrent) return layer.recurrent->width;
        return shape_.heads * (layer.latent ? layer.latent->value_dim : layer.head_dim);
    }

    // x *= factor; nothing = 0, which is added next.
    static void scale_rows(float* x, float factor, long count, float* nothing) {
        parallel(count, even_grain(count, 1, 1 << 14), [&](long begin, long end) {
            for (long i = begin; i < end; i++) x[i] *= factor, nothing[i] = 0;
        });
    }

    // Adds to given rows what belongs to a layer. kept: only the output rows are left of the step's.
    static void add_given(const DecoderStep& step, long layer, float* x, bool kept, long hidden) {
        const float* values = step.added_values[layer];
        const int64_t *outputs = step.output_rows, *end = outputs + step.outputs;
        parallel(step.given, even_grain(step.given, 1, 1 + (1 << 14) / hidden), [&](long begin, long stop) {
            for (long i = begin; i < stop; i++) {
                long row = step.given_rows[i];
                if (kept) {
                    const int64_t* place = std::lower_bound(outputs, end, row);
                    if (place == end || *place != row) continue;
                    row = place - outputs;
                }
                for (long j = 0; j < hidden; j++) x[row * hidden + j] += values[i * hidden + j];
            }
        });
    }

    HeadTurn turn_of(const DecoderLayer& layer, const DecoderStep& step) const {
        const DecoderShape& s = shape_;
        return {s.heads,
                layer.own_kv_heads,
                layer.head_dim,
                layer.query_norm,
                layer.key_norm,
                layer.value_norm,
                s.whole_norm,
                s.epsilon,
                step.angles[layer.rope],
                layer.rotated,
                layer.interleaved,
                layer.query_beta,
                layer.query_length,
                layer.query_offset};
    }

    // From a layer's first map to `seen`, the inputs of its output map: of all rows, or in the last layer of those asked
    // for.
    bool mix(const DecoderLayer& layer, const DecoderStep& step, float* wide, bool last, float* seen) {
        if (!layer.recurrent)
            return layer.latent ? see_latents(layer, step, step.pools[layer.pool], wide, last, seen)
                                : see(layer, step, step.pools[layer.pool], wide, last, seen);
        if (!scan_.run(*layer.recurrent, step.runs, step.states[layer.pool], wide, step.rows, shape_.epsilon, seen))
            return false;
        if (last) keep(step, seen, layer.recurrent->width);
        return true;
    }

    bool see(const DecoderLayer& layer, const DecoderStep& step, const LayerPool& pool, float* wide, bool last,
             float* seen) {
        const DecoderShape& s = shape_;
        long turned = turned_of(layer), attended = attended_of(layer);
        const float* gates = nullptr;
        if (s.gated_attention && !(gates = take_gates(wide, step.rows, turned, attended, layer.head_dim))) return false;
        turn_and_store(turn_of(layer, step), wide, step.positions, step.write_slots[layer.plan], step.rows, pool.keys,
                       pool.values, pool.is_bf16);
        if (last && !step.outputs) return true;
        AttentionShape shape{s.heads,           layer.kv_heads,      layer.head_dim, layer.head_dim,
                             s.attention_scale, s.attention_softcap, layer.sinks};
        attend(*step.plans[layer.plan], shape, pool, wide, turned, seen, attended);
        if (gates) multiply_by_sigmoid(gates, seen, step.rows, attended);
        if (last) keep(step, seen, attended);
        return true;
    }

    // Moves the gates of queries out of the first map's rows, which become [turned] numbers wide; nullptr: no memory.
    const float* take_gates(float* wide, long rows, long turned, long attended, long size) {
        float* gates = gates_.take<float>(rows * attended);
        for (long row = 0; gates && row < rows; row++) {
            const float* from = wide + row * (turned + attended);
            float *to = wide + row * turned, *own = gates + row * attended;
            for (long head = 0; head < shape_.heads; head++) {
                std::memcpy(own + head * size, from + (2 * head + 1) * size, size * sizeof(float));
                std::memmove(to + head * size, from + 2 * head * size, size * sizeof(float));
            }
            std::memmove(to + attended, from + 2 * attended, (turned - attended) * sizeof(float));
        }
        return gates;
    }

    bool see_latents(const DecoderLayer& layer, const DecoderStep& step, const LayerPool& pool, const float* wide,
                     bool last, float* seen) {
        const DecoderShape& s = shape_;
        const Latent& latent = *layer.latent;
        const float* queries = latent_heads_.queries(latent, s.heads, wide, step.rows, step.positions,
                                                     step.write_slots[layer.plan], step.angles[layer.rope], pool);
        if (!queries) return false;
        if (last && !step.outputs) return true;
        long width = s.heads * latent.rank;
        float* latents = latents_.take<float>(step.rows * width);
        if (!latents) return false;
        AttentionShape shape{s.heads, 1, latent.key_dim(), latent.rank, s.attention_scale, 0.0f, layer.sinks};
        attend(*step.plans[layer.plan], shape, pool, queries, s.heads * latent.key_dim(), latents, width);
        if (last) keep(step, latents, width);
        to_values(latent, s.heads, latents, last ? step.outputs : step.rows, seen);
        return true;
    }

    // A dense MLP, from the block before to its `update`.
    bool mlp(const DecoderLayer& layer, const AdapterGroups& adapted, Block& block, long rows, float* wide) {
        if (!normed_.reset(*layer.gate_up, rows) || !gated_.reset(*layer.down, rows)) return false;
        enter(block, layer.before_mlp, normed_, rows);
        if (!gate(layer, adapted, rows, wide)) return false;
        gated_.multiply(*layer.down, layer.down_bias, block.update, shape_.hidden);
        return low_rank_.add(layer.down_changes, adapted, gated_, block.update, shape_.hidden);
    }

    // The same with experts, which read rows of float32.
    bool mixture(const DecoderLayer& layer, Block& block, long rows) {
        const DecoderShape& s = shape_;
        float* normed = plain_.take<float>(rows * s.hidden);
        if (!normed) return false;
        enter(block, layer.before_mlp, normed, rows);
        return mixture_.run(*layer.experts, (Activation)s.activation, normed, rows, s.hidden, block.update);
    }

    // The first half of an MLP, from `normed_` to `gated_`.
    bool gate(const DecoderLayer& layer, const AdapterGroups& adapted, long rows, float* wide) {
        Activation activation = (Activation)shape_.activation;
#if defined(UMBEL_AMX)
        const TiledRows *from = normed_.tiled(), *to = gated_.tiled();
        bool changed = layer.gate_up_changes && adapted.count;
        if (from && to && layer.width % TiledRows::K == 0 && !changed && shape_.gated_mlp && !layer.sparse) {
            gated_tiled(*layer.gate_up->plain(), *from, layer.gate_up_bias, activation, *to);
            return true;
        }
#endif
        long width = (1 + shape_.gated_mlp) * layer.width;
        normed_.multiply(*layer.gate_up, layer.gate_up_bias, wide, width);
        if (!low_rank_.add(layer.gate_up_changes, adapted, normed_, wide, width)) return false;
        if (layer.sparse) keep_highest(wide, rows, layer.width, width, layer.deviations);
        if (shape_.gated_mlp)
            activate(wide, gated_, rows, layer.width, activation);
        else
            activate_alone(wide, gated_, rows, layer.width, activation);
        return true;
    }

    // Moves the output rows to the front. They ascend, so nothing is overwritten before it is moved.
    static void keep(const DecoderStep& step, float* rows, long width) {
        for (long i = 0; i < step.outputs; i++)
            if (step.output_rows[i] != i)
                std::memmove(rows + i * width, rows + step.output_rows[i] * width, width * sizeof(float));
    }

    DecoderShape shape_;
    std::vector<DecoderLayer> layers_;
    Buffer residual_, update_, wide_, attended_;
    Buffer plain_;    // normed rows of experts
    Buffer latents_;  // what latent attention gives
    Buffer gates_;    // of queries
    LatentHeads latent_heads_;
    RecurrentScan scan_;
    SideEmbeddings sides_;
    ParallelStreams streams_;
    Inputs normed_, gated_;
    Mixture mixture_;
    LowRankProducts low_rank_;
};

}  // namespace
}  // namespace umbel

using namespace umbel;

extern "C" {

void* umbel_decoder_create(const DecoderShape* shape) { return new Decoder(*shape); }
void umbel_decoder_free(void* decoder) { delete (Decoder*)decoder; }
void umbel_decoder_set_layer(void* decoder, long index, const DecoderLayer* layer) {
    ((Decoder*)decoder)->set_layer(index, *layer);
}
int umbel_decoder_forward(void* decoder, const DecoderStep* step) { return ((Decoder*)decoder)->forward(*step); }

}  // extern "C"
