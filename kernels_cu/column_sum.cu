// Sums of columns in float32, in a fixed order: the gradient of a bias, and the last step of any
// gradient that is summed over rows.
//
//   first[c] = sum of rows[0, r, c] over r      second[c] = sum of rows[1, r, c] over r
//
//   traffic     sizeof(T) * count * columns bytes per result; partial sums are read from L2
//   constants   T         dtype of rows
//               W, B      dtypes of the results
//
//   The trick: 32 columns per block, so that a warp reads 64 or 128 bytes; the warps divide up the
//   rows, then thread c of the first warp adds the sums of all warps.  blockIdx.y picks the result.
KERNEL(1024)
column_sum(const T *__restrict__ rows, W *__restrict__ first, B *__restrict__ second,
           long long count, int columns) {
    __shared__ float partial[32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int column = blockIdx.x * 32 + lane;
    const T *from = rows + blockIdx.y * count * columns;
    float sum = 0;
    if (column < columns) {
#pragma unroll 8
        for (long long row = warp; row < count; row += warps)
            sum += (float)from[row * columns + column];
    }
    partial[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int other = 1; other < warps; other++) sum += partial[other][lane];
    if (blockIdx.y == 0) first[column] = (W)sum;
    else second[column] = (B)sum;
}
