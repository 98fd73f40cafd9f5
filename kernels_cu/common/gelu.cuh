// The Gaussian error linear unit, gelu(x) = x * s, and its slope s + x * s'.
//
//   s = erfc(-x / sqrt(2)) / 2        or, APPROXIMATE, 1 / (1 + exp(-2 v)) = (1 + tanh(v)) / 2
//                                     v = sqrt(2 / pi) * (x + 0.044715 x^3)
//   s' = exp(-x^2 / 2) / sqrt(2 pi)   or 2 v' s (1 - s),  v' = sqrt(2 / pi) * (1 + 0.134145 x^2)
#pragma once
#include <common/math.cuh>

constexpr float STEEPNESS = 0.7978845608028654f, CUBIC = 0.044715f;  // sqrt(2 / pi)
constexpr float SATURATION = 10;  // beyond it s is 0 or 1; clamping keeps x^3 from overflowing

// exp(-x^2 / 2)
DEVICE float bell(float x) {
    if constexpr (sizeof(T) == 4) return expf(-0.5f * x * x);
    else return exp2f(-0.7213475204444817f * x * x);
}

// s.  In 16 bits erfc(z) / 2 = exp(-z^2) t p(t) with t = 1 / (1 + z / 2) and a fit of p on
// 0 <= z < 9.5: to 1.5e-6 of its value, where rounding to float16 is up to 4.9e-4.
template <bool APPROXIMATE> DEVICE float cdf(float x) {
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
template <bool APPROXIMATE> DEVICE float rise(float x, float s) {
    if constexpr (APPROXIMATE) {
        x = fminf(fmaxf(x, -SATURATION), SATURATION);
        return 2 * STEEPNESS * x * (1 + 3 * CUBIC * x * x) * s * (1 - s);
    } else {
        return 0.3989422804014327f * x * bell(x);
    }
}
