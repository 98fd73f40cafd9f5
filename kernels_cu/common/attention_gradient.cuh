// Gradients of scores, shared by the backward kernels of attention.
//
//   p = exp(score - lse)      ds = p * (dout @ v.T - delta)      delta = rowsum(dout * out) - dlse
#pragma once
#include <common/attention.cuh>

// The numbers of a call.
struct Call {
    Options options;
    float scale;
    int stat_rows;          // rows of a head in stats: see attention_delta.cu
    long long rests_start;  // offset in floats from the start of stats to its `rest` values
    int key_stride, value_stride;  // values from a token of k, or of v, to the next
};

// Limits on unrolling, because sums and options leave few registers for addresses: the iterations
// of a copy that are unrolled, and the widest rows whose loops are.
constexpr int UNROLLED = sizeof(T) == 4 && (DIM > 128 || VALUE_DIM > 128) ? 2 : 4;
constexpr int WIDEST = FOLD ? 128 : 64;

// A row of p sums to 1 except for the rounding of lse and of the scores, which grows with their
// size and which exp turns into a relative error of the whole row.  In float32 the kernel that owns
// queries sums p, and `rest`, the log2 of that sum, is subtracted from exponents.  `rest` is 0 for
// a sum that differs from 1 only by its own rounding, and for one further from 1 than the rounding
// of scores explains: lse may then cover more keys than this call has.
constexpr bool RESTS = sizeof(T) == 4;
constexpr float EPS = 1.0f / (1 << 23);
DEVICE float rest_of(float sum, float lse) {
    const float away = fabsf(sum - 1), most = fminf(0.5f, 32 * EPS * (1 + fabsf(lse)));
    return 2 * EPS < away && away < most ? log2f(sum) : 0.0f;
}

// Statistics of a query: lse (with FOLD times log2(e); +inf where it sees no key, and in padding
// rows), delta and rest.
struct Stat { float lse, delta, rest; };
// A lane holds those of its rows or, where queries are columns, those of its two columns of each n.
template <int M> struct RowStats {
    float2 both[M][2];
    float rest[M][2];

    DEVICE void read(int m, int half, const float *stats, const float *rests) {
        both[m][half] = *reinterpret_cast<const float2 *>(stats);
        rest[m][half] = RESTS && rests != nullptr ? *rests : 0;
    }
    DEVICE Stat of(int m, int, int i) const {
        return {both[m][i / 2].x, both[m][i / 2].y, rest[m][i / 2]};
    }
};
template <int N> struct ColumnStats {
    float4 both[N];
    float2 rest[N];

    DEVICE void read(int n, const float *stats, const float *rests) {
        both[n] = *reinterpret_cast<const float4 *>(stats);
        if constexpr (RESTS) rest[n] = *reinterpret_cast<const float2 *>(rests);
    }
    DEVICE Stat of(int, int n, int i) const {
        if (i % 2) return {both[n].z, both[n].w, rest[n].y};
        return {both[n].x, both[n].y, rest[n].x};
    }
};

// exp(score - lse).  Without FOLD scores may be large, so the difference to lse is taken first,
// while it is exact, and multiplied by `unit` afterwards.
DEVICE float probability(float score, float unit, const Stat &stat) {
    float power = FOLD ? fmaf(score, unit, -stat.lse) : (score - stat.lse) * unit;
    if constexpr (RESTS) power -= stat.rest;
    return exp2f(power);
}

// Turn scores s into p with dropout, the weights of the values, and with DS the products g of dout
// and v into ds; each(m, half, column, p, ds) is called for every pair.
template <bool DS, bool BY_KEYS, int M, int N, class Stats, class Each>
DEVICE void differentiate(const Scores &scores, float (&s)[M][N][4], float (&g)[M][N][4],
                          const Stats &stats, int head, int row, int column, Each each) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            unsigned words[4];
            if constexpr (DROPOUT) scores.draw<BY_KEYS>(words, head, row + m * 16, column + n * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const Stat stat = stats.of(m, n, i);
                const float p = probability(s[m][n][i], scores.unit, stat);
                float kept = 1;
                if constexpr (DROPOUT)
                    kept = words[i] < scores.drop_threshold ? 0 : scores.keep_scale;
                s[m][n][i] = p * kept;
                if constexpr (DS) {
                    g[m][n][i] = p * (g[m][n][i] * kept - stat.delta);
                    each(m, i / 2, column + n * 8 + threadIdx.x % 4 * 2 + i % 2, p, g[m][n][i]);
                }
            }
        }
}
