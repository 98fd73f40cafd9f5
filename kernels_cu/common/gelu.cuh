// The Gaussian error linear unit, gelu(x) = x * s, and its slope s + x * s'.
//
//   s = erfc(-x / sqrt(2)) / 2        or, APPROXIMATE, 1 / (1 + exp(-2 v)) = (1 + tanh(v)) / 2
//                                     v = sqrt(2 / pi) * (x + 0.044715 x^3)
//   s' = exp(-x^2 / 2) / sqrt(2 pi)   or 2 v' s (1 - s),  v' = sqrt(2 / pi) * (1 + 0.134145 x^2)
#pragma once
#include <common/math.cuh>

constexpr float STEEPNESS = 0.7978845608028654f, CUBIC = 0.044715f;  // sqrt(2 / pi)
constexpr float SATURATION = 10;  // beyond it s is 0 or 1; clamping keeps x^3 from overflowing

// s
template <bool APPROXIMATE> DEVICE float cdf(float x) {
    if constexpr (APPROXIMATE) return sigmoid(2 * STEEPNESS * x * (1 + CUBIC * x * x));
    else return 0.5f * erfcf(-0.7071067811865476f * x);
}

// x * s'
template <bool APPROXIMATE> DEVICE float rise(float x, float s) {
    if constexpr (APPROXIMATE) {
        x = fminf(fmaxf(x, -SATURATION), SATURATION);
        return 2 * STEEPNESS * x * (1 + 3 * CUBIC * x * x) * s * (1 - s);
    } else {
        return 0.3989422804014327f * x * expf(-0.5f * x * x);
    }
}
