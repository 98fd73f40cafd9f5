// Sums and products, element by element.
//
//   add c = a + b        multiply c = a * b, da = dc * b, db = dc * a        scale y = factor * x
//
//   traffic     elements * sizeof(T) * (arrays that are read + arrays that are written)
//   constants   T         dtype of every array
//               LANES     values of one access: 16 bytes, or what the addresses are multiples of
//               THREADS   of a block
//
//   The trick: one access of every array a thread, loads before the first store, so that a result
//   may lie over an operand.
#include "common/vector.cuh"

KERNEL(THREADS) add(const T *a, const T *b, T *c, long long elements) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float u[LANES], v[LANES];
    load(u, a + at, elements - at);
    load(v, b + at, elements - at);
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] += v[j];
    store(c + at, u, elements - at);
}

KERNEL(THREADS) multiply(const T *a, const T *b, T *c, long long elements) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float u[LANES], v[LANES];
    load(u, a + at, elements - at);
    load(v, b + at, elements - at);
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] *= v[j];
    store(c + at, u, elements - at);
}

KERNEL(THREADS) multiply_backward(const T *dc, const T *a, const T *b, T *da, T *db,
                                  long long elements) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float d[LANES], u[LANES], v[LANES];
    load(d, dc + at, elements - at);
    load(u, a + at, elements - at);
    load(v, b + at, elements - at);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        u[j] *= d[j];
        v[j] *= d[j];
    }
    store(da + at, v, elements - at);
    store(db + at, u, elements - at);
}

KERNEL(THREADS) scale(const T *x, T *y, long long elements, float factor) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float v[LANES];
    load(v, x + at, elements - at);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] *= factor;
    store(y + at, v, elements - at);
}
