// Linear layers with weights in bfloat16, which become floats in registers: for CPUs that multiply no bfloat16.
//
// Products and sums are float32. A row's sums are in the order of its features, whichever rows are beside it.
#include "panels.h"
#include "rows.h"

namespace manylora {
namespace {

constexpr int64_t PAIR = 2;  // features of a unit

// Activations as floats, [rows, pitch].
struct FloatRows {
    const float* data;
    int64_t pitch;

    FloatRows from(int64_t row) const { return {data + row * pitch, pitch}; }
};

// Panels [columns / PANEL][features / 2][PANEL][2].
struct SixteenBits {
    using Codes = void;
    static constexpr int64_t TASK = 64, PANEL = panel_columns(TASK);
    static constexpr int64_t VECTOR_BYTES = LANES * PAIR * sizeof(Bfloat16), STEP_BYTES = PANEL / LANES * VECTOR_BYTES;
    static constexpr int ROWS = 6;
    static int64_t panel_bytes(int64_t features) { return padded(features, PAIR) / PAIR * STEP_BYTES; }

    template <int R, int VECTORS, class Take>
    static MANYLORA_INLINE void multiply(const FloatRows& x, Vectors weights, int64_t features, int64_t /*column*/,
                                         Ahead ahead, Take take) {
        constexpr int N = VECTORS * REGISTERS_OF_LANES;
        Singles sums[R][N] = {};
        for (int64_t k = 0; k < features; k += PAIR, weights.first += STEP_BYTES) {
            ahead.fetch(k / PAIR);
            // One feature after the other, so that few registers hold weights.
#pragma GCC unroll 2
            for (int feature = 0; feature < PAIR; feature++) {
                Singles columns[N];
                for (int n = 0; n < N; n++) {
                    const uint8_t* vector = weights[n / REGISTERS_OF_LANES];
                    const Sums pairs = load_bits<Sums>(vector + n % REGISTERS_OF_LANES * sizeof(Sums));
                    columns[n] = (Singles)(feature ? pairs & int32_t(0xFFFF0000) : pairs << 16);
                }
                for (int r = 0; r < R; r++) {
                    const float factor = x.data[r * x.pitch + k + feature];
                    for (int n = 0; n < N; n++) sums[r][n] += columns[n] * factor;
                }
            }
        }
        for (int r = 0; r < R; r++) {
            for (int v = 0; v < VECTORS; v++) take(r, v, joined<Floats>(&sums[r][v * REGISTERS_OF_LANES]));
        }
    }
};

// y [rows, columns], contiguous, = x [rows, features] @ weights^T + bias, which is padded to whole panels. `floats` has
// room for the rows as floats, each padded to 16.
void linear(const Bfloat16* x, int64_t x_stride, int64_t rows, int64_t features, const uint8_t* panels,
            const float* bias, int64_t columns, Bfloat16* y, float* floats) {
    const int64_t pitch = padded(features, LANES);
#pragma omp parallel if (rows * features * columns >= MIN_PARALLEL)
    {
#pragma omp for
        for (int64_t row = 0; row < rows; row++) {
            for_vectors(features, [&](int64_t at, int64_t count) {
                store(floats + row * pitch + at, read(x + row * x_stride + at, count));
            });
        }
        multiply_panels<SixteenBits>(FloatRows{floats, pitch}, rows, features, panels, columns,
                                     [&](int64_t row, int64_t column, Floats sums) {
                                         write(y + row * columns + column, sums + load(bias + column), columns - column);
                                     });
    }
}

}  // namespace
}  // namespace manylora

extern "C" void linear_bfloat16(const manylora::Bfloat16* x, int64_t x_stride, int64_t rows, int64_t features,
                                const uint8_t* panels, const float* bias, int64_t columns, manylora::Bfloat16* y,
                                float* floats) {
    manylora::linear(x, x_stride, rows, features, panels, bias, columns, y, floats);
}
