#include "check_kernels.h"

#include <cmath>
#include <vector>

#include "attention.h"
#include "blocks.h"
#include "head.h"
#include "linear.h"

namespace umbel {
namespace {

constexpr float TOLERANCE = 0.03f;  // of the largest value: room for inputs in bfloat16 and weights in INT8

// The same numbers on every machine, between -1 and 1.
class Numbers {
  public:
    float next() {
        state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
        return (float)(int32_t)(state_ >> 32) / 2147483648.0f;
    }
    std::vector<float> take(long count) {
        std::vector<float> values(count);
        for (float& value : values) value = next();
        return values;
    }

  private:
    uint64_t state_ = 1;
};

bool near(const std::vector<float>& actual, const std::vector<float>& expected) {
    float largest = 0;
    for (float value : expected) largest = std::fmax(largest, std::fabs(value));
    for (size_t i = 0; i < expected.size(); i++)
        if (!(std::fabs(actual[i] - expected[i]) <= TOLERANCE * largest)) return false;
    return true;
}

bool linear_works(Format format, long rows) {
    constexpr long N = 72, K = 104;
    Numbers numbers;
    std::vector<float> weight = numbers.take(N * K), x = numbers.take(rows * K), out(rows * N), expected(rows * N);
    MatrixPart part = create_part(format, 0, N, K, false);
    if (!part.data) return false;
    fill_part(part, 0, N, weight.data(), Source::F32, K);
    linear(Matrix{N, K, 1, &part}, x.data(), rows, K, nullptr, out.data(), N);
    free_part(part);
    for (long r = 0; r < rows; r++)
        for (long n = 0; n < N; n++)
            for (long k = 0; k < K; k++) expected[r * N + n] += x[r * K + k] * weight[n * K + k];
    return near(out, expected);
}

// A matrix of one part, whose blocks are bytes of any value but for scales, which are small numbers.
bool blocks_work(Format format, long rows) {
    constexpr long N = 40, K = 512;
    BlockFormat form = block_format(format);
    long row_bytes = K / form.inputs * form.bytes;
    Numbers numbers;
    std::vector<uint8_t> blocks(N * row_bytes);
    for (uint8_t& byte : blocks) byte = (uint8_t)(127 * numbers.next());
    for (long i = 0; i < N * K / form.inputs; i++) {
        uint8_t* block = &blocks[i * form.bytes];
        auto set_half = [&](long at) { block[at] = (uint8_t)(i * 37), block[at + 1] = 0x2c; };  // about 1 / 16
        if (format == Format::MXFP4) {
            block[0] = (uint8_t)(120 + i % 5);
        } else {
            set_half(format == Format::Q2_K   ? 80
                     : format == Format::Q3_K ? 108
                     : format == Format::Q6_K ? 208
                                              : 0);
            if (form.has_min()) set_half(format == Format::Q2_K ? 82 : 2);
        }
    }
    std::vector<float> weight(N * K), x = numbers.take(rows * K), out(rows * N), expected(rows * N);
    for (long n = 0; n < N; n++) dequantise_row(format, &blocks[n * row_bytes], K, &weight[n * K]);
    MatrixPart part = create_part(format, 0, N, K, false);
    if (!part.data) return false;
    pack_blocks(part, 0, N, blocks.data(), row_bytes, 0);
    linear(Matrix{N, K, 1, &part}, x.data(), rows, K, nullptr, out.data(), N);
    free_part(part);
    for (long r = 0; r < rows; r++)
        for (long n = 0; n < N; n++)
            for (long k = 0; k < K; k++) expected[r * N + n] += x[r * K + k] * weight[n * K + k];
    return near(out, expected);
}

// Codes give the bits of the floats that they stand for.
bool codes_work(Format format, long rows) {
    constexpr long N = 40, K = 96, GROUP = 24;
    const bool is_bytes = format == Format::FLOAT8;
    Numbers numbers;
    std::vector<uint8_t> codes(N * K / (is_bytes ? 1 : 2));
    for (uint8_t& code : codes) code = (uint8_t)(127 * numbers.next()) & 0xfe;  // 127 and 255 are no numbers
    std::vector<float> table = numbers.take(16), scales = numbers.take(N * K / GROUP), weight(N * K);
    for (long i = 0; i < N * K; i++) {
        uint8_t code = codes[is_bytes ? i : i / 2];
        int fraction = code & 7, exponent = code >> 3 & 15;
        float magnitude = std::ldexp((float)(exponent ? 8 + fraction : fraction), (exponent ? exponent : 1) - 10);
        float value = is_bytes ? (code & 128 ? -magnitude : magnitude) : table[code >> i % 2 * 4 & 15];
        weight[i] = value * scales[i / GROUP];
    }
    std::vector<float> x = numbers.take(rows * K), out(rows * N), expected(rows * N);
    MatrixPart part = create_part(format, 0, N, K, false, GROUP), plain = create_part(Format::F32, 0, N, K, false);
    if (part.data && plain.data) {
        pack_codes(part, 0, N, codes.data(), scales.data(), is_bytes ? nullptr : table.data());
        fill_part(plain, 0, N, weight.data(), Source::F32, K);
        linear(Matrix{N, K, 1, &part}, x.data(), rows, K, nullptr, out.data(), N);
        linear(Matrix{N, K, 1, &plain}, x.data(), rows, K, nullptr, expected.data(), N);
    }
    bool right = part.data && plain.data && out == expected;
    free_part(part);
    free_part(plain);
    return right;
}

// Causal: row r sees the first `KEYS - rows + r + 1` keys.
bool attends(long rows, bool is_bf16) {
    constexpr long HEADS = 4, SIZE = 64, KEYS = 150;
    constexpr float SCALE = 0.125f;
    Numbers numbers;
    std::vector<float> queries = numbers.take(rows * HEADS * SIZE), keys = numbers.take(KEYS * SIZE),
                       values = numbers.take(KEYS * SIZE), out(queries.size()), expected(queries.size());
    std::vector<bf16> half_keys, half_values;
    for (float key : keys) half_keys.push_back(to_bf16(key));
    for (float value : values) half_values.push_back(to_bf16(value));
    LayerPool pool{is_bf16 ? (void*)half_keys.data() : (void*)keys.data(),
                   is_bf16 ? (void*)half_values.data() : (void*)values.data(), SIZE, is_bf16};

    std::vector<int32_t> low(rows), high(rows), own(rows), ends(rows + 1), slots(KEYS);
    for (long r = 0; r < rows; r++) high[r] = (int32_t)(KEYS - rows + r + 1), own[r] = ends[r] = (int32_t)r;
    ends[rows] = (int32_t)rows;
    for (long key = 0; key < KEYS; key++) slots[key] = (int32_t)key;
    int32_t item_rows[2] = {0, (int32_t)rows}, item_keys[2] = {0, (int32_t)KEYS}, first = 0;
    uint8_t full = 0;
    AttentionPlan plan{rows, 1,          rows,      KEYS,   low.data(), high.data(), item_rows,
                       own.data(), item_keys, &first, &full,      slots.data(), ends.data(), own.data()};
    AttentionShape shape{HEADS, 1, SIZE, SIZE, SCALE, 0.0f, nullptr};
    attend(plan, shape, pool, queries.data(), HEADS * SIZE, out.data(), HEADS * SIZE);

    for (long vector = 0; vector < rows * HEADS; vector++) {
        const float* query = &queries[vector * SIZE];
        float* sum = &expected[vector * SIZE];
        double weights = 0;
        for (long key = 0; key < high[vector / HEADS]; key++) {
            double logit = 0;
            for (long i = 0; i < SIZE; i++) logit += query[i] * keys[key * SIZE + i];
            double weight = std::exp(logit * SCALE);
            weights += weight;
            for (long i = 0; i < SIZE; i++) sum[i] += (float)(weight * values[key * SIZE + i]);
        }
        for (long i = 0; i < SIZE; i++) sum[i] /= (float)weights;
    }
    return near(out, expected);
}

// The tokens that a screened head finds are the best ones of all its logits.
bool head_works(Format format, long rows) {
    constexpr long N = 1500, K = 96;
    Numbers numbers;
    std::vector<float> weight = numbers.take(N * K), x = numbers.take(rows * K), logits(rows * N), best(rows);
    std::vector<int32_t> tokens(rows);
    MatrixPart part = create_part(format, 0, N, K, false);
    if (!part.data) return false;
    if (is_blocks(format)) {
        std::vector<uint8_t> codes(N * K);
        for (long i = 0; i < N * K; i++) codes[i] = (uint8_t)(128 + 127 * weight[i]);
        std::vector<f16> scales(N * K / 32, to_f16(0.0078125f));
        pack_integers(part, 0, N, codes.data(), scales.data(), nullptr);
    } else {
        fill_part(part, 0, N, weight.data(), Source::F32, K);
    }
    Matrix matrix{N, K, 1, &part};
    Head* head = create_head(matrix, true);
    bool right = head != nullptr;
    if (head) {
        choose_tokens(*head, x.data(), rows, K, Picks{}, tokens.data(), best.data());
        linear(matrix, x.data(), rows, K, nullptr, logits.data(), N);
        for (long r = 0; r < rows; r++) {
            const float* row = &logits[r * N];
            long first = 0;
            for (long n = 1; n < N; n++)
                if (row[n] > row[first]) first = n;
            right = right && tokens[r] == first && best[r] == row[first];
        }
        free_head(head);
    }
    free_part(part);
    return right;
}

}  // namespace

bool linears_work() {
    for (Format format : {Format::F32, Format::BF16, Format::F16, Format::INT8})
        for (long rows : {1, 3, 40})
            if (!linear_works(format, rows)) return false;
    for (Format format : {Format::FLOAT8, Format::NF4})
        for (long rows : {1, 3, 40})
            if (!codes_work(format, rows)) return false;
    for (int format = (int)Format::Q4_0; format < (int)Format::INT4; format++)
        for (long rows : {1, 3, 40})
            if (!blocks_work((Format)format, rows)) return false;
    return true;
}

bool attention_works() {
    for (bool is_bf16 : {false, true})
        for (long rows : {1, 6, 40})
            if (!attends(rows, is_bf16)) return false;
    return true;
}

bool heads_work() {
    for (Format format : {Format::F32, Format::BF16, Format::INT8, Format::Q8_0})
        for (long rows : {1, 9})
            if (!head_works(format, rows)) return false;
    return true;
}

}  // namespace umbel
