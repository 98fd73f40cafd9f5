// Conversion of values to another dtype, and their addition to a float32 total.
//
//   cast y = (U) x        beside y = (U) [x, x2, x3], by rows        accumulate total = total + x
//
//   traffic     cast, beside   elements * (sizeof(T) + sizeof(U))
//               accumulate     elements * (sizeof(T) + 8)
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

// Where the columns of each array end in a row of y, how far apart its own rows are, and the tiles
// of a row of y.
struct Beside {
    long long stop[3], pitch[3];
    unsigned tiles;
};

KERNEL(THREADS)
beside(const T *__restrict__ x, const T *__restrict__ x2, const T *__restrict__ x3,
       U *__restrict__ y, const __grid_constant__ Beside of) {
    const unsigned row = blockIdx.x / of.tiles, tile = blockIdx.x % of.tiles;
    const long long at = ((long long)tile * THREADS + threadIdx.x) * LANES;
    if (at >= of.stop[2]) return;
    const int own = (at >= of.stop[0]) + (at >= of.stop[1]);
    const T *const from = own == 0 ? x : own == 1 ? x2 : x3;
    float v[LANES];
    load(v, from + row * of.pitch[own] + at - (own == 0 ? 0 : of.stop[own - 1]));
    store(y, row * of.stop[2] + at, v);
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
