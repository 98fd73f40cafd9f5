// Conversion of values to another dtype, and their addition to a float32 total.
//
//   cast y = (U) x        accumulate total = total + x
//
//   traffic     cast         elements * (sizeof(T) + sizeof(U))
//               accumulate   elements * (sizeof(T) + 8)
//   constants   T, U      dtypes of x and of the result, float for accumulate
//               LANES     values of one access: 16 bytes of the wider dtype, or fewer as the
//                         addresses allow
//               THREADS   threads of a block
//
//   The trick: each thread makes one access to every array, so that the 32 accesses of a warp are
//   contiguous: 16 bytes of both dtypes would leave gaps in the wider array.
#include <common/vector.cuh>

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
