// The squared rectifier of BitNet's feed-forward layer, forward and backward.
//
//   y = max(x, 0)^2        dx = 2 max(x, 0) dy
//
//   traffic     forward   elements * sizeof(T) * 2
//               backward  elements * sizeof(T) * 3
//   constants   T         dtype of every array
//               LANES     values of one access: 16 bytes, or what the addresses are multiples of
//               THREADS   of a block
//
//   The trick: one access of every array a thread, loads before the store, so that dx may lie over
//   x or over dy.
#include "common/vector.cuh"

// max(x, 0) that keeps a NaN
__device__ __forceinline__ float positive(float x) { return x < 0 ? 0 : x; }

KERNEL(THREADS) relu2(const T *x, T *y, long long elements) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float v[LANES];
    load(v, x + at, elements - at);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] = positive(v[j]) * positive(v[j]);
    store(y + at, v, elements - at);
}

KERNEL(THREADS) relu2_backward(const T *dy, const T *x, T *dx, long long elements) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float d[LANES], v[LANES];
    load(d, dy + at, elements - at);
    load(v, x + at, elements - at);
#pragma unroll
    for (int j = 0; j < LANES; j++) d[j] *= 2 * positive(v[j]);
    store(dx + at, d, elements - at);
}
