// The blocks of a cluster as one wide block.  Clusters begin with sm_90; before, SIZE is 1.
#pragma once
#include <common/ptx.cuh>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define CLUSTER_KERNEL(size, ...) KERNEL(__VA_ARGS__)
__device__ uint32_t cluster_rank();  // named below, never called
__device__ void cluster_arrive();
__device__ void cluster_wait();
__device__ void *cluster_map(const void *p, int rank);
#else
// CLUSTER_KERNEL(blocks of a cluster, and what KERNEL takes) name(parameters)
#define CLUSTER_KERNEL(size, ...) KERNEL(__VA_ARGS__) __cluster_dims__(size, 1, 1)
#endif

template <int SIZE> __device__ __forceinline__ int rank_in() {
    if constexpr (SIZE > 1) return cluster_rank();
    else return 0;
}

// Wait for all threads of all blocks, and see what they wrote to shared memory.
template <int SIZE> __device__ __forceinline__ void meet() {
    if constexpr (SIZE > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
}

// Before anything else: a neighbour whose block does not run yet has no shared memory.
template <int SIZE> __device__ __forceinline__ void enter() {
    if constexpr (SIZE > 1) meet<SIZE>();
}

// Where the block of a rank keeps what p points to in this one.
template <int SIZE, class E> __device__ __forceinline__ E *of_block(E *p, int rank) {
    if constexpr (SIZE > 1) return static_cast<E *>(cluster_map(p, rank));
    else return p;
}
