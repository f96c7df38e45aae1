// Exact products of bytes: unsigned weights times signed activations from -127 to 127, summed as integers of 32 bits.
//
// Vectors are as wide as this CPU's registers. With VNNI one instruction takes 4 bytes of each lane. Without it, weights
// of 8 bits are widened to 16, once for all rows of a block: an instruction that multiplies bytes would saturate. Those
// of 4 bits are so small that their products with 32 activations are summed in 16 bits.
#pragma once

#include "simd.h"

namespace manylora {

constexpr int64_t UNIT = 4;  // bytes of a row that a lane takes at once

typedef int16_t Shorts __attribute__((vector_size(REGISTER_BYTES)));

#ifdef __AVX512VNNI__
constexpr bool IS_WIDENED = false;
constexpr int BYTE_ROWS = 6;  // rows of a product that are kept in registers
#else
constexpr bool IS_WIDENED = true;  // codes of rows are kept in 16 bits too
constexpr int BYTE_ROWS = 4;
#endif

#ifdef __AVX512VNNI__

// Lane i: sums + the products of the 4 unsigned bytes of `weights` with the 4 signed ones of `x`.
MANYLORA_INLINE Sums multiply_bytes(Sums sums, Sums weights, Sums x) {
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
}

#else

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
