// The blocks of a cluster used as one wide block.  Clusters need sm_90; before that, SIZE is 1.
#pragma once
#include <common/hopper.cuh>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define CLUSTER_KERNEL(size, ...) KERNEL(__VA_ARGS__)
__device__ uint32_t cluster_rank();  // referred to below, never called
__device__ void cluster_arrive_relaxed();
__device__ void cluster_wait();
__device__ void mbarrier_init(uint64_t *bar, int count);
__device__ void mbarrier_init_fence();
__device__ void mbarrier_arrive_expect_tx(uint64_t *bar, int bytes);
__device__ void mbarrier_wait(uint64_t *bar, int parity);
__device__ void store_async_b32(void *dst, uint32_t value, uint64_t *bar, int rank);
#else
// CLUSTER_KERNEL(blocks of a cluster, arguments of KERNEL) name(parameters)
#define CLUSTER_KERNEL(size, ...) KERNEL(__VA_ARGS__) __cluster_dims__(size, 1, 1)
#endif

template <int SIZE> DEVICE int rank_in() {
    if constexpr (SIZE > 1) return cluster_rank();
    else return 0;
}

// Shared memory for FLOATS partial results that the warps of all blocks exchange; in a cluster with
// an mbarrier that counts their bytes.  A barrier of the whole cluster would also wait for all
// stores to global memory and flush the L1 cache.
template <int CLUSTER> struct Landing { uint64_t landed; };
template <> struct Landing<1> {};
template <int FLOATS, int CLUSTER = 1> struct Exchange : Landing<CLUSTER> {
    float partials[FLOATS];
};

// Call it first: the shared memory of a block that does not run yet cannot be written.
template <int SIZE, class... E> DEVICE void cluster_start(E &...exchanges) {
    if constexpr (SIZE > 1) {
        if (threadIdx.x == 0) {
            (mbarrier_init(&exchanges.landed, 1), ...);
            mbarrier_init_fence();
        }
        cluster_arrive_relaxed();
        cluster_wait();
    }
}

// Send v to all blocks, as partials `mine`, `mine` + stride, .. of the N * stride that all warps
// send together, and wait for those of the others.  All lanes of a warp call it together.  An
// exchange may be used again, with `use` one higher, after another exchange has been used.
template <int SIZE, int N, class E>
DEVICE void share_partials(E &exchange, const float (&v)[N], int mine, int stride, int use) {
    const int lane = threadIdx.x % 32;
    if constexpr (SIZE > 1) {
        __syncwarp();  // all lanes have read the exchange before this one
        if (threadIdx.x == 0)
            mbarrier_arrive_expect_tx(&exchange.landed, N * stride * (int)sizeof(float));
#pragma unroll
        for (int i = 0; i < N; i++)
            if (lane < SIZE)
                store_async_b32(&exchange.partials[i * stride + mine], __float_as_uint(v[i]),
                                &exchange.landed, lane);
        mbarrier_wait(&exchange.landed, use & 1);  // counts arrived bytes: no flush of L1
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (lane == 0) exchange.partials[i * stride + mine] = v[i];
        __syncthreads();
    }
}
