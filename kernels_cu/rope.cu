// Rotary position embedding of queries and keys, in one launch, in place too.
//
//   y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        INVERSE: sin changes its sign
//   of the pairs (i, i + HALF), or INTERLEAVED (2 i, 2 i + 1), of each head; cos and sin are row
//   p of tables, p the token's position.  Columns from 2 HALF on are copied
//   where y is another array.
//
//   traffic     tokens * (HEADS + KV_HEADS) * DIM * sizeof(T) * 2, and HALF * sizeof(C) * 2 a token
//   constants   T, C, I           dtypes of q and k, of the tables, of positions
//               HEADS, KV_HEADS   heads of q and of k; no k where KV_HEADS is 0
//               DIM, HALF         columns of a head; pairs of them that turn
//               LANES             values of one access: 16 bytes, or what DIM, HALF and the
//                                 addresses are multiples of
//               COLUMNS           threads of a head
//               SLOTS             heads of a token that a block turns at a time
//               TOKENS            of a block
//               INTERLEAVED, INVERSE, IN_PLACE
//
//   The trick: a thread keeps its cosines and sines in registers and walks heads, so a table is
//   read once a token.  It loads both values of a pair before it stores one: y may be x.
//   A position outside the tables gives NaN, and no read out of bounds.
#include "common/vector.cuh"

constexpr int PAIRS = INTERLEAVED && LANES > 1 ? LANES / 2 : LANES;  // of a thread at a time
constexpr int TURNED = 2 * HALF;
constexpr int ALL_HEADS = HEADS + KV_HEADS;

// Heads are counted through: those of q, then those of k.
__device__ __forceinline__ bool of_q(int head) { return KV_HEADS == 0 || head < HEADS; }
__device__ __forceinline__ long long start(long long token, int head) {
    return of_q(head) ? (token * HEADS + head) * DIM : (token * KV_HEADS + head - HEADS) * DIM;
}

// Turn the pairs from `pair` on of one head.
__device__ __forceinline__ void turn(const T *x, T *y, int pair, const float (&c)[PAIRS],
                                     const float (&s)[PAIRS]) {
    float first[PAIRS], second[PAIRS];
    if constexpr (!INTERLEAVED || LANES == 1) {
        const int one = INTERLEAVED ? 2 * pair : pair, other = INTERLEAVED ? one + 1 : pair + HALF;
        load(first, x + one);
        load(second, x + other);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const float turned = first[j] * c[j] - second[j] * s[j];
            second[j] = second[j] * c[j] + first[j] * s[j];
            first[j] = turned;
        }
        store(y + one, first);
        store(y + other, second);
    } else {
        float both[2 * PAIRS];
        load(both, x + 2 * pair);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const float turned = both[2 * j] * c[j] - both[2 * j + 1] * s[j];
            both[2 * j + 1] = both[2 * j + 1] * c[j] + both[2 * j] * s[j];
            both[2 * j] = turned;
        }
        store(y + 2 * pair, both);
    }
}

// Token t reads row positions[t % period] of the tables, or row t % period without positions.
KERNEL(TOKENS *SLOTS *COLUMNS) rope(
    const T *q, const T *k, const C *__restrict__ cos, const C *__restrict__ sin,
    const I *__restrict__ positions, T *turned_q, T *turned_k, long long tokens, long long period,
    long long length) {
    const int column = threadIdx.x % COLUMNS, slot = threadIdx.x / COLUMNS % SLOTS;
    const long long token = (long long)blockIdx.x * TOKENS + threadIdx.x / (SLOTS * COLUMNS);
    if (token >= tokens) return;
    const long long index = token % period;
    const long long row = positions == nullptr ? index : (long long)positions[index];
    for (int pair = column * PAIRS; pair < HALF; pair += COLUMNS * PAIRS) {
        float c[PAIRS], s[PAIRS];
        if (row >= 0 && row < length) {
            load(c, cos + row * HALF + pair);
            load(s, sin + row * HALF + pair);
        } else {
#pragma unroll
            for (int j = 0; j < PAIRS; j++) c[j] = s[j] = __int_as_float(0x7fffffff);
        }
#pragma unroll
        for (int j = 0; j < PAIRS; j++) s[j] = INVERSE ? -s[j] : s[j];
#pragma unroll 4
        for (int head = slot; head < ALL_HEADS; head += SLOTS) {
            const long long at = start(token, head);
            turn((of_q(head) ? q : k) + at, (of_q(head) ? turned_q : turned_k) + at, pair, c, s);
        }
    }
    if constexpr (TURNED < DIM && !IN_PLACE) {
        for (int head = slot; head < ALL_HEADS; head += SLOTS)
            for (int rest = TURNED + column * LANES; rest < DIM; rest += COLUMNS * LANES) {
                const long long at = start(token, head) + rest;
                float v[LANES];
                load(v, (of_q(head) ? q : k) + at);
                store((of_q(head) ? turned_q : turned_k) + at, v);
            }
    }
}
