// AMX's tile instructions for CPUs without them: a handler of SIGILL does what the instruction would have done.
//
// It reads the machine code, so what runs is the code of CPUs with AMX: encodings, addresses and shapes are tested too.
// Arithmetic as in Intel's manual. What it does not know goes to the handler before it.
#include <csignal>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>

#include <ucontext.h>

namespace {

constexpr int NUM_TILES = 8, ROWS = 16;

float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

float bfloat16(const uint8_t* row, int index) {
    const uint32_t bits = (uint32_t{row[2 * index + 1]} << 8 | row[2 * index]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return flushed(value);
}

// The tiles of a thread. A tile without a shape has no rows; its use is a fault.
struct Tiles {
    uint8_t rows[NUM_TILES];
    uint16_t row_bytes[NUM_TILES];
    uint8_t data[NUM_TILES][ROWS][64];

    void expect(bool is_right) const {
        if (!is_right) std::abort();
    }
    void ldtilecfg(const uint8_t* config) {
        *this = {};
        expect(config[0] == 1 && config[1] == 0);
        std::memcpy(row_bytes, config + 16, sizeof(row_bytes));
        std::memcpy(rows, config + 48, sizeof(rows));
        for (int i = 0; i < 64; i++) {
            const bool is_reserved = (i > 1 && i < 16) || (i >= 32 && i < 48) || i >= 56;
            expect(!is_reserved || config[i] == 0);
        }
    }
    void tilezero(int tile) {
        expect(rows[tile] > 0);
        std::memset(data[tile], 0, sizeof(data[tile]));
    }
    void tileloadd(int tile, const char* from, int64_t stride) {
        tilezero(tile);
        for (int64_t r = 0; r < rows[tile]; r++) std::memcpy(data[tile][r], from + r * stride, row_bytes[tile]);
    }
    void tilestored(int tile, char* to, int64_t stride) const {
        expect(rows[tile] > 0);
        for (int64_t r = 0; r < rows[tile]; r++) std::memcpy(to + r * stride, data[tile][r], row_bytes[tile]);
    }
    void tdpbf16ps(int sum, int a, int b) {
        const int columns = row_bytes[sum] / 4, pairs = row_bytes[a] / 4;
        expect(rows[sum] > 0 && rows[sum] == rows[a] && rows[b] == pairs && row_bytes[b] == row_bytes[sum]);
        float right[2][ROWS][ROWS] = {};  // first and second elements of the pairs
        for (int k = 0; k < pairs; k++) {
            for (int n = 0; n < columns; n++) {
                for (int i = 0; i < 2; i++) right[i][k][n] = bfloat16(data[b][k], 2 * n + i);
            }
        }
        for (int m = 0; m < rows[sum]; m++) {
            float halves[2][ROWS] = {}, total[ROWS] = {};
            for (int k = 0; k < 2 * pairs; k++) {
                const float left = bfloat16(data[a][m], k);
                for (int n = 0; n < ROWS; n++) {
                    halves[k % 2][n] = flushed(std::fma(left, right[k % 2][k / 2][n], halves[k % 2][n]));
                }
            }
            std::memcpy(total, data[sum][m], 4 * columns);
            for (int n = 0; n < ROWS; n++) total[n] = flushed(flushed(total[n]) + flushed(halves[0][n] + halves[1][n]));
            std::memcpy(data[sum][m], total, 4 * columns);
        }
    }
    void tdpbsud(int sum, int a, int b) {
        const int columns = row_bytes[sum] / 4, bytes = row_bytes[a];
        expect(rows[sum] > 0 && rows[sum] == rows[a] && 4 * rows[b] == bytes && row_bytes[b] == row_bytes[sum]);
        for (int m = 0; m < rows[sum]; m++) {
            uint32_t total[ROWS] = {};  // which wrap as the CPU's do
            std::memcpy(total, data[sum][m], 4 * columns);
            for (int k = 0; k < bytes; k++) {
                const int32_t left = static_cast<int8_t>(data[a][m][k]);
                for (int n = 0; n < columns; n++) total[n] += left * int32_t{data[b][k / 4][4 * n + k % 4]};
            }
            std::memcpy(data[sum][m], total, 4 * columns);
        }
    }
};
thread_local Tiles tiles;
struct sigaction before;

// The operands in memory, and the bytes of the instruction.
struct Operand {
    int64_t address, index, length;
};

Operand operand(const uint8_t* code, const greg_t* registers) {
    constexpr int NUMBERS[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    const int mod = code[4] >> 6, rm = code[4] & 7, high_base = (~code[1] >> 5 & 1) * 8;
    Operand found{0, 0, 5};
    int base = rm | high_base;
    bool has_base = !(mod == 0 && rm == 5);
    if (rm == 4) {
        const int sib = code[found.length++], index = (sib >> 3 & 7) | (~code[1] >> 6 & 1) * 8;
        if (index != 4) found.index = registers[NUMBERS[index]] << (sib >> 6);
        base = (sib & 7) | high_base;
        has_base = !(mod == 0 && (sib & 7) == 5);
    }
    if (has_base) found.address = registers[NUMBERS[base]];
    if (mod == 1) {
        found.address += static_cast<int8_t>(code[found.length++]);
    } else if (mod == 2 || !has_base) {
        int32_t displacement;
        std::memcpy(&displacement, code + found.length, sizeof(displacement));
        found.address += displacement;
        found.length += sizeof(displacement);
    }
    if (!has_base && rm == 5) found.address += registers[REG_RIP] + found.length;
    return found;
}

// Returns the bytes of the instruction, 0 for one that it does not know.
int64_t emulate(const uint8_t* code, const greg_t* registers) {
    if (code[0] != 0xC4 || (code[1] & 0x1F) != 2 || (code[2] & 0x84) != 0) return 0;  // VEX.128.0F38.W0
    const int prefix = code[2] & 3, opcode = code[3], mod = code[4] >> 6, reg = code[4] >> 3 & 7, rm = code[4] & 7;
    constexpr int NONE = 0, F3 = 2, F2 = 3;
    if (mod == 3) {
        if (opcode == 0x49 && prefix == NONE && code[4] == 0xC0) {
            tiles = {};
        } else if (opcode == 0x49 && prefix == F2 && rm == 0) {
            tiles.tilezero(reg);
        } else if (opcode == 0x5C && prefix == F3) {
            tiles.tdpbf16ps(reg, rm, ~code[2] >> 3 & 7);
        } else if (opcode == 0x5E && prefix == F3) {
            tiles.tdpbsud(reg, rm, ~code[2] >> 3 & 7);
        } else {
            return 0;
        }
        return 5;
    }
    const Operand at = operand(code, registers);
    if (opcode == 0x49 && prefix == NONE && reg == 0) {
        tiles.ldtilecfg(reinterpret_cast<const uint8_t*>(at.address + at.index));
    } else if (opcode == 0x4B && prefix == F2 && rm == 4) {
        tiles.tileloadd(reg, reinterpret_cast<const char*>(at.address), at.index);
    } else if (opcode == 0x4B && prefix == F3 && rm == 4) {
        tiles.tilestored(reg, reinterpret_cast<char*>(at.address), at.index);
    } else {
        return 0;
    }
    return at.length;
}

void handle(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const int64_t length = emulate(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
    registers[REG_RIP] += length;
    if (length == 0) sigaction(SIGILL, &before, nullptr);
}

}  // namespace

extern "C" void trap_tiles() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGILL, &action, &before);
}
