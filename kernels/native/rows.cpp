// Operations that pass over rows once: norms, and the gate of the feed-forward.
#include "rows.h"

namespace manylora {
namespace {

// x [rows, heads, size], any strides of rows and heads; out contiguous.
template <class T>
void rms_norm(const T* x, int64_t rows, int64_t row_stride, int64_t heads, int64_t head_stride, int64_t size,
              const T* weight, float eps, T* out) {
#pragma omp parallel for if (rows * heads * size >= MIN_PARALLEL)
    for (int64_t i = 0; i < rows * heads; i++) {
        normalise(x + i / heads * row_stride + i % heads * head_stride, weight, out + i * size, size, eps);
    }
}

// All [rows, size], contiguous.
template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, int64_t rows, int64_t size, T* out,
                  T* new_residual) {
#pragma omp parallel for if (rows * size >= MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t start = row * size;
        for_vectors(size, [&](int64_t at, int64_t count) {
            write(new_residual + start + at, read(x + start + at, count) + read(residual + start + at, count), count);
        });
        normalise(new_residual + start, weight, out + start, size, eps);
    }
}

// out[t] = silu(gate_up[t, :size]) * gate_up[t, size:].
template <class T>
void silu_and_mul(const T* gate_up, int64_t rows, int64_t size, T* out) {
#pragma omp parallel for if (rows * size >= MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) {
        const T *gates = gate_up + row * 2 * size, *ups = gates + size;
        for_vectors(size, [&](int64_t at, int64_t count) {
            const Singles gate = read(gates + at, count);
            const Singles shrunk = exponential(gate < 0.0f ? gate : -gate);
            const Singles sigmoid = (gate < 0.0f ? shrunk : Singles{} + 1.0f) / (1.0f + shrunk);
            write(out + row * size + at, gate * sigmoid * read(ups + at, count), count);
        });
    }
}

}  // namespace
}  // namespace manylora

#define MANYLORA_ROWS(DTYPE, T)                                                                                            \
    extern "C" void rms_norm_##DTYPE(const T* x, int64_t rows, int64_t row_stride, int64_t heads, int64_t head_stride, \
                                     int64_t size, const T* weight, float eps, T* out) {                               \
        manylora::rms_norm(x, rows, row_stride, heads, head_stride, size, weight, eps, out);                               \
    }                                                                                                                  \
    extern "C" void add_rms_norm_##DTYPE(const T* x, const T* residual, const T* weight, float eps, int64_t rows,      \
                                         int64_t size, T* out, T* new_residual) {                                      \
        manylora::add_rms_norm(x, residual, weight, eps, rows, size, out, new_residual);                                   \
    }                                                                                                                  \
    extern "C" void silu_and_mul_##DTYPE(const T* gate_up, int64_t rows, int64_t size, T* out) {                       \
        manylora::silu_and_mul(gate_up, rows, size, out);                                                                  \
    }
MANYLORA_ROWS(float32, float)
MANYLORA_ROWS(bfloat16, manylora::Bfloat16)
