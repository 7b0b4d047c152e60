// Products of signed bytes (weights) with 16-bit integers (inputs), four inputs of one output side by side.
#pragma once

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#include <utility>

#include "simd.h"

namespace umbel {

typedef int8_t vbytes __attribute__((vector_size(VL * 2)));
typedef int16_t vshorts __attribute__((vector_size(VL * 4)));
typedef int64_t vlongs __attribute__((vector_size(VL * 4)));

// VL / 2 outputs × 4 inputs, as 16-bit integers. The instructions by name: the compiler converts in two halves.
UMBEL_INLINE vshorts widen(const int8_t* p) {
#if defined(__AVX512BW__)
    return (vshorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__)
    return (vshorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
    vbytes bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(bytes, vshorts);
#endif
}

// The same 4 inputs for every output.
UMBEL_INLINE vshorts repeat4(const int16_t* p) {
    int64_t four;
    std::memcpy(&four, p, sizeof four);
    return (vshorts)(vlongs{} + four);
}

// Adds products of neighbours: VL sums, two for each output. The empty statement keeps the compiler from computing the
// products of several rows before it adds them, for which there are not enough registers.
UMBEL_INLINE void add_pairs(vi& sums, vshorts weights, vshorts inputs) {
#if defined(__AVX512VNNI__)
    sums = (vi)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVX2__)
    sums += (vi)_mm256_madd_epi16((__m256i)weights, (__m256i)inputs);
    asm("" : "+x"(sums));
#elif defined(__SSE2__)
    sums += (vi)_mm_madd_epi16((__m128i)weights, (__m128i)inputs);
    asm("" : "+x"(sums));
#else
    vi w = (vi)weights, x = (vi)inputs;
    sums += ((w << 16) >> 16) * ((x << 16) >> 16) + (w >> 16) * (x >> 16);
#endif
}

template <int... I>
UMBEL_INLINE vi add_neighbours(vi low, vi high, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(low, high, (2 * I)...) + __builtin_shufflevector(low, high, (2 * I + 1)...);
}

// The two sums of each output added: VL outputs from 2 VL sums.
UMBEL_INLINE vi add_neighbours(vi low, vi high) {
    return add_neighbours(low, high, std::make_integer_sequence<int, VL>{});
}

}  // namespace umbel
