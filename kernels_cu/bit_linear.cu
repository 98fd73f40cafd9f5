// BitNet's linear layer in training: scale and codes of its weight, and the last step of dx.
//
//   bit_scale      w_scale = max(mean |w|, 1e-5)
//   bit_codes      codes = round(w / w_scale) clipped to -1 .. 1: 1 where w / w_scale > 1 / 2
//   bit_gradient   dx = sums * w_scale, where sums = dy codes
//
//   traffic     bit_scale     values * sizeof(T)
//               bit_codes     values * (sizeof(T) + sizeof(U))
//               bit_gradient  values * (4 + sizeof(T))
//   constants   T         dtype of the weight, and of dx
//               U         dtype of the codes: int8 for a product of integers, else T
//               LANES     values of one access: 16 bytes of the widest dtype, or fewer as the
//                         addresses allow
//               THREADS   threads of a block
//               STRIDED   some array is a slice of a wider one: see rows.cuh
//
//   The trick: a block of bit_scale takes every gridDim-th tile, which gives few sums; the last
//   block to end adds them, always in the same order.  Codes need no clipping: a ratio that rounds
//   to 1 or more is above a half, and a half itself rounds to 0, which is even.
#include <common/last_block.cuh>
#include <common/reduce.cuh>
#include <common/rows.cuh>

constexpr int WARPS = THREADS / 32;
constexpr float LEAST = 1e-5f;  // smallest scale, as in BitNet

KERNEL(THREADS)
bit_scale(const T *__restrict__ weight, float *sums, unsigned *arrived, float *w_scale,
          const __grid_constant__ Rows rows, unsigned tiles, long long count) {
    __shared__ Exchange<WARPS> exchange[2];
    __shared__ bool last;
    float sum = 0;
    for (unsigned tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Access<STRIDED> at(rows, tile);
        float v[LANES], part = 0;
        at.load(v, weight, 0);
#pragma unroll
        for (int j = 0; j < LANES; j++) part += fabsf(v[j]);
        sum += part;
    }
    sum = row_sum<THREADS>(sum, exchange[0]);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
    if (!last_to_arrive(arrived, gridDim.x, last)) return;
    float total = 0;
    for (int i = threadIdx.x; i < gridDim.x; i += THREADS) total += __ldcg(&sums[i]);
    total = row_sum<THREADS>(total, exchange[1]);
    if (threadIdx.x != 0) return;
    const float mean = __fdiv_rn(total, (float)count);
    *w_scale = mean < LEAST ? LEAST : mean;  // NaN stays
}

KERNEL(THREADS)
bit_codes(const T *__restrict__ weight, U *__restrict__ codes, const __grid_constant__ Rows rows,
          const float *__restrict__ w_scale) {
    const Access<STRIDED> at(rows);
    float v[LANES];
    at.load(v, weight, 0);
    const float factor = __fdiv_rn(1.0f, *w_scale);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float ratio = v[j] * factor;
        v[j] = ratio > 0.5f ? 1.0f : ratio < -0.5f ? -1.0f : 0.0f;
    }
    at.store(codes, 1, v);
}

KERNEL(THREADS)
bit_gradient(const float *__restrict__ sums, T *__restrict__ dx, const __grid_constant__ Rows rows,
             const float *__restrict__ w_scale) {
    const Access<STRIDED> at(rows);
    const float factor = *w_scale;
    float v[LANES];
    at.load(v, sums, 0);
#pragma unroll
    for (int j = 0; j < LANES; j++) v[j] *= factor;
    at.store(dx, 1, v);
}
