// Softmax over rows, forward and backward.
//
//   y = exp(scale * x - top) / sum(exp(scale * x - top))        top = max(scale * x)
//   dx = scale * y * (dy - sum(y * dy))        a row of nothing but -inf gives 0
//
//   traffic     forward   rows * COLUMNS * sizeof(T) * (KEEP ? 2 : 3)
//               backward  rows * COLUMNS * sizeof(T) * (KEEP ? 3 : 5)
//   constants   T             dtype of every array
//               COLUMNS       length of a row
//               LANES         values of one access: 16 bytes, or what COLUMNS and the addresses
//                             are multiples of
//               ROW_THREADS   threads of a row: a power of two up to 32, or the block
//               THREADS       of a block
//               KEEP          a row stays in registers
//
//   The trick: a row that fits is read once.  A longer one is read twice: every thread keeps the
//   greatest value so far, and rescales its sum when that grows; the second pass divides.  Rows are
//   read where they lie, in slices of wider arrays too.
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "common/vector.cuh"

constexpr int ROWS = THREADS / ROW_THREADS;  // that a block holds
constexpr int STEP = ROW_THREADS * LANES;    // columns between two vectors of a thread
constexpr int DEPTH = (COLUMNS + STEP - 1) / STEP;
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ bool inside(int column) {
    return COLUMNS % STEP == 0 || column < COLUMNS;
}

// ---- forward ----------------------------------------------------------------------------------
KERNEL(THREADS) softmax(const T *x, T *y, long long rows, long long inner, long long x_outer,
                        long long x_step, float scale) {
    __shared__ float tops[WARPS], sums[WARPS];
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const T *its_x = x + start(row, {inner, x_outer, x_step});
    const int first = threadIdx.x % ROW_THREADS * LANES;

    float kept[KEEP ? DEPTH : 1][LANES], top = LOWEST, sum = 0;
#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        const int column = first + k * STEP;
        if (row >= rows || !inside(column)) continue;
        float(&v)[LANES] = kept[KEEP ? k : 0];
        load(v, its_x + column);
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
    const float mine = top;
    top = row_max<ROW_THREADS>(top, tops);
    if constexpr (KEEP) {
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            if (row < rows && inside(first + k * STEP)) {
#pragma unroll
                for (int j = 0; j < LANES; j++) {
                    kept[k][j] = exp_below(kept[k][j] - top);
                    sum += kept[k][j];
                }
            }
        }
    } else {
        sum *= exp_below(mine - top);
    }
    sum = row_sum<ROW_THREADS>(sum, sums);
    const float share = sum == 0 ? 0 : 1 / sum;
    if (row >= rows) return;

#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        const int column = first + k * STEP;
        if (!inside(column)) continue;
        float(&v)[LANES] = kept[KEEP ? k : 0];
        if constexpr (!KEEP) {
            load(v, its_x + column);
#pragma unroll
            for (int j = 0; j < LANES; j++) v[j] = exp_below(v[j] * scale - top);
        }
#pragma unroll
        for (int j = 0; j < LANES; j++) v[j] *= share;
        store(y + row * COLUMNS + column, v);
    }
}

// ---- backward ---------------------------------------------------------------------------------
KERNEL(THREADS) softmax_backward(const T *dy, const T *y, T *dx, long long rows, long long inner,
                                 long long dy_outer, long long dy_step, long long y_outer,
                                 long long y_step, float scale) {
    __shared__ float partial[WARPS];
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const T *its_dy = dy + start(row, {inner, dy_outer, dy_step});
    const T *its_y = y + start(row, {inner, y_outer, y_step});
    const int first = threadIdx.x % ROW_THREADS * LANES;

    Vector<T, LANES> kept_dy[KEEP ? DEPTH : 1], kept_y[KEEP ? DEPTH : 1];
    float sum = 0;
#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        const int column = first + k * STEP;
        if (row >= rows || !inside(column)) continue;
        fetch(kept_dy[KEEP ? k : 0], its_dy + column);
        fetch(kept_y[KEEP ? k : 0], its_y + column);
        float d[LANES], v[LANES];
        widen(d, kept_dy[KEEP ? k : 0]);
        widen(v, kept_y[KEEP ? k : 0]);
#pragma unroll
        for (int j = 0; j < LANES; j++) sum += d[j] * v[j];
    }
    sum = row_sum<ROW_THREADS>(sum, partial);
    if (row >= rows) return;

#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        const int column = first + k * STEP;
        if (!inside(column)) continue;
        if constexpr (!KEEP) {
            fetch(kept_dy[0], its_dy + column);
            fetch(kept_y[0], its_y + column);
        }
        float d[LANES], v[LANES];
        widen(d, kept_dy[KEEP ? k : 0]);
        widen(v, kept_y[KEEP ? k : 0]);
#pragma unroll
        for (int j = 0; j < LANES; j++) d[j] = scale * v[j] * (d[j] - sum);
        store(dx + row * COLUMNS + column, d);
    }
}
