// Rotary position embedding of queries and keys, in one launch; also in place.
//
//   y1 = x1 cos - x2 sin        y2 = x2 cos + x1 sin        INVERSE: with -sin for sin
//   for the pairs (i, i + HALF), or INTERLEAVED (2 i, 2 i + 1), of each head; cos and sin are row
//   p of the tables, where p is the token's position, or with ANGLES those of p * base^(-i / HALF).
//   Columns from 2 HALF on are copied if y is another array.
//
//   traffic     per token, (HEADS + KV_HEADS) * DIM * sizeof(T) * 2 + (ANGLES ? 0 : HALF *
//               sizeof(C) * 2) + sizeof(I); IN_PLACE, with 2 HALF for DIM
//   constants   T, C, I           dtypes of q and k, of the tables, of positions
//               HEADS, KV_HEADS   heads of q and of k; no k where KV_HEADS is 0
//               DIM, HALF         columns of a head; pairs of them that are rotated
//               LANES             values of one access: 16 bytes, or fewer as DIM, HALF and the
//                                 addresses allow
//               COLUMNS           threads of a head
//               SLOTS             heads of a token that a block rotates at a time
//               TOKENS            tokens of a block
//               INTERLEAVED, INVERSE, IN_PLACE, ANGLES
//
//   The trick: a thread keeps its cosines and sines in registers and iterates over heads, so a
//   table is read once per token.  It loads both values of a pair before it stores one: y may be x.
//   A position outside the tables gives NaN and a report, and no read out of bounds.  With ANGLES a
//   block computes the cosines and sines of its tokens once, in shared memory, for all its heads.
#include <common/faults.cuh>
#include <common/heads.cuh>
#include <common/math.cuh>
#include <common/rotate.cuh>

constexpr int ALL_HEADS = HEADS + KV_HEADS;

// Heads are numbered from those of q to those of k.
DEVICE bool of_q(int head) { return KV_HEADS == 0 || head < HEADS; }
DEVICE long long start(long long token, int head, Steps q, Steps k) {
    return of_q(head) ? token * q.token + head * q.head : token * k.token + (head - HEADS) * k.head;
}

DEVICE long long position(const I *positions, long long token, long long period) {
    const long long index = token % period;
    return positions == nullptr ? index : (long long)positions[index];
}

// cos and sin of position * base^(-pair / HALF), with wavelength and angle rounded to float32.
// Half turns are subtracted from the angle in float64, which is right for any position: sinf would
// use local memory.
DEVICE void turn_by(float &c, float &s, long long position, int pair, double log2_base) {
    constexpr double PI = 3.141592653589793, PI_LOW = 1.2246467991473532e-16, INVERSE_PI = 1 / PI;
    const float exponent = divided_by<TURNED>((float)(2 * pair));
    const float wavelength = (float)exp2(exponent * log2_base);
    const double angle = (float)position * (1 / wavelength), halves = rint(angle * INVERSE_PI);
    const double rest = fma(-halves, PI_LOW, fma(-halves, PI, angle));
    sincospif((float)(rest * INVERSE_PI), &s, &c);
    if ((long long)halves % 2 != 0) {
        c = -c;
        s = -s;
    }
}

// 4 blocks on an SM are half of its threads, with 64 registers each; without this bound, ptxas
// spills in order to use fewer.
KERNEL(TOKENS * SLOTS * COLUMNS, 4)
rope(const T *q, const T *k, const C *__restrict__ cos, const C *__restrict__ sin,
     const I *__restrict__ positions, T *turned_q, T *turned_k,
     const __grid_constant__ Tokens tokens, double log2_base, long long *faults, long long who) {
    const long long period = tokens.period, length = tokens.length;
    __shared__ __align__(16) float angles[2][ANGLES ? TOKENS : 1][ANGLES ? HALF : 1];
    const int column = threadIdx.x % COLUMNS, slot = threadIdx.x / COLUMNS % SLOTS;
    const int local = threadIdx.x / (SLOTS * COLUMNS);
    const long long first = (long long)blockIdx.x * TOKENS, token = first + local;
    if constexpr (ANGLES) {
        for (int i = threadIdx.x; i < TOKENS * HALF; i += TOKENS * SLOTS * COLUMNS) {
            const int which = i / HALF, pair = i % HALF;
            turn_by(angles[0][which][pair], angles[1][which][pair],
                    position(positions, first + which, period), pair, log2_base);
        }
        __syncthreads();
    }
    if (token >= tokens.count) return;
    const Steps q_steps = tokens.q, k_steps = tokens.k;
    const Steps q_out_steps = IN_PLACE ? q_steps : Steps{HEADS * DIM, DIM};  // packed
    const Steps k_out_steps = IN_PLACE ? k_steps : Steps{KV_HEADS * DIM, DIM};
    const long long row = ANGLES ? 0 : position(positions, token, period);
    for (int pair = column * PAIRS; pair < HALF; pair += COLUMNS * PAIRS) {
        float c[PAIRS], s[PAIRS];
        if constexpr (ANGLES) {
            load(c, &angles[0][local][pair]);
            load(s, &angles[1][local][pair]);
        } else if (row >= 0 && row < length) {
            load(c, cos + row * HALF + pair);
            load(s, sin + row * HALF + pair);
        } else {
            if (pair == 0 && slot == 0) report(faults, who, token % period, row, length);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) c[j] = s[j] = __int_as_float(0x7fffffff);
        }
#pragma unroll
        for (int j = 0; j < PAIRS; j++) s[j] = INVERSE ? -s[j] : s[j];
#pragma unroll 4
        for (int head = slot; head < ALL_HEADS; head += SLOTS)
            rotate((of_q(head) ? q : k) + start(token, head, q_steps, k_steps),
                   of_q(head) ? turned_q : turned_k, start(token, head, q_out_steps, k_out_steps),
                   pair, c, s);
    }
    if constexpr (TURNED < DIM && !IN_PLACE) {
        for (int head = slot; head < ALL_HEADS; head += SLOTS)
            for (int rest = TURNED + column * LANES; rest < DIM; rest += COLUMNS * LANES) {
                float v[LANES];
                load(v, (of_q(head) ? q : k) + start(token, head, q_steps, k_steps) + rest);
                store(of_q(head) ? turned_q : turned_k,
                      start(token, head, q_out_steps, k_out_steps) + rest, v);
            }
    }
}
