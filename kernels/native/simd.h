// Vectors of 16 floats, and the formats that weights and activations come in.
//
// Written with the compiler's vector types, so that it compiles for any CPU; where the CPU multiplies pairs of bfloat16
// itself (AVX512_BF16), `Packed` uses that. All sums are float32.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace manylora {

#if defined(__clang__) || __GNUC__ >= 12
#define MANYLORA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MANYLORA_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
// A call would force vectors out of their registers.
#define MANYLORA_INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

// Vectors of one register. Products of many rows use these: 16 floats lie in two or four registers of smaller CPUs, and
// the compiler moves such a vector through memory.
#if defined(__AVX512BW__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif
constexpr int SINGLES = REGISTER_BYTES / 4;
constexpr int REGISTERS_OF_LANES = LANES / SINGLES;

typedef float Singles __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t Sums __attribute__((vector_size(REGISTER_BYTES)));

// bfloat16 as it lies in memory: the upper half of a float.
struct Bfloat16 {
    uint16_t bits;
};

MANYLORA_INLINE Floats splat(float value) { return Floats{} + value; }

template <class Vector, class Element>
MANYLORA_INLINE Vector load_bits(const Element* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
}

MANYLORA_INLINE Floats load(const float* from) { return load_bits<Floats>(from); }

MANYLORA_INLINE Words widen(Halves halves) {
#ifdef __AVX512F__
    return (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#else
    return __builtin_convertvector(halves, Words);
#endif
}

MANYLORA_INLINE Floats load(const Bfloat16* from) { return (Floats)(widen(load_bits<Halves>(from)) << 16); }

MANYLORA_INLINE Floats load(const int8_t* from) {
#ifdef __AVX512F__
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_bits<__m128i>(from)));
#else
    return __builtin_convertvector(__builtin_convertvector(load_bits<Bytes>(from), Ints), Floats);
#endif
}

// 16 lanes of the registers that hold them. Copied one by one: an array that is read across its elements is kept in memory.
template <class Wide, class Register>
MANYLORA_INLINE Wide joined(const Register* registers) {
    Register copies[REGISTERS_OF_LANES];
    for (int i = 0; i < REGISTERS_OF_LANES; i++) copies[i] = registers[i];
    return load_bits<Wide>(copies);
}

// One of the registers that hold 16 lanes.
template <class Register, class Wide>
MANYLORA_INLINE Register part_of(const Wide& wide, int i) {
    return load_bits<Register>((const char*)&wide + i * sizeof(Register));
}

// Applies `change` to each register of 16 lanes: a comparison of vectors wider than a register is done lane by lane.
template <class... Wide, class Change>
MANYLORA_INLINE Floats by_register(Change change, Wide... wide) {
    if constexpr (REGISTERS_OF_LANES == 1) {
        return change((Singles)wide...);
    } else {
        Singles changed[REGISTERS_OF_LANES];
        for (int i = 0; i < REGISTERS_OF_LANES; i++) changed[i] = change(part_of<Singles>(wide, i)...);
        return joined<Floats>(changed);
    }
}

// Floats of one register or of 16 lanes, by the type of the vector.
template <class V>
constexpr int LANES_OF = sizeof(V) / sizeof(float);
template <class V>
using IntsOf = std::conditional_t<sizeof(V) == sizeof(Ints), Ints, Sums>;

template <class V, class T>
MANYLORA_INLINE V load_as(const T* from) {
    if constexpr (sizeof(V) == sizeof(Floats)) {
        return load(from);
    } else if constexpr (std::is_same_v<T, float>) {
        return load_bits<V>(from);
    } else if constexpr (std::is_same_v<T, Bfloat16>) {
        typedef uint16_t Some __attribute__((vector_size(sizeof(V) / 2)));
        return (V)(__builtin_convertvector(load_bits<Some>(from), IntsOf<V>) << 16);
    } else {
        typedef int8_t Some __attribute__((vector_size(sizeof(V) / 4)));
        return __builtin_convertvector(__builtin_convertvector(load_bits<Some>(from), IntsOf<V>), V);
    }
}

template <class T>
MANYLORA_INLINE Singles load_singles(const T* from) {
    return load_as<Singles>(from);
}

MANYLORA_INLINE Sums all_equal(int32_t value) { return Sums{} + value; }

// A unit in all lanes.
MANYLORA_INLINE Sums unit_at(const void* from) {
    int32_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    return all_equal(bits);
}

template <class V>
MANYLORA_INLINE void store(float* to, V value) {
    std::memcpy(to, &value, sizeof(value));
}

template <class V>
MANYLORA_INLINE void store(Bfloat16* to, V value) {
    if constexpr (sizeof(V) > REGISTER_BYTES) {
        for (int i = 0; i < REGISTERS_OF_LANES; i++) store(to + i * SINGLES, part_of<Singles>(value, i));
    } else {
#ifdef __AVX512BF16__
        const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
#else
        const auto bits = (IntsOf<V>)value;
        const auto nearest_even = bits + 0x7FFF + (bits >> 16 & 1);
        const auto quiet_nan = bits | 0x400000;
        const auto kept = (value == value ? nearest_even : quiet_nan) >> 16;
#if defined(__AVX2__) && !defined(__AVX512BW__)
        const __m256i halves = _mm256_packus_epi32((__m256i)(kept & 0xFFFF), __m256i{});
        const __m128i rounded = _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0b1000));
#else
        typedef uint16_t Some __attribute__((vector_size(sizeof(V) / 2)));
        const Some rounded = __builtin_convertvector(kept, Some);
#endif
#endif
        std::memcpy(to, &rounded, sizeof(rounded));
    }
}

// To the nearest integers, of two the even one; values of at most 127.
template <class V>
MANYLORA_INLINE void store(int8_t* to, V value) {
    constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
    typedef int8_t Some __attribute__((vector_size(sizeof(V) / 4)));
    const Some rounded = __builtin_convertvector((IntsOf<V>)(value + SHIFT), Some);
    std::memcpy(to, &rounded, sizeof(rounded));
}

// The first `count` elements, less than the vector has; the others are zero, and nothing past them is read.
template <class V = Floats, class T>
MANYLORA_INLINE V load_some(const T* from, int64_t count) {
    T padded[LANES_OF<V>] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load_as<V>(padded);
}

template <class T, class V>
MANYLORA_INLINE void store_some(T* to, V value, int64_t count) {
    T padded[LANES_OF<V>];
    store(padded, value);
    std::memcpy(to, padded, count * sizeof(T));
}

// The first `count` of 64; the others are zero, and nothing past them is read.
MANYLORA_INLINE Words load_fours(const int8_t* from, int64_t count) {
#ifdef __AVX512BW__
    return (Words)_mm512_maskz_loadu_epi8(count >= 4 * LANES ? ~0ull : (1ull << count) - 1, from);
#else
    Words words = {};
    std::memcpy(&words, from, count >= 4 * LANES ? 4 * LANES : count);
    return words;
#endif
}

// Replaces a register of elements, or the first `count` where those are fewer (none where it is not positive).
template <class T, class Change>
MANYLORA_INLINE void update(T* at, int64_t count, Change change) {
    if (count >= SINGLES) {
        store(at, change(load_singles(at)));
    } else if (count > 0) {
        store_some(at, change(load_some<Singles>(at, count)), count);
    }
}

// Where either is NaN, it is b.
template <class V>
MANYLORA_INLINE V maximum(V a, V b) {
    if constexpr (sizeof(V) > REGISTER_BYTES) {
        return by_register([](Singles x, Singles y) { return x > y ? x : y; }, a, b);
    } else {
        return a > b ? a : b;
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// The even lanes of `a` and then of `b` where FIRST is 0, the odd ones where it is 1. The compiler would move vectors of
// two registers lane by lane.
template <int FIRST>
MANYLORA_INLINE Floats every_second(Floats a, Floats b) {
    __m256 halves[4], found[2];
    std::memcpy(halves, &a, sizeof(a));
    std::memcpy(halves + 2, &b, sizeof(b));
    for (int i = 0; i < 2; i++) {
        const __m256 lanes = _mm256_shuffle_ps(halves[2 * i], halves[2 * i + 1], FIRST ? 0xDD : 0x88);
        found[i] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(lanes), 0xD8));
    }
    return load_bits<Floats>(found);
}
#else
template <int FIRST>
MANYLORA_INLINE Floats every_second(Floats a, Floats b) {
    if constexpr (FIRST == 0) {
        return MANYLORA_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    } else {
        return MANYLORA_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    }
}
#endif

// Lane pairs combined: the 8 of `a`, then the 8 of `b`.
template <class Combine>
MANYLORA_INLINE Floats combine_pairs(Floats a, Floats b, Combine combine) {
    return combine(every_second<0>(a, b), every_second<1>(a, b));
}

// Lane i combines the lanes of vector i % N; N is a power of two, at most LANES. The order in which a vector's lanes
// are combined does not depend on N.
template <int N, int LEFT = LANES, class Combine>
MANYLORA_INLINE Floats combine_lanes(const Floats* vectors, Combine combine) {
    if constexpr (LEFT == 1) {
        return vectors[0];
    } else if constexpr (N == 1) {
        const Floats pairs = combine_pairs(vectors[0], vectors[0], combine);
        return combine_lanes<1, LEFT / 2>(&pairs, combine);
    } else {
        Floats pairs[N / 2];
        for (int i = 0; i < N / 2; i++) pairs[i] = combine_pairs(vectors[2 * i], vectors[2 * i + 1], combine);
        return combine_lanes<N / 2, LEFT / 2>(pairs, combine);
    }
}

template <int N>
MANYLORA_INLINE Floats sums_of(const Floats* vectors) {
    return combine_lanes<N>(vectors, [](Floats a, Floats b) { return a + b; });
}

// The largest of a register.
MANYLORA_INLINE float largest_of(Singles values) {
    float largest = values[0];
    for (int i = 1; i < SINGLES; i++) largest = values[i] > largest ? values[i] : largest;
    return largest;
}

// Lane i is the sum of the lanes of vector i % N, as `sums_of`; a vector is one register.
template <int N>
MANYLORA_INLINE Floats sums_of_registers(const Singles* vectors) {
    if constexpr (SINGLES == LANES) {
        return sums_of<N>((const Floats*)vectors);
    } else {
        Floats wide[N] = {};
        for (int i = 0; i < N; i++) std::memcpy(&wide[i], &vectors[i], sizeof(*vectors));
        return sums_of<N>(wide);
    }
}

// 2^x for x <= 0, within 2 units in the last place: exactly 1 at 0, exactly 0 below -126, since a CPU takes a hundred
// cycles for a result that is denormal or less; NaN for NaN.
template <class V>
MANYLORA_INLINE V power_of_two(V x) {
    if constexpr (sizeof(V) > REGISTER_BYTES) {
        return by_register([](Singles part) { return power_of_two(part); }, x);
    } else {
#ifdef __AVX512F__
        const __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const V rest = x - (V)whole;
#else
        constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
        const V shifted = (x < -126.0f ? V{} - 126.0f : x) + SHIFT;
        const V rest = x - (shifted - SHIFT);
#endif
        V series = V{} + 1.535336188319500e-4f;
        series = series * rest + 1.339887440266574e-3f;
        series = series * rest + 9.618437357674640e-3f;
        series = series * rest + 5.550332471162809e-2f;
        series = series * rest + 2.402264791363012e-1f;
        series = series * rest + 6.931472028550421e-1f;
        series = series * rest + 1.0f;
#ifdef __AVX512F__
        const __mmask16 is_normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // or NaN
        return (V)_mm512_maskz_scalef_ps(is_normal, (__m512)series, whole);
#else
        const V result = (V)((IntsOf<V>)series + ((IntsOf<V>)shifted << 23));
        return x < -126.0f ? V{} : x == x ? result : x;
#endif
    }
}

constexpr float LOG2_E = 1.44269504088896341f;

// e^x for x <= 0.
template <class V>
MANYLORA_INLINE V exponential(V x) {
    return power_of_two(x * LOG2_E);
}

// Rows and columns of 16 x 16 words change places.
#if defined(__AVX2__) && !defined(__AVX512F__)
// 8 x 8 words change places, from rows of one vector to rows of another.
MANYLORA_INLINE void transpose_eights(const __m256* rows, __m256* columns) {
    __m256 pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int n = 0; n < 2; n++) {
            fours[i + 2 * n] = _mm256_shuffle_ps(pairs[i + n], pairs[i + n + 2], 0x44);
            fours[i + 2 * n + 1] = _mm256_shuffle_ps(pairs[i + n], pairs[i + n + 2], 0xEE);
        }
    }
    for (int i = 0; i < 4; i++) {
        columns[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        columns[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}

MANYLORA_INLINE void transpose(Words* rows) {
    __m256 halves[LANES][2], columns[2][2][8];
    std::memcpy(halves, rows, sizeof(halves));
    for (int i = 0; i < 2; i++) {
        for (int half = 0; half < 2; half++) {
            __m256 block[8];
            for (int n = 0; n < 8; n++) block[n] = halves[8 * i + n][half];
            transpose_eights(block, columns[half][i]);
        }
    }
    for (int n = 0; n < LANES; n++) {
        for (int half = 0; half < 2; half++) halves[n][half] = columns[n / 8][half][n % 8];
    }
    std::memcpy(rows, halves, sizeof(halves));
}
#else
MANYLORA_INLINE void transpose(Words* rows) {
    const auto exchange = [rows](int distance, auto low, auto high) {
        for (int i = 0; i < LANES; i++) {
            if (i & distance) continue;
            const Words a = rows[i], b = rows[i + distance];
            rows[i] = low(a, b);
            rows[i + distance] = high(a, b);
        }
    };
    using W = Words;
    exchange(
        1, [](W a, W b) { return (W)MANYLORA_SHUFFLE(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30); },
        [](W a, W b) { return (W)MANYLORA_SHUFFLE(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31); });
    exchange(
        2, [](W a, W b) { return (W)MANYLORA_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29); },
        [](W a, W b) { return (W)MANYLORA_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31); });
    exchange(
        4, [](W a, W b) { return (W)MANYLORA_SHUFFLE(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27); },
        [](W a, W b) { return (W)MANYLORA_SHUFFLE(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31); });
    exchange(
        8, [](W a, W b) { return (W)MANYLORA_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23); },
        [](W a, W b) { return (W)MANYLORA_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31); });
}
#endif

// How operands of a product lie in memory. A unit, 32 bits, is what one multiply-add takes of a row: an element as a
// float, or two of bfloat16. Left operands are rows of `Stored`, right ones panels of units.
template <class T>
struct Packed {
    using Stored = float;
    static constexpr int PER_UNIT = 1;

    static MANYLORA_INLINE Singles multiply_add(Singles sum, Sums a, Sums b) { return sum + (Singles)a * (Singles)b; }
    // A register of units of a row, of which `count` elements are left; what is past them is zero.
    static MANYLORA_INLINE Sums register_units(const T* from, int64_t count) {
        if (count >= SINGLES) return (Sums)load_singles(from);
        T padded[SINGLES] = {};
        std::memcpy(padded, from, count * sizeof(T));
        return (Sums)load_singles(padded);
    }
    // 16 units of a row, of which `count` elements are left; what is past them is zero.
    static MANYLORA_INLINE Words row_units(const T* from, int64_t count) {
        return (Words)(count >= LANES ? load(from) : load_some(from, count));
    }
    // 16 columns of as many rows as a unit has elements.
    static MANYLORA_INLINE Words interleave(const T* first, const T* /*second*/) { return (Words)load(first); }
    static MANYLORA_INLINE Words interleave(const int8_t* first, const int8_t* /*second*/) { return (Words)load(first); }
    // Units of as many vectors of small integers as a unit has elements.
    static MANYLORA_INLINE Words unit(Floats first, Floats /*second*/) { return (Words)first; }
};

#ifdef __AVX512BF16__
template <>
struct Packed<Bfloat16> {
    using Stored = Bfloat16;
    static constexpr int PER_UNIT = 2;

    static MANYLORA_INLINE Singles multiply_add(Singles sum, Sums a, Sums b) {
        return (Singles)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
    static MANYLORA_INLINE Sums register_units(const Bfloat16* from, int64_t count) {
        return (Sums)row_units(from, count);
    }
    static MANYLORA_INLINE Words row_units(const Bfloat16* from, int64_t count) {
        return (Words)_mm512_maskz_loadu_epi16(count >= 2 * LANES ? ~0u : (1u << count) - 1, from);
    }
    static MANYLORA_INLINE Words interleave(const Bfloat16* first, const Bfloat16* second) {
        return widen(load_bits<Halves>(first)) | widen(load_bits<Halves>(second)) << 16;
    }
    static MANYLORA_INLINE Words interleave(const int8_t* first, const int8_t* second) {
        return unit(load(first), load(second));
    }
    // Integers of at most 256 are bfloat16 exactly: the lower half of the float is zero.
    static MANYLORA_INLINE Words unit(Floats first, Floats second) { return (Words)first >> 16 | (Words)second; }
};
#endif

}  // namespace manylora
