// The product of a few rows and a weight of 8-bit integers.
//
//   y[r, o] = (sum of x[r, i] * codes[o, i] over i) * absmax[o] / 127        y += ... with ADD
//
//   traffic     outputs * inputs, codes once; outputs * rows * sizeof(U); x from L2
//   constants   T, U, A   dtypes of x, y and absmax
//               ROWS      rows of x, rounded up to a power of two: at most 16
//               OUTPUTS   rows of the weight that a block takes
//               LANES     codes of one access: 16 or 8, or fewer as inputs and the addresses allow
//               PART      values of x that are converted at a time: 8, or fewer as LANES and the
//                         address of x allow
//               ADD       the product is added to y
//
//   The trick: a block takes few outputs and all inputs, divided among its threads: this gives
//   many blocks, and all codes are requested at once.  A thread multiplies each of its codes by all
//   rows.  Sums of threads are added in a fixed order.
#include <common/codes.cuh>
#include <common/math.cuh>
#include <common/reduce.cuh>

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int RESIDENT = ROWS <= 4 ? 4 : ROWS <= 8 ? 3 : 2;

KERNEL(THREADS, RESIDENT)
int8_few_rows_(const T *__restrict__ x, const signed char *__restrict__ codes,
               const A *__restrict__ absmax, U *y, int rows, long long outputs, int inputs) {
    __shared__ Exchange<OUTPUTS * ROWS * WARPS> exchange;
    const long long first = (long long)blockIdx.x * OUTPUTS;
    float sum[OUTPUTS * ROWS] = {};
    const signed char *code_rows[OUTPUTS];
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++)  // past the end, the last row is read again
        code_rows[o] = codes + min(first + o, outputs - 1) * inputs;
#pragma unroll(ROWS <= 4 ? 2 : 1)
    for (int at = threadIdx.x * LANES; at < inputs; at += THREADS * LANES) {
        Vector<signed char, LANES> code[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) fetch(code[o], code_rows[o] + at);
#pragma unroll
        for (int part = 0; part < LANES; part += PART) {
            float w[OUTPUTS][PART];
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++)
                widen_codes(
                    w[o], *reinterpret_cast<const Vector<signed char, PART> *>(&code[o].at[part]));
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                float v[PART];
                load(v, x + (long long)min(r, rows - 1) * inputs + at + part);
#pragma unroll
                for (int o = 0; o < OUTPUTS; o++)
#pragma unroll
                    for (int j = 0; j < PART; j++)
                        sum[o * ROWS + r] = fmaf(v[j], w[o][j], sum[o * ROWS + r]);
            }
        }
    }
    row_sums<THREADS>(sum, exchange);
#pragma unroll
    for (int i = 0; i < OUTPUTS * ROWS; i++) {  // thread i takes sum i; registers cannot be indexed
        const long long output = first + i / ROWS;
        const int row = i % ROWS;
        if (threadIdx.x != i % THREADS || row >= rows || output >= outputs) continue;
        const long long to = row * outputs + output;
        const float value = sum[i] * divided_by<127>((float)absmax[output]);
        y[to] = (U)(ADD ? (float)y[to] + value : value);
    }
}
