// 8-bit integers with one scale per row, or per block of a row, converted to floats.
//
//   w[r, c] = codes[r, c] * absmax[r] / 127        with BLOCK codes[r, c] * absmax[r, c / BLOCK]
//
//   traffic     rows * columns * (sizeof(T) + 1), with BLOCK + sizeof(A) / BLOCK
//   constants   T, A      dtypes of w, of absmax
//               LANES     values of one access: 16 codes, or fewer as the addresses allow
//               BLOCK     values of a row with one scale, a multiple of LANES; 0: all
//               THREADS   threads of a block
//
//   The trick: codes become floats by a byte permutation and a subtraction, see codes.cuh; w is a
//   chunk of the weight that the following product still finds in L2.
#include <common/codes.cuh>
#include <common/math.cuh>
#include <common/rows.cuh>

KERNEL(THREADS)
int8_dequantize_(const signed char *codes, const A *absmax, T *w,
                 const __grid_constant__ Rows rows) {
    const Access<true> at(rows);
    if (at.left <= 0) return;
    float scale;
    if constexpr (BLOCK > 0)
        scale = (float)absmax[(at.row * rows.columns + at.column) / max(BLOCK, 1)];
    else scale = divided_by<127>((float)absmax[at.row]);
    Vector<signed char, LANES> code;
    fetch(code, codes + at.in(0));
    float v[LANES];
    widen_codes(v, code);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] *= scale;
    at.store(w, 1, v);
}
