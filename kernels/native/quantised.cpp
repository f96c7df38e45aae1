// Linear layers with weights in 8 or 4 bits: rows of activations become codes of 8 bits, products are sums of integers.
//
// Integer sums are exact, and the few float operations on them are the same for every number of rows, so a row's result
// does not depend on the other rows. Weights are unsigned codes around ZERO: dot(x, weight - ZERO) is computed as
// dot(x, weight) - ZERO * sum(x), whose second part is where the sums of a row start.
#include <algorithm>
#include <limits>
#include <numeric>

#include "bytes.h"
#include "panels.h"
#include "rows.h"

namespace manylora {
namespace {

constexpr int64_t GROUP = 32;        // codes of a row that share a scale where weights have 4 bits
constexpr int64_t PITCH = 64;        // rows of codes are padded to a multiple of so many
constexpr float SMALLEST = 1e-30f;   // magnitude of a row that is not taken for zeros

MANYLORA_INLINE Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Stores a register of values, rounded to the nearest integer, half to even.
MANYLORA_INLINE void store_codes(int8_t* to, Singles values) {
#if defined(__AVX512F__)
    const __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)values));
#elif defined(__AVX2__)
    const __m256i words = _mm256_cvtps_epi32((__m256)values), pairs = _mm256_packs_epi32(words, words);
    const __m128i halves = _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0b1000));
    const int64_t codes = _mm_cvtsi128_si64(_mm_packs_epi16(halves, halves));
#else
    int8_t codes[SINGLES];
    for (int i = 0; i < SINGLES; i++) codes[i] = static_cast<int8_t>(std::nearbyint(values[i]));
#endif
    std::memcpy(to, &codes, SINGLES);
}

// What `take(at, count)` gives is nearly scale * codes; codes after the last are zero. A row that is not finite gets the
// scale NaN.
template <class Take>
void quantise(Take take, int64_t size, int64_t pitch, int8_t* codes, float* scale) {
    Sums largest = {};  // bits of magnitudes are in the order of the magnitudes, infinity and NaN last
    for_vectors(size, [&](int64_t at, int64_t count) {
        const Sums bits = (Sums)take(at, count) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    });
    int32_t bits = 0;
    for (int i = 0; i < SINGLES; i++) bits = std::max(bits, largest[i]);
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(magnitude));
    if (bits >= 0x7F800000) {
        std::memset(codes, 0, pitch);
        *scale = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    magnitude = std::max(magnitude, SMALLEST);
    *scale = magnitude / 127.0f;
    const float inverse = 127.0f / magnitude;
    for_vectors(size, [&](int64_t at, int64_t count) { store_codes(codes + at, take(at, count) * inverse); });
    std::memset(codes + padded(size, SINGLES), 0, pitch - padded(size, SINGLES));
}

// Rows of activations as codes, [rows, pitch], with their sums per group as the weights want them, and their scales.
struct Activations {
    const int8_t* codes;
    const int16_t* widened;  // the codes in 16 bits, as `widen_row` writes them, where they are multiplied so
    int64_t pitch;
    const int32_t* starts;  // [rows, groups]
    int64_t groups;
    const float* weight_scales;  // [columns], where a column has one

    Activations from(int64_t row) const {
        return {codes + row * pitch, widened + row * pitch, pitch, starts + row * groups, groups, weight_scales};
    }
};

// Turns the sums of 16 columns into floats.
MANYLORA_INLINE Floats to_floats(const Sums* sums) { return to_floats(load_bits<Ints>(sums)); }

// 8 bits: panels [columns / PANEL][units][PANEL][4], units padded to PITCH codes; scales [columns].
struct EightBits {
    using Codes = int8_t;  // of the rows, where they are multiplied on tiles
    static constexpr int64_t ZERO = 128 - BYTE_ZERO, TASK = 64, PANEL = panel_columns(TASK);
    static constexpr int64_t VECTOR_BYTES = LANES * UNIT, STEP_BYTES = PANEL * UNIT;
    static constexpr int ROWS = BYTE_ROWS;
    static constexpr bool WIDENS = IS_WIDENED;
    static int64_t groups(int64_t /*features*/) { return 1; }
    static int64_t panel_bytes(int64_t features) { return padded(features, PITCH) * PANEL; }

    // `take(row, vector, sums)` gets the products of R rows with V vectors of columns, without scales of the rows.
    template <int R, int VECTORS, class Take>
    static MANYLORA_INLINE void multiply(const Activations& x, Vectors weights, int64_t features,
                                         int64_t column, Ahead ahead, Take take) {
        constexpr int N = VECTORS * REGISTERS_OF_LANES;
        Sums sums[R][N];
        for (int r = 0; r < R; r++) {
            for (int n = 0; n < N; n++) sums[r][n] = all_equal(x.starts[r]);
        }
        for (int64_t k = 0; k < features; k += UNIT, weights.first += STEP_BYTES) {
            ahead.fetch(k / UNIT);
            Sums columns[N];
            for (int n = 0; n < N; n++) {
                columns[n] = load_bits<Sums>(weights[n / REGISTERS_OF_LANES] + n % REGISTERS_OF_LANES * sizeof(Sums));
            }
#ifdef MANYLORA_BYTE_PRODUCTS
            for (int r = 0; r < R; r++) {
                const Sums factor = unit_at(x.codes + r * x.pitch + k);
                for (int n = 0; n < N; n++) sums[r][n] = multiply_bytes<BYTE_ZERO>(sums[r][n], columns[n], factor);
            }
#else
            Shorts even[N], odd[N];
            for (int n = 0; n < N; n++) {
                even[n] = even_bytes(columns[n]);
                odd[n] = odd_bytes(columns[n]);
            }
            for (int r = 0; r < R; r++) {
                const int16_t* codes = x.widened + r * x.pitch + k / 2;
                const Shorts one = (Shorts)unit_at(codes), other = (Shorts)unit_at(codes + x.pitch / 2);
                for (int n = 0; n < N; n++) {
                    sums[r][n] += multiply_pairs(even[n], one);
                    sums[r][n] += multiply_pairs(odd[n], other);
                }
            }
#endif
        }
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < VECTORS; v++) {
                take(r, v, to_floats(&sums[r][v * REGISTERS_OF_LANES]) * load(x.weight_scales + column + v * LANES));
            }
        }
    }

#ifdef MANYLORA_TILES
    // The same on tiles, for up to 16 rows and a whole panel: with exact sums a row may be computed here or there. It
    // reads 16 rows of codes.
    template <class Take>
    static void multiply_on_tiles(int64_t rows, const Activations& x, const uint8_t* panel, int64_t features,
                                  int64_t column, Take take) {
        constexpr int V = PANEL / TILE;
        alignas(64) int32_t sums[V * TILE * TILE];
        multiply_tiles<V, false>(x.codes, x.pitch, panel, PANEL * UNIT, padded(features, PITCH) / PITCH, false, sums);
        for (int64_t r = 0; r < rows; r++) {
            for (int v = 0; v < V; v++) {
                const Ints sum = load_bits<Ints>(&sums[(v * TILE + r) * TILE]) + x.starts[r];
                take(r, v, to_floats(sum) * load(x.weight_scales + column + v * LANES));
            }
        }
    }
    static_assert(PITCH == TILE * UNIT);
#endif
};

// 4 bits: panels [columns / PANEL][groups] of codes, [4 units][PANEL][4], the lower 4 bits of which are those of one unit
// and the upper ones of the next, and PANEL scales in bfloat16.
struct FourBits {
    using Codes = void;
    static constexpr int64_t ZERO = 8, TASK = 32, PANEL = panel_columns(TASK), CODES = PANEL * GROUP / 2;
    static constexpr int64_t VECTOR_BYTES = LANES * UNIT, STEP_BYTES = CODES + PANEL * sizeof(Bfloat16);
    // With 16 registers, more rows would be moved to memory and back.
    static constexpr int ROWS = REGISTER_BYTES == 32 ? 4 : BYTE_ROWS;
    static constexpr bool WIDENS = false;
    static int64_t groups(int64_t features) { return padded(features, GROUP) / GROUP; }
    static int64_t panel_bytes(int64_t features) { return groups(features) * STEP_BYTES; }

    template <int R, int VECTORS, class Take>
    static MANYLORA_INLINE void multiply(const Activations& x, Vectors weights, int64_t features, int64_t /*column*/,
                                         Ahead ahead, Take take) {
        constexpr int N = VECTORS * REGISTERS_OF_LANES;
        const int64_t scale_stride = PANEL == LANES ? weights.stride : LANES * sizeof(Bfloat16);
        Floats totals[R][VECTORS] = {};
        for (int64_t k = 0, group = 0; k < features; k += GROUP, group++, weights.first += STEP_BYTES) {
            ahead.fetch(group);
            Sums sums[R][N];
            multiply_group<R, N>(x, weights, k, group, sums);
            for (int v = 0; v < VECTORS; v++) {
                const uint8_t* scales = weights.first + CODES + v * scale_stride;
                const Floats scale = load(reinterpret_cast<const Bfloat16*>(scales));
                for (int r = 0; r < R; r++) totals[r][v] += to_floats(&sums[r][v * REGISTERS_OF_LANES]) * scale;
            }
        }
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < VECTORS; v++) take(r, v, totals[r][v]);
        }
    }

    // Products of a group's codes with those of R rows, from row's code k on.
    template <int R, int N>
    static MANYLORA_INLINE void multiply_group(const Activations& x, Vectors weights, int64_t k, int64_t group,
                                               Sums (&sums)[R][N]) {
#ifdef MANYLORA_BYTE_PRODUCTS
        for (int r = 0; r < R; r++) {
            for (int n = 0; n < N; n++) sums[r][n] = all_equal(x.starts[r * x.groups + group]);
        }
        const auto add = [&sums](int r, int n, Sums weights, Sums codes) {
            sums[r][n] = multiply_bytes<0>(sums[r][n], weights, codes);
        };
#else
        Shorts pairs[R][N] = {};
        const auto add = [&pairs](int r, int n, Sums weights, Sums codes) {
            pairs[r][n] += multiply_nibbles(weights, codes);
        };
#endif
#pragma GCC unroll(IS_WIDENED || REGISTER_BYTES == 32 ? 1 : 4)  // unrolled, it would keep more than fits into registers
        for (int64_t pair = 0; pair < GROUP / UNIT / 2; pair++) {
            Sums low[N], high[N];
            for (int n = 0; n < N; n++) {
                const uint8_t* vector = weights[n / REGISTERS_OF_LANES] + pair * PANEL * UNIT;
                const Sums both = load_bits<Sums>(vector + n % REGISTERS_OF_LANES * sizeof(Sums));
                low[n] = both & 0x0F0F0F0F;
                high[n] = both >> 4 & 0x0F0F0F0F;
            }
            for (int r = 0; r < R; r++) {
                const int8_t* codes = x.codes + r * x.pitch + k + pair * 2 * UNIT;
                const Sums one = unit_at(codes), next = unit_at(codes + UNIT);
                for (int n = 0; n < N; n++) {
                    add(r, n, low[n], one);
                    add(r, n, high[n], next);
                }
            }
        }
#ifndef MANYLORA_BYTE_PRODUCTS
        for (int r = 0; r < R; r++) {
            const Sums start = all_equal(x.starts[r * x.groups + group]);
            for (int n = 0; n < N; n++) sums[r][n] = start + multiply_pairs(pairs[r][n], Shorts{} + 1);
        }
#endif
    }
};

// y [inputs, columns], contiguous, = x [inputs, features] @ weights^T + bias. Scales and bias are padded to whole panels.
// An input is a row of codes; where it is FINE, it is two: the second has what the first leaves out.
template <class W, bool FINE, class T, class Y>
void linear(const T* x, int64_t x_stride, int64_t inputs, int64_t features, const uint8_t* panels, const float* scales,
            const float* bias, int64_t columns, Y* y, int8_t* codes) {
    constexpr int64_t PARTS = FINE ? 2 : 1;
    static_assert(BYTE_ROWS % PARTS == 0 && CHUNK_ROWS % PARTS == 0 && MIN_TILE_ROWS % PARTS == 0);  // computed together
    const int64_t rows = inputs * PARTS, pitch = padded(features, PITCH), groups = W::groups(features);
    const int64_t group_size = groups == 1 ? features : GROUP;
    auto* starts = reinterpret_cast<int32_t*>(codes + rows * pitch);
    auto* row_scales = reinterpret_cast<float*>(starts + rows * groups);
    auto* widened = reinterpret_cast<int16_t*>(row_scales + rows);
    const Activations all{codes, widened, pitch, starts, groups, scales};
#pragma omp parallel if (rows * features * columns >= MIN_PARALLEL)
    {
        [[maybe_unused]] const Registers<typename W::Codes> registers;
#pragma omp for
        for (int64_t input = 0; input < inputs; input++) {
            const auto take = [&](int64_t at, int64_t count) { return read(x + input * x_stride + at, count); };
            int64_t row = input * PARTS;
            quantise(take, features, pitch, codes + row * pitch, row_scales + row);
            if constexpr (FINE) {
                const int8_t* coarse = codes + row * pitch;
                const float scale = row_scales[row++];
                const auto rest = [&](int64_t at, int64_t count) { return take(at, count) - load_singles(coarse + at) * scale; };
                quantise(rest, features, pitch, codes + row * pitch, row_scales + row);
            }
            for (row = input * PARTS; row < (input + 1) * PARTS; row++) {
                for (int64_t g = 0; g < groups; g++) {
                    const int8_t *from = codes + row * pitch + g * group_size, *to = from + group_size;
                    starts[row * groups + g] = -W::ZERO * std::accumulate(from, to, int32_t{0});
                }
                if constexpr (W::WIDENS) widen_row(codes + row * pitch, pitch, widened + row * pitch);
            }
        }
        multiply_panels<W>(all, rows, features, panels, columns, [&](int64_t row, int64_t column, Floats sums) {
            Y* to = y + row / PARTS * columns + column;
            const Floats before = row % PARTS ? read<Floats>(to, columns - column) : load(bias + column);
            write(to, sums * row_scales[row] + before, columns - column);
        });
    }
}

}  // namespace
}  // namespace manylora

extern "C" int64_t panel_columns(int64_t task_columns) { return manylora::panel_columns(task_columns); }

#define MANYLORA_LINEAR(NAME, W, FINE, T, Y)                                                                               \
    extern "C" void NAME(const T* x, int64_t x_stride, int64_t rows, int64_t features, const uint8_t* panels,          \
                         const float* scales, const float* bias, int64_t columns, Y* y, int8_t* codes) {               \
        manylora::linear<manylora::W, FINE>(x, x_stride, rows, features, panels, scales, bias, columns, y, codes);             \
    }
MANYLORA_LINEAR(linear_int8_float32, EightBits, false, float, float)
MANYLORA_LINEAR(linear_int8_bfloat16, EightBits, false, manylora::Bfloat16, manylora::Bfloat16)
MANYLORA_LINEAR(linear_int4_float32, FourBits, false, float, float)
MANYLORA_LINEAR(linear_int4_bfloat16, FourBits, false, manylora::Bfloat16, manylora::Bfloat16)
MANYLORA_LINEAR(head_int8_float32, EightBits, true, float, float)
MANYLORA_LINEAR(head_int8_bfloat16, EightBits, true, manylora::Bfloat16, float)
