#include "decoder.h"

#include <vector>

#include "memory.h"

namespace umbel {
namespace {

class Decoder {
  public:
    explicit Decoder(const DecoderShape& shape) : shape_(shape), layers_(shape.layers) {}

    void set_layer(long index, const DecoderLayer& layer) { layers_[index] = layer; }

    // False when there is no memory for the buffers.
    bool forward(const DecoderStep& step) {
        const DecoderShape& s = shape_;
        long rows = step.rows, turned = (s.heads + 2 * s.kv_heads) * s.head_dim, attended = s.heads * s.head_dim;
        float* x = residual_.take<float>(rows * s.hidden);
        float* normed = normed_.take<float>(rows * s.hidden);
        float* update = update_.take<float>(rows * s.hidden);
        float* wide = wide_.take<float>(rows * (turned > 2 * s.intermediate ? turned : 2 * s.intermediate));
        float* narrow = narrow_.take<float>(rows * (attended > s.intermediate ? attended : s.intermediate));
        if (!x || !normed || !update || !wide || !narrow) return false;

        embed(s.embedding, s.embedding_is_bf16, step.token_ids, s.embedding_scale, x, rows, s.hidden);
        rms_norm(x, layers_[0].before_attention, normed, rows, s.hidden, s.epsilon);
        for (long index = 0; index < s.layers; index++) {
            const DecoderLayer& layer = layers_[index];
            const LayerPool& pool = step.pools[index];
            linear(*layer.qkv, normed, rows, s.hidden, layer.qkv_bias, wide, turned);
            HeadTurn turn{s.heads, s.kv_heads, s.head_dim, layer.query_norm, layer.key_norm, s.epsilon,
                          step.angles[layer.rope]};
            turn_and_store(turn, wide, step.positions, step.write_slots, rows, pool.keys, pool.values, pool.is_bf16);
            bool last = index + 1 == s.layers;
            if (last && !step.outputs) return true;  // the keys of a chunk inside a prompt were all that was asked for
            AttentionShape shape{s.heads, s.kv_heads, s.head_dim, s.attention_scale, 0.0f};
            attend(*step.plans[layer.plan], shape, pool, wide, turned, narrow, attended);
            if (last) {  // from here on rows do not see each other: only those that are asked for go on
                keep(step, x, s.hidden);
                keep(step, narrow, attended);
                rows = step.outputs;
            }
            linear(*layer.output, narrow, rows, attended, layer.output_bias, update, s.hidden);
            add_and_norm(x, update, layer.after_attention, layer.before_mlp, normed, rows, s.hidden, s.epsilon);
            linear(*layer.gate_up, normed, rows, s.hidden, layer.gate_up_bias, wide, 2 * s.intermediate);
            activate(wide, narrow, rows, s.intermediate, (Activation)s.activation);
            linear(*layer.down, narrow, rows, s.intermediate, layer.down_bias, update, s.hidden);
            const float* next = last ? s.final_norm : layers_[index + 1].before_attention;
            add_and_norm(x, update, layer.after_mlp, next, last ? step.hidden : normed, rows, s.hidden, s.epsilon);
        }
        return true;
    }

  private:
    // Moves the output rows to the front. They ascend, so nothing is overwritten before it is moved.
    static void keep(const DecoderStep& step, float* rows, long width) {
        for (long i = 0; i < step.outputs; i++)
            if (step.output_rows[i] != i)
                std::memmove(rows + i * width, rows + step.output_rows[i] * width, width * sizeof(float));
    }

    DecoderShape shape_;
    std::vector<DecoderLayer> layers_;
    Buffer residual_, normed_, update_, wide_, narrow_;
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
