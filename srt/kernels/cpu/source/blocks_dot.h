// Sums of products of unsigned codes (weights) with signed bytes (inputs), 4 inputs of one output side by side.
#pragma once

#include "blocks.h"

#include <utility>

#if !defined(__AVX2__) && !defined(__ARM_FEATURE_DOTPROD)
#define UMBEL_PLAIN_DOT  // no instruction multiplies bytes here
#endif

namespace umbel {

typedef uint8_t vcodes __attribute__((vector_size(VL * 4)));
typedef uint16_t vwords __attribute__((vector_size(VL * 4)));

UMBEL_INLINE vcodes load_codes(const uint8_t* p) {
    vcodes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Bits that cross from one byte into its neighbour have to be masked away.
template <int BITS>
UMBEL_INLINE vcodes shift_left(vcodes v) {
    if constexpr (BITS >= 0)
        return (vcodes)((vwords)v << BITS);
    else
        return (vcodes)((vwords)v >> -BITS);
}

// value[code] + zero for 16 values, or the value where bytes are signed.
template <Format F>
UMBEL_INLINE vcodes look_up(vcodes codes) {
    constexpr BlockFormat f = block_format(F);
    struct Table {
        alignas(16) uint8_t bytes[16];
    };
    static constexpr int ZERO = f.is_signed() ? 0 : f.zero;
    static constexpr Table table = [] {
        Table made{};
        for (int i = 0; i < 16; i++)
            made.bytes[i] = (uint8_t)((F == Format::MXFP4 ? MXFP4_VALUES[i] : IQ4_VALUES[i]) + ZERO);
        return made;
    }();
#if defined(__AVX512BW__)
    return (vcodes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table.bytes)),
                                       (__m512i)codes);
#elif defined(__AVX2__)
    return (vcodes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table.bytes)),
                                       (__m256i)codes);
#elif defined(__aarch64__)
    return (vcodes)vqtbl1q_u8(vld1q_u8(table.bytes), (uint8x16_t)codes);
#else
    for (int i = 0; i < VL * 4; i++) codes[i] = table.bytes[codes[i]];
    return codes;
#endif
}

// VL outputs × 32 inputs out of the lines of a panel: what has to be multiplied with the inputs, and is `zero` too much.
template <Format F>
UMBEL_INLINE void unpack(const uint8_t* lines, vcodes (&codes)[8]) {
    constexpr int BITS = block_format(F).bits;
    auto each = [&]<int... G>(std::integer_sequence<int, G...>, auto&& body) { (body.template operator()<G>(), ...); };
    constexpr auto ALL = std::make_integer_sequence<int, 8>{};
    if constexpr (BITS == 8) each(ALL, [&]<int G>() { codes[G] = load_codes(lines + G * 64); });
    if constexpr (BITS >= 4 && BITS <= 6)
        each(std::make_integer_sequence<int, 4>{}, [&]<int G>() {
            vcodes line = load_codes(lines + G * 64);
            codes[G] = line & 15;
            codes[G + 4] = shift_left<-4>(line) & 15;
        });
    if constexpr (BITS == 5) {
        vcodes bits = load_codes(lines + 4 * 64);
        each(ALL, [&]<int G>() { codes[G] |= shift_left<4 - G>(bits) & 16; });
    }
    if constexpr (BITS == 6) {
        vcodes bits[2] = {load_codes(lines + 4 * 64), load_codes(lines + 5 * 64)};
        each(ALL, [&]<int G>() { codes[G] |= shift_left<4 - G % 4 * 2>(bits[G / 4]) & 48; });
    }
    if constexpr (BITS == 2 || BITS == 3) {
        vcodes bits[2] = {load_codes(lines), load_codes(lines + 64)};
        each(ALL, [&]<int G>() { codes[G] = shift_left<-(G % 4 * 2)>(bits[G / 4]) & 3; });
    }
    if constexpr (BITS == 3) {
        vcodes bits = load_codes(lines + 2 * 64);
        each(ALL, [&]<int G>() { codes[G] |= shift_left<2 - G>(bits) & 4; });
    }
    if constexpr (block_format(F).looked_up) each(ALL, [&]<int G>() { codes[G] = look_up<F>(codes[G]); });
}

UMBEL_INLINE int32_t four_inputs(const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, 4);
    return four;
}

// The sum over groups [FROM, TO) of codes × inputs: exact integers of VL outputs. No code is above LARGEST; with 255,
// codes are signed where SIGNED_BYTES.
template <int FROM, int TO, int LARGEST>
UMBEL_INLINE vi dot(const vcodes (&codes)[8], const int8_t* x) {
#if defined(__AVX512VNNI__)
    vi even{}, odd{};
#pragma GCC unroll 8
    for (int g = FROM; g < TO; g += 2) {
        even = (vi)_mm512_dpbusd_epi32((__m512i)even, (__m512i)codes[g], _mm512_set1_epi32(four_inputs(x + 4 * g)));
        odd = (vi)_mm512_dpbusd_epi32((__m512i)odd, (__m512i)codes[g + 1], _mm512_set1_epi32(four_inputs(x + 4 * g + 4)));
    }
    return even + odd;
#elif defined(__AVXVNNI__)
    vi even{}, odd{};
#pragma GCC unroll 8
    for (int g = FROM; g < TO; g += 2) {
        even = (vi)_mm256_dpbusd_avx_epi32((__m256i)even, (__m256i)codes[g], _mm256_set1_epi32(four_inputs(x + 4 * g)));
        odd = (vi)_mm256_dpbusd_avx_epi32((__m256i)odd, (__m256i)codes[g + 1], _mm256_set1_epi32(four_inputs(x + 4 * g + 4)));
    }
    return even + odd;
#elif defined(__AVX2__)
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum = _mm256_setzero_si256();
    if constexpr (LARGEST == 255) {
#pragma GCC unroll 8
        for (int g = FROM; g < TO; g++) {
            __m256i weight = (__m256i)codes[g];
            __m256i inputs = _mm256_sign_epi8(_mm256_set1_epi32(four_inputs(x + 4 * g)), weight);
            __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weight), inputs);
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
    } else {
        constexpr int TOGETHER = 32767 / (2 * 127 * LARGEST);  // sums of pairs that a 16-bit integer holds
        constexpr int MOST = TOGETHER >= 8 ? 8 : TOGETHER >= 4 ? 4 : 2, STEP = MOST < TO - FROM ? MOST : TO - FROM;
#pragma GCC unroll 8
        for (int at = FROM; at < TO; at += STEP) {
            __m256i pairs = _mm256_maddubs_epi16((__m256i)codes[at], _mm256_set1_epi32(four_inputs(x + 4 * at)));
#pragma GCC unroll 8
            for (int g = 1; g < STEP; g++) {
                __m256i inputs = _mm256_set1_epi32(four_inputs(x + 4 * (at + g)));
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)codes[at + g], inputs));
            }
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    return (vi)sum;
#elif defined(__ARM_FEATURE_DOTPROD)
    vi sum{};
#pragma GCC unroll 2
    for (int at = FROM; at < TO; at += 4) {
        int8x16_t inputs = vld1q_s8(x + 4 * at);
#if defined(__ARM_FEATURE_MATMUL_INT8)
        int32x4_t exact = vusdotq_laneq_s32((int32x4_t)sum, (uint8x16_t)codes[at], inputs, 0);
        exact = vusdotq_laneq_s32(exact, (uint8x16_t)codes[at + 1], inputs, 1);
        exact = vusdotq_laneq_s32(exact, (uint8x16_t)codes[at + 2], inputs, 2);
        exact = vusdotq_laneq_s32(exact, (uint8x16_t)codes[at + 3], inputs, 3);
#else
        auto signed_codes = [&](int g) { return (int8x16_t)codes[g]; };
        int32x4_t exact = vdotq_laneq_s32((int32x4_t)sum, signed_codes(at), inputs, 0);
        exact = vdotq_laneq_s32(exact, signed_codes(at + 1), inputs, 1);
        exact = vdotq_laneq_s32(exact, signed_codes(at + 2), inputs, 2);
        exact = vdotq_laneq_s32(exact, signed_codes(at + 3), inputs, 3);
#endif
        sum = (vi)exact;
    }
    return sum;
#else
    typedef int16_t vshorts __attribute__((vector_size(VL * 4)));
    vi sum{};
#pragma GCC unroll 8
    for (int g = FROM; g < TO; g++) {
        vshorts inputs = (vshorts)splat_int(four_inputs(x + 4 * g));
        vshorts even = (vshorts)((vwords)codes[g] & 255), odd = (vshorts)((vwords)codes[g] >> 8);
        vshorts x_even = (vshorts)((vwords)inputs << 8) >> 8, x_odd = inputs >> 8;
#if defined(__SSE2__)
        sum += (vi)_mm_madd_epi16((__m128i)even, (__m128i)x_even) + (vi)_mm_madd_epi16((__m128i)odd, (__m128i)x_odd);
#else
        vi first = (vi)(even * x_even), second = (vi)(odd * x_odd);  // at most 255 · 127, which 16 bits hold
        sum += ((first << 16) >> 16) + (first >> 16) + ((second << 16) >> 16) + (second >> 16);
#endif
    }
    return sum;
#endif
}

#if defined(UMBEL_SHORT_INPUTS)

typedef int16_t vshorts __attribute__((vector_size(VL * 4)));

// Codes of 16 outputs × 32 inputs as 16-bit integers: `at` gives those of VL outputs and of inputs 0 and 2 of a group, or
// of 1 and 3. These widen bytes where they are multiplied, for few rows.
template <Format F>
class NarrowCodes {
  public:
    UMBEL_INLINE explicit NarrowCodes(const uint8_t* lines) : lines_(lines) {
        if constexpr (BITS != 8 && BITS != 4)
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) unpack<F>(lines + v * 32, codes_[v]);
    }
    UMBEL_INLINE vshorts at(int group, int odd, int v) const {
        if constexpr (BITS == 8) {
            return split((vwords)load_codes(lines_ + group * 64 + v * 32), odd);
        } else if constexpr (BITS == 4) {
            vwords line = (vwords)load_codes(lines_ + group % 4 * 64 + v * 32);
            vwords codes = line >> (group / 4 * 4 + odd * 8) & 15;
            return FORM.looked_up ? split((vwords)look_up<F>((vcodes)codes), 0) : (vshorts)codes;
        } else {
            return split((vwords)codes_[v][group], odd);
        }
    }

  private:
    static constexpr BlockFormat FORM = block_format(F);
    static constexpr int BITS = FORM.bits;

    UMBEL_INLINE static vshorts split(vwords bytes, int odd) {
        if constexpr (FORM.is_signed()) return (vshorts)(odd ? bytes : bytes << 8) >> 8;
        return (vshorts)(odd ? bytes >> 8 : bytes & 255);
    }

    const uint8_t* lines_;
    vcodes codes_[2][8];  // neither of 4 nor of 8 bits
};

// The same, widened once for many rows.
template <Format F>
class WideCodes {
  public:
    UMBEL_INLINE explicit WideCodes(const uint8_t* lines) {
        NarrowCodes<F> narrow(lines);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) wide_[g][i / 2][i % 2] = narrow.at(g, i / 2, i % 2);
    }
    UMBEL_INLINE vshorts at(int group, int odd, int v) const { return wide_[group][odd][v]; }

  private:
    vshorts wide_[8][2][2];
};

// sums[r][v] = the sum over groups [FROM, TO) of codes × 16-bit inputs, R rows 32 inputs apart: exact integers. The empty
// statement keeps the compiler from computing products before it adds them, for which there are not enough registers.
template <int FROM, int TO, int R, class Codes>
UMBEL_INLINE void dot_shorts(const Codes& codes, const int16_t* x, vi (&sums)[R][2]) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = vi{};
#pragma GCC unroll 8
    for (int g = FROM; g < TO; g++)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            vshorts weights[2] = {codes.at(g, odd, 0), codes.at(g, odd, 1)};
            asm("" : "+x"(weights[0]), "+x"(weights[1]));  // each is loaded once
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                __m256i inputs = _mm256_set1_epi32(four_inputs((const int8_t*)(x + r * 32 + g * 4 + odd * 2)));
#pragma GCC unroll 2
                for (int v = 0; v < 2; v++) {
                    sums[r][v] += (vi)_mm256_madd_epi16((__m256i)weights[v], inputs);
                    asm("" : "+x"(sums[r][v]));
                }
            }
        }
}

#endif

// Scales of VL outputs × 32 inputs: of one sub-block, or of two of 16 inputs each.
struct Scales {
    vf scale[2], min[2];
    vf zero;  // of formats that have one for each group
};

UMBEL_INLINE vi widen_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    typedef uint8_t vsmall __attribute__((vector_size(VL)));
    vsmall small;
    std::memcpy(&small, p, sizeof small);
    return __builtin_convertvector(small, vi);
#endif
}

UMBEL_INLINE vi widen_bytes(const int8_t* p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    typedef int8_t vsmall __attribute__((vector_size(VL)));
    vsmall small;
    std::memcpy(&small, p, sizeof small);
    return __builtin_convertvector(small, vi);
#endif
}

template <class Byte>
UMBEL_INLINE vf load_bytes(const Byte* p) {
    return __builtin_convertvector(widen_bytes(p), vf);
}

// What the scales of all blocks of a unit are multiplied with, where a format has that.
struct UnitScales {
    vf scale, min;
};

template <Format F>
UMBEL_INLINE UnitScales load_unit_scales(const uint8_t* scales, long lane) {
    constexpr BlockFormat f = block_format(F);
    UnitScales result{};
    if constexpr (f.inputs == 256) result.scale = load((const f16*)scales + lane);
    if constexpr (f.inputs == 256 && f.has_min()) result.min = load((const f16*)scales + 16 + lane);
    return result;
}

// Of block `block` of a unit, outputs [lane, lane + VL).
template <Format F>
UMBEL_INLINE Scales load_scales(const uint8_t* scales, UnitScales unit, long block, long lane, int group_shift) {
    constexpr BlockFormat f = block_format(F);
    constexpr int SUBS = 32 / f.sub;
    Scales result;
    if constexpr (f.scaling == Scaling::HALF) {
        result.scale[0] = load((const f16*)(scales + block * 32) + lane);
    } else if constexpr (f.scaling == Scaling::HALF_MIN) {
        result.scale[0] = load((const f16*)(scales + block * 64) + lane);
        result.min[0] = -load((const f16*)(scales + block * 64 + 32) + lane);
    } else if constexpr (f.scaling == Scaling::EXPONENT) {
        vi exponent = widen_bytes(scales + block * 16 + lane);
        vi normal = (exponent - 1) << 23, tiny = 0x00200000 + 0x00200000 * exponent;  // 0 and 1: no normal numbers
        result.scale[0] = (vf)(exponent < 2 ? tiny : normal);
    } else if constexpr (f.scaling == Scaling::BYTES) {
        for (int sub = 0; sub < SUBS; sub++)
            result.scale[sub] = unit.scale * load_bytes((const int8_t*)scales + 32 + (block * SUBS + sub) * 16 + lane);
    } else if constexpr (f.scaling == Scaling::BYTES_MIN) {
        result.scale[0] = unit.scale * load_bytes(scales + 64 + block * 32 + lane);
        result.min[0] = unit.min * load_bytes(scales + 64 + block * 32 + 16 + lane);
    } else if constexpr (f.scaling == Scaling::NIBBLES_MIN) {
        for (int sub = 0; sub < SUBS; sub++) {
            vi both = widen_bytes(scales + 64 + (block * SUBS + sub) * 16 + lane);
            result.scale[sub] = unit.scale * __builtin_convertvector(both & 15, vf);
            result.min[sub] = unit.min * __builtin_convertvector(both >> 4, vf);
        }
    } else {
        const uint8_t* at = scales + (block >> group_shift) * 48;
        result.scale[0] = load((const f16*)at + lane);
        result.zero = load_bytes(at + 32 + lane);
    }
    return result;
}

// sum + what integer products of 32 inputs of one row stand for: of all of them, or of both halves. TAKEN has been taken
// away from the codes already.
template <Format F, int TAKEN>
UMBEL_INLINE vf add_products(vf sum, vi first, vi second, const Scales& scales, const float* factors) {
    constexpr BlockFormat f = block_format(F);
    auto as_floats = [&](vi products, float inputs) {
        vf exact = __builtin_convertvector(products, vf);
        if constexpr (f.scaling == Scaling::GROUPS)
            return fnma(TAKEN ? scales.zero - (float)TAKEN : scales.zero, splat(inputs), exact);
        if constexpr (f.zero != TAKEN) return fnma(splat((float)(f.zero - TAKEN)), splat(inputs), exact);
        return exact;
    };
    vf total;
    if constexpr (f.sub == 32) {
        total = as_floats(first, factors[1]) * scales.scale[0];
        if constexpr (f.has_min()) total = fnma(scales.min[0], splat(factors[1]), total);
    } else {
        total = as_floats(first, factors[2]) * scales.scale[0];
        total = fma(as_floats(second, factors[3]), scales.scale[1], total);
        if constexpr (f.has_min()) {
            total = fnma(scales.min[0], splat(factors[2]), total);
            total = fnma(scales.min[1], splat(factors[3]), total);
        }
    }
    return fma(total, splat(factors[0]), sum);
}

// sum + the products of 32 inputs of one row with VL outputs.
template <Format F>
UMBEL_INLINE vf add_block(vf sum, const vcodes (&codes)[8], const Scales& scales, const int8_t* x, const float* factors) {
    constexpr BlockFormat f = block_format(F);
    vi first = dot<0, f.sub / 4, f.largest>(codes, x), second{};
    if constexpr (f.sub == 16) second = dot<4, 8, f.largest>(codes, x);
    return add_products<F, f.is_signed() ? 128 : 0>(sum, first, second, scales, factors);
}

}  // namespace umbel
