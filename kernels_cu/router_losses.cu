// Losses of a router, that balance its experts and keep its logits small, and their gradients.
//
//   p = softmax(logits) of a row; n rows count: those whose mask[row % MASKED] is true
//   BALANCE   loss = EXPERTS * sum over e of (assignments of e / n) * (sum of p[e] / n)
//             slopes[e] = EXPERTS * (assignments of e / n) / n
//             dlogits = dloss * p * (slopes - sum(slopes * p))
//   else      loss = sum(lse^2) / n         dlogits = dloss * 2 * lse / n * p
//
//   traffic     forward    rows * (EXPERTS * sizeof(T) + TOP * sizeof(I))
//               backward   rows * EXPERTS * sizeof(T) * 2
//   constants   T, I       dtypes of logits, of the chosen experts
//               EXPERTS, TOP
//               BALANCE
//               HAS_MASK
//               ROW_THREADS    threads of a row: a power of two up to 32
//               THREADS    threads of a block
//
//   The trick: a lane adds up the same experts of all rows of its group, in registers; groups, then
//   blocks are added in a fixed order, so that the number of blocks depends on that of rows alone.
//   Backward computes the softmax again.
#include <common/device.cuh>
#include <common/math.cuh>
#include <common/reduce.cuh>

constexpr int ROWS = THREADS / ROW_THREADS, HELD = (EXPERTS + ROW_THREADS - 1) / ROW_THREADS;
constexpr int SUMS = BALANCE ? 2 * EXPERTS + 1 : 2;  // of a block: p, assignments, rows; or lse^2

DEVICE bool counts(const bool *mask, long long row, long long masked) {
    return !HAS_MASK || mask[row % masked];
}

// The probabilities of a row, and its lse.
DEVICE float softmax(float (&p)[HELD], const T *logits, int lane) {
    float top = LOWEST, sum = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int expert = i * ROW_THREADS + lane;
        p[i] = expert < EXPERTS ? (float)logits[expert] : __int_as_float(0xff800000);
        top = fmaxf(top, p[i]);
    }
    top = group_max<ROW_THREADS>(top);
#pragma unroll
    for (int i = 0; i < HELD; i++) sum += p[i] = exp_below(p[i] - top);
    sum = group_sum<ROW_THREADS>(sum);
#pragma unroll
    for (int i = 0; i < HELD; i++) p[i] /= sum;
    return top + logf(sum);
}

KERNEL(THREADS, 4)
router_sums(const T *__restrict__ logits, const I *__restrict__ experts,
            const bool *__restrict__ mask, float *__restrict__ partial, long long rows,
            long long masked) {
    __shared__ float shared[ROWS][SUMS];
    const int lane = threadIdx.x % ROW_THREADS, own = threadIdx.x / ROW_THREADS;
    const long long each = (rows + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each;
    const long long stop = first + each < rows ? first + each : rows;
    float sums[HELD] = {}, assigned[HELD] = {}, squares = 0, n = 0;
    for (long long top = first; top < stop; top += ROWS) {
        const bool real = top + own < stop;
        const long long row = real ? top + own : stop - 1;
        float p[HELD];
        const float lse = softmax(p, logits + row * EXPERTS, lane);
        if (!real || !counts(mask, row, masked)) continue;
        n += 1;
        squares += lse * lse;
        if constexpr (BALANCE) {
#pragma unroll
            for (int i = 0; i < HELD; i++) sums[i] += p[i];
            for (int k = 0; k < TOP; k++) {
                const long long number = experts[row * TOP + k];
#pragma unroll
                for (int i = 0; i < HELD; i++)
                    assigned[i] += number == i * ROW_THREADS + lane;
            }
        }
    }
    if constexpr (BALANCE) {
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int expert = i * ROW_THREADS + lane;
            if (expert >= EXPERTS) continue;
            shared[own][expert] = sums[i];
            shared[own][EXPERTS + expert] = assigned[i];
        }
    } else if (lane == 0) {
        shared[own][0] = squares;
    }
    if (lane == 0) shared[own][SUMS - 1] = n;
    __syncthreads();
    for (int i = threadIdx.x; i < SUMS; i += THREADS) {
        float sum = 0;
#pragma unroll 4
        for (int group = 0; group < ROWS; group++) sum += shared[group][i];
        partial[(long long)blockIdx.x * SUMS + i] = sum;
    }
}

// slopes, or count: what backward needs besides.
KERNEL(THREADS)
router_loss(const float *__restrict__ partial, float *__restrict__ loss,
            float *__restrict__ slopes, int blocks) {
    __shared__ Exchange<THREADS / 32> exchange;
    auto total = [&](int i) {
        float sum = 0;
#pragma unroll 4
        for (int block = 0; block < blocks; block++) sum += partial[(long long)block * SUMS + i];
        return sum;
    };
    const float n = fmaxf(total(SUMS - 1), 1);
    float sum = 0;
    if constexpr (BALANCE) {
        for (int expert = threadIdx.x; expert < EXPERTS; expert += THREADS) {
            const float slope = EXPERTS * (total(EXPERTS + expert) / n) / n;
            slopes[expert] = slope;
            sum += slope * total(expert);
        }
        sum = row_sum<THREADS>(sum, exchange);
    } else {
        sum = total(0) / n;
        if (threadIdx.x == 0) *slopes = n;
    }
    if (threadIdx.x == 0) *loss = sum;
}

KERNEL(THREADS)
router_loss_backward(const float *__restrict__ dloss, const T *__restrict__ logits,
                     const bool *__restrict__ mask, const float *__restrict__ slopes,
                     T *__restrict__ dlogits, long long rows, long long masked) {
    const long long number = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const int lane = threadIdx.x % ROW_THREADS;
    const bool real = number < rows;
    const long long row = real ? number : rows - 1;
    float p[HELD], weights[HELD], sum = 0;
    const float lse = softmax(p, logits + row * EXPERTS, lane);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int expert = i * ROW_THREADS + lane;
        if constexpr (BALANCE) {
            weights[i] = expert < EXPERTS ? slopes[expert] : 0;
            sum += weights[i] * p[i];
        } else {
            weights[i] = 2 * lse / *slopes;
        }
    }
    if constexpr (BALANCE) sum = group_sum<ROW_THREADS>(sum);
    if (!real) return;
    const bool counted = counts(mask, row, masked);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int expert = i * ROW_THREADS + lane;
        if (expert < EXPERTS)
            dlogits[row * EXPERTS + expert] =
                (T)(counted ? *dloss * p[i] * (weights[i] - sum) : 0.0f);
    }
}
