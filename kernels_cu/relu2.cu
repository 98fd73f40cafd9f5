// The squared ReLU of BitNet's feed-forward layer, forward and backward.
//
//   y = max(x, 0)^2        dx = 2 max(x, 0) dy
//
//   traffic     forward   elements * sizeof(T) * 2
//               backward  elements * sizeof(T) * 3
//   constants   T         dtype of every array
//               LANES     values of one access: 16 bytes, or fewer as the addresses allow
//               THREADS   threads of a block
//               STRIDED   some array is a slice of a wider one: see rows.cuh
//
//   The trick: each thread makes one access to every array, and loads before it stores, so that dx
//   may overwrite x or dy.  Slices are read and written without a copy.
#include <common/rows.cuh>

// max(x, 0); a NaN stays a NaN.
DEVICE float positive(float x) { return x < 0 ? 0 : x; }

KERNEL(THREADS) relu2(const T *x, T *y, const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float v[LANES];
    at.load(v, x, 0);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] = positive(v[j]) * positive(v[j]);
    at.store(y, 1, v);
}

KERNEL(THREADS) relu2_backward(const T *dy, const T *x, T *dx, const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float d[LANES], v[LANES];
    at.load(d, dy, 0);
    at.load(v, x, 1);
#pragma unroll
    for (int j = 0; j < LANES; j++) d[j] *= 2 * positive(v[j]);
    at.store(dx, 2, d);
}
