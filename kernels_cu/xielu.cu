// xIELU, the activation of Apertus' feed-forward layer, forward and backward.
//
//   y = p x^2 + beta x                            where x > 0,  p = log(1 + exp(alpha_p))
//   y = n (exp(min(x, eps)) - 1 - x) + beta x     elsewhere,    n = beta + log(1 + exp(alpha_n))
//   dalpha_p = sum of dy x^2 where x > 0, times sigmoid(alpha_p); dalpha_n likewise
//
//   traffic     forward   elements * sizeof(T) * 2
//               backward  elements * sizeof(T) * 3, and two floats of each block, summed afterwards
//   constants   T             dtype of x, y and their gradients
//               P, N, B, E    dtypes of alpha_p, alpha_n, beta and eps
//               LANES         values of one access: 16 bytes, or fewer as the addresses allow
//               THREADS       threads of a block
//               STRIDED       some array is a slice of a wider one: see rows.cuh
//
//   The trick: the four numbers are read by every thread, from L1: nothing waits for the host.  A
//   block of backward walks over tiles, so that sums of few blocks remain, in a fixed order.
#include <common/reduce.cuh>
#include <common/rows.cuh>

struct Curve {
    float p, n, beta, eps;

    DEVICE Curve(const P *alpha_p, const N *alpha_n, const B *beta, const E *eps)
        : p(softplus((float)*alpha_p)), n((float)*beta + softplus((float)*alpha_n)),
          beta((float)*beta), eps((float)*eps) {}

    // What p or n multiplies; a NaN stays a NaN.
    DEVICE float term(float x) const {
        return x > 0 ? x * x : expm1f(x < eps ? x : eps) - x;
    }
    DEVICE float slope(float x) const {
        return (x > 0 ? 2 * p * x : n * ((x < eps ? expf(x) : 0.0f) - 1)) + beta;
    }
};

KERNEL(THREADS)
xielu(const T *x, const P *alpha_p, const N *alpha_n, const B *beta, const E *eps, T *y,
      const __grid_constant__ Rows rows) {
    const Access<STRIDED> at(rows);
    const Curve curve(alpha_p, alpha_n, beta, eps);
    float v[LANES];
    at.load(v, x, 0);
#pragma unroll
    for (int j = 0; j < LANES; j++)
        v[j] = (v[j] > 0 ? curve.p : curve.n) * curve.term(v[j]) + curve.beta * v[j];
    at.store(y, 1, v);
}

KERNEL(THREADS)
xielu_backward(const T *dy, const T *x, const P *alpha_p, const N *alpha_n, const B *beta,
               const E *eps, T *dx, float *sums, const __grid_constant__ Rows rows,
               long long tiles) {
    __shared__ Exchange<THREADS / 32 * 2> exchange;
    const Curve curve(alpha_p, alpha_n, beta, eps);
    float sum[2] = {};
    for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Access<STRIDED> at(rows, tile);
        float d[LANES], v[LANES];
        at.load(d, dy, 0);
        at.load(v, x, 1);
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            const float more = d[j] * curve.term(v[j]);  // 0 beyond the end, as d is
            sum[0] += v[j] > 0 ? more : 0.0f;
            sum[1] += v[j] > 0 ? 0.0f : more;
            d[j] *= curve.slope(v[j]);
        }
        at.store(dx, 2, d);
    }
    row_sums<THREADS>(sum, exchange);
    if (threadIdx.x) return;
    sums[blockIdx.x] = sum[0] * sigmoid((float)*alpha_p);
    sums[gridDim.x + blockIdx.x] = sum[1] * sigmoid((float)*alpha_n);
}
