// 4-bit codes: the level of each code, and the number that multiplies the levels of a block of
// values: the largest absolute value (absmax), stored in float32 or in 8 bits; of MXFP4 a power of
// two, stored as its exponent; of Q4_0 any number, in float16.
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

enum { NF4, FP4, MXFP4, Q4_0 };  // of the last two, the first code of a byte is in its low bits

// The level of a code.  One of FP4 and MXFP4 has a sign, two bits of exponent and one of mantissa;
// MXFP4 alone has a negative zero.
template <int KIND> DEVICE float level_of(unsigned code) {
    constexpr float FP4S[8] = {0.0f, 1 / 192.0f, 2 / 3.0f, 1.0f, 1 / 3.0f, 0.5f, 1 / 6.0f, 0.25f};
    constexpr float MXFP4S[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    float level = 0;
#pragma unroll
    for (int c = 0; c < 16; c++) {
        const float size = KIND == FP4 ? FP4S[c % 8] : MXFP4S[c % 8];
        const float negative = KIND == FP4 ? 0.0f - size : -size;
        const float signed_size = KIND == Q4_0 ? c - 8.0f : c < 8 ? size : negative;
        const float value = KIND == NF4 ? nf4_level(c) : signed_size;
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

// 2^(exponent - 127), the scale of a block of MXFP4; that of 0 has no normal number.
DEVICE float power_of_two(unsigned exponent) {
    return __uint_as_float(exponent ? exponent << 23 : 0x400000);
}

template <int KIND, bool DOUBLE, class S>
DEVICE float absmax_of(unsigned block, const S *absmax, const unsigned char *codes) {
    if constexpr (KIND == MXFP4) return power_of_two(codes[block]);
    if constexpr (!DOUBLE) return (float)absmax[block];
    return decoded(absmax[codes[block]], absmax[SCALES + block / 256], absmax[OFFSET]);
}
