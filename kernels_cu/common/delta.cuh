// Chunks of the gated delta rule: where they are, their decays, and products of their tiles.
//
//   constants   T, D, E      dtypes of q, k and v; of decay; of beta
//               DIM          columns of q and k
//               LANES        values of one access to q, k and v
//               CHANNELS     each column of q and k has a decay of its own
//               PACKED, I    see common/texts.cuh
//
// Matrices of chunks that pass from kernel to kernel have a slot for each chunk.  Chunk c of text i,
// which begins at token s, has slot s / CHUNK + i + c: no two have the same, and no kernel needs a
// list of chunks.  Some slots stay empty.
#pragma once
#include <common/reduce.cuh>
#include <common/texts.cuh>
#include <common/vector.cuh>

constexpr int CHUNK = 64, SIDE = 16, THREADS = SIDE * SIDE;
constexpr int DEPTH = DIM <= 16 ? 16 : DIM <= 32 ? 32 : DIM <= 64 ? 64 : 128;  // DIM and zeros
constexpr int COLUMNS = 32;                  // of values: those of a block that walks along a text
constexpr int M = CHUNK / SIDE, N = COLUMNS / SIDE;  // results of a thread: rows, columns
constexpr int ROWS = DEPTH / SIDE;           // rows of the state that a thread holds

struct Sizes {
    long long tokens, each;  // of all texts; of a text, unless PACKED
    int texts, heads, groups, values, tiles;  // groups: value heads of a head; tiles of COLUMNS
    float scale;
};

// The tokens first .. first + count - 1 of a text; its first chunk has slot `slot`.
struct Text {
    long long start, stop, slot;

    DEVICE Text(const I *offsets, int text, const Sizes &s)
        : start(text_start(offsets, text, s.each, s.tokens)),
          stop(text_start(offsets, text + 1, s.each, s.tokens)), slot(start / CHUNK + text) {}

    DEVICE int chunks() const {
        return stop > start ? (int)((stop - start + CHUNK - 1) / CHUNK) : 0;
    }
    DEVICE long long first(long long chunk) const { return start + chunk * CHUNK; }
    DEVICE int count(long long chunk) const {  // of tokens; 0 or less where there is no such chunk
        return (int)max(-1ll, min((long long)CHUNK, stop - first(chunk)));
    }
};

DEVICE Text text_of_slot(const I *offsets, long long slot, const Sizes &s) {
    return Text(offsets, last_text(s.texts, [&](int text) {
        return text_start(offsets, text, s.each, s.tokens) / CHUNK + text <= slot;
    }), s);
}

// ---- decays -------------------------------------------------------------------------------------
// A sum and what rounding took from it: differences of sums of large decays keep their digits.
struct Exact { float high, low; };

DEVICE Exact plus(const Exact &a, const Exact &b) {
    const float sum = a.high + b.high, more = sum - a.high;
    return {sum, a.low + b.low + ((a.high - (sum - more)) + (b.high - more))};
}
// exp(a - b), of which only pairs that do not grow are asked for: no overflow in masked corners
DEVICE float ratio(const Exact &a, const Exact &b) {
    return expf((a.high - b.high) + (a.low - b.low));
}

// Of each token of a chunk: g, the sum of decays; exp(g); exp(g of the last - g); beta.
struct Factors {
    Exact g[CHUNK];
    float into[CHUNK], onward[CHUNK], beta[CHUNK], whole;

    DEVICE float fade(int row, int column) const {
        return row >= column ? ratio(g[row], g[column]) : 0.0f;
    }
};

// By the first warp; barriers are around it.  With CHANNELS only beta: the others are 1.
DEVICE void set(Factors &to, const D *decay, const E *beta, long long first, int count, int head,
                const Sizes &s) {
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x, heads = s.heads * s.groups;
    Exact own[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane * 2 + i;
        const long long at = (first + row) * heads + head;
        own[i] = {!CHANNELS && row < count ? fmaxf((float)decay[at], -800.0f) : 0.0f, 0.0f};
        to.beta[row] = row < count ? (float)beta[at] : 0.0f;
    }
    Exact sum = plus(own[0], own[1]);
#pragma unroll
    for (int away = 1; away < 32; away *= 2) {
        const Exact before = {__shfl_up_sync(0xffffffffu, sum.high, away),
                              __shfl_up_sync(0xffffffffu, sum.low, away)};
        if (lane >= away) sum = plus(before, sum);
    }
    const Exact last = {__shfl_sync(0xffffffffu, sum.high, 31),
                        __shfl_sync(0xffffffffu, sum.low, 31)};
    Exact before = {__shfl_up_sync(0xffffffffu, sum.high, 1),
                    __shfl_up_sync(0xffffffffu, sum.low, 1)};
    if (lane == 0) before = {0.0f, 0.0f};
    own[0] = plus(before, own[0]), own[1] = sum;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane * 2 + i;
        to.g[row] = own[i];
        to.into[row] = expf(own[i].high + own[i].low);
        to.onward[row] = ratio(last, own[i]);
    }
    if (lane == 0) to.whole = expf(last.high + last.low);
}

// With CHANNELS: exp(g of the last) of a column of q and k, from exp(g) of all tokens of a chunk.
DEVICE float whole_of(const float *into, int column) {
    return column < DIM ? into[(CHUNK - 1) * DIM + column] : 0.0f;
}

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
