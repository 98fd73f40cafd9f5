// Layout of the sums of the gradient of q, to which blocks of keys add one by one.  A tile of 64
// queries of a head is float[2][half_columns / 8][128][4]: the registers of the 128 lanes of each
// of two warpgroups, which hold the left and the right half of the columns of a product of 64 rows.
#pragma once
#include <common/warpgroup.cuh>

// Number of columns of a half.
constexpr int half_columns(int dim) { return dim <= PANEL ? PANEL / 2 : PANEL; }
