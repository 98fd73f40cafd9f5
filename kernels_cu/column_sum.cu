// Sums of the columns of float32 partial sums, in a fixed order: the last step of a gradient that
// is summed over rows.
//
//   first[c] = sum of partial[0, r, c] over r      second[c] = sum of partial[1, r, c] over r
//
//   traffic     4 * rows * columns bytes per result, out of L2
//   constants   W, B      dtypes of the results
//
//   The trick: 32 columns a block, so that a warp reads 128 bytes; the warps share out the rows,
//   then thread c of the first warp adds what the warps found.  blockIdx.y picks the result.
KERNEL(1024) column_sum(const float *__restrict__ partial, W *__restrict__ first,
                        B *__restrict__ second, int rows, int columns) {
    __shared__ float found[32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int column = blockIdx.x * 32 + lane;
    const float *from = partial + (long long)blockIdx.y * rows * columns;
    float sum = 0;
    if (column < columns) {
#pragma unroll 8
        for (int row = warp; row < rows; row += warps)
            sum += from[(long long)row * columns + column];
    }
    found[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int other = 1; other < warps; other++) sum += found[other][lane];
    if (blockIdx.y == 0) first[column] = (W)sum;
    else second[column] = (B)sum;
}
