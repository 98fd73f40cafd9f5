// Functions in float32 that several kernels share.
#pragma once

// 1 / (1 + exp(-x)), exact in both limits: an infinite exp gives 0.
DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1 + expf(-x)); }
DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// exp(x) for x <= 0, in two instructions and a multiplication; relative error |x| * 2^-23.
DEVICE float exp_below(float x) { return exp2f(x * 1.4426950408889634f); }

// x / N, rounded once: from sm_100 on, NVRTC with -ftz=true turns x / 3.0f into x * (1 / 3.0f).
template <int N> DEVICE float divided_by(float x) {
    return (N & (N - 1)) == 0 ? x * (1.0f / N) : __fdiv_rn(x, N);
}
