// The squared rectifier of BitNet's feed-forward layer, forward and backward.
//
//   y = max(x, 0)^2        dx = 2 max(x, 0) dy
//
//   traffic     forward   elements * sizeof(T) * 2
//               backward  elements * sizeof(T) * 3
//   constants   T         dtype of every array
//               LANES     values of one access: 16 bytes, or what the addresses are multiples of
//               THREADS   of a block
//               STRIDED   some array is a slice of a wider one: see rows.cuh
//
//   The trick: one access of every array a thread, loads before the store, so that dx may lie over
//   x or over dy.  Arrays are read where they lie.
#include "common/rows.cuh"

// max(x, 0) that keeps a NaN
__device__ __forceinline__ float positive(float x) { return x < 0 ? 0 : x; }

KERNEL(THREADS) relu2(const T *x, T *y, long long columns, unsigned tiles, long long inner,
                      long long x_outer, long long x_step, long long y_outer, long long y_step) {
    const Access<STRIDED> at(columns, tiles);
    float v[LANES];
    at.load(v, x, {inner, x_outer, x_step});
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] = positive(v[j]) * positive(v[j]);
    at.store(y, {inner, y_outer, y_step}, v);
}

KERNEL(THREADS) relu2_backward(const T *dy, const T *x, T *dx, long long columns,
                               unsigned tiles, long long inner, long long dy_outer,
                               long long dy_step, long long x_outer, long long x_step,
                               long long dx_outer, long long dx_step) {
    const Access<STRIDED> at(columns, tiles);
    float d[LANES], v[LANES];
    at.load(d, dy, {inner, dy_outer, dy_step});
    at.load(v, x, {inner, x_outer, x_step});
#pragma unroll
    for (int j = 0; j < LANES; j++) d[j] *= 2 * positive(v[j]);
    at.store(dx, {inner, dx_outer, dx_step}, d);
}
