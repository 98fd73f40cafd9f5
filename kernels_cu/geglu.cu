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
#include <common/math.cuh>
#include <common/rows.cuh>

constexpr float STEEPNESS = 0.7978845608028654f, CUBIC = 0.044715f;  // sqrt(2 / pi)
constexpr float SATURATION = 10;  // beyond it s is 0 or 1; clamping keeps x^3 from overflowing
// Blocks that an SM must hold, in backward; 0 leaves it to the compiler.
constexpr int RESIDENT = STRIDED && APPROXIMATE && sizeof(T) == 2 ? 6 : 0;

// exp(-x^2 / 2)
DEVICE float bell(float x) {
    if constexpr (sizeof(T) == 4) return expf(-0.5f * x * x);
    else return exp2f(-0.7213475204444817f * x * x);
}

// In 16 bits erfc(z) / 2 = exp(-z^2) t p(t) with t = 1 / (1 + z / 2) and a fit of p on 0 <= z < 9.5:
// to 1.5e-6 of its value, where rounding to float16 is up to 4.9e-4.
DEVICE float cdf(float x) {
    if constexpr (APPROXIMATE) return sigmoid(2 * STEEPNESS * x * (1 + CUBIC * x * x));
    else if constexpr (sizeof(T) == 4) return 0.5f * erfcf(-0.7071067811865476f * x);
    else {
        constexpr float P[] = {0.141174033f,  0.138676971f, 0.141359016f, 0.017331427f,
                               0.196886718f, -0.179990917f, 0.0445621461f};
        const float t = __fdividef(1.0f, 1 + 0.35355339059327373f * fabsf(x));
        float p = P[6];
#pragma unroll
        for (int i = 5; i >= 0; i--) p = p * t + P[i];
        const float below = bell(x) * t * p;
        return x < 0 ? below : 1 - below;
    }
}

// x * s'
DEVICE float rise(float x, float s) {
    if constexpr (APPROXIMATE) {
        x = fminf(fmaxf(x, -SATURATION), SATURATION);
        return 2 * STEEPNESS * x * (1 + 3 * CUBIC * x * x) * s * (1 - s);
    } else {
        return 0.3989422804014327f * x * bell(x);
    }
}

KERNEL(THREADS) geglu(const T *gate, const T *up, T *y, const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    float g[LANES], u[LANES];
    at.load(g, gate, 0);
    at.load(u, up, 1);
#pragma unroll
    for (int j = 0; j < LANES; j++) u[j] *= g[j] * cdf(g[j]);
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
        const float s = cdf(g[j]), gelu = g[j] * s;
        g[j] = (s + rise(g[j], s)) * u[j] * d[j];
        u[j] = gelu * d[j];
    }
    at.store(dgate, 3, g);
    at.store(dup, 4, u);
}
