// Vectors of VL floats in the width of the machine, written with the compiler's vector extensions: one text for every
// instruction set. What only some machines can do (tiles, integer dot products) lives beside the kernel that uses it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace umbel {

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

#define UMBEL_INLINE inline __attribute__((always_inline))

typedef uint16_t bf16;  // the upper half of a float32
struct f16 {            // IEEE half precision
    uint16_t bits;
};

UMBEL_INLINE vf load(const float* p) {
    vf v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
UMBEL_INLINE void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
UMBEL_INLINE vf splat(float x) { return x - vf{}; }  // 0 + x would be an addition: it turns -0 into 0
UMBEL_INLINE vi splat_int(int32_t x) { return vi{} + x; }
UMBEL_INLINE vf bits_to_float(vi v) { return (vf)v; }
UMBEL_INLINE vi float_to_bits(vf v) { return (vi)v; }

UMBEL_INLINE float from_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
UMBEL_INLINE bf16 to_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bf16)((bits >> 16) | 0x40);
    return (bf16)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

UMBEL_INLINE vf load(const bf16* p) {
    vh half;
    std::memcpy(&half, p, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
}
UMBEL_INLINE void store(bf16* p, vf v) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    __m256bh half = _mm512_cvtneps_pbh((__m512)v);  // the same, but for what is smaller than every normal number: 0
    std::memcpy(p, &half, sizeof half);
#else
    vu bits = (vu)v;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    vu quiet = (bits >> 16) | 0x40;
    vi nan = (vi)((bits & 0x7fffffffu) > 0x7f800000u);
    vh half = __builtin_convertvector((vu)(((vi)quiet & nan) | ((vi)rounded & ~nan)), vh);
    std::memcpy(p, &half, sizeof half);
#endif
}

UMBEL_INLINE float from_f16(f16 x) {
    uint32_t magnitude = (uint32_t)(x.bits & 0x7fff) << 13, sign = (uint32_t)(x.bits & 0x8000) << 16;
    float value;
    std::memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;  // the difference of the exponents' biases; subnormal numbers become normal
    std::memcpy(&magnitude, &value, 4);
    if ((x.bits & 0x7c00) == 0x7c00) magnitude |= 0x7f800000u;
    magnitude |= sign;
    std::memcpy(&value, &magnitude, 4);
    return value;
}
UMBEL_INLINE f16 to_f16(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return {(uint16_t)(sign | 0x7e00)};
    if (bits >= 0x477ff000u) return {(uint16_t)(sign | 0x7c00)};
    if (bits < 0x38800000u) {  // subnormal: a unit in the last place of the sum is that of the result
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        std::memcpy(&bits, &magnitude, 4);
        return {(uint16_t)(sign | (bits - 0x3f000000u))};
    }
    bits += 0xfffu + (bits >> 13 & 1);
    return {(uint16_t)(sign | ((bits - 0x38000000u) >> 13))};
}
UMBEL_INLINE vf from_halves(vh half) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)half);
#elif defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)half));
#else
    vu bits = __builtin_convertvector(half, vu);
    vu magnitude = (vu)((vf)((bits & 0x7fff) << 13) * 0x1p112f);
    vu special = (vu)((bits & 0x7c00) == 0x7c00) & 0x7f800000u;
    return (vf)(magnitude | special | (bits & 0x8000) << 16);
#endif
}
UMBEL_INLINE vf load(const f16* p) {
    vh half;
    std::memcpy(&half, p, sizeof half);
    return from_halves(half);
}

// a · b + c, rounded once where the machine does so in one instruction: by name, because a compiler may contract one
// kernel and not another, and rows are to have the same bits in both.
UMBEL_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
// c − a · b
UMBEL_INLINE vf fnma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return c - a * b;
#endif
}

UMBEL_INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
UMBEL_INLINE vf max(vf a, vf b) { return a > b ? a : b; }  // written so, each is one instruction
UMBEL_INLINE vf min(vf a, vf b) { return a < b ? a : b; }

UMBEL_INLINE float sum(vf v) {
    float total = 0;
    for (int i = 0; i < VL; i++) total += v[i];
    return total;
}
UMBEL_INLINE float max_of(vf v) {
    float best = v[0];
    for (int i = 1; i < VL; i++) best = v[i] > best ? v[i] : best;
    return best;
}

// e^x to about 2 ulp: x = n·ln 2 + r with |r| <= ln 2 / 2, a polynomial in r, and n into the exponent. Below -87: 0.
UMBEL_INLINE vf exp(vf x) {
    vi too_small = x < splat(-87.0f);
    vf clipped = max(min(x, splat(88.0f)), splat(-87.0f));
    vf shifted = clipped * 1.44269504088896341f + 12582912.0f;  // 1.5 · 2^23: the fraction is rounded away
    vf n = shifted - 12582912.0f;
    vf r = clipped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi exponent = float_to_bits(shifted) << 23;  // n is in the low bits of the sum
    vf result = bits_to_float(float_to_bits(p) + exponent);
    return select(too_small, vf{}, result);
}
// 1 / x to about 1 ulp, for x of which neither x nor 1 / x is smaller than every normal number.
UMBEL_INLINE vf reciprocal(vf x) {
#if defined(__AVX512F__)
    vf y = (vf)_mm512_rcp14_ps((__m512)x);  // a division holds the units of two products for 16 cycles
    return y * (2.0f - x * y);
#else
    return 1.0f / x;
#endif
}
UMBEL_INLINE vf tanh(vf x) {
    vf limited = max(min(x, splat(10.0f)), splat(-10.0f));
    vf e = exp(limited * 2.0f);
    return (e - 1.0f) / (e + 1.0f);
}

UMBEL_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace umbel
