// The two products of gradients dy with the low-rank matrices of up to three adapters of one x, in
// one pass over each dy.
//
//   up = scale * dy @ b      db = scale * dy.T @ low
//
//   traffic     dy once; low once per slab of columns, b once per group of rows, both from L2; with
//               several slabs or groups, float32 sums that lora_gradient_sums adds:
//               slabs * rows * rank and groups * outputs * rank of them
//   constants   T       dtype of dy and low
//               B       dtype of b, which is rounded to T, and of the final db
//               U, W    dtypes of up and db: float where they are sums of one slab, of one group
//               RANK    16, 32 or 64: the largest rank, rounded up
//               LANES   values of dy that are copied at a time: 16 bytes of them, or 1
//
//   The trick: a block owns a slab of columns and a group of rows, and loads the tiles of these
//   rows into a ring.  db of the slab stays in registers until the end: a warp holds some columns
//   and the whole rank.  Of the up of a tile, a warp computes 16 rows by 16 columns of the rank; if
//   there are more warps than such parts, each sums over some of the slab's columns.  These partial
//   sums are added in a fixed order, as are the sums of blocks.
#include <common/tile.cuh>

constexpr int WARPS = 8, THREADS = 32 * WARPS, ROWS = 32;
constexpr int COLUMNS = 512 / sizeof(T), WARP_COLUMNS = COLUMNS / WARPS;
constexpr int PARTS = RANK / 16, SPLITS = WARPS / (ROWS / 16 * PARTS);
constexpr int PITCH = RANK + 8, DEPTH = COLUMNS / SPLITS;
constexpr int M = WARP_COLUMNS / 16, N = RANK / 8;
// blocks that an SM must hold, which the shared memory of most has room for; of few sums, more
constexpr int RESIDENT = RANK == 64 && sizeof(T) == 4 ? 1 : RANK == 16 && sizeof(T) == 2 ? 3 : 2;
using Slab = Tile<T, COLUMNS>;
using Low = Tile<T, RANK>;
constexpr int STAGE = ROWS * (Slab::PITCH + Low::PITCH);

// The adapters: one has the slabs first_slab .. and those up to the next, and its results start at
// up_start and db_start.  Slabs of up are up_slab apart, groups of db db_group; rows of up up_pitch.
struct Parts {
    long long up_start[3], up_slab[3], db_start[3], db_group;
    int outputs[3], ranks[3], dy_pitch[3], low_pitch[3], up_pitch[3], first_slab[3];
    float scale[3];
};

// Copy rows first .. first + COUNT - 1 of a matrix of `rank` columns, with 0 past either end; its
// rows are `pitch` elements apart.
template <int COUNT, class From>
DEVICE void put_low(const Low &to, const From *from, long long first, long long stop, int rank,
                    int pitch) {
#pragma unroll 2
    for (int i = threadIdx.x; i < COUNT * RANK; i += THREADS) {
        const int row = i / RANK, column = i % RANK;
        const bool inside = first + row < stop && column < rank;
        to.at(row, column / Low::CHUNK)[column % Low::CHUNK] =
            inside ? T((float)from[(first + row) * pitch + column]) : T(0.0f);
    }
}

// sum += x * four values
DEVICE void add_four(float (&sum)[4], float x, const float *four) {
    const float4 y = *reinterpret_cast<const float4 *>(four);
    sum[0] = fmaf(x, y.x, sum[0]);
    sum[1] = fmaf(x, y.y, sum[1]);
    sum[2] = fmaf(x, y.z, sum[2]);
    sum[3] = fmaf(x, y.w, sum[3]);
}

// sums += 16 rows of dy by 16 columns of b, over part `split` of the slab's columns.
template <class E>
DEVICE void add_up(float (&sums)[1][2][4], const Tile<E, COLUMNS> &dy, const Tile<E, RANK> &b,
                   int row, int part, int split) {
    const int lane = threadIdx.x % 32, first = split * DEPTH;
    if constexpr (sizeof(E) == 2) {
        const auto from = b.lane(lane % 16, lane / 16);
#pragma unroll 4
        for (int k = first; k < first + DEPTH; k += 16) {
            Fragment<1> left;
            uint32_t right[4];
            fetch(left, dy, row, k / 16);
            ldmatrix_x4_trans(right, from.at(k, part * 2));
            multiply_two<E>(sums, 0, left, right);
        }
    } else {
#pragma unroll 4
        for (int k = first; k < first + DEPTH; k++) {
            const float x = dy.at(row + lane / 2, k / 4)[k % 4];
#pragma unroll
            for (int n = 0; n < 2; n++)
                add_four(sums[0][n], x, b.at(k, part * 4 + lane % 2 * 2 + n));
        }
    }
}

// held += dy.T @ low, for a warp's columns of dy.
template <class E>
DEVICE void add_db(float (&held)[M][N][4], const Tile<E, COLUMNS> &dy, const Tile<E, RANK> &low,
                   int column) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(E) == 2) {
        const auto turned = dy.lane(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        const auto from = low.lane(lane % 16, lane / 16);
#pragma unroll
        for (int k = 0; k < ROWS; k += 16) {
            Fragment<M> left;
#pragma unroll
            for (int m = 0; m < M; m++)
                ldmatrix_x4_trans(left[m], turned.at(k, column / 8 + m * 2));
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t right[4];
                ldmatrix_x4_trans(right, from.at(k, n));
                multiply_two<E>(held, n, left, right);
            }
        }
    } else {
        const int own_column = column + lane / 2;
#pragma unroll 2
        for (int k = 0; k < ROWS; k++) {
            const float x = dy.at(k, own_column / 4)[own_column % 4];
#pragma unroll
            for (int n = 0; n < N; n++) add_four(held[0][n], x, low.at(k, n * 2 + lane % 2));
        }
    }
}

KERNEL(32 * WARPS, RESIDENT)
lora_gradients(const T *__restrict__ dy, const T *__restrict__ dy2, const T *__restrict__ dy3,
               const B *__restrict__ b, const B *__restrict__ b2, const B *__restrict__ b3,
               const T *__restrict__ low, const T *__restrict__ low2, const T *__restrict__ low3,
               U *__restrict__ up, W *__restrict__ db, W *__restrict__ db2, W *__restrict__ db3,
               long long rows, int slabs, int tiles, const __grid_constant__ Parts parts) {
    DYNAMIC_SHARED(T, memory);
    const Low own_b{memory};
    T *const ring = memory + COLUMNS * Low::PITCH;
    float *const sums = reinterpret_cast<float *>(ring + 2 * STAGE);

    const int all_slab = blockIdx.x % slabs, group = blockIdx.x / slabs;
    const int own = (all_slab >= parts.first_slab[1]) + (all_slab >= parts.first_slab[2]);
    const int slab = all_slab - parts.first_slab[own], first_column = slab * COLUMNS;
    const int outputs = parts.outputs[own], rank = parts.ranks[own];
    const int dy_pitch = parts.dy_pitch[own], low_pitch = parts.low_pitch[own];
    const int up_pitch = parts.up_pitch[own];
    const float scale = parts.scale[own];
    if (own > 0) {
        dy = own == 1 ? dy2 : dy3, b = own == 1 ? b2 : b3, low = own == 1 ? low2 : low3;
    }
    const long long first = (long long)group * tiles * ROWS;
    const long long left = (rows - first + ROWS - 1) / ROWS;
    const int steps = left < tiles ? (int)left : tiles;
    up += parts.up_start[own] + slab * parts.up_slab[own];
    db = (own == 0 ? db : own == 1 ? db2 : db3) + parts.db_start[own] + group * parts.db_group;

    auto load = [&](int step) {  // few accesses at a time: addresses take registers
        const Slab to{ring + step % 2 * STAGE};
        const long long top = first + (long long)step * ROWS;
#pragma unroll(LANES > 1 ? 2 : 1)
        for (int i = threadIdx.x; i < ROWS * COLUMNS / LANES; i += THREADS) {
            const int row = i / (COLUMNS / LANES), column = i % (COLUMNS / LANES) * LANES;
            const bool inside = top + row < rows && first_column + column < outputs;
            const T *from = dy + (inside ? (top + row) * dy_pitch + first_column + column : 0);
            T *const target = to.at(row, column / Slab::CHUNK) + column % Slab::CHUNK;
            if constexpr (LANES > 1) cp_async_16(target, from, inside);
            else *target = inside ? *from : T(0.0f);
        }
        cp_async_commit();
        put_low<ROWS>(Low{to.start + ROWS * Slab::PITCH}, low, top, rows, rank, low_pitch);
    };
    load(0);
    put_low<COLUMNS>(own_b, b, first_column, outputs, rank, rank);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = warp % (ROWS / 16) * 16, part = warp / (ROWS / 16) % PARTS;
    const int split = warp / (ROWS / 16 * PARTS);
    float held[M][N][4] = {};
    for (int step = 0; step < steps; step++) {
        const Slab tile{ring + step % 2 * STAGE};
        const Low lows{tile.start + ROWS * Slab::PITCH};
        cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < steps) load(step + 1);

        float up_sums[1][2][4] = {};
        add_up(up_sums, tile, own_b, row, part, split);
        add_db(held, tile, lows, warp * WARP_COLUMNS);

        float *const to = sums + (split * ROWS + row) * PITCH + part * 16;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float *sum = up_sums[0][n];
            if constexpr (sizeof(T) == 2) {
                float *const target = to + lane / 4 * PITCH + n * 8 + lane % 4 * 2;
                *reinterpret_cast<float2 *>(target) = make_float2(sum[0], sum[1]);
                *reinterpret_cast<float2 *>(target + 8 * PITCH) = make_float2(sum[2], sum[3]);
            } else {
                float *const target = to + lane / 2 * PITCH + lane % 2 * 8 + n * 4;
                *reinterpret_cast<float4 *>(target) = make_float4(sum[0], sum[1], sum[2], sum[3]);
            }
        }
        __syncthreads();
        const long long top = first + (long long)step * ROWS;
        for (int i = threadIdx.x; i < ROWS * RANK; i += THREADS) {
            const int here = i / RANK, column = i % RANK;
            float sum = sums[here * PITCH + column];
#pragma unroll
            for (int s = 1; s < SPLITS; s++) sum += sums[(s * ROWS + here) * PITCH + column];
            if (top + here < rows && column < rank)
                up[(top + here) * up_pitch + column] = (U)(scale * sum);
        }
    }

#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool narrow = sizeof(T) == 2;
                const int beside = narrow ? m * 16 + lane / 4 + i / 2 * 8 : lane / 2;
                const int column = first_column + warp * WARP_COLUMNS + beside;
                const int at = n * 8 + (narrow ? lane % 4 * 2 + i % 2 : lane % 2 * 4 + i);
                if (column < outputs && at < rank)
                    db[(long long)column * rank + at] = (W)(scale * held[m][n][i]);
            }
}

// Adds the sums of slabs to up, and those of groups to db, of all adapters; either may be absent.
// The results are counted in order: the rows of up, as wide as all ranks, then each db.
KERNEL(256)
lora_gradient_sums(const float *__restrict__ ups, const float *__restrict__ dbs,
                   T *__restrict__ up, B *__restrict__ db, B *__restrict__ db2,
                   B *__restrict__ db3, long long rows, int width, int pitch, int slabs, int groups,
                   const __grid_constant__ Parts parts) {
    long long at = (long long)blockIdx.x * 256 + threadIdx.x;
    const long long of_up = ups == nullptr ? 0 : rows * width;
    float sum = 0;
    if (at < of_up) {
        const long long row = at / width;
        int own = 0, column = (int)(at - row * width);
        const int whole = column;
        while (own < 2 && column >= parts.ranks[own]) column -= parts.ranks[own++];
        const int stop = own < 2 ? parts.first_slab[own + 1] : slabs;
        const float *from = ups + parts.up_start[own] + row * parts.ranks[own] + column;
#pragma unroll 8
        for (int slab = parts.first_slab[own]; slab < stop; slab++) {
            sum += *from;
            from += parts.up_slab[own];
        }
        up[row * pitch + whole] = (T)sum;
        return;
    }
    at -= of_up;
    if (dbs == nullptr || at >= parts.db_group) return;
    const int own = (at >= parts.db_start[1]) + (at >= parts.db_start[2]);
#pragma unroll 8
    for (int group = 0; group < groups; group++) sum += dbs[group * parts.db_group + at];
    (own == 0 ? db : own == 1 ? db2 : db3)[at - parts.db_start[own]] = (B)sum;
}
