// Exact products of bytes: unsigned weights times signed activations from -127 to 127, summed as integers of 32 bits.
//
// Vectors are as wide as this CPU's registers. Where a CPU has the instruction, it takes 4 bytes of each lane: VNNI, of
// AVX-512 or of AVX2, and the dot product of aarch64. Without it, weights of 8 bits are widened to 16, once for all rows
// of a block: an instruction that multiplies bytes would saturate. Those of 4 bits are so small that their products with
// 32 activations are summed in 16 bits.
#pragma once

#include "simd.h"

#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512BW__)) || defined(__ARM_FEATURE_DOTPROD)
#define MANYLORA_BYTE_PRODUCTS
#endif

namespace manylora {

constexpr int64_t UNIT = 4;  // bytes of a row that a lane takes at once

typedef int16_t Shorts __attribute__((vector_size(REGISTER_BYTES)));

#ifdef MANYLORA_BYTE_PRODUCTS

constexpr bool IS_WIDENED = false;
constexpr int BYTE_ROWS = 6;  // rows of a product that are kept in registers

#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int64_t BYTE_ZERO = 128;  // is taken away from each weight of 8 bits: this instruction takes signed ones
#else
constexpr int64_t BYTE_ZERO = 0;
#endif

// Lane i: sums + the products of the 4 unsigned bytes of `weights`, less ZERO, with the 4 signed ones of `x`. ZERO is
// BYTE_ZERO, or 0 where weights are at most 127.
template <int64_t ZERO>
MANYLORA_INLINE Sums multiply_bytes(Sums sums, Sums weights, Sums x) {
#if defined(__AVX512VNNI__)
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, (__m256i)x);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (Sums)vusdotq_s32((int32x4_t)sums, (uint8x16_t)weights, (int8x16_t)x);
#else
    const Sums moved = ZERO == 0 ? weights : weights ^ all_equal(0x80808080);
    return (Sums)vdotq_s32((int32x4_t)sums, (int8x16_t)moved, (int8x16_t)x);
#endif
}

#else

constexpr bool IS_WIDENED = true;  // codes of rows are kept in 16 bits too
constexpr int64_t BYTE_ZERO = 0;
constexpr int BYTE_ROWS = 4;

// Lane i: the products of 2 numbers of 16 bits, added; none is beyond 255 * 127.
MANYLORA_INLINE Sums multiply_pairs(Shorts a, Shorts b) {
#if defined(__AVX512BW__)
    return (Sums)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (Sums)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    const Sums products = (Sums)(a * b);
    return (products << 16 >> 16) + (products >> 16);
#endif
}

MANYLORA_INLINE Shorts even_bytes(Sums bytes) { return (Shorts)(bytes & 0x00FF00FF); }
MANYLORA_INLINE Shorts odd_bytes(Sums bytes) {
    typedef uint16_t Unsigned __attribute__((vector_size(REGISTER_BYTES)));
    return (Shorts)((Unsigned)bytes >> 8);
}

// Lane i of 16 bits: the products of 2 bytes, added; the weights are at most 15.
MANYLORA_INLINE Shorts multiply_nibbles(Sums weights, Sums x) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
#elif defined(__AVX2__)
    return (Shorts)_mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
#else
    return even_bytes(weights) * ((Shorts)x << 8 >> 8) + odd_bytes(weights) * ((Shorts)x >> 8);
#endif
}

#endif

// Codes of a row in 16 bits, as `multiply_pairs` takes them of a unit: the even ones of all units, then the odd ones.
inline void widen_row(const int8_t* codes, int64_t pitch, int16_t* widened) {
    for (int64_t i = 0; i < pitch / 2; i++) {
        widened[i] = codes[2 * i];
        widened[pitch / 2 + i] = codes[2 * i + 1];
    }
}

}  // namespace manylora
