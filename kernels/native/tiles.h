// The tile registers of AMX: 8 registers of 16 rows of 64 bytes, which multiply bfloat16 and codes of 8 bits.
//
// MANYLORA_NO_TILES leaves them out: Linux may refuse a process their use.
#pragma once

#include <type_traits>
#include <utility>

#include "simd.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && !defined(MANYLORA_NO_TILES)
#define MANYLORA_TILES

namespace manylora {

constexpr int TILE = 16;  // rows of a tile, and 32-bit elements of a row

// What LDTILECFG reads.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};
static_assert(sizeof(TileShapes) == 64);

// Assembly, because g++'s intrinsics do not tell the compiler that a load reads memory. Strides are in bytes.
MANYLORA_INLINE void load_tile_shapes(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
MANYLORA_INLINE void release_tiles() { asm volatile("tilerelease"); }
template <int SUM>
MANYLORA_INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(SUM));
}
template <int TO>
MANYLORA_INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TO), "r"(from), "r"(stride) : "memory");
}
template <int FROM>
MANYLORA_INLINE void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(FROM), "r"(to), "r"(stride) : "memory");
}
// For T float, sum [16, 16] += a [16, 32] @ b, whose row k holds rows 2k and 2k + 1 of 16 columns in pairs, in bfloat16.
// For T int32_t, the same with 4 bytes in place of 2 elements: signed ones of a, unsigned ones of b.
template <class T, int SUM, int A, int B>
MANYLORA_INLINE void multiply_add_tiles() {
    if constexpr (std::is_same_v<T, float>) {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
    } else {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
    }
}

// While it lives, its thread's tiles have their shapes.
class Tiles {
   public:
    Tiles() { load_tile_shapes(TileShapes{}); }
    ~Tiles() { release_tiles(); }
    Tiles(const Tiles&) = delete;
};

template <class Body, int... I>
MANYLORA_INLINE void for_constants(std::integer_sequence<int, I...>, Body body) {
    (body(std::integral_constant<int, I>{}), ...);
}

// N tiles of sums, each [16, 16]: of N tiles of rows of `a` and one of columns, or of one of rows and N of columns. All
// sums are in one order, in whichever tile a row and a column are. Strides are in bytes; a step takes 16 units.
template <int N, bool MANY_ROWS, class T>
void multiply_tiles(const void* a, int64_t a_stride, const void* b, int64_t b_stride, int64_t steps, bool adds,
                    T* sums) {
    static_assert(N <= 4);
    constexpr auto each = std::make_integer_sequence<int, N>{};
    for_constants(each, [&](auto n) { adds ? load_tile<n>(sums + n * TILE * TILE, 64) : zero_tile<n>(); });
    for (int64_t step = 0; step < steps; step++) {
        const char* rows = static_cast<const char*>(a) + step * 64;
        const char* columns = static_cast<const char*>(b) + step * TILE * b_stride;
        MANY_ROWS ? load_tile<4>(columns, b_stride) : load_tile<4>(rows, a_stride);
        for_constants(each, [&](auto n) {
            constexpr int OTHER = 5 + n % 3;  // in turn, so that a load does not wait for the product before
            if constexpr (MANY_ROWS) {
                load_tile<OTHER>(rows + n * TILE * a_stride, a_stride);
                multiply_add_tiles<T, n, OTHER, 4>();
            } else {
                load_tile<OTHER>(columns + n * 64, b_stride);
                multiply_add_tiles<T, n, 4, OTHER>();
            }
        });
    }
    for_constants(each, [&](auto n) { store_tile<n>(sums + n * TILE * TILE, 64); });
}

// body(first, n) for runs of n tiles, which is a constant: 4 at a time, then 2, then 1.
template <class Body>
MANYLORA_INLINE void for_tiles(int64_t count, Body body) {
    int64_t first = 0;
    for (; count - first >= 4; first += 4) body(first, std::integral_constant<int, 4>{});
    if (count - first >= 2) {
        body(first, std::integral_constant<int, 2>{});
        first += 2;
    }
    if (count > first) body(first, std::integral_constant<int, 1>{});
}

}  // namespace manylora

#endif
