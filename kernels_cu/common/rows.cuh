// Rows of arrays that may be slices of wider ones, for kernels that read them where they lie.
//
//   constants   LANES, THREADS and, for Access, STRIDED: some array is such a slice
#pragma once
#include "common/vector.cuh"

// Where rows of an array start: `inner` of them `step` values apart, and such groups `outer`.  Rows
// that make several groups are fewer than 2^32.
struct Layout { long long inner, outer, step; };

__device__ __forceinline__ long long start(long long row, const Layout &of) {
    const unsigned turn = row < of.inner ? 0 : (unsigned)row / (unsigned)of.inner;
    return turn * of.outer + (row - turn * of.inner) * of.step;
}

// One access of a thread of a kernel that goes element by element: block i has tile i % tiles of row
// i / tiles.  Packed arrays are one row, and one number says where all of them are read.
template <bool STRIDED> struct Access {
    long long row = 0, column, left;  // left: columns from there on

    __device__ __forceinline__ Access(long long columns, unsigned tiles) {
        unsigned tile = blockIdx.x;
        if constexpr (STRIDED) {
            row = tile / tiles;
            tile %= tiles;
        }
        column = ((long long)tile * THREADS + threadIdx.x) * LANES;
        left = columns - column;
    }

    __device__ __forceinline__ long long in(const Layout &of) const {
        return STRIDED ? start(row, of) + column : column;
    }

    template <class E>
    __device__ __forceinline__ void load(float (&to)[LANES], const E *from,
                                         const Layout &of) const {
        ::load(to, from + in(of), left);
    }

    template <class E>
    __device__ __forceinline__ void store(E *to, const Layout &of,
                                          const float (&from)[LANES]) const {
        if (left >= LANES) ::store(to, in(of), from);  // in one piece: see vector.cuh
        else ::store(to + in(of), from, left);
    }
};
