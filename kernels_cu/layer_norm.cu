// Layer normalisation, forward and backward.
//
//   h = x + residual      mean = sum(h) / HIDDEN      rstd = 1 / sqrt(mean((h - mean)^2) + eps)
//   hhat = (h - mean) * rstd      y = hhat * w + bias
//
//   g = dy * w      dx = rstd * (g - mean(g) - hhat * mean(g * hhat)) + dh
//   dw = sum(dy * hhat)      dbias = sum(dy)
//
//   traffic, constants and the trick: those of common/norm.cuh
//
//   A row in registers is centred before it is squared.  In a row too long for that, every thread
//   merges the mean and the centred squares of one vector after the other: no digits are lost far
//   from zero, and the row is read twice, not three times.
constexpr bool CENTRED = true;
#include "common/norm.cuh"

CLUSTER_KERNEL(CLUSTER, THREADS, RESIDENT) layer_norm_forward(
    const T *__restrict__ x, const W *__restrict__ weight, const T *__restrict__ residual,
    const B *__restrict__ bias, T *__restrict__ y, T *__restrict__ h, float *__restrict__ mean,
    float *__restrict__ rstd, long long rows, long long inner, long long x_outer,
    long long x_step, long long residual_outer, long long residual_step, float eps) {
    forward(x, weight, residual, bias, y, h, mean, rstd, rows, {inner, x_outer, x_step},
            {inner, residual_outer, residual_step}, eps, 0);
}

CLUSTER_KERNEL(CLUSTER, THREADS, RESIDENT) layer_norm_backward(
    const T *__restrict__ dy, const T *__restrict__ dh, const T *__restrict__ h,
    const W *weight, const float *__restrict__ mean, const float *__restrict__ rstd,
    T *__restrict__ dx, float *__restrict__ partial, long long rows, long long inner,
    long long dy_outer, long long dy_step, long long dh_outer, long long dh_step,
    long long h_outer, long long h_step) {
    backward(dy, dh, h, weight, mean, rstd, dx, partial, rows, {inner, dy_outer, dy_step},
             {inner, dh_outer, dh_step}, {inner, h_outer, h_step}, 0);
}
