// The level of `levels.py` that these kernels were compiled for.
#include "tiles.h"

extern "C" const char* level() {
#if defined(MANYLORA_TILES)
    return "x86-64-v4-amx";
#elif defined(__AVX512BF16__)
    return "x86-64-v4-bf16";
#elif defined(__AVX512VNNI__)
    return "x86-64-v4-vnni";
#elif defined(__AVX512F__)
    return "x86-64-v4";
#elif defined(__AVXVNNI__)
    return "x86-64-v3-vnni";
#elif defined(__AVX2__)
    return "x86-64-v3";
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return "aarch64-i8mm";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "aarch64-dotprod";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "no level";
#endif
}
