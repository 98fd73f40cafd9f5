// Writes a part of a dense weight plus its adapter's change, rounded as a file has it.
//
//   w[r, c] = Q(((s b[r, 0]) a[0, c] + (s b[r, 1]) a[1, c] + ...) + source[r, c])
//
//   traffic     values * (sizeof(T) + sizeof(S)), and rank * (columns + rows) * 4
//   constants   T            dtype of w
//               S            dtype of the weight
//               LANES        values of one access of w and of the weight
//               A_LANES      values of one access of a
//               ROWS         rows of a thread
//               THREADS      threads of a block
//               KIND, GIVEN  what Q makes of values; whether sizes of blocks are given
//               GROUPED, I   a matrix of a group without rows is not written; dtype of offsets
//
//   The trick: a block of values that shares a scale is in neighbouring threads of a warp, so the
//   sum is rounded in registers, and no dense sum is ever in memory.  A row of a is read once for
//   ROWS rows of the weight.
#include <common/rounded_sum.cuh>

KERNEL(THREADS, 2)
rounded_sum_(T *__restrict__ w, const S *__restrict__ source, const float *__restrict__ a,
             const float *__restrict__ b, const float *__restrict__ sizes,
             const I *__restrict__ offsets, const __grid_constant__ Part part) {
    __shared__ float levels[16];
    make_levels(levels);
    const Place at(part);
    if (!wanted(part, at, offsets)) return;
    float sums[ROWS][WIDTH] = {};
    low_rank(sums, part, at, a, b);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
#pragma unroll
        for (int j = 0; j < WIDTH; j += LANES) {
            float v[LANES];
            load(v, source + at.whole(part, k) * part.pitch + at.left + j);
#pragma unroll
            for (int i = 0; i < LANES; i++) sums[k][j + i] = __fadd_rn(sums[k][j + i], v[i]);
        }
    }
    round_rows(sums, w, part, at, levels, sizes);
}
