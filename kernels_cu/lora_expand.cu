// Adds what adapters make of their low ranks to up to three results, each in place.
//
//   y = y + scale * low @ b.T          with BY_RANK, of the transposed matrix: y + scale * low @ a
//
//   traffic     y is read and written once, 2 * rows * columns * sizeof(T); low once per tile of
//               columns and b once per tile of rows, both from L2
//   constants   T          dtype of y and low, 16 bits
//               B          dtype of b, which is rounded to T
//               RANK       the largest rank, rounded up to a multiple of 16
//               BY_RANK    b is (rank, columns), not (columns, rank)
//               LANES      values of an access of y: 8, or 1 as rows and addresses allow
//
//   The trick: a lane of a product holds two of every eight columns.  The rows of b that a warp
//   multiplies with are stored in an order in which these are eight neighbours of y: one access of
//   16 bytes.  y is fetched before the product that is added to it.
#include <common/tile.cuh>
#include <common/vector.cuh>

constexpr int WARPS = 4, THREADS = 32 * WARPS, COLUMNS = 32 * WARPS;
constexpr int ROWS = RANK > 64 ? 64 : 128;  // fewer, where tiles of a high rank fill the memory
using Low = Tile<T, RANK>;
using Right = Tile<T, BY_RANK ? COLUMNS : RANK>;

// The three layers: a layer has the tiles of columns first_tile .. and those up to the next.
struct Parts {
    int columns[3], ranks[3], y_pitch[3], low_pitch[3], first_tile[3];
    float scale[3];
};

// Where a column of a tile is stored: of 32, number 8 q + 2 n + e comes to 8 n + 2 q + e.
DEVICE int stored(int column) {
    return column / 32 * 32 + column % 8 / 2 * 8 + column % 32 / 8 * 2 + column % 2;
}

DEVICE T &element(const Right &right, int column, int k) {
    const int place = stored(column);
    if constexpr (BY_RANK) return right.at(k, place / 8)[place % 8];
    else return right.at(place, k / 8)[k % 8];
}

KERNEL(THREADS)
lora_expand_(T *y, T *y2, T *y3, const T *__restrict__ low, const T *__restrict__ low2,
             const T *__restrict__ low3, const B *__restrict__ b, const B *__restrict__ b2,
             const B *__restrict__ b3, long long rows, int tiles,
             const __grid_constant__ Parts parts) {
    DYNAMIC_SHARED(T, memory);
    const Low lows{memory};
    const Right right{memory + ROWS * Low::PITCH};

    const int tile = blockIdx.x % tiles;
    const int own = (tile >= parts.first_tile[1]) + (tile >= parts.first_tile[2]);
    T *const to = own == 0 ? y : own == 1 ? y2 : y3;
    const T *const from = own == 0 ? low : own == 1 ? low2 : low3;
    const B *const factor = own == 0 ? b : own == 1 ? b2 : b3;
    const int columns = parts.columns[own], rank = parts.ranks[own], pitch = parts.y_pitch[own];
    const int low_pitch = parts.low_pitch[own];
    const float scale = parts.scale[own];
    const int first_column = (tile - parts.first_tile[own]) * COLUMNS;
    const long long top = (long long)(blockIdx.x / tiles) * ROWS;
    const int real = rows - top < ROWS ? (int)(rows - top) : ROWS;

#pragma unroll 4
    for (int i = threadIdx.x; i < COLUMNS * RANK; i += THREADS) {
        const int column = BY_RANK ? i % COLUMNS : i / RANK, k = BY_RANK ? i / COLUMNS : i % RANK;
        const int at = first_column + column;
        const bool inside = at < columns && k < rank;
        const long long place = BY_RANK ? (long long)k * columns + at : (long long)at * rank + k;
        element(right, column, k) = inside ? T((float)factor[place]) : T(0.0f);
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < ROWS * RANK; i += THREADS) {
        const int row = i / RANK, k = i % RANK;
        lows.at(row, k / 8)[k % 8] =
            row < real && k < rank ? from[(top + row) * low_pitch + k] : T(0.0f);
    }
    __syncthreads();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int column = warp * 32 + lane % 4 * 8, left_over = columns - first_column - column;
    const auto rights = BY_RANK ? right.lane(lane % 16, warp * 4 + lane / 16)
                                : right.lane(warp * 32 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    T *const first = to + top * pitch + first_column + column;
#pragma unroll 1
    for (int step = 0; step * 16 < real; step++) {
        float before[2][8] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = step * 16 + half * 8 + lane / 4;
            const int count = row < real ? left_over : 0;
            const T *const at = first + (long long)row * pitch;
            if constexpr (LANES == 8) {
                if (count > 0) load(before[half], at);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) before[half][j] = j < count ? (float)at[j] : 0.0f;
            }
        }
        float sums[1][4][4] = {};
#pragma unroll
        for (int k = 0; k < RANK / 16; k++) {
            Fragment<1> left;
            fetch(left, lows, step * 16, k);
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                uint32_t four[4];
                if constexpr (BY_RANK) ldmatrix_x4_trans(four, rights.at(k * 16, n));
                else ldmatrix_x4(four, rights.at(n * 8, k * 2));
                multiply_two<T>(sums, n, left, four);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = step * 16 + half * 8 + lane / 4;
            const int count = row < real ? left_over : 0;
            T *const at = first + (long long)row * pitch;
#pragma unroll
            for (int j = 0; j < 8; j++)
                before[half][j] = fmaf(scale, sums[0][j / 2][half * 2 + j % 2], before[half][j]);
            if constexpr (LANES == 8) {
                if (count > 0) store(at, before[half]);
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (j < count) at[j] = (T)before[half][j];
            }
        }
    }
}
