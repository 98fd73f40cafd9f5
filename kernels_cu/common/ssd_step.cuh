// A text of one token, with the sums of a chunk of one token in their order.
//
//   constants   T, INITIAL    and those of common/ssd_chunk.cuh
#pragma once
#include <common/ssd_chunk.cuh>

struct OneToken {  // in shared memory
    static constexpr int WIDE = 32, ROWS = PARTS * DEPTH;  // columns of x: a lane has one
    float state[ROWS][WIDE], vectors[2][ROWS], sums[2][WIDE];  // c and b; S^T c and c . b

    // Token `first` is text `number`; columns from `from` on, by all threads of a block.
    template <int THREADS>
    DEVICE void run(const T *x, const R *dt, const A *a_log, const T *b, const T *c, const O *d,
                    const Q *dt_bias, const float *initial, T *y, float *final, long long number,
                    long long first, int head, int from, const Sizes &s, const Strides &strides,
                    float least, float most) {
        constexpr int WARPS = THREADS / WIDE;
        const int heads = s.heads * s.groups, group = head / s.groups;
        const long long token = first * heads + head;
        const int lane = threadIdx.x % WIDE, warp = threadIdx.x / WIDE, column = from + lane;
        const long long own = (number * heads + head) * DIM * s.values + column;
        const bool inside = column < s.values;
#pragma unroll 8
        for (int row = warp; row < ROWS; row += WARPS) {
            const bool real = INITIAL && inside && row < DIM;
            state[row][lane] = real ? initial[own + row * s.values] : 0.0f;
        }
        for (int i = threadIdx.x; i < ROWS; i += THREADS) {
            vectors[0][i] = i < DIM ? (float)c[first * strides.c + group * DIM + i] : 0.0f;
            vectors[1][i] = i < DIM ? (float)b[first * strides.b + group * DIM + i] : 0.0f;
        }
        const float rate = rate_of((float)dt[token], dt_bias, head, least, most);
        const float factor = expf(fmaxf(-expf((float)a_log[head]) * rate, -800.0f));
        const float value =
            inside ? (float)x[first * strides.x + head * s.values + column] : 0.0f;
        __syncthreads();
        if (warp < 2) {
            float sum = 0;
#pragma unroll 16
            for (int row = 0; row < ROWS; row++)
                sum = fmaf(vectors[0][row], warp ? vectors[1][row] : state[row][lane], sum);
            sums[warp][lane] = sum;
        }
        __syncthreads();
        const float u = rate * value;
        if (!inside) return;
#pragma unroll 8
        for (int row = warp; row < DIM; row += WARPS)
            final[own + row * s.values] = fmaf(vectors[1][row], u, factor * state[row][lane]);
        if (warp == 0)
            y[token * s.values + column] = (T)fmaf(
                d ? (float)d[head] : 0.0f, value, fmaf(sums[1][lane], u, sums[0][lane] * factor));
    }
};
