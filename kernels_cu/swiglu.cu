// The gate of Llama's feed-forward layer, forward and backward.
//
//   y = silu(gate) * up        silu(x) = x * s,  s = 1 / (1 + exp(-x))
//   dgate = dy * up * (s + x s (1 - s))        dup = dy * silu(gate)
//
//   traffic     forward   elements * sizeof(T) * 3
//               backward  elements * sizeof(T) * 5
//   constants   T         dtype of every array
//               LANES     values of one access: 16 bytes, or what the addresses are multiples of
//               THREADS   of a block
//               STRIDED   some array is a slice of a wider one: see rows.cuh
//
//   The trick: one access of every array a thread, all loads before the first store, so that a
//   result may lie over an operand: dgate over gate, dup over up.  Arrays are read where they lie:
//   gate and up may be halves of one array.
#include "common/math.cuh"
#include "common/rows.cuh"

KERNEL(THREADS) swiglu(const T *gate, const T *up, T *y, long long columns, unsigned tiles,
                       long long inner, long long gate_outer, long long gate_step,
                       long long up_outer, long long up_step, long long y_outer,
                       long long y_step) {
    const Access<STRIDED> at(columns, tiles);
    float g[LANES], u[LANES];
    at.load(g, gate, {inner, gate_outer, gate_step});
    at.load(u, up, {inner, up_outer, up_step});
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] *= g[j] * sigmoid(g[j]);
    at.store(y, {inner, y_outer, y_step}, u);
}

KERNEL(THREADS) swiglu_backward(
    const T *dy, const T *gate, const T *up, T *dgate, T *dup, long long columns, unsigned tiles,
    long long inner, long long dy_outer, long long dy_step, long long gate_outer,
    long long gate_step, long long up_outer, long long up_step, long long dgate_outer,
    long long dgate_step, long long dup_outer, long long dup_step) {
    const Access<STRIDED> at(columns, tiles);
    float d[LANES], g[LANES], u[LANES];
    at.load(d, dy, {inner, dy_outer, dy_step});
    at.load(g, gate, {inner, gate_outer, gate_step});
    at.load(u, up, {inner, up_outer, up_step});
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float s = sigmoid(g[j]), silu = g[j] * s;
        g[j] = (s + silu * (1 - s)) * u[j] * d[j];
        u[j] = silu * d[j];
    }
    at.store(dgate, {inner, dgate_outer, dgate_step}, g);
    at.store(dup, {inner, dup_outer, dup_step}, u);
}
