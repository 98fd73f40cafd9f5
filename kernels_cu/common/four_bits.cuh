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

constexpr unsigned NORMAL = 0x00800000u, LARGE = 0x7e800000u;  // 2^-126, 2^126: see nearest_code

// Half-way between level I, in ascending order, and the next.
template <int KIND, int I> DEVICE float bound() {
    constexpr float SIZES[8] = {0.0f, 1 / 192.0f, 1 / 6.0f, 0.25f, 1 / 3.0f, 0.5f, 2 / 3.0f, 1.0f};
    if constexpr (KIND == NF4) return (nf4_level(I) + nf4_level(I + 1)) / 2;
    else if constexpr (I == 7) return 0.0f;
    else if constexpr (I < 7) return (SIZES[7 - I] + SIZES[6 - I]) / -2;
    else return (SIZES[I - 8] + SIZES[I - 7]) / 2;
}

// The code of NF4 or FP4 whose level is nearest to a value in -1 .. 1, of two equally near ones the
// lower.
template <int K> DEVICE unsigned nearest_code(float value) {
    const bool a = value > bound<K, 7>();
    float middle = a ? bound<K, 11>() : bound<K, 3>();
    const bool b = value > middle;
    middle = a ? (b ? bound<K, 13>() : bound<K, 9>()) : (b ? bound<K, 5>() : bound<K, 1>());
    const bool c = value > middle;
    const float above = b ? (c ? bound<K, 14>() : bound<K, 12>())
                          : (c ? bound<K, 10>() : bound<K, 8>());
    const float below = b ? (c ? bound<K, 6>() : bound<K, 4>())
                          : (c ? bound<K, 2>() : bound<K, 0>());
    const unsigned rank = b * 4 + c * 2 + (value > (a ? above : below));
    return K == FP4 ? (a ? 0x32547618u : 0x09efcdabu) >> rank * 4 & 15 : a * 8 + rank;  // by levels
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
