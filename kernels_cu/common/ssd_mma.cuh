// What kernels of state space duality on tensor cores share.  A block has 64 columns of a state of one
// head, for a whole text; a warp has 16 of them, transposed, in registers.
//
//   constants   those of common/chunk_mma.cuh and common/ssd_chunk.cuh
//               DIM    rows of a state: 64 or 128
#pragma once
#include <common/ssd_chunk.cuh>  // first: it says what CHANNELS is
#include <common/chunk_mma.cuh>
#include <common/vector.cuh>

constexpr int EXACT = 3;          // parts of what states depend on
constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int WIDE = 16 * WARPS;  // columns of x of a block
constexpr int SLABS = DIM / 64;   // of 64 rows of a state
constexpr int OWN = (BLOCKS + WARPS - 1) / WARPS;  // blocks of P that a warp computes
using Values = Tile<T, WIDE>;     // x or dy, then y or dx
static_assert(sizeof(T) == 2 && DIM % 64 == 0);

struct alignas(16) OfChunk : Factors {};
template <int PARTS> struct Memory {  // shared: rows that read states, rows and values that they take
    T reads[CHUNK * Rows::PITCH], writes[2][CHUNK * Rows::PITCH], values[2][CHUNK * Values::PITCH];
    uint4 scores[PARTS * PLANE];  // P
    OfChunk factors[2];
};

// Factors of the tokens from `first` on, by one warp; dt is of this head.
DEVICE void set_rates(Factors &to, const R *dt, int heads, int head, const Q *dt_bias, float speed,
                      int first, int tokens, float least, float most) {
    const int lane = threadIdx.x % 32;
    Exact own[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane * 2 + i, token = first + row;
        const bool inside = token < tokens;
        const float raw = inside ? (float)dt[(long long)token * heads] : 0.0f;
        const float rate = inside ? rate_of(raw, dt_bias, head, least, most) : 0.0f;
        own[i] = {inside ? fmaxf(speed * rate, -800.0f) : 0.0f, 0.0f};
        to.beta[row] = rate;
    }
    add_up(to, own, lane);
}

// This warp's blocks of P = F C B^T r, in parts; with TURNED, of B C^T F^T without r, from b and c.
template <bool TURNED, int PARTS>
DEVICE void score(uint4 *scores, const Rows &c, const Rows &b, const Factors &factors) {
    const int lane = threadIdx.x % 32, warp = own_warp();
    const auto left_of = c.lane(lane % 16, lane / 16);
    const auto right_of = lane_of_rows(b, 0);
    int rows[OWN], columns[OWN];
    float sum[OWN][1][2][4] = {};
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int block = min(warp + n * WARPS, BLOCKS - 1);
        const int row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
        const int column = block - block_of(row, 0);
        rows[n] = (TURNED ? column : row) * 16, columns[n] = (TURNED ? row : column) * 16;
    }
#pragma unroll 1
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
        for (int step = 0; step < 4; step++)
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                uint32_t left[1][4], right[4];
                const int down = slab * 128;  // bytes
                ldmatrix_x4(left[0], left_of.at(0, step * 2) + rows[n] * Rows::PITCH_BYTES + down);
                ldmatrix_x4(right, right_of.at(0, step * 2) + columns[n] * Rows::PITCH_BYTES + down);
                multiply_two<T>(sum[n], 0, left, right);
            }
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int block = warp + n * WARPS;
        if (block >= BLOCKS) continue;
        uint32_t parts[PARTS][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = rows[n] + lane / 4 + i / 2 * 8;
            const int column = columns[n] + i % 2 * 8 + lane % 4 * 2;
            float both[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                both[e] = sum[n][0][i % 2][i / 2 * 2 + e] *
                          (TURNED ? factors.fade(column + e, row)
                                  : factors.fade(row, column + e) * factors.beta[column + e]);
            split(parts, i, both[0], both[1]);
        }
#pragma unroll
        for (int part = 0; part < PARTS; part++)
            scores[part * PLANE + block * 32 + lane] =
                make_uint4(parts[part][0], parts[part][1], parts[part][2], parts[part][3]);
    }
}

// d += x^T @ scores^T, where x are 16 columns of stripe j, and the scores are in PARTS planes.
template <bool TURNED, int PARTS>
DEVICE void add_scores(float (&d)[CHUNK / 8][4], const uint32_t (&x)[4], const uint4 *scores,
                       int j) {
    constexpr int OF_X = HALF<T> ? 2 : 1;  // exact
    const int first = TURNED ? 0 : j, last = TURNED ? j : STRIPES - 1;
    uint32_t left[OF_X][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const T *const both = reinterpret_cast<const T *>(&x[i]);
        if constexpr (HALF<T>) split(left, i, (float)both[0], (float)both[1]);
        else left[0][i] = x[i];
    }
#pragma unroll
    for (int plane = PARTS - 1; plane >= 0; plane--) {
        uint32_t right[STRIPES][4];
#pragma unroll
        for (int m = first; m <= last; m++) {
            const int block = TURNED ? block_of(j, m) : block_of(m, j);
            const uint4 own = scores[plane * PLANE + block * 32 + threadIdx.x % 32];
            right[m][0] = own.x, right[m][1] = own.y;
            right[m][2] = own.z, right[m][3] = own.w;
        }
#pragma unroll
        for (int part = min(OF_X, PARTS - plane) - 1; part >= 0; part--)
#pragma unroll
            for (int m = first; m <= last; m++) add_two(d, m * 2, left[part], right[m]);
    }
}

// Call use(element, value) for what a lane has of a state, transposed: its columns lane / 4, and 8
// further on.  `at`: the first of the warp's columns; a row has `pitch` numbers.
template <class V, class Use>
DEVICE void each_state(float (&state)[SLABS][8][4], V *at, int pitch, Use use) {
    at += threadIdx.x % 4 * 2 * pitch + threadIdx.x % 32 / 4;
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) use(at[i % 2 * pitch + i / 2 * 8], state[slab][n][i]);
            at += 8 * pitch;
        }
}

// Sixteen tokens of a warp's columns, from `right` on, transposed.  i: tokens 8 * (i / 2) further,
// columns 8 * (i % 2) further.
DEVICE void take_columns(uint32_t (&to)[4], const Values &values, int right, int stripe) {
    const int lane = threadIdx.x % 32;
    const auto from = values.lane(lane % 8 + lane / 16 * 8, right / 8 + lane / 8 % 2);
    ldmatrix_x4_trans(to, from.at(stripe * 16, 0));
}
DEVICE float value_of(const uint32_t (&x)[4], int i, int e) {
    return (float)reinterpret_cast<const T *>(&x[i])[e];
}

// Write one stripe of a warp's columns, result(n, i), to the rows `down` apart from base + at on, by
// way of their place in values; `count` tokens are there.
template <class Result>
DEVICE void put_columns(T *base, long long at, int down, int count, const Values &values, int right,
                        int stripe, Result result) {
    const int lane = threadIdx.x % 32, row = stripe * 16 + lane / 2;
    auto line_of = values.lane(lane % 4 * 2, right / 8);
    line_of.offset += lane / 4 * sizeof(T);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            *reinterpret_cast<T *>(line_of.at(n * 8 + i % 2, i / 2) +
                                   stripe * 16 * Values::PITCH_BYTES) = (T)result(n, i);
    __syncwarp();
    Vector<T, 8> line;  // half of a warp's columns
    fetch(line, values.at(row, right / 8 + lane % 2));
    if (row < count) put(base, at + (long long)row * down + lane % 2 * 8, line);
}

// state = whole * state + rows^T (factor * x), where factor(n) are those of two tokens.
template <class Factor>
DEVICE void grow(float (&state)[SLABS][8][4], float whole, const uint32_t (&x)[STRIPES][4],
                 const Rows &rows, Factor factor) {
    const int lane = threadIdx.x % 32;
    const auto turned = rows.lane(lane % 16, lane / 16);
    float sum[SLABS][8][4] = {};  // tensor cores cut what they add; a state is rounded, once
#pragma unroll
    for (int j = 0; j < STRIPES; j++) {
        uint32_t left[EXACT][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 by = factor(j * 2 + i / 2);
            split(left, i, by.x * value_of(x[j], i, 0), by.y * value_of(x[j], i, 1));
        }
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
            uint32_t of_rows[4][4];
#pragma unroll
            for (int n = 0; n < 4; n++)
                ldmatrix_x4_trans(of_rows[n], turned.at(j * 16, slab * 8 + n * 2));
            add(sum[slab], left, of_rows);
        }
    }
#pragma unroll
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                state[slab][n][i] = fmaf(whole, state[slab][n][i], sum[slab][n][i]);
}
