// Rules out the tokens that a grammar does not allow. Most words of a mask are all ones or all zeros.
#include <algorithm>
#include <cstdint>
#include <limits>

extern "C" void mask_tokens_float32(float* logits, int64_t size, int64_t stride, const int64_t* rows, int64_t num_rows,
                                    const uint32_t* bits, int64_t num_words) {
    constexpr float RULED_OUT = -std::numeric_limits<float>::infinity();
    constexpr float MAX_LOGIT = 1e30F;  // such a logit and NaN stay: the sampler is to see them
#pragma omp parallel for if (num_rows > 1)
    for (int64_t i = 0; i < num_rows; i++) {
        float* row = logits + rows[i] * stride;
        for (int64_t start = 0; start < size; start += 32) {
            const int64_t word = start / 32, count = std::min<int64_t>(32, size - start);
            const uint32_t allowed = word < num_words ? bits[i * num_words + word] : 0;
            if (allowed == ~uint32_t{0}) continue;
            for (int64_t t = 0; t < count; t++) {
                const float logit = row[start + t];
                row[start + t] = allowed >> t & 1 || !(logit < MAX_LOGIT) ? logit : RULED_OUT;
            }
        }
    }
}
