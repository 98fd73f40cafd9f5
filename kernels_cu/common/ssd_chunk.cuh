// Chunks of state space duality: those of common/delta_chunk.cuh, and the rates of tokens.
//
//   constants   those of common/delta_chunk.cuh, whose heads are groups
//               R, A, O, Q    dtypes of dt, a_log, d and dt_bias
//               LOW, HIGH     there are bounds of the rates
#pragma once
constexpr bool CHANNELS = false;  // a head has one decay
#include <common/delta_chunk.cuh>
#include <common/math.cuh>

constexpr int PARTS = (DIM + DEPTH - 1) / DEPTH;  // of a state: DEPTH rows each

struct Strides { int x, b, c, dy; };  // from token to token

// How far a token moves the state: softplus(dt + dt_bias), bounded.
DEVICE float raw_rate(float dt, const Q *dt_bias, int head) {
    return dt_bias ? dt + (float)dt_bias[head] : dt;
}
DEVICE float rate_of(float dt, const Q *dt_bias, int head, float least, float most) {
    float rate = softplus(raw_rate(dt, dt_bias, head));
    if constexpr (LOW) rate = fmaxf(rate, least);
    if constexpr (HIGH) rate = fminf(rate, most);
    return rate;
}
