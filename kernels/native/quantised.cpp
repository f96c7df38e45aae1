// Linear layers with weights in 8 or 4 bits: rows of activations become codes of 8 bits, products are sums of integers.
//
// Integer sums are exact, and the few float operations on them are the same for every number of rows, so a row's result
// does not depend on the other rows. Weights are unsigned codes around ZERO: dot(x, weight - ZERO) is computed as
// dot(x, weight) - ZERO * sum(x), whose second part is where the sums of a row start.
#include <algorithm>
#include <limits>
#include <numeric>

#include "rows.h"
#include "tiles.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace manylora {
namespace {

constexpr int64_t UNIT = 4;          // codes of a row that one multiply-add takes
constexpr int64_t GROUP = 32;        // codes of a row that share a scale where weights have 4 bits
constexpr int64_t PITCH = 64;        // rows of codes are padded to a multiple of so many
constexpr int64_t CHUNK_ROWS = 96;   // of one task, best a multiple of ROWS
constexpr int64_t MIN_TILE_ROWS = 4; // fewer rows are not computed on tiles
constexpr int64_t AHEAD = 1024;      // bytes of a panel that are on their way from memory
constexpr int64_t LINE = 64;         // bytes of a cache line
constexpr float SMALLEST = 1e-30f;   // magnitude of a row that is not taken for zeros

typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));

// Lane i: sums + the products of the 4 unsigned bytes of `weights` with the 4 signed ones of `x`, from -127 to 127.
MANYLORA_INLINE Ints multiply_bytes(Ints sums, Words weights, Words x) {
#ifdef __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)x);
#else
    const Shorts even = (Shorts)(weights & 0x00FF00FF), odd = (Shorts)(weights >> 8 & 0x00FF00FF);
    const Shorts x_even = (Shorts)(x << 8) >> 8, x_odd = (Shorts)x >> 8;
#ifdef __AVX2__
    const auto add = [&sums](Shorts a, Shorts b) {
        __m256i left[2], right[2], products[2];
        std::memcpy(left, &a, sizeof(left));
        std::memcpy(right, &b, sizeof(right));
        for (int i = 0; i < 2; i++) products[i] = _mm256_madd_epi16(left[i], right[i]);
        sums += load_bits<Ints>(products);
    };
    add(even, x_even);
    add(odd, x_odd);
#else
    const Ints pairs[] = {(Ints)(even * x_even), (Ints)(odd * x_odd)};  // a product, at most 255 * 127, has 16 bits
    for (const Ints pair : pairs) sums += (pair << 16 >> 16) + (pair >> 16);
#endif
    return sums;
#endif
}

constexpr int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

MANYLORA_INLINE Floats to_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// Stores 16 values, rounded to the nearest integer, half to even.
MANYLORA_INLINE void store_codes(int8_t* to, Floats values) {
#ifdef __AVX512F__
    const __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)values));
    std::memcpy(to, &codes, sizeof(codes));
#else
    for (int i = 0; i < LANES; i++) to[i] = static_cast<int8_t>(std::nearbyint(values[i]));
#endif
}

// What `take(at, count)` gives is nearly scale * codes; codes after the last are zero. A row that is not finite gets the
// scale NaN.
template <class Take>
void quantise(Take take, int64_t size, int64_t pitch, int8_t* codes, float* scale) {
    Ints largest = {};  // bits of magnitudes are in the order of the magnitudes, infinity and NaN last
    for_vectors(size, [&](int64_t at, int64_t count) {
        const Ints bits = (Ints)take(at, count) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    });
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = std::max(bits, largest[i]);
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
    std::memset(codes + padded(size, LANES), 0, pitch - padded(size, LANES));
}

// Rows of activations as codes, [rows, pitch], with their sums per group as the weights want them, and their scales.
struct Activations {
    const int8_t* codes;
    int64_t pitch;
    const int32_t* starts;  // [rows, groups]
    int64_t groups;
    const float* scales;    // [rows]

    Activations from(int64_t row) const {
        return {codes + row * pitch, pitch, starts + row * groups, groups, scales + row};
    }
};

// What is fetched from memory during a product: so many lines in each of its steps, from there on.
struct Ahead {
    const uint8_t* from;
    int64_t lines;

    MANYLORA_INLINE void fetch(int64_t step) const {
        for (int64_t line = 0; line < lines; line++) __builtin_prefetch(from + (step * lines + line) * LINE, 0, 2);
    }
};

// 8 bits: panels [columns / 64][units][64][4], units padded to PITCH codes; scales [columns].
struct EightBits {
    using Codes = int8_t;  // of the rows, where they are multiplied on tiles
    static constexpr int64_t ZERO = 128, PANEL = 64, STEP_BYTES = PANEL * UNIT;
    static constexpr int V = VECTORS;
    static int64_t groups(int64_t /*features*/) { return 1; }
    static int64_t panel_bytes(int64_t features) { return padded(features, PITCH) * PANEL; }

    // `finish(row, vector, sums)` takes the products of R rows with V vectors of columns, without scales of the rows.
    template <int R, class Finish>
    static MANYLORA_INLINE void multiply(const Activations& x, const uint8_t* panel, int64_t features, int64_t first,
                                     const float* scales, Ahead ahead, Finish finish) {
        Ints sums[R][V];
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < V; v++) sums[r][v] = Ints{} + x.starts[r];
        }
        const uint8_t* weights = panel + first * UNIT;
        for (int64_t k = 0; k < features; k += UNIT, weights += STEP_BYTES) {
            ahead.fetch(k / UNIT);
            Words columns[V];
            for (int v = 0; v < V; v++) columns[v] = load_bits<Words>(weights + v * LANES * UNIT);
            for (int r = 0; r < R; r++) {
                const Words factor = broadcast(x.codes + r * x.pitch + k);
                for (int v = 0; v < V; v++) sums[r][v] = multiply_bytes(sums[r][v], columns[v], factor);
            }
        }
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < V; v++) finish(r, v, to_floats(sums[r][v]) * load(scales + first + v * LANES));
        }
    }

#ifdef MANYLORA_TILES
    // The same on tiles, for up to 16 rows and a whole panel: with exact sums a row may be computed here or there. It
    // reads 16 rows of codes.
    template <class Finish>
    static void multiply_on_tiles(int64_t rows, const Activations& x, const uint8_t* panel, int64_t features,
                                  const float* scales, Finish finish) {
        alignas(64) int32_t sums[V * TILE * TILE];
        multiply_tiles<V, false>(x.codes, x.pitch, panel, PANEL * UNIT, padded(features, PITCH) / PITCH, false, sums);
        for (int64_t r = 0; r < rows; r++) {
            for (int v = 0; v < V; v++) {
                const Ints sum = load_bits<Ints>(&sums[(v * TILE + r) * TILE]) + x.starts[r];
                finish(r, v, to_floats(sum) * load(scales + v * LANES));
            }
        }
    }
    static_assert(V * TILE == PANEL && PITCH == TILE * UNIT);
#endif
};

// 4 bits: panels [columns / 32][groups] of 512 bytes of codes, [4 units][32][4], the lower 4 bits of which are those of
// one unit and the upper ones of the next, and 32 scales in bfloat16.
struct FourBits {
    using Codes = void;
    static constexpr int64_t ZERO = 8, PANEL = 32;
    static constexpr int V = VECTORS / 2;
    static constexpr int64_t CODES = PANEL * GROUP / 2, STEP_BYTES = CODES + PANEL * sizeof(Bfloat16);
    static int64_t groups(int64_t features) { return padded(features, GROUP) / GROUP; }
    static int64_t panel_bytes(int64_t features) { return groups(features) * STEP_BYTES; }

    template <int R, class Finish>
    static MANYLORA_INLINE void multiply(const Activations& x, const uint8_t* panel, int64_t features, int64_t first,
                                     const float* /*scales*/, Ahead ahead, Finish finish) {
        Floats totals[R][V] = {};
        for (int64_t k = 0, group = 0; k < features; k += GROUP, group++, panel += STEP_BYTES) {
            ahead.fetch(group);
            Ints sums[R][V];
            for (int r = 0; r < R; r++) {
                for (int v = 0; v < V; v++) sums[r][v] = Ints{} + x.starts[r * x.groups + group];
            }
            for (int64_t pair = 0; pair < GROUP / UNIT / 2; pair++) {
                Words low[V], high[V];
                for (int v = 0; v < V; v++) {
                    const Words both = load_bits<Words>(panel + pair * PANEL * UNIT + (first + v * LANES) * UNIT);
                    low[v] = both & 0x0F0F0F0F;
                    high[v] = both >> 4 & 0x0F0F0F0F;
                }
                for (int r = 0; r < R; r++) {
                    const int8_t* codes = x.codes + r * x.pitch + k + pair * 2 * UNIT;
                    const Words one = broadcast(codes), next = broadcast(codes + UNIT);
                    for (int v = 0; v < V; v++) {
                        sums[r][v] = multiply_bytes(multiply_bytes(sums[r][v], low[v], one), high[v], next);
                    }
                }
            }
            const auto* scales = reinterpret_cast<const Bfloat16*>(panel + CODES) + first;
            for (int v = 0; v < V; v++) {
                const Floats scale = load(scales + v * LANES);
                for (int r = 0; r < R; r++) totals[r][v] += to_floats(sums[r][v]) * scale;
            }
        }
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < V; v++) finish(r, v, totals[r][v]);
        }
    }
};

// y [inputs, columns], contiguous, = x [inputs, features] @ weights^T + bias. Scales and bias are padded to whole panels.
// An input is a row of codes; where it is FINE, it is two: the second has what the first leaves out.
template <class W, bool FINE, class T, class Y>
void linear(const T* x, int64_t x_stride, int64_t inputs, int64_t features, const uint8_t* panels, const float* scales,
            const float* bias, int64_t columns, Y* y, int8_t* codes) {
    constexpr int64_t PARTS = FINE ? 2 : 1;
    static_assert(ROWS % PARTS == 0 && CHUNK_ROWS % PARTS == 0 && MIN_TILE_ROWS % PARTS == 0);  // computed together
    const int64_t rows = inputs * PARTS, pitch = padded(features, PITCH), groups = W::groups(features);
    const int64_t group_size = groups == 1 ? features : GROUP;
    auto* starts = reinterpret_cast<int32_t*>(codes + rows * pitch);
    auto* row_scales = reinterpret_cast<float*>(starts + rows * groups);
    const Activations all{codes, pitch, starts, groups, row_scales};
    const int64_t chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, tasks = (columns + W::PANEL - 1) / W::PANEL * chunks;
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
                const auto rest = [&](int64_t at, int64_t count) { return take(at, count) - load(coarse + at) * scale; };
                quantise(rest, features, pitch, codes + row * pitch, row_scales + row);
            }
            for (row = input * PARTS; row < (input + 1) * PARTS; row++) {
                for (int64_t g = 0; g < groups; g++) {
                    const int8_t *from = codes + row * pitch + g * group_size, *to = from + group_size;
                    starts[row * groups + g] = -W::ZERO * std::accumulate(from, to, int32_t{0});
                }
            }
        }
        const auto run = [&](int64_t task) {
            const int64_t column = task / chunks * W::PANEL, panel_bytes = W::panel_bytes(features);
            const uint8_t* panel = panels + task / chunks * panel_bytes;
            // What takes products of rows from `row` on and vectors of columns from `first` of the panel on.
            const auto finish = [&](int64_t row, int64_t first) {
                return [&, row, first](int64_t r, int64_t v, Floats sums) {
                    const int64_t at = column + first + v * LANES;
                    if (at >= columns) return;
                    Y* to = y + (row + r) / PARTS * columns + at;
                    const Floats before = (row + r) % PARTS ? read(to, columns - at) : load(bias + at);
                    write(to, sums * row_scales[row + r] + before, columns - at);
                };
            };
            int64_t start = task % chunks * CHUNK_ROWS;
            const int64_t end = std::min(rows, start + CHUNK_ROWS);
#ifdef MANYLORA_TILES
            if constexpr (HAS_TILES<typename W::Codes>) {
                while (end - start >= MIN_TILE_ROWS) {
                    const int64_t count = std::min<int64_t>(TILE, end - start);
                    W::multiply_on_tiles(count, all.from(start), panel, features, scales + column, finish(start, 0));
                    start += count;
                }
            }
#endif
            // The first block of rows waits for the panel, which is cached for the others: they fetch the next one.
            constexpr int64_t LINES = W::STEP_BYTES / LINE;
            const int64_t others = (end - start - 1) / ROWS, lines = others > 0 ? (LINES + others - 1) / others : 0;
            for (int64_t first = 0; first < W::PANEL && column + first < columns; first += W::V * LANES) {
                for_blocks(end - start, [&](int64_t block, auto constant) {
                    const int64_t row = start + block;
                    const int64_t fetched = (block / ROWS - 1) * lines;
                    const Ahead next{panel + panel_bytes * (LINES + fetched) / LINES, fetched < LINES ? lines : 0};
                    const Ahead ahead = block == 0 ? Ahead{panel + AHEAD, LINES} : next;
                    W::template multiply<decltype(constant)::value>(all.from(row), panel, features, first,
                                                                    scales + column, ahead, finish(row, first));
                });
            }
        };
        // A thread takes neighbours, so that the next panel is its own; many rows are divided as threads get ready.
        if (chunks == 1) {
#pragma omp for
            for (int64_t task = 0; task < tasks; task++) run(task);
        } else {
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < tasks; task++) run(task);
        }
    }
}

}  // namespace
}  // namespace manylora

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
