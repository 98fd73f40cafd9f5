// Gradients of scores, as attention's backward kernels share them.
//
//   p = exp(score - lse)      ds = p * (dout @ v.T - delta)      delta = rowsum(dout * out) - dlse
#pragma once
#include "common/attention.cuh"

// What is unrolled, where sums and options leave few registers for addresses: turns of a copy, rows
// of up to so many columns.
constexpr int UNROLLED = sizeof(T) == 4 && (DIM > 128 || VALUE_DIM > 128) ? 2 : 4;
constexpr int WIDEST = FOLD ? 128 : 64;

// Of a query: lse, with FOLD times log2(e), +inf where it sees no key or is none; and delta.  A lane
// holds those of its rows or, where columns are queries, of its two columns of each n.
template <int M>
__device__ __forceinline__ float2 stat_of(const float2 (&rows)[M][2], int m, int, int i) {
    return rows[m][i / 2];
}
template <int N>
__device__ __forceinline__ float2 stat_of(const float4 (&columns)[N], int, int n, int i) {
    return i % 2 ? make_float2(columns[n].z, columns[n].w) : make_float2(columns[n].x, columns[n].y);
}

// Turn scores s into p with dropout, what values are weighted by, and products g of dout and v
// into ds, where DS; each(m, half, column, ds) sees them one by one.
template <bool DS, bool BY_KEYS, int M, int N, class Stats, class Each>
__device__ __forceinline__ void differentiate(const Scores &scores, float (&s)[M][N][4],
                                              float (&g)[M][N][4], const Stats &stats, int head,
                                              int row, int column, Each each) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            unsigned words[4];
            if constexpr (DROPOUT) scores.draw<BY_KEYS>(words, head, row + m * 16, column + n * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 stat = stat_of(stats, m, n, i);
                // without FOLD scores may be large: their difference to lse is exact before it grows
                const float x = s[m][n][i];
                const float p =
                    exp2f(FOLD ? fmaf(x, scores.unit, -stat.x) : (x - stat.x) * scores.unit);
                float kept = 1;
                if constexpr (DROPOUT) kept = words[i] < scores.dropped ? 0 : scores.grown;
                s[m][n][i] = p * kept;
                if constexpr (DS) {
                    g[m][n][i] = p * (g[m][n][i] * kept - stat.y);
                    each(m, i / 2, column + n * 8 + threadIdx.x % 4 * 2 + i % 2, g[m][n][i]);
                }
            }
        }
}
