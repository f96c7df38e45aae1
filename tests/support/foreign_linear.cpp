// Calls a function of quantised.cpp that was compiled for another machine. usage: foreign_linear NAME FOLDER
//
// FOLDER has its operands as files: sizes (rows, features, columns, bytes of y and of the codes, 64 bits each), x, panels,
// scales, bias. It writes y there.
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

using Linear = void(const char* x, int64_t x_stride, int64_t rows, int64_t features, const char* panels,
                    const char* scales, const char* bias, int64_t columns, char* y, char* codes);
extern "C" {
Linear linear_int8_float32, linear_int8_bfloat16, linear_int4_float32, linear_int4_bfloat16, head_int8_float32,
    head_int8_bfloat16;
}

static std::vector<char> read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

int main(int, char** arguments) {
    const std::string name = arguments[1], folder = std::string(arguments[2]) + "/";
    const struct {
        const char* name;
        Linear* call;
    } all[] = {{"linear_int8_float32", linear_int8_float32}, {"linear_int8_bfloat16", linear_int8_bfloat16},
               {"linear_int4_float32", linear_int4_float32}, {"linear_int4_bfloat16", linear_int4_bfloat16},
               {"head_int8_float32", head_int8_float32},     {"head_int8_bfloat16", head_int8_bfloat16}};
    const std::vector<char> x = read(folder + "x"), panels = read(folder + "panels"), scales = read(folder + "scales"),
                            bias = read(folder + "bias"), raw = read(folder + "sizes");
    int64_t sizes[5];
    std::memcpy(sizes, raw.data(), sizeof(sizes));
    std::vector<char> y(sizes[3]), codes(sizes[4]);
    for (const auto& each : all) {
        if (name != each.name) continue;
        each.call(x.data(), sizes[1], sizes[0], sizes[1], panels.data(), scales.data(), bias.data(), sizes[2], y.data(),
                  codes.data());
        std::ofstream(folder + "y", std::ios::binary).write(y.data(), y.size());
        return 0;
    }
    return 2;
}
