// Paged causal attention with running maxima and sums (FlashAttention, arXiv:2205.14135), keys 64 at a time.
//
// Blocks of keys begin at multiples of 64, and a row's arithmetic does not depend on the rows beside it, so a token
// comes out bitwise the same alone, in a batch, and in whichever chunk of a prompt, as long as all values are finite:
// what a row does not see has weight 0, and 0 times NaN is NaN, in rows of the same request only.
#include <algorithm>
#include <limits>
#include <memory>
#include <new>

#include "rows.h"

namespace manylora {
namespace {

constexpr int64_t BLOCK = PANEL;  // keys of a block
constexpr int64_t PART = BLOCK / 2;  // the last block is computed in parts: a row of units for a tile
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// Query rows of one request that are computed together, for one KV head.
struct Task {
    int32_t row, count, position, table;  // `position` of the first row; its pages begin at `table` in the block table

    int64_t end() const { return int64_t{position} + 1; }  // keys that the first row sees
};

template <class T>
struct Call {
    Heads<T> q;
    Pages pages;
    const int32_t* block_table;
    const Task* tasks;
    int64_t num_tasks, heads, group, head_dim;  // `heads` of keys and values, each for a group of query heads
    float scale;
    int64_t window;  // all where it is 0
    T* out;                // [rows, heads * group, head_dim], contiguous
};

// Memory that begins with a cache line, so that no vector lies across two.
template <class E>
class Buffer {
   public:
    explicit Buffer(int64_t size) : data_(new (std::align_val_t(64)) E[size]()) {}
    ~Buffer() { operator delete[](data_, std::align_val_t(64)); }
    Buffer(const Buffer&) = delete;
    E* data() { return data_; }
    E& operator[](int64_t index) { return data_[index]; }

   private:
    E* data_;
};

// What one thread needs for one task; allocated once per call.
template <class T>
struct Room {
    using P = Packed<T>;
    const int64_t rows, features, units, panels;  // all padded; `features` and `units` of a head
    Buffer<typename P::Stored> queries, weights;
    Buffer<uint32_t> keys, values;
    Buffer<float> scores, sums, maxima, totals, factors;
    Buffer<float> key_factors, value_scales;  // of a block's tokens, for their scores (in units of log2) and weights
    Buffer<T> zeros;

    Room(int64_t max_rows, int64_t head_dim)
        : rows((max_rows + LANES - 1) / LANES * LANES),
          features((head_dim + LANES * P::PER_UNIT - 1) / (LANES * P::PER_UNIT) * (LANES * P::PER_UNIT)),
          units(features / P::PER_UNIT),
          panels((head_dim + PANEL - 1) / PANEL),
          queries(rows * features),
          weights(rows * BLOCK),
          keys(units * PANEL),
          values(panels * BLOCK / P::PER_UNIT * PANEL),
          scores(rows * BLOCK),
          sums(rows * panels * PANEL),
          maxima(rows),
          totals(rows * LANES),
          factors(rows),
          key_factors(BLOCK),
          value_scales(BLOCK),
          zeros(features + LANES) {}
};

template <class T>
void pack_queries(const Call<T>& call, const Task& task, int64_t head, Room<T>& room) {
    for (int64_t r = 0; r < task.count * call.group; r++) {
        const T* q = call.q.at(task.row + r / call.group, head * call.group + r % call.group);
        for (int64_t d = 0; d < room.features; d += LANES * Packed<T>::PER_UNIT) {
            const Words units = Packed<T>::row_units(q + d, call.head_dim - d);
            std::memcpy(&room.queries[r * room.features + d], &units, sizeof(units));
        }
    }
}

// Keys of a block, [units, 64], of which `count` are wanted.
template <class T>
void pack_keys(const T* const* keys, int64_t count, int64_t head_dim, Room<T>& room) {
    using P = Packed<T>;
    for (int64_t unit = 0; unit < room.units; unit += LANES) {
        const int64_t feature = unit * P::PER_UNIT;
        for (int64_t t = 0; t < count; t += LANES) {
            Words square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = P::row_units(keys[t + i] + feature, head_dim - feature);
            transpose(square);
            for (int i = 0; i < LANES; i++) {
                std::memcpy(&room.keys[(unit + i) * PANEL + t], &square[i], sizeof(square[i]));
            }
        }
    }
}

// The same of int8: four features change places at once, and become units afterwards.
template <class T>
void pack_keys(const int8_t* const* keys, int64_t count, int64_t head_dim, Room<T>& room) {
    using P = Packed<T>;
    for (int64_t feature = 0; feature < head_dim; feature += 4 * LANES) {
        for (int64_t t = 0; t < count; t += LANES) {
            Words square[LANES];
            for (int i = 0; i < LANES; i++) square[i] = load_fours(keys[t + i] + feature, head_dim - feature);
            transpose(square);
            for (int i = 0; i < LANES && feature + 4 * i < room.features; i++) {
                const auto number = [&](int byte) {
                    return __builtin_convertvector((Ints)(square[i] << (24 - 8 * byte)) >> 24, Floats);
                };
                for (int byte = 0; byte < 4; byte += P::PER_UNIT) {
                    const Words unit = P::unit(number(byte), number(byte + P::PER_UNIT - 1));
                    std::memcpy(&room.keys[(feature + 4 * i + byte) / P::PER_UNIT * PANEL + t], &unit, sizeof(unit));
                }
            }
        }
    }
}

// Keys [units, 64] and values [64 / PER_UNIT, head_dim] of `count` tokens from `first` on, which begins a block. Pages
// hold `Stored`, which is T, or int8 with scales, which are kept beside the panels. Tokens that no row of the task sees,
// all but [start, end), are not read, and zero.
template <class Stored, class T>
void pack_block(const Call<T>& call, const Task& task, int64_t head, int64_t first, int64_t count, int64_t start,
                int64_t end, Room<T>& room) {
    using P = Packed<T>;
    constexpr bool HAS_SCALES = !std::is_same_v<Stored, T>;
    const Stored *keys[BLOCK], *values[BLOCK];
    const int32_t* pages = call.block_table + task.table;
    int64_t page = first / call.pages.page_tokens, token = first % call.pages.page_tokens;
    for (int64_t t = 0; t < count; t++) {
        if constexpr (HAS_SCALES) room.key_factors[t] = room.value_scales[t] = 0;
        if (first + t < start || first + t >= end) {
            keys[t] = values[t] = (const Stored*)room.zeros.data();
        } else {
            const int64_t place = call.pages.offset(pages[page], head, token);
            keys[t] = (const Stored*)call.pages.k + place;
            values[t] = (const Stored*)call.pages.v + place;
            for (int64_t d = 0; d < call.head_dim; d += 64 / sizeof(Stored)) {
                __builtin_prefetch(keys[t] + d);
                __builtin_prefetch(values[t] + d);
            }
            if constexpr (HAS_SCALES) {
                const int64_t of_scales = call.pages.scale_offset(pages[page], head, token);
                room.key_factors[t] = call.pages.k_scales[of_scales] * (call.scale * LOG2_E);
                room.value_scales[t] = call.pages.v_scales[of_scales];
            }
        }
        if (++token == call.pages.page_tokens) {
            token = 0;
            page++;
        }
    }
    pack_keys(keys, count, call.head_dim, room);
    constexpr int64_t depth = BLOCK / P::PER_UNIT;
    for (int64_t unit = 0; unit < count / P::PER_UNIT; unit++) {
        const Stored *row = values[unit * P::PER_UNIT], *next = values[unit * P::PER_UNIT + P::PER_UNIT - 1];
        for (int64_t d = 0; d < call.head_dim; d += LANES) {
            Words both;
            if (call.head_dim - d >= LANES) {
                both = P::interleave(row + d, next + d);
            } else {
                Stored padded[2][LANES] = {};
                std::memcpy(padded[0], row + d, (call.head_dim - d) * sizeof(Stored));
                std::memcpy(padded[1], next + d, (call.head_dim - d) * sizeof(Stored));
                both = P::interleave(padded[0], padded[1]);
            }
            std::memcpy(&room.values[(d / PANEL * depth + unit) * PANEL + d % PANEL], &both, sizeof(both));
        }
    }
}

// Hides what a row does not see of `count` keys, all but [begin, end). Returns the largest of each lane.
inline Floats seen_scores(float* scores, int64_t count, int64_t begin, int64_t end) {
    const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool sees_all = begin <= 0 && end >= count;
    Singles most[REGISTERS_OF_LANES];
    for (int part = 0; part < REGISTERS_OF_LANES; part++) {
        Singles largest = Singles{} + NOTHING;
        for (int64_t key = part * SINGLES; key < count; key += LANES) {
            Singles score = load_singles(scores + key);
            if (!sees_all) {
                const Singles at = part_of<Singles>(lanes, 0) + (float)key;
                score = at >= (float)begin && at < (float)end ? score : Singles{} + NOTHING;
                store(scores + key, score);
            }
            largest = maximum(largest, score);
        }
        most[part] = largest;
    }
    return joined<Floats>(most);
}

// Turns the scores of a block's `keys`, in units of log2, into weights, times the scales of the values that they are for, and updates
// the rows' maxima and totals.
template <class T>
void weigh(const Call<T>& call, const Task& task, int64_t first, int64_t keys, Room<T>& room) {
    const int64_t rows = task.count * call.group;
    for (int64_t start = 0; start < rows; start += LANES) {
        const int64_t count = std::min<int64_t>(LANES, rows - start);
        Floats most[LANES] = {};
        for (int64_t i = 0; i < count; i++) {
            const int64_t end = task.end() + (start + i) / call.group;
            const int64_t begin = call.window ? end - call.window : 0;
            most[i] = seen_scores(&room.scores[(start + i) * BLOCK], keys, begin - first, end - first);
        }
        const Floats before = load(&room.maxima[start]);
        const Floats after = maximum(before, combine_lanes<LANES>(most, [](Floats a, Floats b) { return maximum(a, b); }));
        // Rows that have seen nothing so far begin at 0.
        const Floats origin = by_register([](Singles most) { return most == NOTHING ? Singles{} : most; }, after);
        const Floats factors = power_of_two(before - origin);
        store(&room.maxima[start], after);
        store(&room.factors[start], factors);
        float origins[LANES];
        store(origins, origin);
        for (int64_t i = 0; i < count; i++) {
            const float* scores = &room.scores[(start + i) * BLOCK];
            auto* weights = &room.weights[(start + i) * BLOCK];
            float* totals = &room.totals[(start + i) * LANES];
            const float factor = room.factors[start + i], from = origins[i];
            for (int64_t part = 0; part < LANES; part += SINGLES) {
                Singles total = load_singles(totals + part) * factor;
                for (int64_t key = part; key < keys; key += LANES) {
                    const Singles weight = power_of_two(load_singles(scores + key) - from);
                    total += weight;
                    store(weights + key, weight * load_singles(&room.value_scales[key]));
                }
                store(totals + part, total);
            }
        }
    }
}

template <class T>
void attend(const Call<T>& call, const Task& task, int64_t head, Room<T>& room) {
    using P = Packed<T>;
    constexpr int64_t depth = BLOCK / P::PER_UNIT;
    const int64_t rows = task.count * call.group, last = task.end() + task.count - 1, width = room.panels * PANEL;
    const int64_t start = call.window ? std::max<int64_t>(0, task.end() - call.window) : 0;
    pack_queries(call, task, head, room);
    std::fill_n(room.key_factors.data(), BLOCK, call.scale * LOG2_E);
    std::fill_n(room.value_scales.data(), BLOCK, 1.0f);
    std::fill_n(room.sums.data(), rows * width, 0.0f);
    std::fill_n(room.maxima.data(), rows, NOTHING);
    std::fill_n(room.totals.data(), rows * LANES, 0.0f);
    for (int64_t first = start / BLOCK * BLOCK; first < last; first += BLOCK) {
        const int64_t count = last - first > PART ? BLOCK : PART;  // what is past it weighs nothing
        if (call.pages.k_scales) {
            pack_block<int8_t>(call, task, head, first, count, start, last, room);
        } else {
            pack_block<T>(call, task, head, first, count, start, last, room);
        }
        multiply_panel<T>(rows, room.queries.data(), room.features, room.units, room.keys.data(), count,
                          [&](int64_t row, int64_t key, Singles products) {
                              store(&room.scores[row * BLOCK + key], products * load_singles(&room.key_factors[key]));
                          });
        weigh(call, task, first, count, room);
        for (int64_t panel = 0; panel < room.panels; panel++) {
            multiply_panel<T>(rows, room.weights.data(), BLOCK, count / P::PER_UNIT,
                              &room.values[panel * depth * PANEL],
                              call.head_dim - panel * PANEL, [&](int64_t row, int64_t d, Singles weighted) {
                                  float* sum = &room.sums[row * width + panel * PANEL + d];
                                  store(sum, load_singles(sum) * room.factors[row] + weighted);
                              });
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        const int64_t place = ((task.row + row / call.group) * call.heads + head) * call.group + row % call.group;
        const Floats totals = load(&room.totals[row * LANES]);
        const float total = sums_of<1>(&totals)[0];
        for_vectors(call.head_dim, [&](int64_t d, int64_t count) {
            write(call.out + place * call.head_dim + d, load_singles(&room.sums[row * width + d]) / total, count);
        });
    }
}

// Returns whether there was too little memory; nothing is computed then.
template <class T>
bool attention(const Call<T>& call) {
    int64_t most = 0, work = 0;
    for (int64_t i = 0; i < call.num_tasks; i++) {
        most = std::max<int64_t>(most, call.tasks[i].count);
        work += int64_t{call.tasks[i].count} * call.tasks[i].end();
    }
    bool is_short = false;
#pragma omp parallel if (work * call.heads * call.group * call.head_dim >= MIN_PARALLEL)
    {
        Registers<T> registers;
        std::unique_ptr<Room<T>> room;
        try {
            room = std::make_unique<Room<T>>(most * call.group, call.head_dim);
        } catch (const std::bad_alloc&) {  // an exception must not leave a parallel region
#pragma omp atomic write
            is_short = true;
        }
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < call.num_tasks * call.heads; i++) {
            if (!is_short) attend(call, call.tasks[i / call.heads], i % call.heads, *room);
        }
    }
    return is_short;
}

// The rows of a fused projection of q, k and v, before attention.
template <class T>
struct Projection {
    Heads<T> q, k, v;
    const T *q_norm, *k_norm;  // [head_dim] or null
    float eps;
    const float *cos, *sin;
    const int64_t* slots;
    int64_t rows;
};

// Norms the heads where there are norms, rotates them, and stores keys and values.
template <class T>
void place(const Projection<T>& x, const Pages& pages) {
    const auto normalise_heads = [](const Heads<T>& heads, int64_t row, const T* weight, float eps) {
        for (int64_t head = 0; weight && head < heads.count; head++) {
            normalise<T>(heads.at(row, head), weight, heads.at(row, head), heads.size, eps);
        }
    };
#pragma omp parallel for if (x.rows * (x.q.count + x.k.count) * x.q.size >= MIN_PARALLEL)
    for (int64_t row = 0; row < x.rows; row++) {
        normalise_heads(x.q, row, x.q_norm, x.eps);
        normalise_heads(x.k, row, x.k_norm, x.eps);
        rotate(x.q, row, x.cos, x.sin);
        rotate(x.k, row, x.cos, x.sin);
        store_token(x.k, x.v, row, pages, x.slots[row]);
    }
}

}  // namespace
}  // namespace manylora

// Without `rows`, what `place` does is left out: q may have any strides then.
#define MANYLORA_ATTEND(DTYPE, T)                                                                                          \
    extern "C" bool attend_##DTYPE(                                                                                    \
        T* q, int64_t q_row, int64_t q_head, int64_t rows, const T* q_norm, const T* k_norm, float eps,                \
        const float* cos, const float* sin, const int64_t* slots, const manylora::Pages* pages,                            \
        const int32_t* block_table, const manylora::Task* tasks, int64_t num_tasks, int64_t heads,                           \
        int64_t group, int64_t head_dim, float scale, int64_t window, T* out) {                                        \
        const manylora::Heads<T> queries{q, q_row, q_head, heads * group, head_dim};                                       \
        const manylora::Heads<T> keys{queries.at(0, heads * group), q_row, q_head, heads, head_dim};                       \
        const manylora::Heads<T> values{keys.at(0, heads), q_row, q_head, heads, head_dim};                                \
        manylora::place<T>({queries, keys, values, q_norm, k_norm, eps, cos, sin, slots, rows}, *pages);                   \
        return manylora::attention<T>({queries, *pages, block_table, tasks, num_tasks, heads, group, head_dim, \
                                   scale, window, out});                                                               \
    }
MANYLORA_ATTEND(float32, float)
MANYLORA_ATTEND(bfloat16, manylora::Bfloat16)
