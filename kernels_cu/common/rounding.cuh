// Values of a weight as a file holds them: codes of a block of values, and the numbers that a
// reader gets for them.
//
//   NF4, FP4, INT8    level or code, times the largest magnitude of the block or, of INT8, the row
//   MXFP4             level times a power of two
//   Q8_0              code times d, d = max |v| / 127 in float16, as are the others'
//   Q4_0, Q5_0        (code - 8 or 16) times d, d = the first value of the largest magnitude / -8 or
//                     -16
//   Q4_1, Q5_1        code times d, plus the smallest value; d = range / 15 or 31
//   TERNARY           sign times a given size, or 0 up to half of it
//
// A block is neighbouring values of a row, of which WIDTH are in one thread.  Every product, sum
// and quotient is rounded by itself, as the programs round that write and read such files.
#pragma once
#include <common/four_bits.cuh>
#include <common/math.cuh>

enum { INT8 = 4, Q8_0, Q5_0, Q4_1, Q5_1, TERNARY };  // after NF4, FP4, MXFP4 and Q4_0

constexpr float TINIEST = 1.504632769052528e-36f;  // 2^-119: an INT8 row below it is 0
constexpr unsigned INFINITE = 0x7f800000u, NO_NUMBER = 0x7fc00000u;

template <int KIND> constexpr int block_of() { return KIND == NF4 || KIND == FP4 ? 64 : 32; }

DEVICE float in_half(float x) { return __half2float(__float2half_rn(x)); }

DEVICE float inverse(float x) { return x == 0 ? 0.0f : __frcp_rn(x); }

// The largest of the values of `MEMBERS` neighbouring threads.
template <int MEMBERS> DEVICE unsigned largest(unsigned value) {
#pragma unroll
    for (int d = MEMBERS / 2; d > 0; d /= 2)
        value = max(value, __shfl_xor_sync(0xffffffffu, value, d));
    return value;
}

// Rounds WIDTH values of each thread; `levels` are those of the kind, `size` is a given one.
template <int KIND, bool GIVEN, int WIDTH>
DEVICE void round_block(float (&v)[WIDTH], const float *levels, float size) {
    if constexpr (KIND == TERNARY) {
        const float by = __frcp_rn(size), zero = 0 * size;  // what is not finite shows in all
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            v[j] = __fmul_rn(fabsf(v[j]), by) > 0.5f ? copysignf(size, v[j]) : zero;
        return;
    }
    constexpr int MEMBERS = block_of<KIND>() / WIDTH;
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < WIDTH; j++) bits = max(bits, __float_as_uint(v[j]) & 0x7fffffffu);
    if constexpr (KIND != INT8) bits = largest<MEMBERS>(bits);
    const float top = __uint_as_float(KIND == INT8 ? __float_as_uint(size) : bits);
    const bool broken = __float_as_uint(top) >= INFINITE;

    if constexpr (KIND == NF4 || KIND == FP4) {
        const float unit = bits > LARGE ? 0.25f : 1.0f;
        const float by = bits < NORMAL ? 0.0f : __frcp_rn(top * unit);
        const float by_level = broken ? __uint_as_float(NO_NUMBER) : GIVEN ? size : top;
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            v[j] = levels[nearest_code<KIND>(v[j] * unit * by)] * by_level;
    } else if constexpr (KIND == MXFP4) {
        const unsigned exponent = max((int)(bits >> 23) - 2, 0);
        const float back = broken ? __uint_as_float(NO_NUMBER) : power_of_two(exponent);
        const float by = __uint_as_float((254 - exponent) << 23);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            const float x = fabsf(v[j]) * by;
            const int code = (x > 0.25f) + (x >= 0.75f) + (x > 1.25f) + (x >= 1.75f) + (x > 2.5f)
                             + (x >= 3.5f) + (x > 5.0f);
            v[j] = copysignf(levels[code], v[j]) * back;
        }
    } else if constexpr (KIND == INT8) {
        const float most = top < TINIEST ? 0.0f : top;
        const float by = broken || most == 0 ? 0.0f : __fdiv_rn(127.0f, most);
        const float back = broken ? __uint_as_float(NO_NUMBER) : divided_by<127>(most);
#pragma unroll
        for (int j = 0; j < WIDTH; j++)
            v[j] = (float)(broken ? 0 : __float2int_rn(__fmul_rn(v[j], by))) * back;
    } else if constexpr (KIND == Q8_0) {
        const float d = broken ? __uint_as_float(NO_NUMBER) : divided_by<127>(top);
        const float by = inverse(d), back = in_half(d);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            const float x = __fmul_rn(v[j], by), down = floorf(fabsf(x));
            v[j] = copysignf(down + floorf(2 * (fabsf(x) - down)), x) * back;
        }
    } else if constexpr (KIND == Q4_0 || KIND == Q5_0) {
        constexpr int HALF_STEPS = KIND == Q4_0 ? 8 : 16;
        const int member = threadIdx.x % MEMBERS;
        unsigned first = 0xffffffffu;  // twice the place of the first such value, plus its sign
#pragma unroll
        for (int j = WIDTH - 1; j >= 0; j--) {
            const unsigned own = __float_as_uint(v[j]);
            if ((own & 0x7fffffffu) == bits) first = (member * WIDTH + j) * 2 + (own >> 31);
        }
        const unsigned sign = ~largest<MEMBERS>(~first) & 1;
        const float d = broken ? __uint_as_float(NO_NUMBER)
                               : (sign ? top : -top) * (1.0f / HALF_STEPS);
        const float by = inverse(d), back = in_half(d);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            const float code = truncf(__fadd_rn(__fmul_rn(v[j], by), HALF_STEPS + 0.5f));
            v[j] = (fminf(code, 2 * HALF_STEPS - 1) - HALF_STEPS) * back;
        }
    } else {
        constexpr int STEPS = KIND == Q4_1 ? 15 : 31;
        float low = v[0], high = v[0];
#pragma unroll
        for (int j = 1; j < WIDTH; j++) low = fminf(low, v[j]), high = fmaxf(high, v[j]);
#pragma unroll
        for (int k = MEMBERS / 2; k > 0; k /= 2) {
            low = fminf(low, __shfl_xor_sync(0xffffffffu, low, k));
            high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, k));
        }
        const float d = broken ? __uint_as_float(NO_NUMBER) : divided_by<STEPS>(high - low);
        const float by = inverse(d), back = in_half(d), least = in_half(low);
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            const float code = truncf(__fadd_rn(__fmul_rn(v[j] - low, by), 0.5f));
            v[j] = __fadd_rn(__fmul_rn(fminf(code, STEPS), back), least);
        }
    }
}
