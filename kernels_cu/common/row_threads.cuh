// How threads share a row: part of a warp, a whole block, or the blocks of a cluster.
//
//   constants   COLUMNS       length of a row
//               LANES         values of one access
//               ROW_THREADS   threads of a block that share a row: a power of two up to 32, or all
//               THREADS       threads of a block
//               CLUSTER       blocks that share a row: 1, or up to 8 from sm_90 on
#pragma once
#include <common/cluster.cuh>
#include <common/reduce.cuh>

constexpr int ROWS = THREADS / ROW_THREADS;          // rows that a block works on at once
constexpr int STEP = CLUSTER * ROW_THREADS * LANES;  // columns between two vectors of a thread
constexpr int DEPTH = (COLUMNS + STEP - 1) / STEP;   // vectors of a thread
constexpr int WARPS = CLUSTER * THREADS / 32;        // warps of a row that several warps share

// Whether the row has this column.  All vectors of a thread but the last begin inside the row.
DEVICE bool inside(int column, int k = DEPTH - 1) {
    return COLUMNS % STEP == 0 || k + 1 < DEPTH || column < COLUMNS;
}

// The first column of vector k of a thread of this block.
DEVICE int column_of(int k, int thread = threadIdx.x % ROW_THREADS) {
    return (rank_in<CLUSTER>() * ROW_THREADS + thread) * LANES + k * STEP;
}
