// SGMV: LoRA adapters of any rank applied to one batch, with weights read where they lie in the pages.
#include <algorithm>

#include "multiply.h"

namespace manylora {
namespace {

constexpr int64_t UNIT_BYTES = 256;     // offsets count in this many bytes, rows start at multiples of it
constexpr int64_t COLUMNS = 2 * PANEL;  // of B that one task reads
constexpr int64_t SHRINK_ROWS = 64;
constexpr int64_t SHRINK_FEATURES = 1024;  // 8 rows of this many features fit into the L1 cache
constexpr int64_t AHEAD = 8;            // units of B, or steps of A, that are on their way from memory
constexpr int64_t AHEAD_ROWS = 8;       // of y that are on their way
constexpr int64_t MAX_RANK = 256;
constexpr int64_t PACKED_FEATURES = 512;  // of A that are packed for tiles at a time
template <class T>
constexpr int64_t SHRINK_GROUPS = HAS_TILES<T> ? 2 : 1;  // row groups of a task
template <class T>
constexpr int64_t BRIDGE_UNIT = HAS_TILES<T> ? 32 : GROUP_ROWS;  // rank rows that one product takes

template <int64_t MULTIPLE>
int64_t up_to(int64_t size) {
    return (size + MULTIPLE - 1) / MULTIPLE * MULTIPLE;
}

struct Sites {
    const int32_t* offsets;  // [slots, layers, modules, 2, groups]
    const int32_t* ranks;    // [slots, layers, modules]
    const float* scalings;   // [slots, layers, modules]
    int64_t layers, modules, groups;
};

template <class T>
struct Call {
    const T* x;
    int64_t x_stride;
    T* y;
    int64_t y_stride;
    const char* arena;
    Sites sites;
    const int32_t *tile_slot, *tile_start, *tile_length;  // [capacity]
    int64_t capacity, layer, module, slices, features;
    const int64_t* widths;
    typename Packed<T>::Stored* bridge;  // [rows + 15, slices, bridge_width()]

    int64_t entry(int64_t tile, int64_t slice) const {
        return (int64_t{tile_slot[tile]} * sites.layers + layer) * sites.modules + module + slice;
    }
    int64_t rank(int64_t tile, int64_t slice) const {
        return tile_slot[tile] < 0 ? 0 : sites.ranks[entry(tile, slice)];
    }
    int64_t start(int64_t tile) const { return tile_start[tile]; }
    int64_t length(int64_t tile) const { return tile_length[tile]; }
    const T* group(int64_t tile, int64_t slice, int64_t part, int64_t index) const {
        const int64_t offset = sites.offsets[(entry(tile, slice) * 2 + part) * sites.groups + index];
        return reinterpret_cast<const T*>(arena + offset * UNIT_BYTES);
    }
    int64_t pitch(int64_t columns) const {
        constexpr int64_t unit = UNIT_BYTES / sizeof(T);
        return (columns + unit - 1) / unit * unit;
    }
    typename Packed<T>::Stored* bridge_row(int64_t row, int64_t slice) const {
        return bridge + (row * slices + slice) * bridge_width();
    }
    int64_t bridge_width() const { return up_to<BRIDGE_UNIT<T>>(sites.groups * GROUP_ROWS); }
};

#ifdef MANYLORA_TILES
// bridge = x @ A^T, 16 rank rows of one slice of one tile, from rank row `first`; zero behind the last.
inline void shrink_tiles(const Call<Bfloat16>& call, int64_t tile, int64_t slice, int64_t first) {
    using P = Packed<Bfloat16>;
    const int64_t rank = call.rank(tile, slice), end = call.start(tile) + call.length(tile);
    if (first >= up_to<BRIDGE_UNIT<Bfloat16>>(rank)) return;
    alignas(64) Words panel[PACKED_FEATURES / P::PER_UNIT];
    alignas(64) Bfloat16 padded[TILE * PACKED_FEATURES];
    const Bfloat16* weights[TILE];
    for (int64_t r = first; r < std::min(first + TILE, rank); r++) {
        weights[r - first] = call.group(tile, slice, 0, r / GROUP_ROWS) + r % GROUP_ROWS * call.pitch(call.features);
    }
    for (int64_t start = call.start(tile); start < end; start += SHRINK_ROWS) {
        const int64_t rows = std::min(SHRINK_ROWS, end - start), row_tiles = (rows + TILE - 1) / TILE;
        alignas(64) float sums[SHRINK_ROWS * TILE] = {};
        for (int64_t k = 0; k < call.features && first < rank; k += PACKED_FEATURES) {
            const int64_t features = std::min(PACKED_FEATURES, call.features - k);
            const int64_t padded_features = up_to<2 * TILE>(features), steps = padded_features / (2 * TILE);
            for (int64_t step = 0; step < steps; step++) {
                const int64_t at = step * 2 * TILE;
                Words square[TILE] = {};
                for (int r = 0; r < TILE; r++) {
                    if (r >= GROUP_ROWS && rank - first == GROUP_ROWS) continue;
                    __builtin_prefetch(weights[r] + k + at + AHEAD * 2 * TILE);
                    square[r] = P::row_units(weights[r] + k + at, features - at);
                }
                transpose(square);
                std::memcpy(&panel[step * TILE], square, sizeof(square));
            }
            const Bfloat16* x = call.x + start * call.x_stride + k;
            for_tiles(row_tiles, [&](int64_t t, auto n) {
                if ((t + n) * TILE <= rows && features == padded_features) {
                    multiply_tiles<n, true>(x + t * TILE * call.x_stride, call.x_stride * sizeof(*x), panel,
                                            sizeof(Words), steps, true, &sums[t * TILE * TILE]);
                    return;
                }
                for (int64_t one = t; one < t + n; one++) {
                    for (int64_t r = 0; r < std::min<int64_t>(TILE, rows - one * TILE); r++) {
                        Bfloat16* row = padded + r * PACKED_FEATURES;
                        std::memcpy(row, x + (one * TILE + r) * call.x_stride, features * sizeof(*row));
                        std::memset(row + features, 0, (padded_features - features) * sizeof(*row));
                    }
                    multiply_tiles<1, true>(padded, PACKED_FEATURES * sizeof(*padded), panel, sizeof(Words), steps,
                                            true, &sums[one * TILE * TILE]);
                }
            });
        }
        for (int64_t row = 0; row < rows; row++) {
            store(call.bridge_row(start + row, slice) + first, load(&sums[row * TILE]));
        }
    }
}
#endif

// bridge = x @ A^T, the rank rows of one task of one slice of one tile, from row group `index`.
template <class T>
void shrink(const Call<T>& call, int64_t tile, int64_t slice, int64_t index) {
#ifdef MANYLORA_TILES
    if constexpr (HAS_TILES<T>) return shrink_tiles(call, tile, slice, index * GROUP_ROWS);
#endif
    if (index * GROUP_ROWS >= call.rank(tile, slice)) return;
    const T* weights = call.group(tile, slice, 0, index);
    const int64_t pitch = call.pitch(call.features), end = call.start(tile) + call.length(tile);
    for (int64_t start = call.start(tile); start < end; start += SHRINK_ROWS) {
        const int64_t stop = std::min(start + SHRINK_ROWS, end);
        Floats sums[SHRINK_ROWS / 2] = {};
        for (int64_t k = 0; k < call.features; k += SHRINK_FEATURES) {
            const int64_t features = std::min(SHRINK_FEATURES, call.features - k);
            for (int64_t row = start; row < stop; row += 2) {
                const T* x = call.x + row * call.x_stride + k;
                sums[(row - start) / 2] += stop - row > 1
                    ? multiply_group<T, 2>(x, call.x_stride, weights + k, pitch, features)
                    : multiply_group<T, 1>(x, call.x_stride, weights + k, pitch, features);
            }
        }
        for (int64_t row = start; row < stop; row++) {
            float both[LANES];
            store(both, sums[(row - start) / 2]);
            auto* bridge = call.bridge_row(row, slice) + index * GROUP_ROWS;
            store_some(bridge, load_some(both + (row - start) % 2 * GROUP_ROWS, GROUP_ROWS), GROUP_ROWS);
        }
    }
}

// y += scaling * bridge @ B^T, at most COLUMNS columns of one slice of one tile.
template <class T>
void expand(const Call<T>& call, int64_t tile, int64_t slice, int64_t first, int64_t column) {
    using P = Packed<T>;
    const int64_t rank = call.rank(tile, slice), width = call.widths[slice], pitch = call.pitch(width);
    if (rank == 0) return;
    const int64_t units = rank / P::PER_UNIT, columns = std::min(COLUMNS, width - first);
    alignas(64) uint32_t panels[COLUMNS / PANEL][MAX_RANK / P::PER_UNIT][PANEL];
    const auto weights = [&](int64_t r) {
        return call.group(tile, slice, 1, r / GROUP_ROWS) + r % GROUP_ROWS * pitch + first;
    };
    const auto fetch = [columns](const T* row) {
        for (int64_t n = 0; n < columns; n += 64 / sizeof(T)) __builtin_prefetch(row + n);
    };
    const int64_t start = call.start(tile), length = call.length(tile);
    T* y = call.y + start * call.y_stride + column + first;
    for (int64_t r = 0; r < std::min(AHEAD * P::PER_UNIT, rank); r++) fetch(weights(r));
    for (int64_t row = 0; row < std::min(length, AHEAD_ROWS); row++) fetch(y + row * call.y_stride);
    for (int64_t unit = 0; unit < units; unit++) {
        const T* row = weights(unit * P::PER_UNIT);
        if (const int64_t later = (unit + AHEAD) * P::PER_UNIT; later < rank) {
            for (int64_t r = later; r < later + P::PER_UNIT; r++) fetch(weights(r));
        }
        for (int64_t n = 0; n < columns; n += LANES) {  // a row is followed by padding up to its pitch
            const Words both = P::interleave(row + n, row + (P::PER_UNIT - 1) * pitch + n);
            std::memcpy(&panels[n / PANEL][unit][n % PANEL], &both, sizeof(both));
        }
    }
    if constexpr (HAS_TILES<T>) {
        for (int64_t unit = units; unit % (BRIDGE_UNIT<T> / P::PER_UNIT) != 0; unit++) {
            for (auto& panel : panels) std::memset(panel[unit], 0, sizeof(panel[unit]));
        }
    }
    const float scaling = call.sites.scalings[call.entry(tile, slice)];
    const auto* bridge = call.bridge_row(start, slice);
    const int64_t bridge_stride = call.bridge_row(start + 1, slice) - bridge;
    for (int64_t n = 0; n < columns; n += PANEL) {
        multiply_panel<T>(length, bridge, bridge_stride, units, panels[n / PANEL][0], columns - n,
                          [&](int64_t row, int64_t at, Singles delta) {
                              update(y + row * call.y_stride + n + at, columns - n - at,
                                     [&](Singles before) { return before + scaling * delta; });
                          });
    }
}

template <class T>
void sgmv(const Call<T>& call) {
    int64_t tiles = call.capacity;
    while (tiles > 0 && call.tile_slot[tiles - 1] < 0) tiles--;
    const int64_t parts = call.bridge_width() / (SHRINK_GROUPS<T> * GROUP_ROWS), shrinks = call.slices * parts;
    int64_t starts[4] = {}, work = 0;  // of each slice among the blocks of columns
    int64_t columns[4] = {};
    for (int64_t slice = 0; slice < call.slices; slice++) {
        starts[slice + 1] = starts[slice] + (call.widths[slice] + COLUMNS - 1) / COLUMNS;
        columns[slice + 1] = columns[slice] + call.widths[slice];
        for (int64_t tile = 0; tile < tiles; tile++) {
            work += call.rank(tile, slice) * call.length(tile) * (call.features + call.widths[slice]);
        }
    }
    if (work == 0) return;
    const int64_t blocks = starts[call.slices];
#pragma omp parallel if (work >= MIN_PARALLEL)
    {
        Registers<T> registers;
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tiles * shrinks; task++) {
            const int64_t part = task % shrinks;
            shrink(call, task / shrinks, part / parts, part % parts * SHRINK_GROUPS<T>);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tiles * blocks; task++) {
            const int64_t block = task % blocks;
            const int64_t slice = (block >= starts[1]) + (block >= starts[2] && call.slices > 2);
            expand(call, task / blocks, slice, (block - starts[slice]) * COLUMNS, columns[slice]);
        }
    }
}

}  // namespace
}  // namespace manylora

#define MANYLORA_SGMV(NAME, T)                                                                                             \
    extern "C" void NAME(const T* x, int64_t x_stride, T* y, int64_t y_stride, const char* arena,                      \
                         const int32_t* offsets, const int32_t* ranks, const float* scalings, int64_t layers,          \
                         int64_t modules, int64_t groups, const int32_t* slot, const int32_t* start,                   \
                         const int32_t* length, int64_t capacity, int64_t layer, int64_t module, int64_t slices,       \
                         int64_t features, const int64_t* widths, manylora::Packed<T>::Stored* bridge) {                   \
        manylora::sgmv<T>({x, x_stride, y, y_stride, arena, {offsets, ranks, scalings, layers, modules, groups}, slot,     \
                       start, length, capacity, layer, module, slices, features, widths, bridge});                     \
    }
MANYLORA_SGMV(sgmv_float32, float)
MANYLORA_SGMV(sgmv_bfloat16, manylora::Bfloat16)
