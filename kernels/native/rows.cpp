// Operations that pass over rows once: norms, rotary embedding, the gate of the feed-forward, storing keys and values.
#include "rows.h"

namespace weft {
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

template <class T>
void rope(const Heads<T>& q, const Heads<T>& k, int64_t rows, const float* cos, const float* sin) {
#pragma omp parallel for if (rows * (q.count + k.count) * q.size >= MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) {
        rotate(q, row, cos, sin);
        rotate(k, row, cos, sin);
    }
}

// out[t] = silu(gate_up[t, :size]) * gate_up[t, size:].
template <class T>
void silu_and_mul(const T* gate_up, int64_t rows, int64_t size, T* out) {
#pragma omp parallel for if (rows * size >= MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) {
        const T *gates = gate_up + row * 2 * size, *ups = gates + size;
        for_vectors(size, [&](int64_t at, int64_t count) {
            const Floats gate = read(gates + at, count);
            const Floats shrunk = exponential(gate < 0.0f ? gate : -gate);
            const Floats sigmoid = (gate < 0.0f ? shrunk : splat(1.0f)) / (1.0f + shrunk);
            write(out + row * size + at, gate * sigmoid * read(ups + at, count), count);
        });
    }
}

// k and v [rows, heads, size] to the pages; slots below 0 are not stored.
template <class T>
void kv_write(const Heads<const T>& k, const Heads<const T>& v, int64_t rows, const Pages<T>& pages,
              const int64_t* slots) {
#pragma omp parallel for if (2 * rows * k.count * k.size >= MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) store_token(k, v, row, pages, slots[row]);
}

}  // namespace
}  // namespace weft

#define WEFT_ROWS(DTYPE, T)                                                                                            \
    extern "C" void rms_norm_##DTYPE(const T* x, int64_t rows, int64_t row_stride, int64_t heads, int64_t head_stride, \
                                     int64_t size, const T* weight, float eps, T* out) {                               \
        weft::rms_norm(x, rows, row_stride, heads, head_stride, size, weight, eps, out);                               \
    }                                                                                                                  \
    extern "C" void add_rms_norm_##DTYPE(const T* x, const T* residual, const T* weight, float eps, int64_t rows,      \
                                         int64_t size, T* out, T* new_residual) {                                      \
        weft::add_rms_norm(x, residual, weight, eps, rows, size, out, new_residual);                                   \
    }                                                                                                                  \
    extern "C" void rope_##DTYPE(T* q, int64_t q_row, int64_t q_head, int64_t q_heads, T* k, int64_t k_row,            \
                                 int64_t k_head, int64_t k_heads, int64_t rows, int64_t size, const float* cos,        \
                                 const float* sin) {                                                                   \
        weft::rope<T>({q, q_row, q_head, q_heads, size}, {k, k_row, k_head, k_heads, size}, rows, cos, sin);           \
    }                                                                                                                  \
    extern "C" void silu_and_mul_##DTYPE(const T* gate_up, int64_t rows, int64_t size, T* out) {                  \
        weft::silu_and_mul(gate_up, rows, size, out);                                                             \
    }                                                                                                                  \
    extern "C" void kv_write_##DTYPE(const T* k, int64_t k_row, int64_t k_head, const T* v, int64_t v_row,             \
                                     int64_t v_head, int64_t rows, int64_t heads, int64_t size, T* k_pages,            \
                                     T* v_pages, int64_t page_stride, int64_t page_head, int64_t token_stride,         \
                                     const int64_t* slots, int64_t page_tokens) {                                      \
        weft::kv_write<T>({k, k_row, k_head, heads, size}, {v, v_row, v_head, heads, size}, rows,                      \
                          {k_pages, v_pages, page_stride, page_head, token_stride, page_tokens}, slots);               \
    }
WEFT_ROWS(float32, float)
WEFT_ROWS(bfloat16, weft::Bfloat16)
