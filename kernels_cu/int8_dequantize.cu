// Integers of eight bits and a scale a row, as floats.
//
//   w[r, c] = codes[r, c] * absmax[r] / 127
//
//   traffic     rows * columns * (sizeof(T) + 1)
//   constants   T, A      dtypes of w, of absmax
//               LANES     values of one access: 16 codes, or what the addresses are multiples of
//               THREADS   of a block
//
//   The trick: codes become floats by bytes and differences, and w is written where it lies: a
//   chunk that the product behind it finds in L2.
#include "common/codes.cuh"
#include "common/math.cuh"
#include "common/rows.cuh"

KERNEL(THREADS) int8_dequantize_(const signed char *codes, const A *absmax, T *w,
                                 const __grid_constant__ Rows rows) {
    const Access<true> at(rows);
    if (at.left <= 0) return;
    const float scale = divided_by<127>((float)absmax[at.row]);
    Vector<signed char, LANES> code;
    fetch(code, codes + at.in(0));
    float v[LANES];
    widen_codes(v, code);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] *= scale;
    at.store(w, 1, v);
}
