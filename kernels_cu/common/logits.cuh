// Accesses to rows of logits, and the soft cap of a logit.
//
//   constants   T, G       dtypes of the logits and of their gradient
//               COLUMNS    size of the vocabulary
//               LANES      values of one access
//               RAGGED     rows may begin anywhere, not only at multiples of LANES
//               SOFTCAP
//
// Accesses are 16 bytes wide for any vocabulary: they begin at aligned addresses, which may be
// before the row, and values outside of the row are ignored.
#pragma once
#include <common/vector.cuh>

constexpr int WIDTH = COLUMNS + (RAGGED ? LANES - 1 : 0);  // columns covered by a row's accesses
using Values = Vector<T, LANES>;

DEVICE float capped(float x, float softcap) {
    if constexpr (SOFTCAP) return softcap * tanhf(x * (1 / softcap));  // one division per thread
    else return x;
}

// The number of columns from the start of a row's first access to the start of the row.
DEVICE int lead(long long start) { return RAGGED ? (int)(start % LANES) : 0; }

DEVICE bool inside(int column) { return !RAGGED || (column >= 0 && column < COLUMNS); }

// inner * (x + bias), or outer * tanh(inner * (x + bias)) with CAP; bias with ADD.
template <bool CAP, bool ADD, class A>
DEVICE float z_of(float x, const A *bias, int column, float inner, float outer) {
    if constexpr (ADD) x += inside(column) ? (float)bias[column] : 0.0f;
    x *= inner;
    if constexpr (CAP) x = outer * tanhf(x);
    return x;
}

// The derivative of z by its logit.
DEVICE float slope_of(float z, float inner, float outer) {
    if constexpr (SOFTCAP) {
        const float tanh = z * (1 / outer);
        return inner * outer * (1 - tanh * tanh);
    } else {
        return inner;
    }
}

// Whether an access extends into a neighbouring row.
DEVICE bool cut(int column) { return RAGGED && (column < 0 || column + LANES > COLUMNS); }

template <class E>
DEVICE void fetch_row(Vector<E, LANES> &v, const E *row, int column) {
    if (!cut(column)) return fetch(v, row + column);
#pragma unroll
    for (int j = 0; j < LANES; j++) v.at[j] = inside(column + j) ? row[column + j] : (E)0.0f;
}

DEVICE void store_row(G *dlogits, long long start, int column, const float (&d)[LANES]) {
    if (!cut(column)) return store(dlogits, start + column, d);
#pragma unroll
    for (int j = 0; j < LANES; j++)
        if (inside(column + j)) dlogits[start + column + j] = (G)d[j];
}
