// All gradients of a step between backward and optimizer: their norm, and their rescaling.
//
//   measure   norm = sqrt(sum of (g / divisor)^2), finite, factor = min(1, max_norm / norm) / divisor;
//             WRITE: also out = g / divisor, float32
//   rescale   g *= factor, in place; no change where factor is 1 or a gradient is not finite
//
//   traffic     measure: elements * sizeof(g), and + 4 with WRITE; rescale: 2 * elements * sizeof(g)
//   constants   those of common/many.cuh, with the fields GRADIENT and OUT; a kind is a dtype
//               WRITE     whether measure writes `out`
//
//   The trick: a block takes every gridDim-th chunk, which gives few sums; the last block to end
//   adds them, always in the same order.  Eight squares are added in float32, or in float64 where
//   they are outside of its range; the sums of eight are added in float64.
#include <common/last_block.cuh>
#include <common/many.cuh>

constexpr int WARPS = THREADS / 32;

DEVICE double block_sum(double v, double *partial) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < WARPS ? partial[threadIdx.x % 32] : 0.0;
#pragma unroll
    for (int d = WARPS / 2; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    return v;
}

DEVICE double squares(const Values &v) {
    float sum = 0, largest = 0;
    each([&](int i, int j) {
        sum += v.at[i][j] * v.at[i][j];
        largest = fmaxf(largest, fabsf(v.at[i][j]));
    });
    double wide = sum;
    if (largest > 1e18f || (0 < largest && largest < 1e-15f)) {
        wide = 0;
        each([&](int i, int j) { wide += (double)v.at[i][j] * v.at[i][j]; });
    }
    return wide;
}

// Call use(address of the tensor, offset, count) for each of the chunk's spans that this warp owns.
template <class Use>
DEVICE void spans(const long long *tensor, long long first, Use use) {
    with_kind(tensor[KIND], [&](auto kind) {
        using T = NumberOf<decltype(kind)::value>;
        const long long elements = tensor[ELEMENTS], end = min(first + CHUNK, elements);
        for (long long at = first + threadIdx.x / 32 * SPAN; at < end; at += WARPS * SPAN)
            use(address<T>(tensor, GRADIENT), at, elements - at);
    });
}

DEVICE void scale(Values &v, float by) {
    each([&](int i, int j) { v.at[i][j] *= by; });
}

KERNEL(THREADS, 4)
measure(const long long *tensors, const int *owners, int chunks, const double *divisor,
        double max_norm, double *sums, unsigned *arrived, double *norm, float *factor,
        bool *finite) {
    __shared__ double partial[2][WARPS];
    __shared__ bool last;
    const float inverse = divisor ? (float)(1 / *divisor) : 1.0f;
    double sum = 0;
    for (int c = blockIdx.x; c < chunks; c += gridDim.x) {
        const long long *tensor = tensors + (long long)owners[c] * FIELDS;
        spans(tensor, (c - tensor[FIRST]) * CHUNK, [&](auto *from, long long at, long long count) {
            Values v;
            load(v, from + at, count);
            scale(v, inverse);
            if constexpr (WRITE) store(address<float>(tensor, OUT), at, v, count);
            sum += squares(v);
        });
    }
    sum = block_sum(sum, partial[0]);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
    if (!last_to_arrive(arrived, gridDim.x, last)) return;
    double total = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += THREADS) total += __ldcg(&sums[i]);
    total = block_sum(total, partial[1]);
    if (threadIdx.x == 0) {
        const double root = sqrt(total);
        *norm = root;
        *finite = root < 1e300;  // squares of finite float32 stay far below
        *factor = (float)(root > max_norm ? max_norm / root : 1.0) * inverse;
    }
}

KERNEL(THREADS)
rescale(const long long *tensors, const int *owners, const float *factor, const bool *finite) {
    const float by = *finite ? *factor : 1.0f;
    const long long *tensor = tensors + (long long)owners[blockIdx.x] * FIELDS;
    if (by != 1)
        spans(tensor, (blockIdx.x - tensor[FIRST]) * CHUNK,
              [&](auto *to, long long at, long long count) {
                  Values v;
                  load(v, to + at, count);
                  scale(v, by);
                  store(to, at, v, count);
              });
}
