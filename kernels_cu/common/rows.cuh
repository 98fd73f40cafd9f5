// Rows of arrays that may be slices of wider ones, for kernels that read them without a copy.
//
//   constants   LANES, THREADS and, for Access, STRIDED: some array is such a slice
#pragma once
#include <common/vector.cuh>

// Where the rows of an array start: groups of `inner` rows, `step` values apart in a group; groups
// are `outer` values apart.  With more than one group there are fewer than 2^32 rows.
struct Layout { long long inner, outer, step; };

DEVICE long long start(long long row, const Layout &of) {
    const unsigned group = row < of.inner ? 0 : (unsigned)row / (unsigned)of.inner;
    return group * of.outer + (row - group * of.inner) * of.step;
}

// The layouts of all arrays of a kernel, at most five, in the order of its parameters.
struct Layouts { long long inner, outer[5], step[5]; };

DEVICE Layout layout(const Layouts &of, int array) {
    return {of.inner, of.outer[array], of.step[array]};
}

// The rows of an elementwise kernel: block i has tile i % tiles of row i / tiles.  Packed arrays
// are one row.
struct Rows {
    Layouts layouts;
    long long columns;
    unsigned tiles;  // of a row
};

// One access of a thread to every array of Rows; `array` is an index into Layouts.
template <bool STRIDED> struct Access {
    const Rows &rows;
    long long row = 0, column, left;  // left: number of columns from `column` on

    DEVICE Access(const Rows &rows, unsigned tile = blockIdx.x) : rows(rows) {
        if constexpr (STRIDED) {
            row = tile / rows.tiles;
            tile %= rows.tiles;
        }
        column = ((long long)tile * THREADS + threadIdx.x) * LANES;
        left = rows.columns - column;
    }

    DEVICE long long in(int array) const {
        if constexpr (!STRIDED) return column;
        return start(row, layout(rows.layouts, array)) + column;
    }

    template <class E>
    DEVICE void load(float (&to)[LANES], const E *from, int array) const {
        ::load(to, from + in(array), left);
    }

    template <class E>
    DEVICE void store(E *to, int array, const float (&from)[LANES]) const {
        if (left >= LANES) ::store(to, in(array), from);  // not split in four: see vector.cuh
        else ::store(to + in(array), from, left);
    }
};
