// Groups of sorted rows: the tiles of a grouped product, and sums of the rows of each group.
//
//   tiles[t] = (group, first row, end of its rows) of the t-th tile of ROWS rows
//   sums[e, c] = sum over the p of e of weights[order[p]] * x[row(p), c]
//   p is in group e if offsets[e] <= p < offsets[e + 1]; row(p) is p, or order[p] / TOP
//
//   traffic     tiles: offsets, tiles * 12        sums: rows * columns * sizeof(T), sums once
//   constants   I, T, B    dtypes of offsets, of x, of sums
//               ROWS       of a tile
//               TOP        0 where row(p) is p; rows have no weights then
//               WEIGHTED, W    whether there are weights; their dtype
//
//   The trick: the host knows that there are at most rows / ROWS + experts + 1 tiles, and starts as
//   many blocks; the device knows which there are.  Group `experts` holds the rows that no group
//   has; group -1 marks the end of the list.  Sums are in a fixed order.
#include <common/device.cuh>

constexpr int MOST = 1024, THREADS = 1024;  // groups; threads that list tiles

DEVICE int end_of(const I *offsets, int group, int rows) {
    return min(max((int)offsets[group + 1], 0), rows);
}

KERNEL(1024)
group_tiles(const I *__restrict__ offsets, int *__restrict__ tiles, int experts, int rows,
            int most) {
    __shared__ int starts[MOST + 2], ends[MOST + 2], sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto end = [&](int group) {
        return group < 0 ? 0 : group < experts ? end_of(offsets, group, rows) : rows;
    };
    int before = 0;
    for (int top = 0; top <= experts; top += THREADS) {
        const int group = top + threadIdx.x;
        const int size = group <= experts ? end(group) - end(group - 1) : 0;
        const int own = size > 0 ? (size + ROWS - 1) / ROWS : 0;
        int sum = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) sums[warp] = sum;
        __syncthreads();
        int total = 0;
        for (int w = 0; w < 32; w++) {
            if (w == warp) sum += before + total;
            total += sums[w];
        }
        before += total;
        if (group <= experts) {
            starts[group] = sum - own;
            ends[group] = end(group);
        }
        __syncthreads();
    }
    for (int tile = threadIdx.x; tile < most; tile += THREADS) {
        int low = 0, high = experts + 1;  // the last group that starts at this tile or before
        while (low + 1 < high) {
            const int middle = (low + high) / 2;
            if (starts[middle] <= tile) low = middle;
            else high = middle;
        }
        const int first = low == 0 ? 0 : ends[low - 1];
        tiles[3 * tile] = tile < before ? low : -1;
        tiles[3 * tile + 1] = first + (tile - starts[low]) * ROWS;
        tiles[3 * tile + 2] = ends[low];
    }
}

constexpr int SUM_ROWS = 8;  // rows of a group that a block adds at the same time

KERNEL(32 * SUM_ROWS)
group_sums(const T *__restrict__ x, const int *__restrict__ order, const W *__restrict__ weights,
           const I *__restrict__ offsets, B *__restrict__ sums, int rows, int columns) {
    __shared__ float partial[SUM_ROWS][32];
    const int group = blockIdx.y, lane = threadIdx.x % 32, own = threadIdx.x / 32;
    const int column = blockIdx.x * 32 + lane;
    const int first = group == 0 ? 0 : end_of(offsets, group - 1, rows);
    const int stop = end_of(offsets, group, rows);
    float sum = 0;
    if (column < columns)
#pragma unroll 4
        for (int p = first + own; p < stop; p += SUM_ROWS) {
            const int at = TOP == 0 ? p : order[p], row = TOP == 0 ? p : at / max(TOP, 1);
            const float value = (float)x[(long long)row * columns + column];
            sum = WEIGHTED ? fmaf((float)weights[at], value, sum) : sum + value;
        }
    partial[own][lane] = sum;
    __syncthreads();
    if (own > 0 || column >= columns) return;
#pragma unroll
    for (int i = 1; i < SUM_ROWS; i++) sum += partial[i][lane];
    sums[(long long)group * columns + column] = (B)sum;
}
