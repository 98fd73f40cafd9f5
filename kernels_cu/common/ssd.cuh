// Products of chunks of state space duality: those of common/delta.cuh, with states of any number of
// rows.
//
//   constants   those of common/delta.cuh and common/ssd_chunk.cuh
#pragma once
#include <common/ssd_chunk.cuh>  // first: it says what CHANNELS is
#include <common/delta.cuh>

using Whole = Tile<PARTS * DEPTH, COLUMNS, 0>;

DEVICE State slab_of(const Whole &state, int slab) {
    return State{state.start + slab * DEPTH * COLUMNS};
}

// What a block walks along: COLUMNS columns of the state of a head, in one text.
struct Place {
    int head, group, from;
    long long own;  // of the state, among those of all texts
    Text text;

    DEVICE Place(const I *offsets, const Sizes &s)
        : head(blockIdx.x / s.tiles % (s.heads * s.groups)), group(head / s.groups),
          from(blockIdx.x % s.tiles * COLUMNS),
          own((blockIdx.x / s.tiles * (long long)DIM) * s.values + from),
          text(offsets, blockIdx.x / (s.tiles * s.heads * s.groups), s) {}
};

// state = whole * state + keys^T (factor * values), for rows of the state as many as DEPTH.
template <class Factor>
DEVICE void grow(const State &state, float whole, const Keys &keys, const Values &values,
                 Factor factor) {
    constexpr int ROWS = DEPTH / SIDE;
    const int column = thread_x() * N;
    float next[ROWS][N];
#pragma unroll
    for (int m = 0; m < ROWS; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
            next[m][n] = whole * state.at(thread_y() * ROWS + m, column + n);
    add_columns(next, keys, values, 0, factor);
    each(next, [&](int row, int column, float value) { state.at(row, column) = value; });
}
