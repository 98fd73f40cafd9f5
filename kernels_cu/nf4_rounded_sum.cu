// Writes a part of a 4-bit weight plus its adapter's change, rounded as a file has it.
//
//   w[r, c] = Q(((s b[r, 0]) a[0, c] + (s b[r, 1]) a[1, c] + ...) + level[code] * absmax)
//
//   traffic     values * (sizeof(T) + 1 / 2), blocks * sizeof(S), and rank * (columns + rows) * 4
//   constants   those of rounded_sum.cu, and
//               FROM         whose levels the weight has: NF4, FP4, MXFP4 or Q4_0
//               S            dtype of absmax
//               DOUBLE       absmax is stored in 8 bits
//               BYTES        of one access of codes
//
//   The trick: that of rounded_sum.cu; codes become levels in shared memory, as in nf4_dequantize.
#include <common/rounded_sum.cuh>

KERNEL(THREADS, 2)
nf4_rounded_sum_(T *__restrict__ w, const unsigned char *__restrict__ packed,
                 const S *__restrict__ absmax, const unsigned char *__restrict__ codes,
                 const float *__restrict__ a, const float *__restrict__ b,
                 const float *__restrict__ sizes, const I *__restrict__ offsets,
                 const __grid_constant__ Part part, int shift) {
    __shared__ float levels[16], stored[16];
    if (threadIdx.x < 16) stored[threadIdx.x] = level_of<FROM>(threadIdx.x);
    make_levels(levels);
    const Place at(part);
    if (!wanted(part, at, offsets)) return;
    float sums[ROWS][WIDTH] = {};
    low_rank(sums, part, at, a, b);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        const long long first = at.whole(part, k) * part.pitch + at.left;
        const float size = absmax_of<FROM, DOUBLE>((unsigned)(first >> shift), absmax, codes);
        const unsigned char *from = packed + first / 2;
        const unsigned pairs = BYTES == 2 ? *reinterpret_cast<const unsigned short *>(from)
                                          : from[0] | from[1] << 8;
#pragma unroll
        for (int j = 0; j < WIDTH; j++) {
            const bool low = (j % 2 != 0) != (FROM >= MXFP4);
            const unsigned code = pairs >> (j / 2 * 8 + (low ? 0 : 4)) & 15;
            sums[k][j] = __fadd_rn(sums[k][j], __fmul_rn(stored[code], size));
        }
    }
    round_rows(sums, w, part, at, levels, sizes);
}
