// Softmax over rows, forward and backward.
//
//   y = exp(scale * x - top) / sum(exp(scale * x - top))        top = max(scale * x)
//   dx = scale * y * (dy - sum(y * dy))        a row whose values are all -inf gives 0
//
//   traffic     forward   rows * COLUMNS * sizeof(T) * (KEEP ? 2 : 3)
//               backward  rows * COLUMNS * sizeof(T) * (KEEP ? 3 : 5)
//               without KEEP, with clusters, the second read may still find the row in L2
//   constants   T             dtype of every array
//               COLUMNS       length of a row
//               LANES         values of one access: 16 bytes, or fewer as COLUMNS and the addresses
//                             allow
//               ROW_THREADS   threads of a block that share a row: a power of two up to 32, or all
//               THREADS       threads of a block
//               CLUSTER       blocks that share a row: 1, or up to 8 from sm_90 on
//               RESIDENT      blocks that an SM must hold
//               KEEP          a row stays in registers
//
//   The trick: a row that fits is read once.  Every thread computes exp(value - its own maximum),
//   so that threads exchange the maximum and the sum together: by shuffles in a warp, through
//   shared memory in a block, or through that of the other blocks of a cluster.  A longer row is
//   read twice: a thread rescales its sum when its maximum grows.  Rows are read without a copy, in
//   slices of wider arrays too.
//
//   Rows of every length are kept in registers, not in shared memory.  Two blocks whose threads use
//   32 registers each for that keep 128 KiB on an SM, and while one waits for the sum of its row,
//   the other loads or stores.  Shared memory has 227 KiB on sm_90, and 99 KiB on sm_86, 89 and
//   120: a row of more than half of it would occupy the SM alone, which would idle in every
//   exchange, while a cluster holds that row in halves.  Before sm_90 shared memory would only save
//   the second read of a few lengths: those of 16 bits from 32,768 to 50,000 columns, or 80,000 on
//   sm_80.
#include <common/math.cuh>
#include <common/row_threads.cuh>
#include <common/rows.cuh>
#include <common/vector.cuh>

// ---- forward ----------------------------------------------------------------------------------
CLUSTER_KERNEL(CLUSTER, THREADS, RESIDENT)
softmax(const T *x, T *y, long long rows, long long inner, long long x_outer, long long x_step,
        float scale) {
    __shared__ Exchange<2 * WARPS, CLUSTER> exchange;
    const long long row = (long long)(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / ROW_THREADS;
    const int first = column_of(0);
    const T *x_row = x + start(row, {inner, x_outer, x_step}) + first;
    const long long at = row * COLUMNS + first;  // of y; see `store` in vector.cuh
    cluster_start<CLUSTER>(exchange);

    float kept[KEEP ? DEPTH : 1][LANES], top = LOWEST, sum = 0;
#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        if (row >= rows || !inside(first + k * STEP, k)) continue;
        float (&v)[LANES] = kept[KEEP ? k : 0];
        load(v, x_row + k * STEP);
        const float before = top;
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            v[j] *= scale;
            top = fmaxf(top, v[j]);
        }
        if constexpr (!KEEP) {
            sum *= exp_below(before - top);
#pragma unroll
            for (int j = 0; j < LANES; j++) sum += exp_below(v[j] - top);
        }
    }
#pragma unroll
    for (int k = 0; KEEP && k < DEPTH; k++) {
        if (row >= rows || !inside(first + k * STEP, k)) continue;
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            kept[k][j] = exp_below(kept[k][j] - top);
            sum += kept[k][j];
        }
    }
    const float mine = top;
    row_exp_sum<ROW_THREADS, CLUSTER>(top, sum, exchange);
    if (row >= rows) return;
    const float reciprocal = sum == 0 ? 0 : (KEEP ? exp_below(mine - top) : 1) / sum;

#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        if (!inside(first + k * STEP, k)) continue;
        float (&v)[LANES] = kept[KEEP ? k : 0];
        if constexpr (!KEEP) {
            load(v, x_row + k * STEP);
#pragma unroll
            for (int j = 0; j < LANES; j++) v[j] = exp_below(v[j] * scale - top);
        }
#pragma unroll
        for (int j = 0; j < LANES; j++) v[j] *= reciprocal;
        store(y, at + k * STEP, v);
    }
}

// ---- backward ---------------------------------------------------------------------------------
CLUSTER_KERNEL(CLUSTER, THREADS, RESIDENT)
softmax_backward(const T *dy, const T *y, T *dx, long long rows, long long inner,
                 long long dy_outer, long long dy_step, long long y_outer, long long y_step,
                 float scale) {
    __shared__ Exchange<WARPS, CLUSTER> exchange;
    const long long row = (long long)(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / ROW_THREADS;
    const int first = column_of(0);
    const T *dy_row = dy + start(row, {inner, dy_outer, dy_step}) + first;
    const T *y_row = y + start(row, {inner, y_outer, y_step}) + first;
    const long long at = row * COLUMNS + first;  // of dx
    cluster_start<CLUSTER>(exchange);

    Vector<T, LANES> kept_dy[KEEP ? DEPTH : 1], kept_y[KEEP ? DEPTH : 1];
    float sum = 0;
#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        if (row >= rows || !inside(first + k * STEP, k)) continue;
        fetch(kept_dy[KEEP ? k : 0], dy_row + k * STEP);
        fetch(kept_y[KEEP ? k : 0], y_row + k * STEP);
        float d[LANES], v[LANES];
        widen(d, kept_dy[KEEP ? k : 0]);
        widen(v, kept_y[KEEP ? k : 0]);
#pragma unroll
        for (int j = 0; j < LANES; j++) sum += d[j] * v[j];
    }
    sum = row_sum<ROW_THREADS, CLUSTER>(sum, exchange);
    if (row >= rows) return;

#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        if (!inside(first + k * STEP, k)) continue;
        if constexpr (!KEEP) {
            fetch(kept_dy[0], dy_row + k * STEP);
            fetch(kept_y[0], y_row + k * STEP);
        }
        float d[LANES], v[LANES];
        widen(d, kept_dy[KEEP ? k : 0]);
        widen(v, kept_y[KEEP ? k : 0]);
#pragma unroll
        for (int j = 0; j < LANES; j++) d[j] = scale * v[j] * (d[j] - sum);
        store(dx, at + k * STEP, d);
    }
}
