// The two small matrix products that everything here is made of.
#pragma once

#include <algorithm>

#include "tiles.h"

namespace manylora {

// Whether rows of T are multiplied on tiles.
#ifdef MANYLORA_TILES
template <class T>
constexpr bool HAS_TILES = std::is_same_v<T, Bfloat16> || std::is_same_v<T, int8_t>;
#else
template <class T>
constexpr bool HAS_TILES = false;
#endif

// What a thread holds while it multiplies.
class Tiles;
struct Nothing {};
template <class T>
using Registers = std::conditional_t<HAS_TILES<T>, Tiles, Nothing>;

constexpr int ROWS = 6;  // rows of a product that are kept in registers
constexpr int VECTORS = REGISTER_BYTES == 64 ? 4 : 1;  // and vectors of columns
constexpr int PANEL = 64;   // columns of a panel
constexpr int64_t MIN_PARALLEL = 1 << 14;  // elements or multiply-adds worth a second thread
static_assert(PANEL % (VECTORS * LANES) == 0);

// Calls body(row, R) for blocks of R rows, at most ROWS, R an integral constant.
template <int ROWS, class Body>
MANYLORA_INLINE void for_blocks(int64_t rows, Body body) {
    int64_t row = 0;
    // Products of two rows are too few to fill the time that one takes: 8 rows are twice 4 rather than 6 and 2.
    for (; rows - row >= ROWS && !(ROWS == 6 && rows - row == 8); row += ROWS) body(row, std::integral_constant<int, ROWS>{});
    if constexpr (ROWS > 4) {
        for (; rows - row >= 4; row += 4) body(row, std::integral_constant<int, 4>{});
    }
    if constexpr (ROWS > 2) {
        if (rows - row >= 2) body(row, std::integral_constant<int, 2>{}), row += 2;
    }
    if (rows - row >= 1) body(row, std::integral_constant<int, 1>{});
}

// Some columns of a @ panel for R rows; `finish(row, column, values)` takes the result, a register at a time.
template <class T, int R, int VECTORS, class Finish>
MANYLORA_INLINE void multiply_block(const typename Packed<T>::Stored* a, int64_t a_stride, int64_t units,
                                const uint32_t* panel, Finish finish) {
    using P = Packed<T>;
    constexpr int N = VECTORS * REGISTERS_OF_LANES;
    Singles sums[R][N] = {};
    for (int64_t u = 0; u < units; u++) {
        Sums columns[N];
        for (int n = 0; n < N; n++) columns[n] = load_bits<Sums>(panel + u * PANEL + n * SINGLES);
        for (int r = 0; r < R; r++) {
            const Sums factor = unit_at(a + r * a_stride + u * P::PER_UNIT);
            for (int n = 0; n < N; n++) sums[r][n] = P::multiply_add(sums[r][n], factor, columns[n]);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int n = 0; n < N; n++) finish(r, n * SINGLES, sums[r][n]);
    }
}

#ifdef MANYLORA_TILES
// multiply_panel on tiles.
template <class Finish>
inline void multiply_panel_tiles(int64_t rows, const Bfloat16* a, int64_t a_stride, int64_t units,
                                 const uint32_t* panel, int64_t columns, Finish finish) {
    const int64_t steps = (units + TILE - 1) / TILE, tiles = (std::min<int64_t>(columns, PANEL) + TILE - 1) / TILE;
    alignas(64) float sums[PANEL * TILE];
    for (int64_t row = 0; row < rows; row += TILE) {
        const int64_t count = std::min<int64_t>(TILE, rows - row);
        for_tiles(tiles, [&](int64_t first, auto n) {
            multiply_tiles<n, false>(a + row * a_stride, a_stride * sizeof(*a), panel + first * TILE,
                                     PANEL * sizeof(*panel), steps, false, sums);
            for (int64_t r = 0; r < count; r++) {
                for (int64_t t = 0; t < n; t++) {
                    finish(row + r, (first + t) * TILE, load(&sums[(t * TILE + r) * TILE]));
                }
            }
        });
    }
}
#endif

// a [rows, units] @ panel [units, PANEL]: at least the first `columns`, of which there may be more than a panel has.
// Strides are in elements. A row's result does not depend on the other rows. The thread holds `Registers<T>`. Where there
// are tiles, rows and units of `a` and units of the panel are read up to multiples of 16: further rows may hold anything,
// further units are zero.
template <class T, class Finish>
inline void multiply_panel(int64_t rows, const typename Packed<T>::Stored* a, int64_t a_stride, int64_t units,
                           const uint32_t* panel, int64_t columns, Finish finish) {
#ifdef MANYLORA_TILES
    if constexpr (HAS_TILES<T>) return multiply_panel_tiles(rows, a, a_stride, units, panel, columns, finish);
#endif
    for (int64_t column = 0; column < PANEL && column < columns; column += VECTORS * LANES) {
        for_blocks<ROWS>(rows, [&](int64_t row, auto constant) {
            constexpr int R = decltype(constant)::value;
            const auto end = [&](int64_t r, int64_t c, Singles values) { finish(row + r, column + c, values); };
            if (VECTORS > 2 && columns - column <= 2 * LANES) {
                multiply_block<T, R, 2>(a + row * a_stride, a_stride, units, panel + column, end);
            } else {
                multiply_block<T, R, VECTORS>(a + row * a_stride, a_stride, units, panel + column, end);
            }
        });
    }
}

constexpr int GROUP_ROWS = 8;  // rank rows of a row group

// Lane r * 8 + g is x row r times weight row g, for R rows of x, 1 or 2, and the 8 rows of a row group.
template <class T, int R>
MANYLORA_INLINE Floats multiply_group(const T* x, int64_t x_stride, const T* weights, int64_t pitch, int64_t features) {
    using P = Packed<T>;
    constexpr int STEP = P::PER_UNIT * SINGLES;
    constexpr int AT_ONCE = REGISTER_BYTES == 64 ? GROUP_ROWS : GROUP_ROWS / 2;  // weight rows whose sums fit into registers
    Singles sums[R * GROUP_ROWS] = {};
    for (int first = 0; first < GROUP_ROWS; first += AT_ONCE) {
        Singles some[R][AT_ONCE] = {};
        for (int64_t k = 0; k < features; k += STEP) {
            Sums rows[R];
            for (int r = 0; r < R; r++) rows[r] = P::register_units(x + r * x_stride + k, features - k);
            for (int g = 0; g < AT_ONCE; g++) {
                const Sums weight = P::register_units(weights + (first + g) * pitch + k, features - k);
                for (int r = 0; r < R; r++) some[r][g] = P::multiply_add(some[r][g], rows[r], weight);
            }
        }
        for (int r = 0; r < R; r++) {
            for (int g = 0; g < AT_ONCE; g++) sums[r * GROUP_ROWS + first + g] = some[r][g];
        }
    }
    return sums_of_registers<R * GROUP_ROWS>(sums);
}

}  // namespace manylora
