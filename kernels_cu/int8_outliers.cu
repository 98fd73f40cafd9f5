// Marks the columns that hold a value beyond a threshold, and lists them.
//
//   outliers[c] = any |x[r, c]| >= threshold      list = indices of outlier columns, ascending
//                                                 count = their number
//
//   traffic     rows * columns * sizeof(T) + 2 * columns
//   constants   T         dtype of x
//
//   The trick: later kernels read the number of columns on the device, so that the host need not
//   wait.  32 columns per block, so that a warp reads 64 or 128 bytes, as in column_sum.cu.
KERNEL(1024)
int8_outliers(const T *__restrict__ x, bool *__restrict__ outliers, long long rows, int columns,
              float threshold) {
    __shared__ bool partial[32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const int column = blockIdx.x * 32 + lane;
    bool any = false;
    if (column < columns) {
#pragma unroll 8
        for (long long row = warp; row < rows; row += warps)
            any |= fabsf((float)x[row * columns + column]) >= threshold;
    }
    partial[warp][lane] = any;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int other = 1; other < warps; other++) any |= partial[other][lane];
    outliers[column] = any;
}

// Launched with one block.  `list` has room for all columns.
KERNEL(1024)
int8_outlier_list(const bool *__restrict__ outliers, int *__restrict__ list,
                  int *__restrict__ count, int columns) {
    __shared__ int partial[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;  // marked columns to the left of these 1024
    for (int first = 0; first < columns; first += 1024) {
        const int column = first + threadIdx.x;
        const bool marked = column < columns && outliers[column];
        const unsigned beside = __ballot_sync(0xffffffffu, marked);
        if (lane == 0) partial[warp] = __popc(beside);
        __syncthreads();
        int slot = before + __popc(beside & ((1u << lane) - 1));
#pragma unroll
        for (int other = 0; other < 32; other++) {
            slot += other < warp ? partial[other] : 0;
            before += partial[other];
        }
        if (marked) list[slot] = column;
        __syncthreads();  // all have read the counts, which the next iteration overwrites
    }
    if (threadIdx.x == 0) *count = before;
}
