// Reads ggml's blocks, as numbers or into panels.
#include "blocks.h"
#include "threads.h"

namespace umbel {
namespace {

// A block of a file, of 32 or 256 inputs. Which fields mean something is up to the format's Scaling.
struct Block {
    uint8_t codes[256];  // in the order of the inputs
    f16 scale, min;
    int8_t scales[16];  // of sub-blocks
    uint8_t mins[16];
    uint8_t exponent;
};

f16 read_half(const uint8_t* p) {
    f16 value;
    std::memcpy(&value, p, 2);
    return value;
}

// 16 bytes hold 32 codes: the first 16 in their lower halves.
void read_nibbles(const uint8_t* from, uint8_t* codes) {
    for (long i = 0; i < 16; i++) {
        codes[i] = from[i] & 15;
        codes[i + 16] = from[i] >> 4;
    }
}

// 32 bytes hold two bits of 128 codes each: byte l those of inputs l, l + 32, l + 64 and l + 96.
void read_pairs(const uint8_t* from, int place, uint8_t* codes) {
    for (long j = 0; j < 4; j++)
        for (long l = 0; l < 32; l++) codes[j * 32 + l] |= (uint8_t)((from[l] >> 2 * j & 3) << place);
}

// Q4_K and Q5_K: eight scales and eight minima of 6 bits in 12 bytes.
void read_six_bits(const uint8_t* from, Block& block) {
    for (int i = 0; i < 4; i++) {
        block.scales[i] = (int8_t)(from[i] & 63);
        block.mins[i] = from[i + 4] & 63;
        block.scales[i + 4] = (int8_t)((from[i + 8] & 15) | from[i] >> 6 << 4);
        block.mins[i + 4] = (uint8_t)(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
    }
}

template <Format F>
void read_block(const uint8_t* from, Block& block) {
    if constexpr (F == Format::Q4_0 || F == Format::IQ4_NL) {
        block.scale = read_half(from);
        read_nibbles(from + 2, block.codes);
    } else if constexpr (F == Format::Q4_1) {
        block.scale = read_half(from);
        block.min = read_half(from + 2);
        read_nibbles(from + 4, block.codes);
    } else if constexpr (F == Format::Q5_0 || F == Format::Q5_1) {
        block.scale = read_half(from);
        if (F == Format::Q5_1) block.min = read_half(from + 2);
        const uint8_t* rest = from + (F == Format::Q5_1 ? 4 : 2);
        read_nibbles(rest + 4, block.codes);
        for (long i = 0; i < 32; i++) block.codes[i] |= (uint8_t)((rest[i / 8] >> i % 8 & 1) << 4);
    } else if constexpr (F == Format::Q8_0) {
        block.scale = read_half(from);
        for (long i = 0; i < 32; i++) block.codes[i] = from[2 + i] ^ 128;
    } else if constexpr (F == Format::MXFP4) {
        block.exponent = from[0];
        read_nibbles(from + 1, block.codes);
    } else if constexpr (F == Format::Q2_K) {
        std::memset(block.codes, 0, 256);
        for (long half = 0; half < 2; half++) read_pairs(from + 16 + 32 * half, 0, block.codes + 128 * half);
        for (int i = 0; i < 16; i++) {
            block.scales[i] = (int8_t)(from[i] & 15);
            block.mins[i] = from[i] >> 4;
        }
        block.scale = read_half(from + 80);
        block.min = read_half(from + 82);
    } else if constexpr (F == Format::Q3_K) {
        for (long i = 0; i < 256; i++) block.codes[i] = (uint8_t)((from[i % 32] >> i / 32 & 1) << 2);
        for (long half = 0; half < 2; half++) read_pairs(from + 32 + 32 * half, 0, block.codes + 128 * half);
        const uint8_t* scales = from + 96;
        for (int i = 0; i < 16; i++) {
            int low = scales[i % 8] >> i / 8 * 4 & 15, high = scales[8 + i % 4] >> i / 4 * 2 & 3;
            block.scales[i] = (int8_t)((low | high << 4) - 32);
        }
        block.scale = read_half(from + 108);
    } else if constexpr (F == Format::Q4_K || F == Format::Q5_K) {
        block.scale = read_half(from);
        block.min = read_half(from + 2);
        read_six_bits(from + 4, block);
        const uint8_t* low = from + (F == Format::Q4_K ? 16 : 48);
        for (long pair = 0; pair < 4; pair++)
            for (long i = 0; i < 32; i++) {
                block.codes[pair * 64 + i] = low[pair * 32 + i] & 15;
                block.codes[pair * 64 + 32 + i] = low[pair * 32 + i] >> 4;
            }
        if constexpr (F == Format::Q5_K)
            for (long sub = 0; sub < 8; sub++)
                for (long i = 0; i < 32; i++) block.codes[sub * 32 + i] |= (uint8_t)((from[16 + i] >> sub & 1) << 4);
    } else if constexpr (F == Format::Q6_K) {
        for (long half = 0; half < 2; half++) {
            uint8_t* codes = block.codes + half * 128;
            for (long i = 0; i < 64; i++) {
                codes[i] = from[half * 64 + i] & 15;
                codes[i + 64] = from[half * 64 + i] >> 4;
            }
            read_pairs(from + 128 + half * 32, 4, codes);
        }
        std::memcpy(block.scales, from + 192, 16);
        block.scale = read_half(from + 208);
    } else if constexpr (F == Format::IQ4_XS) {
        block.scale = read_half(from);
        int high = from[2] | from[3] << 8;
        for (int i = 0; i < 8; i++) {
            int low = from[4 + i / 2] >> i % 2 * 4 & 15;
            block.scales[i] = (int8_t)((low | (high >> 2 * i & 3) << 4) - 32);
        }
        for (long sub = 0; sub < 8; sub++) read_nibbles(from + 8 + sub * 16, block.codes + sub * 32);
    }
}

UMBEL_INLINE uint32_t four(const uint8_t* codes) {
    uint32_t word;
    std::memcpy(&word, codes, 4);
    return word;
}

// One output's share of the lines of 32 inputs: 4 bytes of each line.
template <int BITS>
UMBEL_INLINE void put_codes(const uint8_t* codes, long output, uint8_t* lines) {
    auto put = [&](long line, uint32_t word) { std::memcpy(lines + line * 64 + output * 4, &word, 4); };
    if constexpr (BITS == 8)
        for (long g = 0; g < 8; g++) put(g, four(codes + 4 * g) ^ (SIGNED_BYTES ? 0x80808080u : 0));
    if constexpr (BITS >= 4 && BITS <= 6)
        for (long g = 0; g < 4; g++)
            put(g, (four(codes + 4 * g) & 0x0f0f0f0fu) | (four(codes + 4 * g + 16) & 0x0f0f0f0fu) << 4);
    if constexpr (BITS == 2 || BITS == 3 || BITS == 6)
        for (long half = 0; half < 2; half++) {
            uint32_t word = 0;
            for (long j = 0; j < 4; j++)
                word |= (four(codes + half * 16 + 4 * j) >> (BITS == 6 ? 4 : 0) & 0x03030303u) << 2 * j;
            put((BITS == 6 ? 4 : 0) + half, word);
        }
    if constexpr (BITS == 3 || BITS == 5) {
        uint32_t word = 0;
        for (long g = 0; g < 8; g++) word |= (four(codes + 4 * g) >> (BITS - 1) & 0x01010101u) << g;
        put(BITS - 1, word);
    }
}

// The scales of one block of the file for one output, `number` blocks of that size into the unit.
template <Format F>
void put_scales(const Block& block, long number, long output, uint8_t* scales) {
    constexpr BlockFormat f = block_format(F);
    auto put_half = [&](uint8_t* at, f16 value) { std::memcpy(at + output * 2, &value, 2); };
    if constexpr (f.scaling == Scaling::HALF) {
        put_half(scales + number * 32, block.scale);
    } else if constexpr (f.scaling == Scaling::HALF_MIN) {
        put_half(scales + number * 64, block.scale);
        put_half(scales + number * 64 + 32, block.min);
    } else if constexpr (f.scaling == Scaling::EXPONENT) {
        scales[number * 16 + output] = block.exponent;
    } else if constexpr (f.scaling == Scaling::BYTES) {
        put_half(scales, block.scale);
        for (long sub = 0; sub < 256 / f.sub; sub++) scales[32 + sub * 16 + output] = (uint8_t)block.scales[sub];
    } else {
        put_half(scales, block.scale);
        put_half(scales + 32, block.min);
        for (long sub = 0; sub < 256 / f.sub; sub++) {
            if constexpr (f.scaling == Scaling::BYTES_MIN) {
                scales[64 + sub * 32 + output] = (uint8_t)block.scales[sub];
                scales[64 + sub * 32 + 16 + output] = block.mins[sub];
            } else {
                scales[64 + sub * 16 + output] = (uint8_t)(block.scales[sub] | block.mins[sub] << 4);
            }
        }
    }
}

// body(scales, codes, first, count) for the units of a panel, each with blocks [first, first + count) of 32 inputs.
template <class Body>
void each_unit(const MatrixPart& part, long panel, Body&& body) {
    BlockFormat f = block_format(part.format);
    uint8_t* scales = (uint8_t*)part.panel(panel);
    for (long first = 0, blocks = part.k / 32; first < blocks; first += UNIT) {
        long count = blocks - first < UNIT ? blocks - first : UNIT;
        body(scales, scales + unit_scale_bytes(f, part.group_shift, count), first, count);
        scales += unit_bytes(f, part.group_shift);
    }
}

template <Format F>
void pack_row(const MatrixPart& part, long output, const uint8_t* row) {
    constexpr BlockFormat f = block_format(F);
    long lane = output % PANEL;
    each_unit(part, output / PANEL, [&](uint8_t* scales, uint8_t* codes, long, long count) {
        Block block;
        for (long number = 0; number < count * 32 / f.inputs; number++, row += f.bytes) {
            read_block<F>(row, block);
            put_scales<F>(block, number, lane, scales);
            for (long at = 0; at < f.inputs; at += 32, codes += f.code_bytes())
                put_codes<f.bits>(block.codes + at, lane, codes);
        }
    });
}

template <Format F>
float weight_of(const Block& block, long i) {
    constexpr BlockFormat f = block_format(F);
    int code = block.codes[i];
    if constexpr (F == Format::MXFP4) {
        uint32_t bits = block.exponent < 2 ? 0x00200000u << block.exponent : (uint32_t)(block.exponent - 1) << 23;
        float scale;
        std::memcpy(&scale, &bits, 4);
        return scale * (float)MXFP4_VALUES[code];
    }
    float scale = from_f16(block.scale);
    if constexpr (f.inputs == 256) scale *= (float)block.scales[i / f.sub];
    if constexpr (f.looked_up) return scale * (float)IQ4_VALUES[code];
    float weight = scale * (float)(code - f.zero);
    if constexpr (f.scaling == Scaling::HALF_MIN) return weight + from_f16(block.min);
    if constexpr (f.has_min()) return weight - from_f16(block.min) * (float)block.mins[i / f.sub];
    return weight;
}

template <Format F>
void dequantise_blocks(const uint8_t* row, long k, float* out) {
    constexpr BlockFormat f = block_format(F);
    Block block;
    for (long at = 0; at < k; at += f.inputs, row += f.bytes) {
        read_block<F>(row, block);
        for (long i = 0; i < f.inputs; i++) out[at + i] = weight_of<F>(block, i);
    }
}

// body.operator()<F>() for the format.
template <class Body>
void with_format(Format format, Body&& body) {
    switch (format) {
        case Format::Q4_0: return body.template operator()<Format::Q4_0>();
        case Format::Q4_1: return body.template operator()<Format::Q4_1>();
        case Format::Q5_0: return body.template operator()<Format::Q5_0>();
        case Format::Q5_1: return body.template operator()<Format::Q5_1>();
        case Format::Q8_0: return body.template operator()<Format::Q8_0>();
        case Format::Q2_K: return body.template operator()<Format::Q2_K>();
        case Format::Q3_K: return body.template operator()<Format::Q3_K>();
        case Format::Q4_K: return body.template operator()<Format::Q4_K>();
        case Format::Q5_K: return body.template operator()<Format::Q5_K>();
        case Format::Q6_K: return body.template operator()<Format::Q6_K>();
        case Format::IQ4_NL: return body.template operator()<Format::IQ4_NL>();
        case Format::IQ4_XS: return body.template operator()<Format::IQ4_XS>();
        case Format::MXFP4: return body.template operator()<Format::MXFP4>();
        default: return;
    }
}

// Where row `row` of a file belongs.
long place_of(long row, long head_rows) {
    if (!head_rows) return row;
    long within = row % head_rows;
    return row - within + within % 2 * (head_rows / 2) + within / 2;
}

}  // namespace

long block_panel_bytes(const MatrixPart& part) {
    BlockFormat f = block_format(part.format);
    long blocks = part.k / 32, bytes = blocks / UNIT * unit_bytes(f, part.group_shift);
    if (blocks % UNIT) bytes += unit_bytes(f, part.group_shift, blocks % UNIT);
    return (bytes + 63) / 64 * 64;
}

void pack_blocks(MatrixPart& part, long first, long count, const uint8_t* rows, long row_bytes, long head_rows) {
    with_format(part.format, [&]<Format F>() {
        parallel(count, even_grain(count, 8, PANEL), [&](long begin, long end) {
            for (long row = begin; row < end; row++)
                pack_row<F>(part, first + place_of(row, head_rows), rows + row * row_bytes);
        });
    });
}

void pack_integers(MatrixPart& part, long first, long count, const uint8_t* codes, const f16* scales,
                   const uint8_t* zeros) {
    const bool is_bytes = block_format(part.format).bits == 8;
    const long blocks = part.k / 32, groups = blocks >> part.group_shift, block_bytes = is_bytes ? 32 : 16;
    auto pack = [&](long row) {
        long lane = (first + row) % PANEL;
        const uint8_t* from = codes + row * blocks * block_bytes;
        each_unit(part, (first + row) / PANEL, [&](uint8_t* own_scales, uint8_t* out, long block, long width) {
            long group = row * groups + (block >> part.group_shift);
            for (long i = 0; i <= (width - 1) >> part.group_shift; i++) {
                uint8_t* at = own_scales + i * (zeros ? 48 : 32);
                std::memcpy(at + lane * 2, scales + group + i, 2);
                if (zeros) at[32 + lane] = zeros[group + i];
            }
            for (long end = block + width; block < end; block++, from += block_bytes) {
                if (is_bytes) {
                    put_codes<8>(from, lane, out);
                    out += block_format(Format::INT8_GROUPS).code_bytes();
                    continue;
                }
                uint8_t unpacked[32];
                for (long i = 0; i < 16; i++) {
                    unpacked[2 * i] = from[i] & 15;
                    unpacked[2 * i + 1] = from[i] >> 4;
                }
                put_codes<4>(unpacked, lane, out);
                out += block_format(Format::INT4).code_bytes();
            }
        });
    };
    parallel(count, even_grain(count, 8, PANEL), [&](long begin, long end) {
        for (long row = begin; row < end; row++) pack(row);
    });
}

void dequantise_row(Format format, const uint8_t* row, long k, float* out) {
    switch (format) {
        case Format::F32: std::memcpy(out, row, k * sizeof(float)); return;
        case Format::BF16:
        case Format::F16:
            for (long i = 0; i < k; i++) {
                f16 half = read_half(row + 2 * i);
                out[i] = format == Format::F16 ? from_f16(half) : from_bf16(half.bits);
            }
            return;
        default: with_format(format, [&]<Format F>() { dequantise_blocks<F>(row, k, out); });
    }
}

}  // namespace umbel

extern "C" {

// Rows `which` of a file as float32, [count, k] one after the other; without `which` the first `count`. Uses the whole
// team.
void umbel_blocks_dequantise(int format, const uint8_t* rows, long row_bytes, const int64_t* which, long count, long k,
                             float* out) {
    umbel::parallel(count, umbel::even_grain(count, 4), [&](long begin, long end) {
        for (long i = begin; i < end; i++)
            umbel::dequantise_row((umbel::Format)format, rows + (which ? which[i] : i) * row_bytes, k, out + i * k);
    });
}

}  // extern "C"
