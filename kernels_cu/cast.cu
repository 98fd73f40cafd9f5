// Values of one dtype, rounded to another or added to float32.
//
//   cast y = (U) x        accumulate total = total + x
//
//   traffic     cast         elements * (sizeof(T) + sizeof(U))
//               accumulate   elements * (sizeof(T) + 8)
//   constants   T, U      dtypes of x and of the result, float for accumulate
//               LANES     values of one access: 16 bytes of the wider dtype, or what the addresses
//                         are multiples of
//               THREADS   of a block
//
//   The trick: one access of every array a thread, so that the 32 of a warp always lie side by
//   side: 16 bytes on both sides would leave gaps on the wider one.
#include "common/vector.cuh"

KERNEL(THREADS) cast(const T *__restrict__ x, U *__restrict__ y, long long elements) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float v[LANES];
    load(v, x + at, elements - at);
    store(y + at, v, elements - at);
}

KERNEL(THREADS) accumulate(const T *__restrict__ x, U *__restrict__ total, long long elements) {
    const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * LANES;
    float v[LANES], sum[LANES];
    load(v, x + at, elements - at);
    load(sum, total + at, elements - at);
#pragma unroll
    for (int j = 0; j < LANES; j++) sum[j] += v[j];
    store(total + at, sum, elements - at);
}
