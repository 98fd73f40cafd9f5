// Conversion of 8-bit integers to floats.
#pragma once
#include <common/vector.cuh>

// The four bytes of a word.  A byte b + 128 is the low mantissa byte of the float 2^23 + b + 128.
// That takes two instructions for each byte, both at full rate, which conversions do not have.
DEVICE void widen_four(float *to, unsigned word) {
    word ^= 0x80808080u;
#pragma unroll
    for (int j = 0; j < 4; j++)
        to[j] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7540 + j)) - 8388736.0f;
}

template <int LANES>
DEVICE void widen_codes(float (&to)[LANES], const Vector<signed char, LANES> &from) {
    if constexpr (LANES % 4 == 0) {
#pragma unroll
        for (int j = 0; j < LANES; j += 4)
            widen_four(to + j, *reinterpret_cast<const unsigned *>(&from.at[j]));
    } else {
        widen(to, from);
    }
}
