// AMX's tile instructions in scalar C++, for `kernels/native/tiles.h` on CPUs without them.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace weft {

constexpr int NUM_TILES = 8;

// The instructions by their names, as Intel's manual defines them. A tile without a shape is a fault.
struct EmulatedTiles {
    uint8_t rows[NUM_TILES];
    uint16_t row_bytes[NUM_TILES];
    uint8_t data[NUM_TILES][TILE][64];

    void ldtilecfg(const void* config) {
        *this = {};
        const auto* bytes = static_cast<const uint8_t*>(config);
        if (bytes[0] != 1 || bytes[1] != 0) std::abort();
        std::memcpy(row_bytes, bytes + 16, sizeof(row_bytes));
        std::memcpy(rows, bytes + 48, sizeof(rows));
    }
    void tilezero(int tile) {
        if (rows[tile] == 0) std::abort();
        std::memset(data[tile], 0, sizeof(data[tile]));
    }
    void tileloadd(int tile, const void* from, int64_t stride) {
        tilezero(tile);
        for (int64_t r = 0; r < rows[tile]; r++) {
            std::memcpy(data[tile][r], static_cast<const char*>(from) + r * stride, row_bytes[tile]);
        }
    }
    void tilestored(int tile, void* to, int64_t stride) {
        if (rows[tile] == 0) std::abort();
        for (int64_t r = 0; r < rows[tile]; r++) {
            std::memcpy(static_cast<char*>(to) + r * stride, data[tile][r], row_bytes[tile]);
        }
    }
    void tdpbf16ps(int sum, int a, int b) {
        const int columns = row_bytes[sum] / 4, pairs = row_bytes[a] / 4;
        const bool fits = rows[sum] == rows[a] && rows[b] == pairs && row_bytes[b] == row_bytes[sum];
        if (rows[sum] == 0 || !fits) std::abort();
        for (int m = 0; m < rows[sum]; m++) {
            for (int n = 0; n < columns; n++) {
                float halves[2] = {};  // of the first elements of the pairs, and of the second
                for (int k = 0; k < 2 * pairs; k++) {
                    const float left = element(data[a][m], k), right = element(data[b][k / 2], 2 * n + k % 2);
                    halves[k % 2] = flushed(std::fma(left, right, halves[k % 2]));
                }
                float before;
                std::memcpy(&before, &data[sum][m][4 * n], sizeof(before));
                const float after = flushed(flushed(before) + flushed(halves[0] + halves[1]));
                std::memcpy(&data[sum][m][4 * n], &after, sizeof(after));
            }
        }
    }

   private:
    static float flushed(float x) {
        return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
    }
    static float element(const uint8_t* row, int index) {
        uint32_t bits = (uint32_t{row[2 * index + 1]} << 8 | row[2 * index]) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof(value));
        return flushed(value);
    }
};
inline thread_local EmulatedTiles emulated_tiles;

WEFT_INLINE void load_tile_shapes(const TileShapes& shapes) { emulated_tiles.ldtilecfg(&shapes); }
WEFT_INLINE void release_tiles() { emulated_tiles = {}; }
template <int SUM>
WEFT_INLINE void zero_tile() {
    emulated_tiles.tilezero(SUM);
}
template <int TO>
WEFT_INLINE void load_tile(const void* from, int64_t stride) {
    emulated_tiles.tileloadd(TO, from, stride);
}
template <int FROM>
WEFT_INLINE void store_tile(void* to, int64_t stride) {
    emulated_tiles.tilestored(FROM, to, stride);
}
template <int SUM, int A, int B>
WEFT_INLINE void multiply_add_tiles() {
    emulated_tiles.tdpbf16ps(SUM, A, B);
}

}  // namespace weft
