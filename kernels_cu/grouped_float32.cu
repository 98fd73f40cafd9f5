// Products of sorted rows with the matrices of their groups, in float32.
//
//   FORM 0, 1 and 2: y = x weight[e]^T + bias[e], dx = dy weight[e], dweight[e] = dy^T x, where e
//   is the group of a row: see common/groups.cuh
//
//   traffic     as in grouped_linear.cu
//   constants   T, B, I     float; dtypes of bias and of offsets
//               FORM, A_TOP, B_TOP, ROWS, COLUMNS    see common/groups.cuh
//               BIAS        whether there is a bias
//               DEPTH       values of a sum in a stage
//
//   The trick: a thread adds four rows by four columns.  Sums of DEPTH values are taken first and
//   then added: shorter chains of roundings.  The next stage is loaded into registers meanwhile.
#include <common/vector.cuh>
#include <common/groups.cuh>

constexpr int THREADS = 256, SIDE = 16;  // threads along the rows and along the columns
constexpr int M = ROWS / SIDE, N = COLUMNS / SIDE, PITCH = 4;
static_assert(M == 4 && N == 4, "a thread reads four values at once");

// The values of a thread's part of a stage: COUNT rows or columns of c by DEPTH.  Values that lie
// side by side in memory go to neighbouring threads: those of a sum (ALONG), or those across it.
template <int COUNT, bool ALONG> struct Stage {
    static constexpr int EACH = COUNT * DEPTH / THREADS;
    float at[EACH];

    static DEVICE int place(int i) {  // of the sum
        const int all = i * THREADS + threadIdx.x;
        return ALONG ? all % DEPTH : all / COUNT;
    }
    static DEVICE int side(int i) {
        const int all = i * THREADS + threadIdx.x;
        return ALONG ? all / DEPTH : all % COUNT;
    }
    template <class Read> DEVICE void load(Read read) {
#pragma unroll
        for (int i = 0; i < EACH; i++) at[i] = read(side(i), place(i));
    }
    DEVICE void store(float (&to)[DEPTH][COUNT + PITCH]) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) to[place(i)][side(i)] = at[i];
    }
};

KERNEL(THREADS, 2)
grouped_float32(const T *__restrict__ a, const T *__restrict__ b, const B *__restrict__ bias,
                const int *__restrict__ order, const int *__restrict__ tiles,
                const I *__restrict__ offsets, T *__restrict__ c,
                const __grid_constant__ Sizes s) {
    __shared__ __align__(16) float lefts[DEPTH][ROWS + PITCH], tops[DEPTH][COLUMNS + PITCH];
    __shared__ int numbers[ROWS];
    const Part part = part_of(tiles, offsets, s, blockIdx.x);
    if (part.group < 0) return;
    const bool none = FORM != 2 && part.group == s.experts;
    const int depth = FORM == 2 ? max(part.stop - part.first, 0) : none ? 0 : s.k;
    const int column = threadIdx.x % SIDE * N, row = threadIdx.x / SIDE * M;
    if constexpr (FORM != 2) {
        for (int i = threadIdx.x; i < ROWS; i += THREADS)
            numbers[i] =
                part.first + i < part.stop ? row_of<A_TOP>(order, part.first + i) : -1;
        __syncthreads();
    }

    Stage<ROWS, FORM != 2> left;
    Stage<COLUMNS, FORM == 0> top;
    auto load = [&](int from) {
        left.load([&](int m, int place) {
            const int k = from + place;
            if (k >= depth) return 0.0f;
            if constexpr (FORM == 2) {
                if (part.row + m >= s.m) return 0.0f;
                return a[(long long)row_of<A_TOP>(order, part.first + k) * s.m + part.row + m];
            } else {
                return numbers[m] < 0 ? 0.0f : a[(long long)numbers[m] * s.k + k];
            }
        });
        top.load([&](int n, int place) {
            const int k = from + place, at = part.column + n;
            if (k >= depth || at >= s.n) return 0.0f;
            if constexpr (FORM == 0) return b[part.at + (long long)at * s.k + k];
            else if constexpr (FORM == 1) return b[part.at + (long long)k * s.n + at];
            else return b[(long long)row_of<B_TOP>(order, part.first + k) * s.n + at];
        });
    };
    float sum[M][N] = {};
    load(0);
    for (int from = 0; from < depth; from += DEPTH) {
        __syncthreads();  // all threads are done with the previous stage
        left.store(lefts);
        top.store(tops);
        __syncthreads();
        load(from + DEPTH);
        float part_sum[M][N] = {};
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            Vector<float, 4> x, y;
            fetch(x, &lefts[k][row]);
            fetch(y, &tops[k][column]);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n++)
                    part_sum[m][n] = fmaf(x.at[m], y.at[n], part_sum[m][n]);
        }
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) sum[m][n] += part_sum[m][n];
    }
    const int most = FORM == 2 ? s.m - part.row : part.stop - part.first;
    T *const to = c + (FORM == 2 ? part.at + (long long)part.row * s.n
                                 : (long long)part.first * s.n) + part.column;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int at = part.column + column + n;
            if (row + m >= most || at >= s.n) continue;
            if constexpr (BIAS)
                if (!none) sum[m][n] += (float)bias[(long long)part.group * s.n + at];
            to[(long long)(row + m) * s.n + column + n] = sum[m][n];
        }
}
