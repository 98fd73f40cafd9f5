// One access of a thread of a kernel that goes element by element over rows of arrays, which may
// be slices of wider ones.
//
//   constants   LANES, THREADS
//
// Tile i % tiles of row i / tiles is that of block i.  Row r of an array starts at r / inner *
// outer + r % inner * step, with an outer and a step of its own; packed arrays are one row.
#pragma once

struct Access {
    unsigned outer, inner;
    long long column, left;  // left: columns from there on

    __device__ __forceinline__ Access(long long columns, unsigned tiles, unsigned rows) {
        const unsigned row = blockIdx.x / tiles;
        outer = row / rows;
        inner = row % rows;
        column = ((long long)(blockIdx.x % tiles) * THREADS + threadIdx.x) * LANES;
        left = columns - column;
    }

    __device__ __forceinline__ long long in(long long outer_step, long long step) const {
        return outer * outer_step + inner * step + column;
    }
};
