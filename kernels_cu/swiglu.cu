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
//
//   The trick: one access of every array a thread, all loads before the first store, so that a
//   result may lie over an operand: dgate over gate, dup over up.
#include "common/math.cuh"
#include "common/vector.cuh"

KERNEL(THREADS) swiglu(const T *gate, const T *up, T *y, long long elements) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float g[LANES], u[LANES];
    load(g, gate + at, elements - at);
    load(u, up + at, elements - at);
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] *= g[j] * sigmoid(g[j]);
    store(y + at, u, elements - at);
}

KERNEL(THREADS) swiglu_backward(const T *dy, const T *gate, const T *up, T *dgate, T *dup,
                                long long elements) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float d[LANES], g[LANES], u[LANES];
    load(d, dy + at, elements - at);
    load(g, gate + at, elements - at);
    load(u, up + at, elements - at);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float s = sigmoid(g[j]), silu = g[j] * s;
        g[j] = (s + silu * (1 - s)) * u[j] * d[j];
        u[j] = silu * d[j];
    }
    store(dgate + at, g, elements - at);
    store(dup + at, u, elements - at);
}
