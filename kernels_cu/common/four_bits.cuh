// 4-bit codes: the level of each code, and the largest absolute value (absmax) of a block of
// values, stored in float32 or in 8 bits.
#pragma once

// The level of an NF4 code.
__device__ constexpr float nf4_level(int code) {
    // clang-format off
    constexpr float LEVELS[16] = {
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
        0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
    // clang-format on
    return LEVELS[code];
}

// The level of an NF4 or an FP4 code.  An FP4 code has a sign, two bits of exponent and one of
// mantissa.
template <bool FP4> DEVICE float level_of(unsigned code) {
    constexpr float SIZES[8] = {0.0f, 1 / 192.0f, 2 / 3.0f, 1.0f, 1 / 3.0f, 0.5f, 1 / 6.0f, 0.25f};
    float level = 0;
#pragma unroll
    for (int c = 0; c < 16; c++) {
        const float value = !FP4 ? nf4_level(c) : c < 8 ? SIZES[c % 8] : 0.0f - SIZES[c % 8];
        level = code == c ? value : level;
    }
    return level;
}

// DOUBLE quantization: each block has an 8-bit code instead of its absmax.  The array `absmax` then
// holds a table of 256 values for these codes, an offset, and a scale for every 256 blocks.
constexpr int TABLE = 256, OFFSET = 256, SCALES = 257;

DEVICE float decoded(float value, float scale, float offset) {
    return __fadd_rn(__fmul_rn(value, scale), offset);
}

template <bool DOUBLE>
DEVICE float absmax_of(unsigned block, const float *absmax, const unsigned char *codes) {
    if constexpr (!DOUBLE) return absmax[block];
    return decoded(absmax[codes[block]], absmax[SCALES + block / 256], absmax[OFFSET]);
}
