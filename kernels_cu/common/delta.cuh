// Products of chunks of the gated delta rule, in float32.
//
//   constants   T            dtype of q, k and v
//               LANES        values of one access to q, k and v
//               and those of common/delta_chunk.cuh
#pragma once
#include <common/delta_chunk.cuh>
#include <common/reduce.cuh>
#include <common/vector.cuh>

constexpr int SIDE = 16, THREADS = SIDE * SIDE;
constexpr int COLUMNS = 32;                  // of values: those of a block that walks along a text
constexpr int M = CHUNK / SIDE, N = COLUMNS / SIDE;  // results of a thread: rows, columns
constexpr int ROWS = DEPTH / SIDE;           // rows of the state that a thread holds

// ---- tiles in shared memory ---------------------------------------------------------------------
// HEIGHT x WIDTH floats; rows with a PAD are an odd number of 16 bytes apart.
template <int HEIGHT, int WIDTH, int PAD = 4> struct Tile {
    static constexpr int PITCH = WIDTH + PAD, SIZE = HEIGHT * PITCH;
    float *start;

    DEVICE float &at(int row, int column) const { return start[row * PITCH + column]; }
    DEVICE const Vector<float, 4> &four(int row, int column) const {
        return *reinterpret_cast<const Vector<float, 4> *>(&at(row, column));
    }
    // Copy `rows` rows of `columns` values, `stride` apart, times factors, if there are any; the
    // rest becomes 0.
    template <int STEP, class V>
    DEVICE void load(const V *from, int stride, int rows, int columns,
                     const float *factors = nullptr) const {
#pragma unroll 4
        for (int i = threadIdx.x; i < HEIGHT * (WIDTH / STEP); i += THREADS) {
            const int row = i / (WIDTH / STEP), column = i % (WIDTH / STEP) * STEP;
            float values[STEP] = {};
            if (row < rows && column < columns) {
                ::load(values, from + row * stride + column);
                if (factors) {
#pragma unroll
                    for (int i = 0; i < STEP; i++)
                        values[i] *= factors[row * columns + column + i];
                }
            }
            store(&at(row, column), values);
        }
    }
};
using Keys = Tile<CHUNK, DEPTH>;         // q or k
using Square = Tile<CHUNK, CHUNK>;       // pairs of tokens
using State = Tile<DEPTH, COLUMNS, 0>;
using Values = Tile<CHUNK, COLUMNS, 0>;  // v, and what has its shape

// A thread holds rows y * ROWS .. of a product and columns x * N ..
DEVICE int thread_x() { return threadIdx.x % SIDE; }
DEVICE int thread_y() { return threadIdx.x / SIDE; }

// sum += a @ b for the first `depth` columns of a, a multiple of 4.
template <class A, class B>
DEVICE void add_rows(float (&sum)[M][N], const A &a, const B &b, int depth) {
    const int row = thread_y() * M, column = thread_x() * N;
#pragma unroll 2
    for (int k = 0; k < depth; k += 4) {
        Vector<float, 4> left[M];
        Vector<float, N> right[4];
#pragma unroll
        for (int m = 0; m < M; m++) left[m] = a.four(row + m, k);
#pragma unroll
        for (int i = 0; i < 4; i++) fetch(right[i], &b.at(k + i, column));
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n++)
                    sum[m][n] = fmaf(left[m].at[i], right[i].at[n], sum[m][n]);
    }
}

// sum += a^T @ (factor * b), over the rows of a and b from `first` on.
template <int COUNT, class A, class B, class Factor>
DEVICE void add_columns(float (&sum)[COUNT][N], const A &a, const B &b, int first, Factor factor) {
    constexpr int WIDE = COUNT < 4 ? COUNT : 4;
    const int row = thread_y() * COUNT, column = thread_x() * N;
#pragma unroll 2
    for (int k = first; k < CHUNK; k++) {
        Vector<float, WIDE> left[COUNT / WIDE];
        Vector<float, N> right;
#pragma unroll
        for (int m = 0; m < COUNT / WIDE; m++) fetch(left[m], &a.at(k, row + m * WIDE));
        fetch(right, &b.at(k, column));
        const float by = factor(k);
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float value = right.at[n] * by;
#pragma unroll
            for (int m = 0; m < COUNT; m++)
                sum[m][n] = fmaf(left[m / WIDE].at[m % WIDE], value, sum[m][n]);
        }
    }
}

// Call use(row, column, value) for each value that a thread holds.
template <int COUNT, class Use> DEVICE void each(float (&values)[COUNT][N], Use use) {
#pragma unroll
    for (int m = 0; m < COUNT; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
            use(thread_y() * COUNT + m, thread_x() * N + n, values[m][n]);
}

// t becomes the inverse of I + A; a holds A below its diagonal, t begins as I.
DEVICE void invert(const Square &a, const Square &t) {
    // blocks of `half` are inverted: so are those of twice that; above the diagonal is A21 T11
#pragma unroll 1
    for (int half = 1; half < CHUNK; half *= 2) {
        const auto pairs = [&](auto use) {
            for (int i = threadIdx.x; i < CHUNK / 2 * half; i += THREADS) {
                const int top = i / (half * half) * 2 * half;
                use(top, top + half, i / half % half, i % half);
            }
            __syncthreads();
        };
        pairs([&](int top, int low, int row, int column) {
            float sum = 0;
            for (int j = column; j < half; j++)
                sum = fmaf(a.at(low + row, top + j), t.at(top + j, top + column), sum);
            t.at(top + row, low + column) = sum;
        });
        pairs([&](int top, int low, int row, int column) {
            float sum = 0;
            for (int j = 0; j <= row; j++)
                sum = fmaf(t.at(low + row, low + j), t.at(top + j, low + column), sum);
            t.at(low + row, top + column) = -sum;
        });
    }
}

constexpr int SLAB = 32;  // depth of the parts in which products are computed
using Left = Tile<CHUNK, SLAB>;
using Right = Tile<(DEPTH < CHUNK ? CHUNK : DEPTH), SLAB>;

// sum += left @ right^T; rows y * M + m, columns x + n * SIDE.  left(row, k) and right(column, k)
// read values, of which those along k are side by side; with TURNED, in right those along columns.
template <bool TURNED = false, int COUNT, class A, class B>
DEVICE void multiply(float (&sum)[M][COUNT], float *memory, int depth, A left, B right) {
    const Left a{memory};
    const Right b{memory + Left::SIZE};
    const int x = thread_x(), y = thread_y();
#pragma unroll 1
    for (int from = 0; from < depth; from += SLAB) {
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x; i < CHUNK * SLAB; i += THREADS)
            a.at(i / SLAB, i % SLAB) = left(i / SLAB, from + i % SLAB);
#pragma unroll 4
        for (int i = threadIdx.x; i < COUNT * SIDE * SLAB; i += THREADS) {
            const int column = TURNED ? i % (COUNT * SIDE) : i / SLAB;
            const int k = TURNED ? i / (COUNT * SIDE) : i % SLAB;
            b.at(column, k) = right(column, from + k);
        }
        __syncthreads();
#pragma unroll 2
        for (int k = 0; k < SLAB; k += 4) {
            Vector<float, 4> rows[M];
#pragma unroll
            for (int m = 0; m < M; m++) rows[m] = a.four(y * M + m, k);
#pragma unroll
            for (int n = 0; n < COUNT; n++) {
                const Vector<float, 4> column = b.four(x + n * SIDE, k);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sum[m][n] = fmaf(rows[m].at[i], column.at[i], sum[m][n]);
            }
        }
    }
}
