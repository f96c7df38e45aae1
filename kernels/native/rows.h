// What the operations on rows do with one row.
#pragma once

#include <cmath>

#include "multiply.h"

namespace manylora {

// Heads of the rows of a projection, [rows, count, size], any strides of rows and heads.
template <class T>
struct Heads {
    T* data;
    int64_t row_stride, head_stride, count, size;

    T* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

// Keys and values in pages, [pages, heads, page_tokens, size], the same strides. Where there are scales,
// [pages, heads, page_tokens], the same strides and consecutive tokens, they are int8, else of a step's own type.
struct Pages {
    void *k, *v;
    float *k_scales, *v_scales;  // both null or neither
    int64_t page_stride, head_stride, token_stride, scale_page_stride, scale_head_stride, page_tokens;

    int64_t offset(int64_t page, int64_t head, int64_t token) const {
        return page * page_stride + head * head_stride + token * token_stride;
    }
    int64_t scale_offset(int64_t page, int64_t head, int64_t token) const {
        return page * scale_page_stride + head * scale_head_stride + token;
    }
};

// Calls body(offset, count) for each register of `size` elements, of which `count` are left.
template <class Body>
inline void for_vectors(int64_t size, Body body) {
    for (int64_t at = 0; at < size; at += SINGLES) body(at, size - at);
}

template <class V = Singles, class T>
MANYLORA_INLINE V read(const T* from, int64_t count) {
    return count >= LANES_OF<V> ? load_as<V>(from) : load_some<V>(from, count);
}

template <class T, class V>
MANYLORA_INLINE void write(T* to, V value, int64_t count) {
    count >= LANES_OF<V> ? store(to, value) : store_some(to, value, count);
}

template <class T>
void normalise(const T* x, const T* weight, T* out, int64_t size, float eps) {
    Singles squares = {};
    for_vectors(size, [&](int64_t at, int64_t count) {
        const Singles value = read(x + at, count);
        squares += value * value;
    });
    const float scale = 1.0f / std::sqrt(sums_of_registers<1>(&squares)[0] / size + eps);
    for_vectors(size, [&](int64_t at, int64_t count) {
        write(out + at, read(x + at, count) * scale * read(weight + at, count), count);
    });
}

// In place; cos and sin [rows, size].
template <class T>
void rotate(const Heads<T>& x, int64_t row, const float* cos, const float* sin) {
    const int64_t half = x.size / 2;
    const float *cosines = cos + row * x.size, *sines = sin + row * x.size;
    for (int64_t head = 0; head < x.count; head++) {
        T *first = x.at(row, head), *second = first + half;
        for_vectors(half, [&](int64_t at, int64_t count) {
            const Singles a = read(first + at, count), b = read(second + at, count);
            write(first + at, a * read(cosines + at, count) + b * read(sines + at, count), count);
            write(second + at, b * read(cosines + half + at, count) + a * read(sines + half + at, count), count);
        });
    }
}

// A vector in 8 bits, as `manylora.kernels.kv_scales.quantise` defines it; returns the scale.
template <class T>
float quantise(const T* x, int64_t size, int8_t* out) {
    Singles most = {}, unsound = {};
    for_vectors(size, [&](int64_t at, int64_t count) {
        const Singles value = read(x + at, count);
        most = maximum((Singles)((Sums)value & 0x7FFFFFFF), most);
        unsound += value * 0.0f;  // NaN where a value is infinite or NaN
    });
    const float scale = largest_of(most) / 127 + sums_of_registers<1>(&unsound)[0];
    if (!(scale > 0)) {
        std::memset(out, 0, size);
        return scale;
    }
    for_vectors(size, [&](int64_t at, int64_t count) {
        const Singles steps = read(x + at, count) / scale, largest = Singles{} + 127.0f;
        write(out + at, steps > largest ? largest : steps < -largest ? -largest : steps, count);
    });
    return scale;
}

// A slot below 0 is not stored.
template <class T>
void store_token(const Heads<T>& k, const Heads<T>& v, int64_t row, const Pages& pages, int64_t slot) {
    if (slot < 0) return;
    const int64_t page = slot / pages.page_tokens, token = slot % pages.page_tokens;
    for (int64_t head = 0; head < k.count; head++) {
        const int64_t to = pages.offset(page, head, token);
        if (pages.k_scales) {
            const int64_t scale = pages.scale_offset(page, head, token);
            pages.k_scales[scale] = quantise(k.at(row, head), k.size, (int8_t*)pages.k + to);
            pages.v_scales[scale] = quantise(v.at(row, head), k.size, (int8_t*)pages.v + to);
        } else {
            std::memcpy((T*)pages.k + to, k.at(row, head), k.size * sizeof(T));
            std::memcpy((T*)pages.v + to, v.at(row, head), k.size * sizeof(T));
        }
    }
}

}  // namespace manylora
