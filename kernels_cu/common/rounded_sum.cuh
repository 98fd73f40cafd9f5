// A weight plus the change of its adapter, rounded as a file has it: the part that does not depend
// on how the weight is stored.
//
// A warp has ROWS rows of 32 * WIDTH columns, a block of threads 8 warps one under another, and
// blocks with the same columns follow each other: they find their part of a in L1.
#pragma once
#include <common/rounding.cuh>
#include <common/vector.cuh>

constexpr int WIDTH = 4;  // neighbouring columns of a thread
constexpr int SPAN = 32 * WIDTH, WARPS = THREADS / 32;

struct Part {
    int top, left;     // its first row and column
    int rows, width;   // of it
    int pitch;         // columns of the whole weight
    int rank, height;  // height: rows of an expert, or all
    int groups;        // blocks of threads one under another
    float scale;
};

struct Place {
    int row, column;  // of the part, the first of a thread
    bool inside;
    int top, left;  // of the whole weight

    DEVICE explicit Place(const Part &part) {
        row = (blockIdx.x % part.groups * WARPS + threadIdx.x / 32) * ROWS;
        column = blockIdx.x / part.groups * SPAN + threadIdx.x % 32 * WIDTH;
        inside = column < part.width;  // others take part in the exchange of their warp
        column = inside ? column : 0;
        top = part.top + row;
        left = part.left + column;
    }

    // The row k of a thread, in the whole weight; the last one in place of those below it.
    DEVICE long long whole(const Part &part, int k) const {
        return top + min(k, part.rows - 1 - row);
    }
};

// Whether the rows of a warp are to be written: those of groups without rows are not.
DEVICE bool wanted(const Part &part, const Place &at, const I *offsets) {
    if (at.row >= part.rows) return false;
    if constexpr (!GROUPED) return true;
    const int group = at.top / part.height;
    return offsets[group] < offsets[group + 1];
}

// sums[k] = scale * b[row + k] a, rounded product by product and sum by sum
DEVICE void low_rank(float (&sums)[ROWS][WIDTH], const Part &part, const Place &at, const float *a,
                     const float *b) {
    const long long expert = at.top / part.height;  // that of all rows of the warp
    a += expert * part.rank * part.pitch + at.left;
    for (int r = 0; r < part.rank; r++) {
        float low[WIDTH];
#pragma unroll
        for (int j = 0; j < WIDTH; j += A_LANES)
            load(reinterpret_cast<float (&)[A_LANES]>(low[j]), a + r * part.pitch + j);
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const float up = __fmul_rn(b[at.whole(part, k) * part.rank + r], part.scale);
#pragma unroll
            for (int j = 0; j < WIDTH; j++)
                sums[k][j] = __fadd_rn(sums[k][j], __fmul_rn(up, low[j]));
        }
    }
}

DEVICE void write(T *w, const Part &part, const Place &at, int k, const float (&v)[WIDTH]) {
    if (!at.inside || at.row + k >= part.rows) return;
    const long long to = (long long)(at.row + k) * part.width + at.column;
#pragma unroll
    for (int j = 0; j < WIDTH; j += LANES)
        store(w, to + j, reinterpret_cast<const float (&)[LANES]>(v[j]));
}

// Rounds the values of a thread; `sizes` are given of rows, for INT8, of all, for TERNARY, or of
// blocks.
DEVICE void round_rows(float (&sums)[ROWS][WIDTH], T *w, const Part &part, const Place &at,
                       const float *levels, const float *sizes) {
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        const long long row = at.whole(part, k);
        float size = KIND == TERNARY ? 1 : 127;
        if constexpr (GIVEN)
            size = sizes[KIND == TERNARY ? 0
                         : KIND == INT8  ? row
                                         : (row * part.pitch + at.left) / block_of<KIND>()];
        round_block<KIND, GIVEN>(sums[k], levels, size);
        write(w, part, at, k, sums[k]);
    }
}

constexpr bool HAS_LEVELS = KIND <= MXFP4;

DEVICE void make_levels(float *levels) {
    if (HAS_LEVELS && threadIdx.x < 16) levels[threadIdx.x] = level_of<KIND>(threadIdx.x);
    __syncthreads();
}
