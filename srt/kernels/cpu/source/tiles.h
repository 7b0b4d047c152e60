// AMX tiles: eight registers of 16 rows × 64 bytes, and the products that read them. With UMBEL_AMX_EMULATED the same
// names are plain memory and loops, so that packing and indexing are tested on machines that have no tiles.
//
//   A: 16 rows of x, 32 bfloat16 or 64 bytes each        B: 16 rows of groups (2 bfloat16, 4 bytes) of 16 outputs
//   C[row, output] += sum of A[row, k] · B[k / group, output, k % group]
#pragma once

#include "simd.h"

#if defined(UMBEL_AMX) && !defined(UMBEL_AMX_EMULATED)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace umbel {

#if defined(UMBEL_AMX)

constexpr long TILE_ROWS = 16;
constexpr long TILE_BYTES = 64;  // of one row

#if !defined(UMBEL_AMX_EMULATED)

// Whether this process may use tiles; asks the operating system the first time.
inline bool tiles_allowed() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
    return allowed;
}

// All eight tiles in their full size for the calling thread, as long as this object lives. Other libraries of the
// process configure tiles for themselves, so it is made in every chunk of a loop, not once per thread. Where tiles are
// not allowed it does nothing: whoever uses them has asked before.
class Tiles {
  public:
    Tiles() {
        if (!tiles_allowed()) return;
        struct alignas(64) {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } configuration{};
        configuration.palette = 1;
        for (int tile = 0; tile < 8; tile++) {
            configuration.row_bytes[tile] = TILE_BYTES;
            configuration.rows[tile] = TILE_ROWS;
        }
        asm volatile("ldtilecfg %0" ::"m"(configuration));
    }
    ~Tiles() {
        if (tiles_allowed()) asm volatile("tilerelease");
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// Tile numbers are part of the instruction, so they are template arguments. Written as the assembler's text: the
// compiler's own macros do not say that a load reads memory, and a store before it may then come after it.
template <int T>
UMBEL_INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
UMBEL_INLINE void tile_load(const void* base, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(T) : "memory");
}
template <int T>
UMBEL_INLINE void tile_load_passing(const void* base, long stride) {  // leaves the first cache to others
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(T) : "memory");
}
template <int T>
UMBEL_INLINE void tile_store(void* base, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(T) : "memory");
}

// C += A · B
template <int C, int A, int B>
UMBEL_INLINE void tile_multiply_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
UMBEL_INLINE void tile_multiply_signed() {  // both signed bytes, sums int32
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
UMBEL_INLINE void tile_multiply_signed_unsigned() {  // A signed, B unsigned bytes, sums int32
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
UMBEL_INLINE void tile_multiply_unsigned_signed() {  // A unsigned, B signed bytes, sums int32
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#else

inline bool tiles_allowed() { return true; }

struct TileMemory {
    alignas(64) uint8_t bytes[8][TILE_ROWS][TILE_BYTES];
    bool configured;
};
inline thread_local TileMemory tile_memory{};

class Tiles {
  public:
    Tiles() {
        std::memset(tile_memory.bytes, 0, sizeof tile_memory.bytes);
        tile_memory.configured = true;
    }
    ~Tiles() { tile_memory.configured = false; }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// A tile that is used without a configuration is a fault of the hardware, so it is one here.
inline uint8_t (&tile_bytes(int tile))[TILE_ROWS][TILE_BYTES] {
    if (!tile_memory.configured) __builtin_trap();
    return tile_memory.bytes[tile];
}

template <int T>
void tile_zero() {
    std::memset(tile_bytes(T), 0, TILE_ROWS * TILE_BYTES);
}
template <int T>
void tile_load(const void* base, long stride) {
    for (long row = 0; row < TILE_ROWS; row++)
        std::memcpy(tile_bytes(T)[row], (const char*)base + row * stride, TILE_BYTES);
}
template <int T>
void tile_load_passing(const void* base, long stride) {
    tile_load<T>(base, stride);
}
template <int T>
void tile_store(void* base, long stride) {
    for (long row = 0; row < TILE_ROWS; row++) std::memcpy((char*)base + row * stride, tile_bytes(T)[row], TILE_BYTES);
}

template <class T>
T tile_element(int tile, long row, long at) {
    T value;
    std::memcpy(&value, tile_bytes(tile)[row] + at * (long)sizeof(T), sizeof(T));
    return value;
}

// Even and odd inputs are summed apart and join the sum at the end, as the hardware does.
template <int C, int A, int B>
void tile_multiply_bf16() {
    for (long row = 0; row < TILE_ROWS; row++)
        for (long o = 0; o < 16; o++) {
            float even = 0, odd = 0;
            for (long k = 0; k < 16; k++) {
                even += from_bf16(tile_element<bf16>(A, row, 2 * k)) * from_bf16(tile_element<bf16>(B, k, 2 * o));
                odd += from_bf16(tile_element<bf16>(A, row, 2 * k + 1)) *
                       from_bf16(tile_element<bf16>(B, k, 2 * o + 1));
            }
            float sum = tile_element<float>(C, row, o) + (even + odd);
            std::memcpy(tile_bytes(C)[row] + o * 4, &sum, 4);
        }
}
template <class Input, class Weight, int C, int A, int B>
void tile_multiply_bytes() {
    for (long row = 0; row < TILE_ROWS; row++)
        for (long o = 0; o < 16; o++) {
            int32_t sum = tile_element<int32_t>(C, row, o);
            for (long k = 0; k < 64; k++)
                sum += (int32_t)tile_element<Input>(A, row, k) * tile_element<Weight>(B, k / 4, 4 * o + k % 4);
            std::memcpy(tile_bytes(C)[row] + o * 4, &sum, 4);
        }
}
template <int C, int A, int B>
void tile_multiply_signed() {
    tile_multiply_bytes<int8_t, int8_t, C, A, B>();
}
template <int C, int A, int B>
void tile_multiply_signed_unsigned() {
    tile_multiply_bytes<int8_t, uint8_t, C, A, B>();
}
template <int C, int A, int B>
void tile_multiply_unsigned_signed() {
    tile_multiply_bytes<uint8_t, int8_t, C, A, B>();
}

#endif
#endif

}  // namespace umbel
