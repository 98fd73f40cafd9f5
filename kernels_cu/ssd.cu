// State space duality, the recurrence of Mamba2, by chunks of tokens.
//
//   r = clip(softplus(dt + dt_bias)), S = exp(-exp(a_log) r) S + r b x^T, y = S^T c + d x, by token
//
//   of a chunk, with S before it, g the sums of its decays, F[i, j] = exp(g[i] - g[j]) for j <= i
//   and U = r x:   Y = exp(g) C S + (F C B^T) U + d X     S' = exp(g[63]) S + (exp(g[63] - g) B)^T U
//
//   traffic     ssd_rates     dt, and two floats for each token and head, written
//               ssd_chunks    2 tokens groups DIM sizeof(T), and a matrix of 64 x 64 floats for each
//                             chunk and group, written
//               ssd_states    that matrix, b and c for each head and tile of 32 columns; x and y once
//               ssd_step      the state of each head, read and written
//   constants   see common/delta.cuh, whose q and k are c and b, and whose heads are groups
//               R, A, O, Q    dtypes of dt, a_log, d and dt_bias
//               LOW, HIGH     there are bounds of r
//               INITIAL       there are states before the texts
//               BACKWARD      for backward: the states before chunks are written, not y
//
//   The trick: C B^T is the same for all heads of a group, so that their decays are applied when it
//   is read.  A block takes 32 columns of a state, which depend on no other column, along a text.
//   Of states with more than 128 rows, b and c are read 128 columns at a time.
#include <common/ssd.cuh>
#include <common/ssd_step.cuh>

KERNEL(256)
ssd_rates(const R *__restrict__ dt, const A *__restrict__ a_log, const Q *__restrict__ dt_bias,
          float *__restrict__ decay, float *__restrict__ rate, long long count, int heads,
          float least, float most) {
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    const int head = i % heads;
    rate[i] = rate_of((float)dt[i], dt_bias, head, least, most);
    decay[i] = -expf((float)a_log[head]) * rate[i];
}

KERNEL(THREADS, 2)
ssd_chunks(const T *__restrict__ b, const T *__restrict__ c, const I *__restrict__ offsets,
           float *__restrict__ scores, const __grid_constant__ Sizes s,
           const __grid_constant__ Strides strides) {
    __shared__ __align__(16) float memory[2 * Square::SIZE];
    const long long slot = blockIdx.x / s.heads;
    const int group = blockIdx.x % s.heads;
    const Text text = text_of_slot(offsets, slot, s);
    const long long first = text.first(slot - text.slot);
    const int count = text.count(slot - text.slot);
    if (count <= 0) return;
    constexpr int SLAB = DEPTH < CHUNK ? DEPTH : CHUNK;
    const Tile<CHUNK, SLAB> rows{memory}, columns{memory + Square::SIZE};
    const int x = thread_x(), y = thread_y();
    float sum[M][M] = {};  // rows y * M + m, columns x + n * SIDE
#pragma unroll 1
    for (int from = 0; from < DIM; from += SLAB) {
        if (from) __syncthreads();
        rows.load<LANES>(c + first * strides.c + group * DIM + from, strides.c, count, DIM - from);
        columns.load<LANES>(b + first * strides.b + group * DIM + from, strides.b, count,
                            DIM - from);
        __syncthreads();
#pragma unroll 2
        for (int depth = 0; depth < SLAB; depth += 4) {
            Vector<float, 4> left[M], right[M];
#pragma unroll
            for (int m = 0; m < M; m++) {
                left[m] = rows.four(y * M + m, depth);
                right[m] = columns.four(x + m * SIDE, depth);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < M; n++)
                        sum[m][n] = fmaf(left[m].at[i], right[n].at[i], sum[m][n]);
        }
    }
    float *const to = scores + blockIdx.x * (long long)(CHUNK * CHUNK);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < M; n++) to[(y * M + m) * CHUNK + x + n * SIDE] = sum[m][n];
}

KERNEL(THREADS, 2)
ssd_states(const T *__restrict__ x, const float *__restrict__ decay, const float *__restrict__ rate,
           const T *__restrict__ b, const T *__restrict__ c, const O *__restrict__ d,
           const float *__restrict__ initial, const I *__restrict__ offsets,
           const float *__restrict__ scores, T *__restrict__ y, float *__restrict__ final,
           float *__restrict__ states, const __grid_constant__ Sizes s,
           const __grid_constant__ Strides strides) {
    DYNAMIC_SHARED(float, memory);
    __shared__ Factors factors;
    const Keys keys{memory};
    const Square square{keys.start + Keys::SIZE};
    const Whole state{square.start + Square::SIZE};
    const Values values{state.start + Whole::SIZE};
    const Place place(offsets, s);
    const int heads = s.heads * s.groups, head = place.head, from = place.from;
    const int width = s.values - from;
    for (int i = threadIdx.x; i < PARTS * DEPTH * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const bool inside = INITIAL && row < DIM && column < width;
        state.at(row, column) = inside ? initial[place.own + row * s.values + column] : 0.0f;
    }
    const int chunks = place.text.chunks(), row = thread_y() * M;
    for (int chunk = 0; chunk < chunks; chunk++) {
        const long long first = place.text.first(chunk), slot = place.text.slot + chunk;
        const int count = place.text.count(chunk);
        const T *const token = x + first * strides.x + head * s.values + from;
        __syncthreads();
        set(factors, decay, rate, first, count, head, s);
        if constexpr (BACKWARD) {
            float *const to = states + (slot * heads + head) * DIM * s.values + from;
            for (int i = threadIdx.x; i < DIM * COLUMNS; i += THREADS)
                if (i % COLUMNS < width)
                    to[i / COLUMNS * s.values + i % COLUMNS] =
                        state.at(i / COLUMNS, i % COLUMNS);
        } else square.load<4>(scores + (slot * s.heads + place.group) * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK);
        float part[M][N] = {};
        if constexpr (!BACKWARD) {
            const T *const own = c + first * strides.c + place.group * DIM;
#pragma unroll 1
            for (int slab = 0; slab < PARTS; slab++) {
                if (slab) __syncthreads();
                keys.load<LANES>(own + slab * DEPTH, strides.c, count, DIM - slab * DEPTH);
                __syncthreads();
                add_rows(part, keys, slab_of(state, slab), DEPTH);
            }
        }
        __syncthreads();
        if constexpr (!BACKWARD)
            for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS)
                square.at(i / CHUNK, i % CHUNK) *= factors.fade(i / CHUNK, i % CHUNK);
        each(part, [&](int row, int column, float) {
            const bool inside = row < count && column < width;
            values.at(row, column) =
                inside ? factors.beta[row] * (float)token[row * strides.x + column] : 0.0f;
        });
        __syncthreads();
        if constexpr (!BACKWARD) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < N; n++) part[m][n] *= factors.into[row + m];
            add_rows(part, square, values, row + M);  // of a triangle
            T *const to = y + (first * heads + head) * s.values + from;
            const float skip = d ? (float)d[head] : 0.0f;
            each(part, [&](int row, int column, float value) {
                if (row >= count || column >= width) return;
                const float own = (float)token[row * strides.x + column];
                to[row * (heads * s.values) + column] = (T)fmaf(skip, own, value);
            });
        }
        const T *const own = b + first * strides.b + place.group * DIM;
#pragma unroll 1
        for (int slab = 0; slab < PARTS; slab++) {
            if (slab) __syncthreads();
            keys.load<LANES>(own + slab * DEPTH, strides.b, count, DIM - slab * DEPTH);
            __syncthreads();
            grow(slab_of(state, slab), factors.whole, keys, values,
                 [&](int row) { return factors.onward[row]; });
        }
    }
    if constexpr (BACKWARD) return;
    __syncthreads();
    for (int i = threadIdx.x; i < DIM * COLUMNS; i += THREADS)
        if (i % COLUMNS < width)
            final[place.own + i / COLUMNS * s.values + i % COLUMNS] =
                state.at(i / COLUMNS, i % COLUMNS);
}

// One token of each text, with the bits of a chunk of one token.
KERNEL(THREADS, 4)
ssd_step(const T *__restrict__ x, const R *__restrict__ dt, const A *__restrict__ a_log,
         const T *__restrict__ b, const T *__restrict__ c, const O *__restrict__ d,
         const Q *__restrict__ dt_bias, const float *__restrict__ initial, T *__restrict__ y,
         float *__restrict__ final, const __grid_constant__ Sizes s,
         const __grid_constant__ Strides strides, float least, float most) {
    __shared__ OneToken token;
    const int heads = s.heads * s.groups, head = blockIdx.x / s.tiles % heads;
    const long long number = blockIdx.x / (s.tiles * heads);
    token.run<THREADS>(x, dt, a_log, b, c, d, dt_bias, initial, y, final, number, number, head,
                       blockIdx.x % s.tiles * OneToken::WIDE, s, strides, least, most);
}
