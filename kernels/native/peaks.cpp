// How fast this CPU reads memory and multiplies at best: bounds of any kernel, measured with nothing else to do.
//
// Each function does its work on all threads. Products have enough independent sums to hide an instruction's latency.
#include "bytes.h"
#include "tiles.h"

namespace manylora {
namespace {

#if defined(__x86_64__)
#define MANYLORA_KEEP(VALUE) asm volatile("" : "+v"(VALUE))
#else
#define MANYLORA_KEEP(VALUE) asm volatile("" : "+w"(VALUE))
#endif
constexpr int CHAINS = 12;

// Does sum = step(sum, a, b) for each of CHAINS sums, `steps` times on each thread. Returns the number of products.
template <class Vector, class Factor, class Step>
int64_t on_all_threads(int64_t steps, Step step) {
    int64_t products = 0;
#pragma omp parallel reduction(+ : products)
    {
        Vector sums[CHAINS] = {};
        Factor a = {}, b = {};
        MANYLORA_KEEP(b);
        for (int64_t i = 0; i < steps; i++) {
            for (int c = 0; c < CHAINS; c++) {
                MANYLORA_KEEP(a);  // as if it changed, so that each product is computed
                sums[c] = step(sums[c], a, b);
                MANYLORA_KEEP(sums[c]);
            }
        }
        products += steps * CHAINS;
    }
    return products;
}

#ifdef MANYLORA_TILES
template <class T>
int64_t tiles_on_all_threads(int64_t steps) {
    int64_t calls = 0;
    alignas(64) int8_t zeros[TILE * 64] = {};
#pragma omp parallel reduction(+ : calls)
    {
        const Tiles tiles;
        load_tile<4>(zeros, 64);
        load_tile<5>(zeros, 64);
        for (int64_t i = 0; i < steps; i++) {
            for_constants(std::make_integer_sequence<int, 4>{}, [](auto n) { multiply_add_tiles<T, n, 4, 5>(); });
        }
        calls += steps * 4;
    }
    return calls;
}
#endif

}  // namespace
}  // namespace manylora

using namespace manylora;

// Reads all bytes once; returns a sum of them, so that no read is left out.
extern "C" int64_t peak_read(const void* data, int64_t size) {
    constexpr int64_t BLOCK = 1 << 16;
    const auto* bytes = static_cast<const uint8_t*>(data);
    int64_t total = 0;
#pragma omp parallel for reduction(+ : total)
    for (int64_t block = 0; block < size / BLOCK; block++) {
        Sums sums[4] = {};
        const uint8_t* from = bytes + block * BLOCK;
        for (int64_t at = 0; at < BLOCK; at += sizeof(sums)) {
            for (int i = 0; i < 4; i++) sums[i] += load_bits<Sums>(from + at + i * sizeof(Sums));
        }
        total += (sums[0] + sums[1] + sums[2] + sums[3])[0];
    }
    return total;
}

// Each returns the number of multiply-adds that were done.
extern "C" int64_t peak_float32(int64_t steps) {
    const auto step = [](Singles sum, Singles a, Singles b) { return sum + a * b; };
    return on_all_threads<Singles, Singles>(steps, step) * SINGLES;
}

extern "C" int64_t peak_bfloat16(int64_t steps) {
#ifdef MANYLORA_TILES
    return tiles_on_all_threads<float>(steps) * TILE * TILE * 32;
#elif defined(__AVX512BF16__)
    const auto step = [](Singles sum, Sums a, Sums b) { return Packed<Bfloat16>::multiply_add(sum, a, b); };
    return on_all_threads<Singles, Sums>(steps, step) * SINGLES * 2;
#else
    return peak_float32(steps);
#endif
}

extern "C" int64_t peak_int8(int64_t steps) {
#ifdef MANYLORA_TILES
    return tiles_on_all_threads<int32_t>(steps) * TILE * TILE * 64;
#elif defined(MANYLORA_BYTE_PRODUCTS)
    const auto step = [](Sums sum, Sums a, Sums b) { return multiply_bytes<0>(sum, a, b); };
    return on_all_threads<Sums, Sums>(steps, step) * SINGLES * 4;
#else
    const auto step = [](Sums sum, Shorts a, Shorts b) { return sum + multiply_pairs(a, b); };
    return on_all_threads<Sums, Shorts>(steps, step) * SINGLES * 2;
#endif
}

extern "C" int64_t peak_int4(int64_t steps) {
#ifdef MANYLORA_BYTE_PRODUCTS
    const auto step = [](Sums sum, Sums a, Sums b) { return multiply_bytes<0>(sum, a, b); };
    return on_all_threads<Sums, Sums>(steps, step) * SINGLES * 4;
#else
    const auto step = [](Shorts sum, Sums a, Sums b) { return sum + multiply_nibbles(a, b); };
    return on_all_threads<Shorts, Sums>(steps, step) * SINGLES * 4;
#endif
}
