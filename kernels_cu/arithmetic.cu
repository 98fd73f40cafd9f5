// Sums and products, element by element.
//
//   add c = a + b        multiply c = a * b, da = dc * b, db = dc * a        scale y = factor * x
//
//   traffic     elements * sizeof(T) * (arrays that are read + arrays that are written)
//   constants   T         dtype of every array
//               LANES     values of one access: 16 bytes, or what the addresses are multiples of
//               THREADS   of a block
//               STRIDED   some array is a slice of a wider one: see rows.cuh
//
//   The trick: one access of every array a thread, loads before the first store, so that a result
//   may lie over an operand.  Arrays are read where they lie.
#include "common/rows.cuh"

KERNEL(THREADS) add(const T *a, const T *b, T *c, long long columns, unsigned tiles,
                    long long inner, long long a_outer, long long a_step, long long b_outer,
                    long long b_step, long long c_outer, long long c_step) {
    const Access<STRIDED> at(columns, tiles);
    float u[LANES], v[LANES];
    at.load(u, a, {inner, a_outer, a_step});
    at.load(v, b, {inner, b_outer, b_step});
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] += v[j];
    at.store(c, {inner, c_outer, c_step}, u);
}

KERNEL(THREADS) multiply(const T *a, const T *b, T *c, long long columns, unsigned tiles,
                         long long inner, long long a_outer, long long a_step, long long b_outer,
                         long long b_step, long long c_outer, long long c_step) {
    const Access<STRIDED> at(columns, tiles);
    float u[LANES], v[LANES];
    at.load(u, a, {inner, a_outer, a_step});
    at.load(v, b, {inner, b_outer, b_step});
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] *= v[j];
    at.store(c, {inner, c_outer, c_step}, u);
}

KERNEL(THREADS) multiply_backward(
    const T *dc, const T *a, const T *b, T *da, T *db, long long columns, unsigned tiles,
    long long inner, long long dc_outer, long long dc_step, long long a_outer, long long a_step,
    long long b_outer, long long b_step, long long da_outer, long long da_step,
    long long db_outer, long long db_step) {
    const Access<STRIDED> at(columns, tiles);
    float d[LANES], u[LANES], v[LANES];
    at.load(d, dc, {inner, dc_outer, dc_step});
    at.load(u, a, {inner, a_outer, a_step});
    at.load(v, b, {inner, b_outer, b_step});
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        u[j] *= d[j];
        v[j] *= d[j];
    }
    at.store(da, {inner, da_outer, da_step}, v);
    at.store(db, {inner, db_outer, db_step}, u);
}

KERNEL(THREADS) scale(const T *x, T *y, long long columns, unsigned tiles, long long inner,
                      long long x_outer, long long x_step, long long y_outer, long long y_step,
                      float factor) {
    const Access<STRIDED> at(columns, tiles);
    float v[LANES];
    at.load(v, x, {inner, x_outer, x_step});
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] *= factor;
    at.store(y, {inner, y_outer, y_step}, v);
}
