// A text of one token, with the sums of a chunk of one token in their order.
//
//   constants   T, INITIAL    and those of common/delta_chunk.cuh
#pragma once
#include <common/delta_chunk.cuh>

struct OneToken {  // in shared memory
    static constexpr int WIDE = 32;  // columns of values: a lane has one
    float state[DEPTH][WIDE], vectors[2][DEPTH], sums[3][WIDE];  // q and k; S^T q, S^T k and q . k
    float factors[CHANNELS ? DEPTH : 1];

    // Token `first` is text `number`; columns from `from` on, by all threads of a block.
    template <int THREADS>
    DEVICE void run(const T *q, const T *k, const T *v, const D *decay, const E *beta,
                    const float *initial, T *out, float *final, long long number, long long first,
                    int value_head, int from, const Sizes &s) {
        const int heads = s.heads * s.groups;
        const long long token = first * heads + value_head;
        const int lane = threadIdx.x % WIDE, warp = threadIdx.x / WIDE, column = from + lane;
        const long long at = (first * s.heads + value_head / s.groups) * DIM;
        const long long own = (number * heads + value_head) * DIM * s.values + column;
        const bool inside = column < s.values;
#pragma unroll
        for (int row = warp; row < DEPTH; row += THREADS / WIDE) {
            const bool real = INITIAL && inside && row < DIM;
            state[row][lane] = real ? initial[own + row * s.values] : 0.0f;
        }
        for (int i = threadIdx.x; i < DEPTH; i += THREADS) {
            vectors[0][i] = i < DIM ? (float)q[at + i] : 0.0f;
            vectors[1][i] = i < DIM ? (float)k[at + i] : 0.0f;
            if constexpr (CHANNELS)
                factors[i] = i < DIM ? expf((float)decay[token * DIM + i]) : 0.0f;
        }
        const float factor = CHANNELS ? 1.0f : expf(fmaxf((float)decay[token], -800.0f));
        const auto of_row = [&](int row) { return CHANNELS ? factors[row] : factor; };
        const float value = inside ? (float)v[token * s.values + column] : 0.0f;
        __syncthreads();
        if (warp < 3) {
            float sum = 0;
#pragma unroll 16
            for (int row = 0; row < DEPTH; row++) {
                float left = vectors[warp == 1][row];
                if (CHANNELS && warp < 2) left *= factors[row];
                sum = fmaf(left, warp < 2 ? state[row][lane] : vectors[1][row], sum);
            }
            sums[warp][lane] = sum;
        }
        __syncthreads();
        const float u = (float)beta[token] * fmaf(-factor, sums[1][lane], value);
        if (!inside) return;
#pragma unroll
        for (int row = warp; row < DIM; row += THREADS / WIDE)
            final[own + row * s.values] = fmaf(vectors[1][row], u, of_row(row) * state[row][lane]);
        if (warp == 0)
            out[token * s.values + column] =
                (T)fmaf(sums[2][lane] * s.scale, u, sums[0][lane] * (factor * s.scale));
    }
};
