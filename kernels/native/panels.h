// How a linear layer multiplies rows with weights in panels of columns: the division among threads and registers, and
// what is fetched ahead.
#pragma once

#include <algorithm>

#include "multiply.h"

namespace manylora {

constexpr int64_t CHUNK_ROWS = 96;   // of one task, best a multiple of the rows of a block
constexpr int64_t MIN_TILE_ROWS = 4; // fewer rows are not computed on tiles
constexpr int64_t AHEAD_BYTES = 2048;  // of a panel that are on their way from memory
constexpr int64_t LINE = 64;         // bytes of a cache line

// Columns of a panel. Where registers are small, many rows take one vector of columns at a time, which must lie together:
// then the next one comes from memory meanwhile.
constexpr int64_t panel_columns(int64_t task_columns) { return REGISTER_BYTES == 64 ? task_columns : LANES; }

constexpr int64_t padded(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Weights of vectors of columns: those of the first, and the bytes to the next.
struct Vectors {
    const uint8_t* first;
    int64_t stride;

    MANYLORA_INLINE const uint8_t* operator[](int64_t vector) const { return first + vector * stride; }
};

// What is fetched from memory in each step of a product: a number of lines of a number of streams. From the step `turn` on
// it is what lies `jump` bytes further.
struct Ahead {
    const uint8_t* from;
    int64_t step_bytes, lines, streams, stride, turn, jump;

    MANYLORA_INLINE void fetch(int64_t step) const {
        const uint8_t* at = from + step * step_bytes + (step >= turn ? jump : 0);
        for (int64_t stream = 0; stream < streams; stream++) {
            for (int64_t line = 0; line < lines; line++) __builtin_prefetch(at + stream * stride + line * LINE, 0, 2);
        }
    }
};

// Multiplies rows with all panels of a layer. All threads call it together, when the rows are ready.
//
// W is the format of the weights: columns of a TASK and of a PANEL, VECTOR_BYTES of 16 columns and STEP_BYTES of a panel
// that a step takes, the ROWS of a block, and multiply<R, VECTORS>(rows, weights, features, column, ahead, take), the
// product of R rows with VECTORS vectors of columns from `column` of the layer on. `take(r, vector, sums)` gets it.
// `write(row, column, sums)` gets vectors of columns of the layer, of which the last may be there in part.
template <class W, class Rows, class Write>
void multiply_panels(const Rows& all, int64_t rows, int64_t features, const uint8_t* panels, int64_t columns,
                     Write write) {
    constexpr int64_t ALL = W::TASK / LANES, LINES = (W::STEP_BYTES + LINE - 1) / LINE;
    const int64_t chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, tasks = (columns + W::TASK - 1) / W::TASK * chunks;
    const int64_t panel_bytes = W::panel_bytes(features);
    const int64_t stride = W::PANEL == LANES ? panel_bytes : W::VECTOR_BYTES;
    const auto run = [&](int64_t task) {
        const int64_t first = task / chunks * W::TASK;
        int64_t start = task % chunks * CHUNK_ROWS;
        const int64_t end = std::min(rows, start + CHUNK_ROWS);
        // What takes products of rows from `row` on and vectors of columns from `column` on.
        const auto take = [&](int64_t row, int64_t column) {
            return [&, row, column](int64_t r, int64_t v, Floats sums) {
                if (column + v * LANES < columns) write(row + r, column + v * LANES, sums);
            };
        };
#ifdef MANYLORA_TILES
        if constexpr (HAS_TILES<typename W::Codes>) {
            while (end - start >= MIN_TILE_ROWS) {
                const int64_t count = std::min<int64_t>(TILE, end - start);
                W::multiply_on_tiles(count, all.from(start), panels + first / W::PANEL * panel_bytes, features, first,
                                     take(start, first));
                start += count;
            }
        }
#endif
        // The first block of rows waits for the panels, which are cached for the others: they fetch the next one.
        const int64_t others = (end - start - 1) / W::ROWS, lines = others > 0 ? (LINES + others - 1) / others : 0;
        const auto multiply = [&](int64_t block, int64_t column, auto count, auto vectors) {
            const uint8_t* panel = panels + column / W::PANEL * panel_bytes;
            const int64_t row = start + block, fetched = (block / W::ROWS - 1) * lines;
            // The end of its streams is followed by the beginning of the next ones.
            const int64_t streams = W::PANEL == LANES ? vectors : 1, turn = (panel_bytes - AHEAD_BYTES) / W::STEP_BYTES;
            const Ahead own{panel + AHEAD_BYTES, W::STEP_BYTES, LINES, streams, stride, turn, (streams - 1) * stride};
            const Ahead next{panel + panel_bytes * (LINES + fetched) / LINES, lines * LINE,
                             fetched < LINES ? lines : 0, 1, 0, features, 0};
            W::template multiply<count, vectors>(all.from(row), Vectors{panel, stride}, features, column,
                                                 block == 0 ? own : next, take(row, column));
        };
        // With 16 registers one row takes all columns at a time, two rows half of them, and many rows few.
        constexpr std::integral_constant<int, ALL> vectors;
        constexpr std::integral_constant<int, REGISTER_BYTES == 64 ? ALL : 1> few;
        if (end - start == 1) {
            multiply(0, first, std::integral_constant<int, 1>{}, vectors);
        } else if (end - start == 2 && REGISTER_BYTES < 64) {
            for (int64_t column = first; column < first + W::TASK && column < columns; column += W::TASK / 2) {
                multiply(0, column, std::integral_constant<int, 2>{}, std::integral_constant<int, ALL / 2>{});
            }
        } else {
            for (int64_t column = first; column < first + W::TASK && column < columns; column += few * LANES) {
                for_blocks<W::ROWS>(end - start, [&](int64_t block, auto count) { multiply(block, column, count, few); });
            }
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

}  // namespace manylora
