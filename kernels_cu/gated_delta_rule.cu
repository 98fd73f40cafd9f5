// The gated delta rule by chunks of tokens; in 16 bits, many shapes have gated_delta_rule_mma.cu.
//
//   S = exp(decay) S;  S = S + beta k (v - S^T k)^T;  out = scale S^T q       token by token
//
//   of a chunk, with S before it, g the sums of its decays, F[i, j] = exp(g[i] - g[j]) for j <= i:
//   (I + A) U = beta (V - exp(g) K S)       A = beta F K K^T below its diagonal
//   out = scale (exp(g) Q S + (F Q K^T) U)  S' = exp(g[63]) S + (exp(g[63] - g) K)^T U
//
//   traffic     delta_chunks   2 tokens heads DIM sizeof(T), and 2 or 3 matrices of 64 x 64 floats
//                              for each chunk and value head, written
//               delta_states   those matrices, and q and k, for each tile of 32 values; v and out once
//               delta_step     the state of each value head, read and written
//   constants   see common/delta.cuh
//               INITIAL        there are states before the texts
//               BACKWARD       for backward: F K K^T is written too; U and the states before chunks
//                              are written, not out
//
//   The trick: what does not depend on the state is computed for all chunks at once; then a block
//   takes 32 columns of a state, which depend on no other column, along a text.  The inverse of
//   I + A is made of those of halves of its diagonal: with T11 and T22, the other block is
//   -T22 A21 T11.  All is float32, so that states of long texts are as exact as in NumPy.
#include <common/delta.cuh>
#include <common/delta_step.cuh>

// F Q K^T, the inverse of I + A and, with BACKWARD, F K K^T below the diagonal.
KERNEL(THREADS, 2)
delta_chunks(const T *__restrict__ q, const T *__restrict__ k, const D *__restrict__ decay,
             const E *__restrict__ beta, const I *__restrict__ offsets,
             float *__restrict__ scores, float *__restrict__ solve, float *__restrict__ alike,
             const __grid_constant__ Sizes s) {
    __shared__ __align__(16) float memory[2 * Square::SIZE];
    __shared__ Factors factors;
    const long long slot = blockIdx.x / s.heads;
    const int head = blockIdx.x % s.heads, heads = s.heads * s.groups;
    const Text text = text_of_slot(offsets, slot, s);
    const long long first = text.first(slot - text.slot);
    const int count = text.count(slot - text.slot);
    if (count <= 0) return;
    constexpr int PART = DEPTH < CHUNK ? DEPTH : CHUNK;
    const Tile<CHUNK, PART> queries{memory}, keys{memory + Square::SIZE};
    const int x = thread_x(), y = thread_y();
    float by_query[M][M] = {}, by_key[M][M] = {};  // rows y * M + m, columns x + n * SIDE
#pragma unroll 1
    for (int from = 0; from < DEPTH; from += PART) {
        const long long at = (first * s.heads + head) * DIM + from;
        const int stride = s.heads * DIM;
        if (from) __syncthreads();
        queries.load<LANES>(q + at, stride, count, DIM - from);
        keys.load<LANES>(k + at, stride, count, DIM - from);
        __syncthreads();
#pragma unroll 2
        for (int depth = 0; depth < PART; depth += 4) {
            Vector<float, 4> left[2][M], right[M];
#pragma unroll
            for (int m = 0; m < M; m++) {
                left[0][m] = queries.four(y * M + m, depth);
                left[1][m] = keys.four(y * M + m, depth);
                right[m] = keys.four(x + m * SIDE, depth);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < M; n++) {
                        const float key = right[n].at[i];
                        by_query[m][n] = fmaf(left[0][m].at[i], key, by_query[m][n]);
                        by_key[m][n] = fmaf(left[1][m].at[i], key, by_key[m][n]);
                    }
        }
    }
    const Square a{memory}, t{memory + Square::SIZE};
    for (int group = 0; group < s.groups; group++) {
        const int value_head = head * s.groups + group;
        const long long matrix = (slot * heads + value_head) * CHUNK * CHUNK;
        __syncthreads();
        set(factors, decay, beta, first, count, value_head, s);
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < M; n++) {
                const int row = y * M + m, column = x + n * SIDE;
                const float fade = factors.fade(row, column);
                const float both = row > column ? fade * by_key[m][n] : 0.0f;
                scores[matrix + row * CHUNK + column] = fade * by_query[m][n] * s.scale;
                if constexpr (BACKWARD) alike[matrix + row * CHUNK + column] = both;
                a.at(row, column) = factors.beta[row] * both;
                t.at(row, column) = row == column;
            }
        __syncthreads();
        invert(a, t);
        for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS)
            solve[matrix + i] = i % CHUNK <= i / CHUNK ? t.at(i / CHUNK, i % CHUNK) : 0.0f;
    }
}

// out and the last states; with BACKWARD, U and the state before each chunk.
KERNEL(THREADS, CHANNELS ? 1 : 2)
delta_states(const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
             const D *__restrict__ decay, const E *__restrict__ beta,
             const float *__restrict__ initial, const I *__restrict__ offsets,
             const float *__restrict__ scores, const float *__restrict__ solve,
             const float *__restrict__ into, const float *__restrict__ onward,
             T *__restrict__ out, float *__restrict__ final, float *__restrict__ u,
             float *__restrict__ states, float *__restrict__ rest,
             const __grid_constant__ Sizes s) {
    DYNAMIC_SHARED(float, memory);
    __shared__ Factors factors;
    const Keys keys{memory};
    const Square square{keys.start + Keys::SIZE};
    const State state{square.start + Square::SIZE};
    const Values values{state.start + State::SIZE};
    const int heads = s.heads * s.groups, value_head = blockIdx.x / s.tiles % heads;
    const int number = blockIdx.x / (s.tiles * heads), head = value_head / s.groups;
    const int from = blockIdx.x % s.tiles * COLUMNS, width = s.values - from;
    const Text text(offsets, number, s);
    const long long own = ((long long)number * heads + value_head) * DIM * s.values + from;
    for (int i = threadIdx.x; i < DEPTH * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const bool inside = INITIAL && row < DIM && column < width;
        state.at(row, column) = inside ? initial[own + row * s.values + column] : 0.0f;
    }
    const int chunks = text.chunks(), row = thread_y() * M, column = thread_x() * N;
    for (int chunk = 0; chunk < chunks; chunk++) {
        const long long first = text.first(chunk), matrix = (text.slot + chunk) * heads + value_head;
        const int count = text.count(chunk);
        const long long at = (first * s.heads + head) * DIM;
        const int stride = s.heads * DIM;
        const T *const token = v + (first * heads + value_head) * s.values + from;
        const int down = heads * s.values;
        const float *const into_of = CHANNELS ? into + matrix * CHUNK * DIM : nullptr;
        __syncthreads();
        set(factors, decay, beta, first, count, value_head, s);
        square.load<4>(solve + matrix * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK);
        float part[M][N] = {}, of_state[M][N] = {}, next[ROWS][N];
        if constexpr (!BACKWARD) {
            keys.load<LANES>(q + at, stride, count, DIM, into_of);
            __syncthreads();
            add_rows(of_state, keys, state, DEPTH);
            __syncthreads();
        }
        keys.load<LANES>(k + at, stride, count, DIM, into_of);
        __syncthreads();
        if constexpr (BACKWARD) {
            float *const to = states + matrix * DIM * s.values + from;
            for (int i = threadIdx.x; i < DIM * COLUMNS; i += THREADS)
                if (i % COLUMNS < width)
                    to[i / COLUMNS * s.values + i % COLUMNS] =
                        state.at(i / COLUMNS, i % COLUMNS);
        }
        add_rows(part, keys, state, DEPTH);
        each(part, [&](int row, int column, float read) {
            const bool inside = row < count && column < width;
            const float value = inside ? (float)token[row * down + column] : 0.0f;
            const float error = fmaf(-factors.into[row], read, value);
            values.at(row, column) = factors.beta[row] * error;
            if (BACKWARD && CHANNELS && column < width)
                rest[(matrix * CHUNK + row) * s.values + from + column] = error;
        });
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) part[m][n] = 0;
        add_rows(part, square, values, row + M);  // of a triangle
        __syncthreads();
        each(part, [&](int row, int column, float value) {
            values.at(row, column) = value;
            if (BACKWARD && column < width)
                u[(matrix * CHUNK + row) * s.values + from + column] = value;
        });
        if constexpr (!BACKWARD) square.load<4>(scores + matrix * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK);
        if constexpr (CHANNELS)
            keys.load<LANES>(k + at, stride, count, DIM, onward + matrix * CHUNK * DIM);
        __syncthreads();
        if constexpr (!BACKWARD) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n++) of_state[m][n] *= factors.into[row + m] * s.scale;
            add_rows(of_state, square, values, row + M);
            T *const to = out + (first * heads + value_head) * s.values + from;
            each(of_state, [&](int row, int column, float value) {
                if (row < count && column < width) to[row * down + column] = (T)value;
            });
        }
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
            const int row = thread_y() * ROWS + m;
            const float whole = CHANNELS ? whole_of(into_of, row) : factors.whole;
#pragma unroll
            for (int n = 0; n < N; n++) next[m][n] = whole * state.at(row, column + n);
        }
        add_columns(next, keys, values, 0, [&](int row) { return factors.onward[row]; });
        __syncthreads();
        each(next, [&](int row, int column, float value) { state.at(row, column) = value; });
    }
    if constexpr (BACKWARD) return;
    __syncthreads();
    for (int i = threadIdx.x; i < DIM * COLUMNS; i += THREADS)
        if (i % COLUMNS < width)
            final[own + i / COLUMNS * s.values + i % COLUMNS] =
                state.at(i / COLUMNS, i % COLUMNS);
}

// One token of each text, with the bits of a chunk of one token.
KERNEL(THREADS, 4)
delta_step(const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
           const D *__restrict__ decay, const E *__restrict__ beta,
           const float *__restrict__ initial, T *__restrict__ out, float *__restrict__ final,
           const __grid_constant__ Sizes s) {
    __shared__ OneToken token;
    const int heads = s.heads * s.groups, value_head = blockIdx.x / s.tiles % heads;
    const long long number = blockIdx.x / (s.tiles * heads);
    token.run<THREADS>(q, k, v, decay, beta, initial, out, final, number, number, value_head,
                       blockIdx.x % s.tiles * OneToken::WIDE, s);
}
