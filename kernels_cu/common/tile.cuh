// Tiles in shared memory, and the products of a warp with them: 16-bit values on tensor cores,
// float32 by FMAs in the same layout, with 16-byte reads that a quarter or an eighth of a warp
// elements.
//
// A lane holds float[M][N][4] of a result of 16 * M rows by 8 * N columns.  In each part of 16 x 8,
// [0] and [1] are of row lane / 4, [2] and [3] of the row 8 below; the columns are lane % 4 * 2 and
// the next, except where `column` says otherwise.
#pragma once
#include <common/ptx.cuh>

// The number of the warp, in a form that the compiler knows to be the same in all lanes: values
// derived from it take uniform registers, and branches on it need no reconvergence.
DEVICE int own_warp() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

// Call use(m, half) for every row that a lane holds a part of; half is 1 for the row 8 below.
template <int M, class Use> DEVICE void each_row(Use use) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) use(m, half);
}

constexpr int padded(int columns) { return (columns + 15) / 16 * 16; }  // depth of a product

// Rows of 16-byte chunks.  Eight neighbouring rows have the same chunk in eight different groups of
// banks: by an xor where a row fills all banks, else because a row has an odd number of chunks.
template <class E, int COLUMNS> struct Tile {
    static constexpr int CHUNK = 16 / sizeof(E);
    static constexpr int CHUNKS = COLUMNS / CHUNK;
    static constexpr bool XOR = CHUNKS % 8 == 0;
    static constexpr int PITCH = (XOR ? CHUNKS : CHUNKS | 1) * CHUNK;
    static constexpr int PITCH_BYTES = PITCH * sizeof(E);
    E *start;

    DEVICE E *at(int row, int chunk) const {
        return start + row * PITCH + (XOR ? chunk ^ (row & 7) : chunk) * CHUNK;
    }
    // A position of each thread, and the addresses `rows` and `chunks` further on.  These offsets
    // share no bit with the thread's own row and chunk, so that they become a constant: in the
    // address, or in a single xor.
    struct Lane {
        char *start;      // the same in all threads
        uint32_t offset;  // offset of this thread in bytes

        DEVICE char *at(int rows, int chunks) const {
            const int mixed = XOR ? (rows ^ chunks) & 7 : 0, added = XOR ? chunks & ~7 : chunks;
            return start + (rows * PITCH_BYTES + added * 16) + (offset ^ mixed * 16u);
        }
    };
    DEVICE Lane lane(int row, int chunk) const {
        return {reinterpret_cast<char *>(start),
                opaque(row * PITCH_BYTES + (XOR ? chunk ^ (row & 7) : chunk) * 16)};
    }
    // Start an asynchronous copy of USED columns of the rows first .. first + COUNT - 1 by THREADS
    // threads; rows from `stop` on and padding become 0.  UNROLLED: iterations whose addresses fit
    // into registers.
    template <int COUNT, int USED, int THREADS, int UNROLLED = COUNT * CHUNKS>
    DEVICE void copy(const E *from, int first, int stop, int stride) const {
        constexpr int STEPS = (COUNT * CHUNKS + THREADS - 1) / THREADS;
        // STAYS: a thread copies the same chunk of every row, and goes down by DOWN rows each time
        constexpr bool STAYS = THREADS % CHUNKS == 0;
        constexpr int DOWN = THREADS / CHUNKS;
        const int row = STAYS ? threadIdx.x / CHUNKS : 0, chunk = STAYS ? threadIdx.x % CHUNKS : 0;
        const int bytes = stride * (int)sizeof(E), left = stop - first - row;
        const char *real = reinterpret_cast<const char *>(from);
        real += (long long)(first + row) * bytes + chunk * 16;
        const auto to = lane(row, chunk);
#pragma unroll UNROLLED
        for (int step = 0; step < STEPS; step++) {
            const int i = step * THREADS + threadIdx.x;
            if (COUNT * CHUNKS % THREADS != 0 && i >= COUNT * CHUNKS) break;
            const int down = STAYS ? step * DOWN : i / CHUNKS, column = STAYS ? chunk : i % CHUNKS;
            const bool inside = down < left && (COLUMNS == USED || column * CHUNK < USED);
            if constexpr (STAYS) {
                cp_async_16(to.at(down, 0), real, inside);
                real += (long long)DOWN * bytes;
            } else {
                cp_async_16(at(down, column), real + (long long)down * bytes + column * 16, inside);
            }
        }
    }
};

// ---- products ----------------------------------------------------------------------------------
template <int M> using Fragment = uint32_t[M][4];  // 16 columns of 16 * M rows: operand a of mma

DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
    mma_m16n8k16_f16(d, a, b, d);
}
DEVICE void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __nv_bfloat16) {
    mma_m16n8k16_bf16(d, a, b, d);
}
DEVICE uint32_t pair(float low, float high, __half) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&both);
}
DEVICE uint32_t pair(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&both);
}

// d[..][n] and d[..][n + 1] += a @ b, where b are the 16 columns that one ldmatrix_x4 loads.
template <class E, int M, int N>
DEVICE void multiply_two(float (&d)[M][N][4], int n, const Fragment<M> &a, const uint32_t (&b)[4]) {
    const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
    for (int m = 0; m < M; m++) {
        multiply(d[m][n], a[m], b0, E());
        multiply(d[m][n + 1], a[m], b1, E());
    }
}

// Load the fragment of the rows from `row` on and the columns from 16 * step on.
template <int M, class E, int COLUMNS>
DEVICE void fetch(uint32_t (&a)[M][4], const Tile<E, COLUMNS> &tile, int row, int step) {
    const auto from = tile.lane(row + threadIdx.x % 16, threadIdx.x / 16 % 2);
#pragma unroll
    for (int m = 0; m < M; m++) ldmatrix_x4(a[m], from.at(m * 16, step * 2));
}

// s = a @ b.T for the rows of a from `row` on (with KEPT, its fragments `kept`) and 8 * N rows of
// b.  Here and below, loops along rows of more than WIDEST columns are not fully unrolled:
// prefetched values and their addresses would need the registers of other sums.
template <bool KEPT, int WIDEST = 1024, int M, int N, int STEPS, class E, int COLUMNS>
DEVICE void product_abt(float (&s)[M][N][4], uint32_t (&kept)[STEPS][M][4],
                        const Tile<E, COLUMNS> &a, int row, const Tile<E, COLUMNS> &b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0;
    if constexpr (sizeof(E) == 2) {
        const auto from = b.lane(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        auto take = [&](int step) {
            Fragment<M> again;
            if constexpr (!KEPT) fetch(again, a, row, step);
            Fragment<M> &left = KEPT ? kept[KEPT ? step : 0] : again;
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t right[4];
                ldmatrix_x4(right, from.at(n * 8, step * 2));
                multiply_two<E>(s, n, left, right);
            }
        };
        if constexpr (COLUMNS > WIDEST) {
#pragma unroll 4
            for (int step = 0; step < COLUMNS / 16; step++) take(step);
        } else {
#pragma unroll
            for (int step = 0; step < COLUMNS / 16; step++) take(step);
        }
    } else {
        const auto from = a.lane(row + lane / 4, 0);
        const decltype(from) right[2] = {b.lane(lane % 4 * 2, 0), b.lane(lane % 4 * 2 + 1, 0)};
#pragma unroll 1
        for (int chunk = 0; chunk < COLUMNS / 4; chunk += 2) {
            float4 x[M][2][2];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        x[m][half][c] = *reinterpret_cast<const float4 *>(
                            from.at(m * 16 + half * 8, chunk + c));
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float4 y[2];
#pragma unroll
                    for (int c = 0; c < 2; c++)
                        y[c] = *reinterpret_cast<const float4 *>(right[e].at(n * 8, chunk + c));
#pragma unroll
                    for (int m = 0; m < M; m++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            // sums of eight first: shorter chains of roundings; with sixteen
                            // columns or fewer, the order and the roundings of a plain product
                            float &sum = s[m][n][half * 2 + e];
                            float part = COLUMNS > 16 ? 0.0f : sum;
#pragma unroll
                            for (int c = 0; c < 2; c++) {
                                part = fmaf(x[m][half][c].x, y[c].x, part);
                                part = fmaf(x[m][half][c].y, y[c].y, part);
                                part = fmaf(x[m][half][c].z, y[c].z, part);
                                part = fmaf(x[m][half][c].w, y[c].w, part);
                            }
                            sum = COLUMNS > 16 ? sum + part : part;
                        }
                }
        }
    }
}

// The first column of o[..][n] that a lane holds of the product below.  In float32 a lane holds
// runs of four columns, in two n.
template <class E> DEVICE int column(int n) {
    const int quarter = threadIdx.x % 4;
    return sizeof(E) == 2 ? n * 8 + quarter * 2 : n / 2 * 16 + quarter * 4 + n % 2 * 2;
}

// o += p @ b with 8 * K rows of b; p is the result of product_abt, rounded to E.  In float32, PART
// rows are summed before they are added to o: for n rows, o is then rounded n / PART times.
template <int PART = 8, int M, int K, int N, class E, int COLUMNS>
DEVICE void add_product_ab(float (&o)[M][N][4], const float (&p)[M][K][4],
                           const Tile<E, COLUMNS> &b) {
    static_assert(N == COLUMNS / 8 && 8 % PART == 0);
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(E) == 2) {
        const auto from = b.lane(lane % 16, lane / 16);
#pragma unroll
        for (int k = 0; k < K; k += 2) {
            Fragment<M> left;
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    left[m][i] =
                        pair(p[m][k + i / 2][i % 2 * 2], p[m][k + i / 2][i % 2 * 2 + 1], E());
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t right[4];
                ldmatrix_x4_trans(right, from.at(k * 8, n));
                multiply_two<E>(o, n, left, right);
            }
        }
    } else {
        auto element = [&](int m, int k, int half, int row) {  // one of four lanes has it
            return __shfl_sync(0xffffffffu, p[m][k][half * 2 + row % 2], row / 2, 4);
        };
        const auto from = b.lane(0, lane % 4);
        auto read = [&](int row, int n) {
            return *reinterpret_cast<const float4 *>(from.at(row, n * 2));
        };
        auto add = [](float &x, float &y, float &z, float &w, float factor, const float4 &row) {
            x = fmaf(factor, row.x, x), y = fmaf(factor, row.y, y);
            z = fmaf(factor, row.z, z), w = fmaf(factor, row.w, w);
        };
        auto one_by_one = [&](int k, int row) {
            float elements[M][2];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) elements[m][half] = element(m, k, half, row);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                const float4 y = read(k * 8 + row, n);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float *first = &o[m][n][half * 2], *second = &o[m][n + 1][half * 2];
                        add(first[0], first[1], second[0], second[1], elements[m][half], y);
                    }
            }
        };
        auto together = [&](int k, int from) {
            float elements[M][2][PART];
#pragma unroll
            for (int i = 0; i < PART; i++)
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        elements[m][half][i] = element(m, k, half, from + i);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                float part[M][2][4] = {};
#pragma unroll
                for (int i = 0; i < PART; i++) {
                    const float4 y = read(k * 8 + from + i, n);
#pragma unroll
                    for (int m = 0; m < M; m++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            float (&to)[4] = part[m][half];
                            add(to[0], to[1], to[2], to[3], elements[m][half][i], y);
                        }
                }
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            o[m][n + i / 2][half * 2 + i % 2] += part[m][half][i];
            }
        };
#pragma unroll
        for (int k = 0; k < K; k++) {
            if constexpr (PART > 1) {
#pragma unroll
                for (int from = 0; from < 8; from += PART) together(k, from);
            } else {  // wide rows: prefetched values would take the registers of the sums
#pragma unroll(COLUMNS > 128 ? 1 : 4)
                for (int quarter = 0; quarter < 4; quarter++) {
                    one_by_one(k, quarter * 2);
                    one_by_one(k, quarter * 2 + 1);
                }
            }
        }
    }
}

// Write USED columns of one row of such a sum, times `factor`: of a lane's upper row (half 0) or of
// the row 8 below (half 1).
template <int USED, int N, class E>
DEVICE void put_row(E *to, const float (&o)[N][4], int half, float factor) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (N * 8 != USED && column<E>(n) >= USED) continue;
        const float first = o[n][half * 2] * factor, second = o[n][half * 2 + 1] * factor;
        if constexpr (sizeof(E) == 2)
            *reinterpret_cast<uint32_t *>(to + column<E>(n)) = pair(first, second, E());
        else *reinterpret_cast<float2 *>(to + column<E>(n)) = make_float2(first, second);
    }
}
