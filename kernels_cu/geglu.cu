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
//               LANES         values of one access: 16 bytes, or what the addresses are multiples of
//               THREADS       of a block
//               STRIDED       some array is a slice of a wider one: see rows.cuh
//               APPROXIMATE   the formula with tanh
//
//   The trick: neither form of s cancels where x is far below 0, and the second costs one exp.
//   All loads stand before the first store, so that dgate may lie over gate and dup over up, and
//   arrays are read where they lie: gate and up may be halves of one array.
#include "common/math.cuh"
#include "common/rows.cuh"

constexpr float STEEPNESS = 0.7978845608028654f, CUBIC = 0.044715f;  // sqrt(2 / pi)
constexpr float SATURATION = 10;  // from here on s is 0 or 1, and x^3 may not overflow

__device__ __forceinline__ float share(float x) {
    if constexpr (APPROXIMATE) return sigmoid(2 * STEEPNESS * x * (1 + CUBIC * x * x));
    else return 0.5f * erfcf(-0.7071067811865476f * x);
}

// x times the derivative of its share
__device__ __forceinline__ float rise(float x, float s) {
    if constexpr (APPROXIMATE) {
        x = fminf(fmaxf(x, -SATURATION), SATURATION);
        return 2 * STEEPNESS * x * (1 + 3 * CUBIC * x * x) * s * (1 - s);
    } else {
        return 0.3989422804014327f * x * expf(-0.5f * x * x);
    }
}

KERNEL(THREADS) geglu(const T *gate, const T *up, T *y, long long columns, unsigned tiles,
                      long long inner, long long gate_outer, long long gate_step,
                      long long up_outer, long long up_step, long long y_outer,
                      long long y_step) {
    const Access<STRIDED> at(columns, tiles);
    float g[LANES], u[LANES];
    at.load(g, gate, {inner, gate_outer, gate_step});
    at.load(u, up, {inner, up_outer, up_step});
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] *= g[j] * share(g[j]);
    at.store(y, {inner, y_outer, y_step}, u);
}

KERNEL(THREADS) geglu_backward(
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
        const float s = share(g[j]), gelu = g[j] * s;
        g[j] = (s + rise(g[j], s)) * u[j] * d[j];
        u[j] = gelu * d[j];
    }
    at.store(dgate, {inner, dgate_outer, dgate_step}, g);
    at.store(dup, {inner, dup_outer, dup_step}, u);
}
