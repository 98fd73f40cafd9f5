// Elementwise sums and products.
//
//   add c = a + b        multiply c = a * b, da = dc * b, db = dc * a        scale y = factor * x
//   clip y = min(max(x, -bound), bound), dx = dy where |x| <= bound, else 0
//
//   traffic     elements * sizeof(T) * (arrays that are read + arrays that are written)
//   constants   T         dtype of every array
//               LANES     values of one access: 16 bytes, or fewer as the addresses allow
//               THREADS   threads of a block
//               STRIDED   some array is a slice of a wider one: see rows.cuh
//
//   The trick: each thread makes one access to every array, and all loads before the first store,
//   so that a result may overwrite an operand.  Slices are read and written without a copy.
#include <common/rows.cuh>

KERNEL(THREADS) add(const T *a, const T *b, T *c, const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float u[LANES], v[LANES];
    at.load(u, a, 0);
    at.load(v, b, 1);
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] += v[j];
    at.store(c, 2, u);
}

KERNEL(THREADS) multiply(const T *a, const T *b, T *c, const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float u[LANES], v[LANES];
    at.load(u, a, 0);
    at.load(v, b, 1);
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] *= v[j];
    at.store(c, 2, u);
}

KERNEL(THREADS)
multiply_backward(const T *dc, const T *a, const T *b, T *da, T *db,
                  const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float d[LANES], u[LANES], v[LANES];
    at.load(d, dc, 0);
    at.load(u, a, 1);
    at.load(v, b, 2);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        u[j] *= d[j];
        v[j] *= d[j];
    }
    at.store(da, 3, v);
    at.store(db, 4, u);
}

KERNEL(THREADS) scale(const T *x, T *y, const __grid_constant__ Rows rows, float factor) {
    const Access<STRIDED> at(rows);
    float v[LANES];
    at.load(v, x, 0);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] *= factor;
    at.store(y, 1, v);
}

KERNEL(THREADS) clip(const T *x, T *y, const __grid_constant__ Rows rows, float bound) {
    const Access<STRIDED> at(rows);
    float v[LANES];
    at.load(v, x, 0);
#pragma unroll
    for (int j = 0; j < LANES; j++)  // a NaN stays a NaN
        v[j] = v[j] > bound ? bound : v[j] < -bound ? -bound : v[j];
    at.store(y, 1, v);
}

KERNEL(THREADS)
clip_backward(const T *dy, const T *x, T *dx, const __grid_constant__ Rows rows, float bound) {
    const Access<STRIDED> at(rows);
    float d[LANES], v[LANES];
    at.load(d, dy, 0);
    at.load(v, x, 1);
#pragma unroll
    for (int j = 0; j < LANES; j++) d[j] = fabsf(v[j]) <= bound ? d[j] : 0.0f;
    at.store(dx, 2, d);
}
