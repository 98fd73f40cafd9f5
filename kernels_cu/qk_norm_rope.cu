// RMS norm of each head of queries and keys, then rotary position embedding; forward and backward.
//
//   rstd = 1 / sqrt(mean(x^2) + eps)      z = x * rstd * (w + offset)
//   y1 = z1 cos - z2 sin                  y2 = z2 cos + z1 sin
//   for the pairs (i, i + HALF), or INTERLEAVED (2 i, 2 i + 1), of each head; cos and sin are row
//   p of the tables, where p is the token's position.  From column 2 HALF on, y is z.
//
//   dz1 = dy1 cos + dy2 sin    dz2 = dy2 cos - dy1 sin    xhat = x * rstd    g = dz * (w + offset)
//   dx = rstd * (g - xhat * mean(g * xhat))      dw = sum(dz * xhat) over tokens and heads
//
//   traffic     per token, with H = HEADS + KV_HEADS and a row of the tables:
//               forward   H * (DIM * sizeof(T) * 2 + 4) + HALF * sizeof(C) * 2
//               backward  H * (DIM * sizeof(T) * 3 + 4) + HALF * sizeof(C) * 2
//               weights stay in L1, the partial sums of dw in L2
//   constants   T, C, I           dtypes of q and k, of the tables, of positions
//               W, B              dtypes of the weights of q and of k
//               HEADS, KV_HEADS   heads of q and of k
//               DIM, HALF         columns of a head; pairs of them that are rotated
//               LANES             values of one access: 16 bytes, or fewer as DIM, HALF, the steps
//                                 and the addresses allow
//               GROUP             threads of a head: a power of two up to 32
//               THREADS           threads of a block
//               FORWARD_RESIDENT, RESIDENT    blocks that an SM must hold, forward and backward
//               INTERLEAVED
//
//   The trick: a warp takes a token.  It reads the row of the tables once, into registers, and
//   iterates over the heads of q, then of k, SLOTS at a time.  A thread holds both columns of a
//   pair, so threads only exchange the sums of a head.  In backward, a warp iterates over tokens
//   and adds to dw in float32, that of q and that of k alternately: the other is kept in shared
//   memory, to save registers.  A block writes one row of partial sums, which column_sum.cu adds in
//   a fixed order: no atomics, equal bits.
//   A position outside the tables gives NaN and a report, and no read out of bounds.
#include <common/faults.cuh>
#include <common/heads.cuh>
#include <common/reduce.cuh>
#include <common/vector.cuh>

constexpr int PAIRS = INTERLEAVED && LANES > 1 ? LANES / 2 : LANES;  // pairs of a chunk
constexpr int PARTS = 2 * PAIRS / LANES;                             // accesses of a chunk
constexpr int CHUNKS = (DIM + 2 * PAIRS - 1) / (2 * PAIRS);          // chunks of a head
constexpr int DEPTH = (CHUNKS + GROUP - 1) / GROUP;                  // chunks of a thread
constexpr int SLOTS = 32 / GROUP;                                    // heads of a warp at a time
constexpr int WARPS = THREADS / 32;
constexpr int VALUES = DEPTH * 2 * PAIRS;  // values of a head per thread

// A chunk is PAIRS rotated pairs or, from column 2 HALF on, 2 PAIRS neighbours without rotation.
template <class E> struct Chunk { Vector<E, LANES> part[PARTS]; };
using Angles = float[DEPTH][PAIRS];
using Parked = float[VALUES][32];  // a warp's dw in shared memory, one column per thread

DEVICE int chunk_of(int k) { return threadIdx.x % GROUP + k * GROUP; }
DEVICE bool exists(int chunk) { return CHUNKS % GROUP == 0 || chunk < CHUNKS; }
DEVICE bool rotates(int chunk) { return chunk * PAIRS < HALF; }
DEVICE int column(int chunk, int part) {
    if constexpr (PARTS == 1) return chunk * LANES;
    else if constexpr (INTERLEAVED) return 2 * chunk + part;
    else return rotates(chunk) ? chunk * PAIRS + part * HALF : (2 * chunk + part) * PAIRS;
}
DEVICE bool inside(int column) { return DIM % (2 * PAIRS) == 0 || column < DIM; }

// Read a head; columns past its end, and a head that does not exist, become 0.
template <class E>
DEVICE void fetch(Chunk<E> (&to)[DEPTH], const E *head, bool in_range = true) {
#pragma unroll
    for (int k = 0; k < DEPTH; k++)
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int at = column(chunk_of(k), part);
            to[k].part[part] = {};
            if (in_range && exists(chunk_of(k)) && inside(at)) fetch(to[k].part[part], head + at);
        }
}

// Convert a chunk to floats: to[0] and to[1] are the first and the second columns of its pairs.
template <class E>
DEVICE void widen(float (&to)[2][PAIRS], const Chunk<E> &from) {
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
        for (int j = 0; j < PAIRS; j++)
            if constexpr (PARTS == 1) to[side][j] = (float)from.part[0].at[2 * j + side];
            else to[side][j] = (float)from.part[side].at[j];
}

// Write a chunk of the head at base + head.
DEVICE void store(T *base, long long head, const float (&from)[2][PAIRS], int chunk) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int at = column(chunk, part);
        float v[LANES];
#pragma unroll
        for (int j = 0; j < LANES; j++) v[j] = PARTS == 1 ? from[j % 2][j / 2] : from[part][j];
        if (exists(chunk) && inside(at)) store(base, head + at, v);
    }
}

// Read row positions[index] of the tables, or without positions row `index`; return its number.
DEVICE long long look_up(Angles &c, Angles &s, const C *cos, const C *sin, const I *positions,
                         long long index, long long length) {
    const long long row = positions == nullptr ? index : (long long)positions[index];
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        if (!rotates(chunk_of(k))) continue;
        if (row >= 0 && row < length) {
            load(c[k], cos + row * HALF + chunk_of(k) * PAIRS);
            load(s[k], sin + row * HALF + chunk_of(k) * PAIRS);
        } else {
#pragma unroll
            for (int j = 0; j < PAIRS; j++) c[k][j] = s[k][j] = __int_as_float(0x7fffffff);
        }
    }
    return row;
}

// ---- forward ----------------------------------------------------------------------------------
// The COUNT heads of q, or of k, of one token.
template <int COUNT, class E>
DEVICE void forward(const T *x, long long step, const E *weight, T *y, float *rstd, const Angles &c,
                    const Angles &s, float eps, float offset) {
    Chunk<E> w[DEPTH];
    fetch(w, weight);
#pragma unroll 1  // unrolled iterations would spill
    for (int first = 0; first < COUNT; first += SLOTS) {
        const int head = first + threadIdx.x % 32 / GROUP;
        const bool in_range = head < COUNT;
        Chunk<T> kept[DEPTH];
        fetch(kept, x + head * step, in_range);
        float squares = 0;
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float v[2][PAIRS];
            widen(v, kept[k]);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) squares += v[0][j] * v[0][j] + v[1][j] * v[1][j];
        }
        const float scale = rsqrtf(group_sum<GROUP>(squares) * (1.0f / DIM) + eps);
        if (!in_range) continue;
        if (threadIdx.x % GROUP == 0) rstd[head] = scale;
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            const bool rotated = rotates(chunk_of(k));
            float v[2][PAIRS], factor[2][PAIRS];
            widen(v, kept[k]);
            widen(factor, w[k]);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                const float one = v[0][j] * scale * (factor[0][j] + offset);
                const float two = v[1][j] * scale * (factor[1][j] + offset);
                v[0][j] = rotated ? one * c[k][j] - two * s[k][j] : one;
                v[1][j] = rotated ? two * c[k][j] + one * s[k][j] : two;
            }
            store(y, head * DIM, v, chunk_of(k));
        }
    }
}

KERNEL(THREADS, FORWARD_RESIDENT)
qk_norm_rope_forward(
    const T *__restrict__ q, const T *__restrict__ k, const W *__restrict__ q_weight,
    const B *__restrict__ k_weight, const C *__restrict__ cos, const C *__restrict__ sin,
    const I *__restrict__ positions, T *__restrict__ turned_q, T *__restrict__ turned_k,
    float *__restrict__ q_rstd, float *__restrict__ k_rstd, const __grid_constant__ Tokens tokens,
    float eps, float offset, long long *__restrict__ faults, long long who) {
    const Steps q_steps = tokens.q, k_steps = tokens.k;
    const long long token = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= tokens.count) return;
    Angles c, s;
    const long long row = look_up(c, s, cos, sin, positions, token % tokens.period, tokens.length);
    if (threadIdx.x % 32 == 0 && (row < 0 || row >= tokens.length))
        report(faults, who, token % tokens.period, row, tokens.length);
    forward<HEADS>(q + token * q_steps.token, q_steps.head, q_weight,
                   turned_q + token * HEADS * DIM, q_rstd + token * HEADS, c, s, eps, offset);
    forward<KV_HEADS>(k + token * k_steps.token, k_steps.head, k_weight,
                      turned_k + token * KV_HEADS * DIM, k_rstd + token * KV_HEADS, c, s, eps,
                      offset);
}

// ---- backward ---------------------------------------------------------------------------------
template <int COUNT, class E>
DEVICE void backward(const T *dy, const T *x, long long step, const E *weight, const float *rstd,
                     T *dx, Parked &parked, const Angles &c, const Angles &s, float offset) {
    float dw[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; i++) dw[i] = parked[i][threadIdx.x % 32];
#pragma unroll 1  // unrolled iterations would spill
    for (int first = 0; first < COUNT; first += SLOTS) {
        const int head = first + threadIdx.x % 32 / GROUP;
        const bool in_range = head < COUNT;
        const float scale = in_range ? rstd[head] : 0;
        Chunk<T> kept_dy[DEPTH], kept_x[DEPTH];
        Chunk<E> w[DEPTH];
        fetch(kept_dy, dy + head * DIM, in_range);
        fetch(kept_x, x + head * step, in_range);
        fetch(w, weight);
        float g[DEPTH][2][PAIRS], product = 0;
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            const bool rotated = rotates(chunk_of(k));
            float d[2][PAIRS], v[2][PAIRS], factor[2][PAIRS];
            widen(d, kept_dy[k]);
            widen(v, kept_x[k]);
            widen(factor, w[k]);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                const float dz[2] = {rotated ? d[0][j] * c[k][j] + d[1][j] * s[k][j] : d[0][j],
                                     rotated ? d[1][j] * c[k][j] - d[0][j] * s[k][j] : d[1][j]};
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    const float xhat = v[side][j] * scale;
                    g[k][side][j] = dz[side] * (factor[side][j] + offset);
                    product += g[k][side][j] * xhat;
                    dw[(2 * k + side) * PAIRS + j] += dz[side] * xhat;
                }
            }
        }
        const float mean = group_sum<GROUP>(product) * (1.0f / DIM);
        if (!in_range) continue;
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float v[2][PAIRS];
            widen(v, kept_x[k]);
#pragma unroll
            for (int side = 0; side < 2; side++)
#pragma unroll
                for (int j = 0; j < PAIRS; j++)
                    g[k][side][j] = scale * (g[k][side][j] - v[side][j] * scale * mean);
            store(dx, head * DIM, g[k], chunk_of(k));
        }
    }
#pragma unroll
    for (int i = 0; i < VALUES; i++) parked[i][threadIdx.x % 32] = dw[i];
}

// partial[0, block] is the block's part of the gradient of q_weight, partial[1, block] of k_weight.
KERNEL(THREADS, RESIDENT)
qk_norm_rope_backward(
    const T *__restrict__ dturned_q, const T *__restrict__ dturned_k, const T *__restrict__ q,
    const T *__restrict__ k, const W *__restrict__ q_weight, const B *__restrict__ k_weight,
    const C *__restrict__ cos, const C *__restrict__ sin, const I *__restrict__ positions,
    const float *__restrict__ q_rstd, const float *__restrict__ k_rstd, T *__restrict__ dq,
    T *__restrict__ dk, float *__restrict__ partial, const __grid_constant__ Tokens tokens,
    float offset) {
    __shared__ Parked dw[2][WARPS];
    const int warp = threadIdx.x / 32;
    for (int i = 0; i < 2 * VALUES; i++) dw[i / VALUES][warp][i % VALUES][threadIdx.x % 32] = 0;
    for (long long token = (long long)blockIdx.x * WARPS + warp; token < tokens.count;
         token += gridDim.x * WARPS) {
        const long long of_q = token * HEADS, of_k = token * KV_HEADS;
        Angles c, s;
        look_up(c, s, cos, sin, positions, token % tokens.period, tokens.length);
        backward<HEADS>(dturned_q + of_q * DIM, q + token * tokens.q.token, tokens.q.head, q_weight,
                        q_rstd + of_q, dq + of_q * DIM, dw[0][warp], c, s, offset);
        backward<KV_HEADS>(dturned_k + of_k * DIM, k + token * tokens.k.token, tokens.k.head,
                           k_weight, k_rstd + of_k, dk + of_k * DIM, dw[1][warp], c, s, offset);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * VALUES * GROUP; i += THREADS) {
        const int j = i % PAIRS, lane = i / PAIRS % GROUP, of = i / PAIRS / GROUP;
        const int which = of / (2 * DEPTH), k = of / 2 % DEPTH, side = of % 2;
        const int chunk = lane + k * GROUP;
        const int at = PARTS == 1 ? column(chunk, 0) + 2 * j + side : column(chunk, side) + j;
        if (!exists(chunk) || !inside(at)) continue;
        float sum = 0;
        for (int other = 0; other < WARPS * SLOTS; other++)
            sum +=
                dw[which][other / SLOTS][(2 * k + side) * PAIRS + j][lane + other % SLOTS * GROUP];
        partial[((long long)which * gridDim.x + blockIdx.x) * DIM + at] = sum;
    }
}
