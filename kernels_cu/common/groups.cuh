// Products of sorted rows with the matrices of their groups: which part of them a job is.
//
//   FORM 0     c[p, n] = sum over k of a[row(p), k] * b[e, n, k] + bias[e, n]    y of x and weight
//   FORM 1     c[p, n] = sum over k of a[row(p), k] * b[e, k, n]                 dx of dy and weight
//   FORM 2     c[e, m, n] = sum over the p of e of a[row(p), m] * b[row(p), n]   dweight of dy and x
//
//   p is in group e if offsets[e] <= p < offsets[e + 1]; row(p) is p, or order[p] / TOP
//
//   constants   FORM
//               A_TOP, B_TOP      TOP of a and of b; 0 where row(p) is p
//               ROWS, COLUMNS     of c, of a block
//               I                 dtype of offsets
#pragma once

struct Sizes {
    int experts, rows;  // groups; rows that are sorted
    int m, n, k;        // of a group's product; m in FORM 2, k in the others
    int across, down;   // tiles of n; of m in FORM 2
};

// The end of a group; it is never before 0 or beyond the rows, whatever offsets hold.
DEVICE int end_of(const I *offsets, int group, int rows) {
    return min(max((int)offsets[group + 1], 0), rows);
}
DEVICE int start_of(const I *offsets, int group, int rows) {
    return group == 0 ? 0 : end_of(offsets, group - 1, rows);
}

struct Part {
    int group;        // -1: none; `experts`: rows that are in no group
    int first, stop;  // rows of c; in FORM 2 the p of the sum
    int row, column;  // where the tile begins in c; row in FORM 2 alone
    long long at;     // where the group's matrix begins, in b or, in FORM 2, in c
};

// The part that job number `job` is.
DEVICE Part part_of(const int *tiles, const I *offsets, const Sizes &s, int job) {
    const int tile = job / s.across, column = job % s.across * COLUMNS;
    if constexpr (FORM == 2) {
        const int group = tile / s.down;
        return {group, start_of(offsets, group, s.rows), end_of(offsets, group, s.rows),
                tile % s.down * ROWS, column, (long long)group * s.m * s.n};
    } else {
        const int group = tiles[3 * tile];
        return {group, tiles[3 * tile + 1], tiles[3 * tile + 2], 0, column,
                (long long)group * s.n * s.k};
    }
}

template <int TOP> DEVICE int row_of(const int *order, int p) {
    if constexpr (TOP == 0) return p;
    else return order[p] / TOP;
}
