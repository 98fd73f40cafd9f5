// The gate of Gemma's feed-forward layer, forward and backward.
//
//   y = gelu(gate) * up        gelu(x) = x * s
//   s = erfc(-x / sqrt(2)) / 2        or, APPROXIMATE, 1 / (1 + exp(-2 v)) = (1 + tanh(v)) / 2
//                                     v = sqrt(2 / pi) * (x + 0.044715 x^3)
//   dgate = dy * up * (s + x s')      dup = dy * gelu(gate)
//   s' = exp(-x^2 / 2) / sqrt(2 pi)   or 2 v' s (1 - s),  v' = sqrt(2 / pi) * (1 + 0.134145 x^2)
//
//   traffic     forward   elements * sizeof(T) * 3
//               backward  elements * sizeof(T) * 5
//   constants   T             dtype of every array
//               LANES         values of one access: 16 bytes, or fewer as the addresses allow
//               THREADS       threads of a block
//               STRIDED       some array is a slice of a wider one: see rows.cuh
//               APPROXIMATE   the formula with tanh
//
//   The trick: no form of s suffers from cancellation where x is far below 0, and in 16 bits each
//   costs one exp: with erfcf, instructions took longer than memory.  All loads come before the
//   first store, so that dgate may overwrite gate and dup overwrite up.  Slices are read without a
//   copy: gate and up may be halves of one array.
#include <common/gelu.cuh>
#include <common/rows.cuh>

// Blocks that an SM must hold, in backward; 0 leaves it to the compiler.
constexpr int RESIDENT = STRIDED && APPROXIMATE && sizeof(T) == 2 ? 6 : 0;

KERNEL(THREADS) geglu(const T *gate, const T *up, T *y, const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float g[LANES], u[LANES];
    at.load(g, gate, 0);
    at.load(u, up, 1);
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] *= g[j] * cdf<APPROXIMATE>(g[j]);
    at.store(y, 2, u);
}

KERNEL(THREADS, RESIDENT)
geglu_backward(const T *dy, const T *gate, const T *up, T *dgate, T *dup,
               const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float d[LANES], g[LANES], u[LANES];
    at.load(d, dy, 0);
    at.load(g, gate, 1);
    at.load(u, up, 2);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float s = cdf<APPROXIMATE>(g[j]), gelu = g[j] * s;
        g[j] = (s + rise<APPROXIMATE>(g[j], s)) * u[j] * d[j];
        u[j] = gelu * d[j];
    }
    at.store(dgate, 3, g);
    at.store(dup, 4, u);
}
