// Sums of the gradient of q, to which blocks of keys add in turns: a tile of 64 queries of a head
// has float[2][turn_columns / 8][128][4], as the lanes of two warpgroups hold its columns, left and
// right half, of products of 64 rows.
#pragma once
#include "common/warpgroup.cuh"

// Columns of a half.
constexpr int turn_columns(int dim) { return dim <= PANEL ? PANEL / 2 : PANEL; }
