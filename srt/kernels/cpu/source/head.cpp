#include "head.h"

#include <algorithm>
#include <new>

#include "blocks.h"
#include "head_screen.h"
#include "threads.h"

namespace umbel {
namespace {

bool screens_blocks([[maybe_unused]] const Matrix& matrix) {
#if defined(UMBEL_COARSE_ROWS)
    return matrix.count == 1 && takes_coarse(matrix.parts->format) && !matrix.order;
#else
    return false;
#endif
}

}  // namespace

Head* create_head(const Matrix& matrix, bool screen, bool coarse) {
    Head* head = new (std::nothrow) Head{};
    if (!head) return nullptr;
    head->matrix = &matrix;
    head->exact = matrix.plain();
    head->coarse = coarse;
    if (coarse && screens_blocks(matrix)) head->exact = matrix.parts;
    if (!screen || !head->exact || is_coded(head->exact->format)) return head;
    const MatrixPart& exact = *head->exact;
    bool blocks = is_blocks(exact.format);
    head->radii = new (std::nothrow) float[exact.panels * PANEL]{};
    if (blocks)
        head->block_offsets = new (std::nothrow) float[exact.panels * PANEL]{};
    else
        head->offsets = new (std::nothrow) int32_t[exact.panels * PANEL]{};
    if (blocks || exact.format == Format::INT8) {
        head->screen = &exact;
    } else {
        head->copy = create_part(Format::INT8, 0, exact.n, exact.k, exact.exact);
        head->screen = head->copy.data ? &head->copy : nullptr;
        if (head->screen) place_on_nodes(Matrix{exact.n, exact.k, 1, &head->copy});
    }
    if (!head->radii || !(blocks ? (void*)head->block_offsets : head->offsets) || !head->screen) {
        free_head(head);
        return nullptr;
    }
    if (!fill_screen(*head)) head->screen = nullptr;  // weights that are not finite: all logits will say so
    return head;
}

void free_head(Head* head) {
    if (!head) return;
    free_part(head->copy);
    delete[] head->radii;
    delete[] head->offsets;
    delete[] head->block_offsets;
    delete head;
}

namespace {

const MatrixPart& part_of(const Matrix& matrix, long output) {
    const MatrixPart* part = matrix.parts;
    while (output >= part->first + part->n) part++;
    return *part;
}

}  // namespace

void logits_of(Head& head, const float* x, long rows, long x_stride, const int32_t* ids, long count, float* out) {
    if (rows <= 0 || count <= 0) return;
    const Matrix& matrix = *head.matrix;
    Int8Rows inputs{};
    BlockInputs block_inputs{};
    bool blocks = false;
    for (const MatrixPart* part = matrix.parts; part < matrix.parts + matrix.count; part++) {
        if (part->format == Format::INT8 && !inputs.values) inputs = quantize_rows(*part, x, rows, x_stride);
        blocks = blocks || is_blocks(part->format);
    }
    if (blocks) block_inputs = round_rows(matrix, x, rows, x_stride);
    float* tiles = head.gathered.take<float>(team_size() * std::max(rows, (long)Int8Products::MOST_ROWS) * PANEL);
    parallel(count, even_grain(count, 4), [&](long begin, long end) {
        float* tile = tiles + team_rank() * std::max(rows, (long)Int8Products::MOST_ROWS) * PANEL;
        const MatrixPart* held_part = nullptr;  // whose panel `held` has its logits in `tile`
        long held = -1;
        for (long i = begin; i < end; i++) {
            const MatrixPart& weight = part_of(matrix, ids[i]);
            long output = ids[i] - weight.first, panel = output / PANEL;
            if (weight.format != Format::INT8) {
                bool same = panel == held && &weight == held_part;
                if (!same && is_blocks(weight.format))
                    multiply_panel(weight, block_inputs, panel, tile);
                else if (!same)
                    linear_panel(weight, x, rows, x_stride, panel, tile);
                for (long row = 0; row < rows; row++) out[row * count + i] = tile[row * PANEL + output % PANEL];
            } else {
                Int8Products products(weight, inputs);
                for (long t = 0; t < inputs.tiles; t++) {
                    products.compute(t, panel, t, inputs.tiles, tile);
                    long last = std::min(inputs.first_row(t + 1), rows);
                    for (long row = inputs.first_row(t); row < last; row++)
                        out[row * count + i] =
                            tile[(row - inputs.first_row(t)) * PANEL + output % PANEL] * weight.scales[output];
                }
            }
            held = panel;
            held_part = &weight;
        }
    });
}

}  // namespace umbel

extern "C" {

void* umbel_head_create(const void* matrix, int screen, int coarse) {
    return umbel::create_head(*(const umbel::Matrix*)matrix, screen != 0, coarse != 0);
}

void umbel_head_free(void* head) { umbel::free_head((umbel::Head*)head); }

// Of the copy, the radii and the offsets: the exact matrix is the caller's.
long umbel_head_bytes(const void* head) {
    const umbel::Head& it = *(const umbel::Head*)head;
    if (!it.radii) return 0;
    long outputs = it.exact->panels * umbel::PANEL * (long)sizeof(float);
    return 2 * outputs + (it.copy.data ? it.copy.data_bytes + outputs : 0);
}

int umbel_head_screens(const void* head) { return ((const umbel::Head*)head)->screen != nullptr; }

void umbel_head_choose(void* head, const float* x, long rows, long x_stride, const uint8_t* kinds,
                       const double* inverse_temperatures, const uint64_t* keys, const int32_t* top_k,
                       const double* min_p, const uint32_t* const* masks, int32_t* tokens, float* logits) {
    umbel::Picks picks{kinds, inverse_temperatures, keys, top_k, min_p, masks};
    umbel::choose_tokens(*(umbel::Head*)head, x, rows, x_stride, picks, tokens, logits);
}

void umbel_head_rows(void* head, const float* x, long rows, long x_stride, const int32_t* ids, long count, float* out) {
    umbel::logits_of(*(umbel::Head*)head, x, rows, x_stride, ids, count, out);
}

void umbel_head_all(void* head, const float* x, long rows, long x_stride, float* out, long out_stride) {
    umbel::linear(*((umbel::Head*)head)->matrix, x, rows, x_stride, nullptr, out, out_stride);
}

void umbel_head_counters(const void* head, long* counters) {
    const umbel::HeadCounters& it = ((const umbel::Head*)head)->counters;
    counters[0] = it.rows;
    counters[1] = it.candidates;
    counters[2] = it.exact;
    counters[3] = it.fallbacks;
}

}  // extern "C"
