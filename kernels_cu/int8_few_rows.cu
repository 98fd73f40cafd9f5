// The product of a few rows and a weight of 8-bit integers.
//
//   y[r, o] = (sum of x[r, i] * codes[o, i] over i) * absmax[o] / 127        y += ... with ADD
//   y[r, o] = sum of x[r, i] * codes[o, i] * absmax[o, i / BLOCK] over i     with BLOCK
//
//   traffic     outputs * inputs, codes once, with BLOCK and scales; outputs * rows * sizeof(U); x from L2
//   constants   T, U, A   dtypes of x, y and absmax
//               TENSOR    on tensor cores: x of 16 bits, and 16 codes in one access
//               ROWS      rows of x, rounded up to a power of two: at most 16; with TENSOR 8 or 16
//               OUTPUTS   rows of the weight that a block takes; with TENSOR 16, at a time
//               LANES     codes of one access: 16 or 8, or fewer as inputs and the addresses allow
//               PART      values of x that are converted at a time: 8, or fewer as LANES and the
//                         address of x allow
//               BLOCK     values with one scale, a multiple of 16; 0: a row has one
//               ADD       the product is added to y
//
//   The trick: a code is exact in 16 bits, and tensor cores multiply it by eight rows at once.  With
//   BLOCK they multiply the dense weight, code times scale rounded to T.  The
//   order of columns in a product is free as long as x has the same order, so a lane reads 16
//   neighbouring codes, and meanwhile the next ones, which may be those of other outputs: two
//   blocks of an SM take all of them.  Without tensor cores, a block takes few outputs and all
//   inputs, divided among its threads: this gives many blocks, and all codes are requested at once.
//   Sums of threads, or of warps, are added in a fixed order.
#include <common/codes.cuh>
#include <common/math.cuh>
#include <common/ptx.cuh>
#include <common/reduce.cuh>

constexpr int THREADS = TENSOR ? 256 : 128, WARPS = THREADS / 32;
constexpr int RESIDENT = TENSOR ? 2 : ROWS <= 4 ? 4 : ROWS <= 8 ? 3 : 2;

// Write or add a sum.
DEVICE void finish(U *y, const A *absmax, float sum, int row, long long output, long long outputs) {
    const long long to = row * outputs + output;
    const float value = BLOCK ? sum : sum * divided_by<127>((float)absmax[output]);
    y[to] = (U)(ADD ? (float)y[to] + value : value);
}

using Sums = float[4];
using Weights = unsigned[4];
using Rows = unsigned[2];
DEVICE void multiply(Sums &sums, const Weights &w, const Rows &x, __half) {
    mma_m16n8k16_f16(sums, w, x, sums);
}
DEVICE void multiply(Sums &sums, const Weights &w, const Rows &x, __nv_bfloat16) {
    mma_m16n8k16_bf16(sums, w, x, sums);
}
DEVICE void multiply(Sums &, const Weights &, const Rows &, float) {}

// Two small integers in 16 bits each; the high half of their float32 is a bfloat16.
DEVICE unsigned pair_of(float first, float second, __half) {
    Vector<__half, 2> pair;
    pair.at[0] = __half(first), pair.at[1] = __half(second);
    return reinterpret_cast<const unsigned &>(pair);
}
DEVICE unsigned pair_of(float first, float second, __nv_bfloat16) {
    if constexpr (BLOCK > 0) {
        Vector<__nv_bfloat16, 2> pair;
        pair.at[0] = __nv_bfloat16(first), pair.at[1] = __nv_bfloat16(second);
        return reinterpret_cast<const unsigned &>(pair);
    }
    return __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
}
DEVICE unsigned pair_of(float, float, float) { return 0; }

constexpr int UNIT = 64, GROUPS = (ROWS + 7) / 8;  // columns of four lanes; rows of x by eight
constexpr int UNITS = GROUPS == 1 && BLOCK == 0 ? 4 : 2;  // that a warp takes at a time
constexpr int STEP = WARPS * UNITS * UNIT;         // columns that a block takes at a time
constexpr int PITCH = 16 + 4;                      // of sums: lanes write to different banks

DEVICE void by_tensor_cores(const T *x, const signed char *codes, const A *absmax, U *y, int rows,
                            long long outputs, int inputs) {
    __shared__ float partials[2][WARPS][8 * GROUPS][PITCH];
    using Chunk = Vector<signed char, 16>;
    const int lane = threadIdx.x % 32, high = lane / 4, low = lane % 4;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same for all
    const int first = warp * UNITS * UNIT;
    const T *x_rows[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++)  // past the end, the last row is read again
        x_rows[i] = x + (long long)min(8 * i + high, rows - 1) * inputs + low * 16;

    const signed char *code_rows[2];
    const A *scale_rows[2];
    auto take = [&](long long top) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const long long start = min(top + 8 * i + high, outputs - 1) * inputs + low * 16;
            code_rows[i] = codes + start;
            if constexpr (BLOCK > 0) scale_rows[i] = absmax + start / max(BLOCK, 1);
        }
    };
    auto read = [&](Chunk (&to)[UNITS][2], A (&scales)[UNITS][2], int from) {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = from + u * UNIT;
                if (at + low * 16 < inputs) {
                    fetch(to[u][i], code_rows[i] + at);
                    if constexpr (BLOCK > 0) scales[u][i] = scale_rows[i][at / max(BLOCK, 1)];
                } else {
                    to[u][i] = {};
                    scales[u][i] = A(0.0f);
                }
            }
    };

    Chunk now[UNITS][2], next[UNITS][2];
    A scales[UNITS][2], next_scales[UNITS][2];
    long long top = blockIdx.x * 16ll;
    take(top);
    read(now, scales, first);
    for (int turn = 0; top < outputs; turn ^= 1) {
        const long long own = top;
        top += gridDim.x * 16ll;
        Sums sums[GROUPS] = {};
        int from = first;
        do {
            const bool more = from + STEP < inputs;
            if (!more && top < outputs) take(top);
            if (more || top < outputs) read(next, next_scales, more ? from + STEP : first);
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const int at = from + u * UNIT;
                Vector<T, 16> v[GROUPS] = {};
#pragma unroll
                for (int i = 0; i < GROUPS; i++)
                    if (at + low * 16 < inputs) fetch(v[i], x_rows[i] + at);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    Weights a;
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float four[4];
                        widen_four(four, reinterpret_cast<const unsigned *>(&now[u][i])[c]);
                        if constexpr (BLOCK > 0)
#pragma unroll
                            for (int j = 0; j < 4; j++) four[j] *= (float)scales[u][i];
                        a[i] = pair_of(four[0], four[1], T());
                        a[2 + i] = pair_of(four[2], four[3], T());
                    }
#pragma unroll
                    for (int i = 0; i < GROUPS; i++) {
                        const unsigned *const words = reinterpret_cast<const unsigned *>(&v[i]);
                        const Rows b = {words[2 * c], words[2 * c + 1]};
                        multiply(sums[i], a, b, T());
                    }
                }
            }
#pragma unroll
            for (int u = 0; u < UNITS; u++)
#pragma unroll
                for (int i = 0; i < 2; i++) now[u][i] = next[u][i], scales[u][i] = next_scales[u][i];
            from += STEP;
        } while (from < inputs);

#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                partials[turn][warp][8 * i + 2 * low + j % 2][8 * (j / 2) + high] = sums[i][j];
        __syncthreads();  // before it, all threads have read what `turn` had two turns ago
        const int row = threadIdx.x / 16;
        const long long output = own + threadIdx.x % 16;
        if (row >= rows || output >= outputs) continue;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += partials[turn][w][row][threadIdx.x % 16];
        finish(y, absmax, sum, row, output, outputs);
    }
}

DEVICE void by_threads(const T *x, const signed char *codes, const A *absmax, U *y, int rows,
                       long long outputs, int inputs) {
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
        float scale[OUTPUTS];
#pragma unroll
        for (int o = 0; o < OUTPUTS; o++) {
            fetch(code[o], code_rows[o] + at);
            if constexpr (BLOCK > 0)
                scale[o] = (float)absmax[(code_rows[o] + at - codes) / max(BLOCK, 1)];
        }
#pragma unroll
        for (int part = 0; part < LANES; part += PART) {
            float w[OUTPUTS][PART];
#pragma unroll
            for (int o = 0; o < OUTPUTS; o++)
                widen_codes(
                    w[o], *reinterpret_cast<const Vector<signed char, PART> *>(&code[o].at[part]));
            if constexpr (BLOCK > 0)
#pragma unroll
                for (int o = 0; o < OUTPUTS; o++)
#pragma unroll
                    for (int j = 0; j < PART; j++) w[o][j] *= scale[o];
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
        finish(y, absmax, sum[i], row, output, outputs);
    }
}

KERNEL(THREADS, RESIDENT)
int8_few_rows_(const T *__restrict__ x, const signed char *__restrict__ codes,
               const A *__restrict__ absmax, U *y, int rows, long long outputs, int inputs) {
    if constexpr (TENSOR) by_tensor_cores(x, codes, absmax, y, rows, outputs, inputs);
    else by_threads(x, codes, absmax, y, rows, outputs, inputs);
}
