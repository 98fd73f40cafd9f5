// The gate of Llama's feed-forward layer, forward and backward.
//
//   y = silu(gate) * up        silu(x) = x * s,  s = 1 / (1 + exp(-x))
//   dgate = dy * up * (s + x s (1 - s))        dup = dy * silu(gate)
//
//   traffic     forward   elements * sizeof(T) * 3
//               backward  elements * sizeof(T) * 5
//   constants   T         dtype of every array
//               LANES     values of one access: 16 bytes, or fewer as the addresses allow
//               THREADS   threads of a block
//               STRIDED   some array is a slice of a wider one: see rows.cuh
//
//   The trick: each thread makes one access to every array, and all loads before the first store,
//   so that a result may overwrite an operand: dgate may overwrite gate, and dup up.  Slices are
//   read and written without a copy: gate and up may be halves of one array.
#include <common/math.cuh>
#include <common/rows.cuh>

KERNEL(THREADS) swiglu(const T *gate, const T *up, T *y, const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float g[LANES], u[LANES];
    at.load(g, gate, 0);
    at.load(u, up, 1);
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] *= g[j] * sigmoid(g[j]);
    at.store(y, 2, u);
}

KERNEL(THREADS)
swiglu_backward(const T *dy, const T *gate, const T *up, T *dgate, T *dup,
                const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float d[LANES], g[LANES], u[LANES];
    at.load(d, dy, 0);
    at.load(g, gate, 1);
    at.load(u, up, 2);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float s = sigmoid(g[j]), silu = g[j] * s;
        g[j] = (s + silu * (1 - s)) * u[j] * d[j];
        u[j] = silu * d[j];
    }
    at.store(dgate, 3, g);
    at.store(dup, 4, u);
}
