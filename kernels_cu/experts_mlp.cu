// What lies between the products of a mixture of experts: the gate, and the sums of each row.
//
//   p is the place of assignment order[p] among those sorted by expert, which is of row
//   order[p] / TOP; g are its gates and u its ups, halves of both[p]; RELU2 has only g, all of it
//
//   activation   act[p] = f(g) * u: SWIGLU f(g) = g * sigmoid(g), GEGLU gelu; SWIGLU_CLAMPED
//                f(min(g, limit)) * (1 + clamp(u, limit)), f(g) = g * sigmoid(alpha * g);
//                RELU2 max(g, 0)^2
//   backward     from d[p] = down^T dy: both[p] becomes its gradient, w * d times the slopes of
//                act, d[p] becomes w * act, and dw = sum(act * d) + sum(bias[e] * dy)
//   combine      y[row] = sum over k of w[row, k] * out[places[row, k]], in the order of k
//
//   traffic     activation  assignments * INNER * sizeof(T) * 3, of RELU2 2
//               backward    assignments * INNER * sizeof(T) * 6, of RELU2 4, with BIAS
//                           + HIDDEN * sizeof(T)
//               combine     (assignments + rows) * HIDDEN * sizeof(T)
//   constants   T, W, B, I    dtypes of rows, of weights, of bias, of experts
//               INNER, HIDDEN, TOP, EXPERTS
//               LANES         values of one access
//               THREADS, ROW_THREADS    of a block; of a row in backward, a power of two up to 32
//                             or the block
//               ACTIVATION    SWIGLU 0, SWIGLU_CLAMPED 1, GEGLU 2, GEGLU_TANH 3, RELU2 4
//               BIAS          whether down has a bias
//               WEIGHTED      whether rows are multiplied by weights before they are added
//
//   The trick: dw needs no second product: the dot of an expert's result with dy is that of act
//   with down^T dy.  So nothing of the forward pass is kept, and backward overwrites what it
//   recomputed.  An assignment to an expert that does not exist has place -1 and gives NaN.
#include <common/gelu.cuh>
#include <common/reduce.cuh>
#include <common/vector.cuh>

enum { SWIGLU, SWIGLU_CLAMPED, GEGLU, GEGLU_TANH, RELU2 };
constexpr bool TANH = ACTIVATION == GEGLU_TANH, GATED = ACTIVATION != RELU2;
constexpr int WIDTH = GATED ? 2 * INNER : INNER;  // of a row of both

// act and its slopes by g and u.
struct Gate { float act, by_gate, by_up; };

DEVICE Gate gate_of(float g, float u, float limit, float alpha) {
    if constexpr (ACTIVATION == SWIGLU_CLAMPED) {
        const bool g_inside = g <= limit, u_inside = fabsf(u) <= limit;
        g = fminf(g, limit), u = fminf(fmaxf(u, -limit), limit) + 1;
        const float s = sigmoid(alpha * g), f = g * s;
        return {f * u, g_inside ? u * (s + alpha * f * (1 - s)) : 0, u_inside ? f : 0};
    } else if constexpr (ACTIVATION == RELU2) {
        const float f = g < 0 ? 0 : g;
        return {f * f, 2 * f, 0};
    } else if constexpr (ACTIVATION == SWIGLU) {
        const float s = sigmoid(g), f = g * s;
        return {f * u, u * (s + f * (1 - s)), f};
    } else {
        const float s = cdf<TANH>(g), f = g * s;
        return {f * u, u * (s + rise<TANH>(g, s)), f};
    }
}

KERNEL(THREADS)
experts_activation(const T *__restrict__ both, T *__restrict__ act, long long assignments,
                   float limit, float alpha) {
    const long long vector = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long p = vector / (INNER / LANES);
    const int column = vector % (INNER / LANES) * LANES;
    if (p >= assignments) return;
    float g[LANES], u[LANES] = {};
    load(g, both + p * WIDTH + column);
    if constexpr (GATED) load(u, both + p * WIDTH + INNER + column);
#pragma unroll
    for (int j = 0; j < LANES; j++) g[j] = gate_of(g[j], u[j], limit, alpha).act;
    store(act + p * INNER + column, g);
}

KERNEL(THREADS)
experts_backward(T *both, T *d, const W *__restrict__ weights, const int *__restrict__ order,
                 const I *__restrict__ experts, const B *__restrict__ bias,
                 const T *__restrict__ dy, W *__restrict__ dweights, long long assignments,
                 float limit, float alpha) {
    __shared__ Exchange<THREADS / 32> exchange;
    const long long p = (long long)blockIdx.x * (THREADS / ROW_THREADS) + threadIdx.x / ROW_THREADS;
    const int lane = threadIdx.x % ROW_THREADS;
    const bool real = p < assignments;
    const int at = real ? order[p] : 0;
    const float w = (float)weights[at];
    float product = 0;
    if (real) {
        both += p * WIDTH, d += p * INNER;
        for (int column = lane * LANES; column < INNER; column += ROW_THREADS * LANES) {
            float g[LANES], u[LANES] = {}, x[LANES];
            load(g, both + column);
            if constexpr (GATED) load(u, both + INNER + column);
            load(x, d + column);
#pragma unroll
            for (int j = 0; j < LANES; j++) {
                const Gate gate = gate_of(g[j], u[j], limit, alpha);
                product = fmaf(gate.act, x[j], product);
                g[j] = w * x[j] * gate.by_gate;
                u[j] = w * x[j] * gate.by_up;
                x[j] = w * gate.act;
            }
            store(both, column, g);
            if constexpr (GATED) store(both, INNER + column, u);
            store(d, column, x);
        }
        if constexpr (BIAS) {
            const long long expert = experts[at];
            if (expert >= 0 && expert < EXPERTS)
                for (int column = lane; column < HIDDEN; column += ROW_THREADS)
                    product = fmaf((float)bias[expert * HIDDEN + column],
                                   (float)dy[(long long)(at / TOP) * HIDDEN + column], product);
        }
    }
    product = row_sum<ROW_THREADS>(product, exchange);
    if (real && lane == 0) dweights[at] = (W)product;
}

KERNEL(THREADS)
experts_combine(const T *__restrict__ out, const int *__restrict__ places,
                const W *__restrict__ weights, T *__restrict__ y, long long rows) {
    const long long vector = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long row = vector / (HIDDEN / LANES);
    const int column = vector % (HIDDEN / LANES) * LANES;
    if (row >= rows) return;
    float sum[LANES] = {};
#pragma unroll 4
    for (int k = 0; k < TOP; k++) {
        const int place = places[row * TOP + k];
        const float missing = WEIGHTED ? __int_as_float(0x7fffffff) : 0;
        float x[LANES], w = 1;
        if constexpr (WEIGHTED) w = (float)weights[row * TOP + k];
        load(x, out + (long long)max(place, 0) * HIDDEN + column);
#pragma unroll
        for (int j = 0; j < LANES; j++) sum[j] += place < 0 ? missing : w * x[j];
    }
    store(y + row * HIDDEN + column, sum);
}
