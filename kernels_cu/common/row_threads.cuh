// How threads share rows: those of a part of a warp, of a block, or of the blocks of a cluster.
//
//   constants   COLUMNS       length of a row
//               LANES         values of one access
//               ROW_THREADS   threads of a block that share a row: a power of two up to 32, or all
//               THREADS       of a block
//               CLUSTER       blocks that share a row: 1, or up to 8 from sm_90 on
#pragma once
#include "common/cluster.cuh"
#include "common/reduce.cuh"

constexpr int ROWS = THREADS / ROW_THREADS;         // that a block holds side by side
constexpr int STEP = CLUSTER * ROW_THREADS * LANES;  // columns between two vectors of a thread
constexpr int DEPTH = (COLUMNS + STEP - 1) / STEP;   // vectors of a thread
constexpr int WARPS = CLUSTER * THREADS / 32;        // that share a row of more than a warp

// Whether the row has such a column.  Vector k of a thread begins in the row unless it is the last.
__device__ __forceinline__ bool inside(int column, int k = DEPTH - 1) {
    return COLUMNS % STEP == 0 || k + 1 < DEPTH || column < COLUMNS;
}

// The columns of vector k of a thread of this block.
__device__ __forceinline__ int column_of(int k, int thread = threadIdx.x % ROW_THREADS) {
    return (rank_in<CLUSTER>() * ROW_THREADS + thread) * LANES + k * STEP;
}
