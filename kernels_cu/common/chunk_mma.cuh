// Products of chunks on tensor cores, as exact as in float32: a float32 is the sum of parts of 16
// bits, and products of such parts are exact.
//
//   constants   T      dtype of rows: of 16 bits
//               and those of common/delta_chunk.cuh
#pragma once
#include <common/delta_chunk.cuh>
#include <common/tile.cuh>

constexpr int STRIPES = CHUNK / 16;  // of 16 tokens
constexpr int BLOCKS = STRIPES * (STRIPES + 1) / 2;  // of 16 x 16, on and below the diagonal
constexpr int PLANE = BLOCKS * 32;   // uint4 of one part of a triangle
constexpr int SHORT = 2;             // parts of what out depends on
using Rows = Tile<T, DIM>;           // q or k

DEVICE int block_of(int row, int column) { return row * (row + 1) / 2 + column; }

// ---- floats in parts ----------------------------------------------------------------------------
template <class V> constexpr bool HALF = false;
template <> constexpr bool HALF<__half> = true;
using Part = __nv_bfloat16;
DEVICE float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
DEVICE float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Register i of operands whose sum has the values low and high.
template <int PARTS>
DEVICE void split(uint32_t (&to)[PARTS][4], int i, float low, float high) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        to[part][i] = pair(low, high, Part());
        low -= low_of(to[part][i]), high -= high_of(to[part][i]);
    }
}
// The first operand with the 16 columns of results `left` and `right`.
template <int PARTS>
DEVICE void split(uint32_t (&to)[PARTS][4], const float (&left)[4], const float (&right)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        split(to, i, left[i * 2], left[i * 2 + 1]);
        split(to, 2 + i, right[i * 2], right[i * 2 + 1]);
    }
}

template <int N>
DEVICE void add_two(float (&d)[N][4], int n, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
    const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
    multiply(d[n], a, b0, Part());
    multiply(d[n + 1], a, b1, Part());
}

// d += the sum of the parts a, times b: 8 * N rows or columns of q or k.  What is small comes first.
template <int PARTS, int N>
DEVICE void add(float (&d)[N][4], const uint32_t (&a)[PARTS][4], const uint32_t (&b)[N / 2][4]) {
    if constexpr (HALF<T>) {  // a float16 is two bfloat16
        uint32_t parts[N / 2][2][4];
#pragma unroll
        for (int n = 0; n < N / 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const T *const both = reinterpret_cast<const T *>(&b[n][i]);
                split(parts[n], i, (float)both[0], (float)both[1]);
            }
#pragma unroll
        for (int part = PARTS - 1; part >= 0; part--) {
#pragma unroll
            for (int n = 0; n < N / 2; n++)
                if (part < PARTS - 1) add_two(d, n * 2, a[part], parts[n][1]);
#pragma unroll
            for (int n = 0; n < N / 2; n++) add_two(d, n * 2, a[part], parts[n][0]);
        }
    } else {
#pragma unroll
        for (int part = PARTS - 1; part >= 0; part--)
#pragma unroll
            for (int n = 0; n < N / 2; n++) add_two(d, n * 2, a[part], b[n]);
    }
}

// Of factors of tokens, those of the two in result n that a lane holds.
DEVICE float2 two_of(const float *factors, int n) {
    return *reinterpret_cast<const float2 *>(factors + n * 8 + threadIdx.x % 4 * 2);
}
DEVICE void scale_by(float (&d)[4], const float2 &factors, float scale) {
    const float even = factors.x * scale, odd = factors.y * scale;
    d[0] *= even, d[1] *= odd, d[2] *= even, d[3] *= odd;
}

// d += state @ rows^T, where the state has 64 columns of rows: those from the 16 bytes `chunk` on of
// a lane's own.
template <int PARTS>
DEVICE void add_rows(float (&d)[CHUNK / 8][4], const float (&state)[8][4], const Rows::Lane &from,
                     int chunk) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t left[PARTS][4], right[STRIPES][4];
        split(left, state[step * 2], state[step * 2 + 1]);
#pragma unroll
        for (int n = 0; n < STRIPES; n++) ldmatrix_x4(right[n], from.at(n * 16, chunk + step * 2));
        add(d, left, right);
    }
}
// The second operand: rows, from the 16 bytes `chunk` on.
DEVICE Rows::Lane lane_of_rows(const Rows &rows, int chunk) {
    const int lane = threadIdx.x % 32;
    return rows.lane(lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2);
}
// The same with one of the halves of the columns of rows.
template <int PARTS>
DEVICE void add_rows(float (&d)[CHUNK / 8][4], const float (&state)[8][4], const Rows &rows,
                     int half) {
    add_rows<PARTS>(d, state, lane_of_rows(rows, half * 8), 0);
}
