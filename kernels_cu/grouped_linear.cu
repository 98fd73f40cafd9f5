// Products of sorted rows with the matrices of their groups, in 16 bits.
//
//   FORM 0, 1 and 2: y = x weight[e]^T + bias[e], dx = dy weight[e], dweight[e] = dy^T x, where e
//   is the group of a row: see common/groups.cuh
//
//   traffic     rows and matrices once each, where the tiles of a group run at the same time: then
//               others come from L2; c once
//   constants   T, B, I     dtypes of a, b and c; of bias; of offsets
//               FORM, A_TOP, B_TOP, ROWS, COLUMNS    see common/groups.cuh
//               BIAS        whether there is a bias
//               DEPTH, STAGES    values of a sum in a stage, and stages of the ring
//               DOWN        warps of a block along the rows of c
//               RESIDENT    blocks that an SM must hold
//               WIDE        rows of a, b and c allow accesses of 16 bytes
//
//   The trick: rows of x are read where they are (TOP), so that no sorted copy of them exists.  A
//   block takes its tile from a list that was made on the device: see groups.cu.  Each sum is that
//   of one warp, in the order of k: no atomics, equal bits.
#include <common/tile.cuh>
#include <common/vector.cuh>
#include <common/groups.cuh>

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int WM = ROWS / DOWN, WN = COLUMNS / (WARPS / DOWN), M = WM / 16, N = WN / 8;
constexpr int A_ROWS = FORM == 2 ? DEPTH : ROWS, B_ROWS = FORM == 0 ? COLUMNS : DEPTH;
using Left = Tile<T, FORM == 2 ? ROWS : DEPTH>;
using Right = Tile<T, FORM == 0 ? DEPTH : COLUMNS>;
using Result = Tile<T, COLUMNS>;
constexpr int STAGE = A_ROWS * Left::PITCH + B_ROWS * Right::PITCH;

// Start copying COUNT rows of a tile from the first column on, of which `left` exist; row_of(turn,
// down) is the number of a row, or -1 past the last one: then it is 0.
template <int COUNT, int WIDTH, class Row>
DEVICE void copy(const Tile<T, WIDTH> &to, const T *from, int pitch, int left, Row row_of) {
    constexpr int CHUNKS = WIDTH / 8, STEP = THREADS / CHUNKS;
    const int chunk = threadIdx.x % CHUNKS, column = chunk * 8;
#pragma unroll
    for (int i = 0; i < (COUNT + STEP - 1) / STEP; i++) {
        const int down = i * STEP + threadIdx.x / CHUNKS;
        if (COUNT % STEP != 0 && down >= COUNT) break;
        const int row = column < left ? row_of(i, down) : -1;
        const T *real = from + (row < 0 ? 0 : (long long)row * pitch + column);
        if constexpr (WIDE) {
            cp_async_16(to.at(down, chunk), real, row >= 0);
        } else {
            Vector<T, 8> values;
#pragma unroll
            for (int j = 0; j < 8; j++)
                values.at[j] = row >= 0 && column + j < left ? real[j] : T(0.0f);
            put(to.at(down, chunk), values);
        }
    }
}

KERNEL(THREADS, RESIDENT)
grouped_linear(const T *__restrict__ a, const T *__restrict__ b, const B *__restrict__ bias,
               const int *__restrict__ order, const int *__restrict__ tiles,
               const I *__restrict__ offsets, T *__restrict__ c,
               const __grid_constant__ Sizes s) {
    DYNAMIC_SHARED(T, memory);
    const Part part = part_of(tiles, offsets, s, blockIdx.x);
    if (part.group < 0) return;
    const int lane = threadIdx.x % 32, warp = own_warp();
    const int down = warp % DOWN * WM, right = warp / DOWN * WN;
    const bool none = FORM != 2 && part.group == s.experts;
    const int depth = FORM == 2 ? max(part.stop - part.first, 0) : none ? 0 : s.k;
    const int steps = (depth + DEPTH - 1) / DEPTH;
    const T *const matrix = FORM == 2 ? b : b + (none ? 0 : part.at);
    constexpr int DOWN_BY = THREADS / (DEPTH / 8);  // rows between two that a thread copies
    int numbers[(ROWS + DOWN_BY - 1) / DOWN_BY];     // of those rows of a, in FORM 0 and 1
    if constexpr (FORM != 2) {
#pragma unroll
        for (int i = 0; i < (ROWS + DOWN_BY - 1) / DOWN_BY; i++) {
            const int p = part.first + i * DOWN_BY + threadIdx.x / (DEPTH / 8);
            numbers[i] = p < part.stop ? row_of<A_TOP>(order, p) : -1;
        }
    }

    auto load = [&](int step) {
        if (step < steps) {
            const Left left{memory + step % STAGES * STAGE};
            const Right top{left.start + A_ROWS * Left::PITCH};
            const int k = step * DEPTH;
            if constexpr (FORM == 2) {
                const int first = part.first + k, rows = part.stop - first;
                copy<DEPTH>(left, a + part.row, s.m, s.m - part.row, [&](int, int i) {
                    return i < rows ? row_of<A_TOP>(order, first + i) : -1;
                });
                copy<DEPTH>(top, b + part.column, s.n, s.n - part.column, [&](int, int i) {
                    return i < rows ? row_of<B_TOP>(order, first + i) : -1;
                });
            } else {
                copy<ROWS>(left, a + k, s.k, s.k - k, [&](int turn, int) { return numbers[turn]; });
                if constexpr (FORM == 0)
                    copy<COLUMNS>(top, matrix + k, s.k, s.k - k, [&](int, int i) {
                        return part.column + i < s.n ? part.column + i : -1;
                    });
                else
                    copy<DEPTH>(top, matrix + part.column, s.n, s.n - part.column,
                                [&](int, int i) { return k + i < s.k ? k + i : -1; });
            }
        }
        cp_async_commit();
    };

    float sum[M][N][4] = {};
    if constexpr (BIAS) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = part.column + right + n * 8 + lane % 4 * 2 + e;
                const bool inside = !none && at < s.n;
                const float value =
                    inside ? (float)bias[(long long)part.group * s.n + at] : 0.0f;
#pragma unroll
                for (int m = 0; m < M; m++) sum[m][n][e] = sum[m][n][2 + e] = value;
            }
    }
    for (int step = 0; step < STAGES - 1; step++) load(step);
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this stage has arrived, and all warps are done with the previous one
        load(step + STAGES - 1);
        const Left left{memory + step % STAGES * STAGE};
        const Right top{left.start + A_ROWS * Left::PITCH};
        const auto turned = left.lane(lane % 8 + lane / 16 * 8, down / 8 + lane / 8 % 2);
        const auto from = FORM == 0 ? top.lane(right + lane % 8 + lane / 16 * 8, lane / 8 % 2)
                                    : top.lane(lane % 16, right / 8 + lane / 16);
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++) {
            Fragment<M> rows;
            if constexpr (FORM == 2) {
#pragma unroll
                for (int m = 0; m < M; m++) ldmatrix_x4_trans(rows[m], turned.at(k * 16, m * 2));
            } else {
                fetch(rows, left, down, k);
            }
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t columns[4];
                if constexpr (FORM == 0) ldmatrix_x4(columns, from.at(n * 8, k * 2));
                else ldmatrix_x4_trans(columns, from.at(k * 16, n));
                multiply_two<T>(sum, n, rows, columns);
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();  // the ring, which nothing is copied to any more, now holds the result

    const Result result{memory};
    each_row<M>([&](int m, int half) {
        const int row = down + m * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int column = right + n * 8 + lane % 4 * 2;
            *reinterpret_cast<uint32_t *>(result.at(row, column / 8) + column % 8) =
                pair(sum[m][n][half * 2], sum[m][n][half * 2 + 1], T());
        }
    });
    __syncthreads();
    const int most = FORM == 2 ? s.m - part.row : part.stop - part.first;
    const long long to = (FORM == 2 ? part.at + (long long)part.row * s.n
                                    : (long long)part.first * s.n) + part.column;
    for (int i = threadIdx.x; i < ROWS * (COLUMNS / 8); i += THREADS) {
        const int row = i / (COLUMNS / 8), chunk = i % (COLUMNS / 8);
        const int columns = s.n - part.column - chunk * 8;
        if (row >= most || columns <= 0) continue;
        const long long at = to + (long long)row * s.n + chunk * 8;
        Vector<T, 8> values;
        fetch(values, result.at(row, chunk));
        if constexpr (WIDE) {
            put(c, at, values);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j < columns) c[at + j] = values.at[j];
        }
    }
}
