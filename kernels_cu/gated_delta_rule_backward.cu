// Gradients of the gated delta rule: of the states along a text, then of what is in the chunks; in
// 16 bits, many shapes have gated_delta_rule_backward_mma.cu.
//
//   in the notation of gated_delta_rule.cu, with P = scale F Q K^T, T = (I + A)^-1, dS' the gradient
//   of the state after a chunk, and B = beta (V - exp(g) K S), so that U = T B:
//   dU = P^T dout + exp(g[63] - g) K dS'          dB = T^T dU          dv = beta dB
//   dS = scale (exp(g) Q)^T dout - (beta exp(g) K)^T dB + exp(g[63]) dS'
//   dA = -dB U^T        dP = dout U^T        X = F (scale dP)        Y = F beta dA
//   dq = scale exp(g) dout S^T + X K
//   dk = -beta exp(g) dB S^T + exp(g[63] - g) U dS'^T + X^T Q + (Y + Y^T) K
//   dbeta = rows of dB (V - exp(g) K S), and of dA F K K^T
//   ddecay[t] = all that passes from before t to t or later, as exp(decay[t]) is a factor of it
//
//   traffic     delta_state_gradients    as delta_states; dS' and dB are written
//               delta_chunk_gradients    the states before and after each chunk, U, dB and dout for
//                                        each value head; q, k and their gradients once
//   constants   see common/delta.cuh
//               FINAL                    there is a gradient of the last states
//
//   The trick: as in forward, only the gradient of the state passes along a text, in tiles of 32
//   columns.  A block of the second kernel has all value heads of a head, so that dq and dk are sums
//   in registers: no atomics.  ddecay is summed from the terms that decay[t] scales; the difference
//   of sums over all pairs would be lost in rounding where decays are strong.
#include <common/delta.cuh>

KERNEL(THREADS, CHANNELS ? 1 : 2)
delta_state_gradients(const T *__restrict__ dout, const float *__restrict__ dfinal,
                      const T *__restrict__ q, const T *__restrict__ k,
                      const D *__restrict__ decay, const E *__restrict__ beta,
                      const I *__restrict__ offsets, const float *__restrict__ scores,
                      const float *__restrict__ solve, const float *__restrict__ into,
                      const float *__restrict__ onward, float *__restrict__ db,
                      float *__restrict__ dstates, float *__restrict__ dinitial,
                      const __grid_constant__ Sizes s) {
    DYNAMIC_SHARED(float, memory);
    __shared__ Factors factors;
    const Keys keys{memory};
    const Square square{keys.start + Keys::SIZE};
    const State state{square.start + Square::SIZE};
    const Values douts{state.start + State::SIZE}, values{douts.start + Values::SIZE};
    const int heads = s.heads * s.groups, value_head = blockIdx.x / s.tiles % heads;
    const int number = blockIdx.x / (s.tiles * heads), head = value_head / s.groups;
    const int from = blockIdx.x % s.tiles * COLUMNS, width = s.values - from;
    const Text text(offsets, number, s);
    const long long own = ((long long)number * heads + value_head) * DIM * s.values + from;
    for (int i = threadIdx.x; i < DEPTH * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const bool inside = FINAL && row < DIM && column < width;
        state.at(row, column) = inside ? dfinal[own + row * s.values + column] : 0.0f;
    }
    const int row = thread_y() * M, column = thread_x() * N;
    for (int chunk = text.chunks() - 1; chunk >= 0; chunk--) {
        const long long first = text.first(chunk), matrix = (text.slot + chunk) * heads + value_head;
        const int count = text.count(chunk);
        const long long at = (first * s.heads + head) * DIM;
        const int stride = s.heads * DIM;
        const float *const into_of = CHANNELS ? into + matrix * CHUNK * DIM : nullptr;
        const float *const onward_of = CHANNELS ? onward + matrix * CHUNK * DIM : nullptr;
        __syncthreads();
        set(factors, decay, beta, first, count, value_head, s);
        keys.load<LANES>(k + at, stride, count, DIM, onward_of);
        square.load<4>(scores + matrix * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK);
        douts.load<LANES>(dout + (first * heads + value_head) * s.values + from,
                          heads * s.values, count, width);
        float part[M][N] = {}, next[ROWS][N];
        __syncthreads();
        float *const to = dstates + matrix * DIM * s.values + from;
        for (int i = threadIdx.x; i < DIM * COLUMNS; i += THREADS)
            if (i % COLUMNS < width)
                to[i / COLUMNS * s.values + i % COLUMNS] =
                    state.at(i / COLUMNS, i % COLUMNS);
        add_rows(part, keys, state, DEPTH);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) part[m][n] *= factors.onward[row + m];
        add_columns(part, square, douts, row, [](int) { return 1.0f; });  // of a triangle
        each(part, [&](int row, int column, float value) { values.at(row, column) = value; });
        __syncthreads();
        square.load<4>(solve + matrix * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK);
        if constexpr (CHANNELS) keys.load<LANES>(k + at, stride, count, DIM, into_of);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) part[m][n] = 0;
        __syncthreads();
        add_columns(part, square, values, row, [](int) { return 1.0f; });
        __syncthreads();
        each(part, [&](int row, int column, float value) {
            values.at(row, column) = value;
            if (column < width) db[(matrix * CHUNK + row) * s.values + from + column] = value;
        });
        __syncthreads();
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
            const int row = thread_y() * ROWS + m;
            const float whole = CHANNELS ? whole_of(into_of, row) : factors.whole;
#pragma unroll
            for (int n = 0; n < N; n++) next[m][n] = whole * state.at(row, column + n);
        }
        add_columns(next, keys, values, 0,
                    [&](int row) { return -factors.beta[row] * factors.into[row]; });
        __syncthreads();
        keys.load<LANES>(q + at, stride, count, DIM, into_of);
        __syncthreads();
        add_columns(next, keys, douts, 0, [&](int row) { return s.scale * factors.into[row]; });
        __syncthreads();
        each(next, [&](int row, int column, float value) { state.at(row, column) = value; });
    }
    __syncthreads();
    for (int i = threadIdx.x; dinitial && i < DIM * COLUMNS; i += THREADS)
        if (i % COLUMNS < width)
            dinitial[own + i / COLUMNS * s.values + i % COLUMNS] =
                state.at(i / COLUMNS, i % COLUMNS);
}

struct Rows { float after[CHUNK], before[CHUNK], dbeta[CHUNK]; };

KERNEL(THREADS, 1)
delta_chunk_gradients(const T *__restrict__ dout, const T *__restrict__ q, const T *__restrict__ k,
                      const T *__restrict__ v, const D *__restrict__ decay,
                      const E *__restrict__ beta, const I *__restrict__ offsets,
                      const float *__restrict__ scores, const float *__restrict__ alike,
                      const float *__restrict__ u, const float *__restrict__ db,
                      const float *__restrict__ states, const float *__restrict__ dstates,
                      T *__restrict__ dq, T *__restrict__ dk, T *__restrict__ dv,
                      D *__restrict__ ddecay, E *__restrict__ dbeta,
                      const __grid_constant__ Sizes s) {
    DYNAMIC_SHARED(float, memory);
    __shared__ Factors factors;
    __shared__ Rows rows;
    __shared__ Exchange<THREADS / 32> exchange;
    const Square by_query{memory + Left::SIZE + Right::SIZE};  // X
    const Square by_key{by_query.start + Square::SIZE};        // Y
    const Square pairs{by_key.start + Square::SIZE};           // dP P + dA A, then sums along rows
    const long long slot = blockIdx.x / s.heads;
    const int head = blockIdx.x % s.heads, heads = s.heads * s.groups;
    const Text text = text_of_slot(offsets, slot, s);
    const long long first = text.first(slot - text.slot);
    const int count = text.count(slot - text.slot);
    if (count <= 0) return;
    const int x = thread_x(), y = thread_y();
    const long long at = (first * s.heads + head) * DIM;
    const int stride = s.heads * DIM, down = heads * s.values;
    const auto key = [&](int row, int column) {
        return row < count && column < DIM ? (float)k[at + row * stride + column] : 0.0f;
    };
    const auto query = [&](int row, int column) {
        return row < count && column < DIM ? (float)q[at + row * stride + column] : 0.0f;
    };
    float sum_q[M][ROWS] = {}, sum_k[M][ROWS] = {};
#pragma unroll 1
    for (int group = 0; group < s.groups; group++) {
        const int value_head = head * s.groups + group;
        const long long matrix = slot * heads + value_head;
        const long long token = (first * heads + value_head) * s.values;
        const float *const own_u = u + matrix * CHUNK * s.values;
        const float *const own_db = db + matrix * CHUNK * s.values;
        const float *const own_state = states + matrix * DIM * s.values;
        const float *const own_dstate = dstates + matrix * DIM * s.values;
        // readers of arrays by (row, column of v), k of `multiply`
        const auto of_dout = [&](int row, int column) {
            const bool inside = row < count && column < s.values;
            return inside ? (float)dout[token + row * down + column] : 0.0f;
        };
        const auto of_u = [&](int row, int column) {
            return column < s.values ? own_u[row * s.values + column] : 0.0f;
        };
        const auto of_db = [&](int row, int column) {
            return column < s.values ? own_db[row * s.values + column] : 0.0f;
        };
        const auto of_state = [&](int row, int column) {
            const bool inside = row < DIM && column < s.values;
            return inside ? own_state[row * s.values + column] : 0.0f;
        };
        const auto of_dstate = [&](int row, int column) {
            const bool inside = row < DIM && column < s.values;
            return inside ? own_dstate[row * s.values + column] : 0.0f;
        };
        __syncthreads();
        set(factors, decay, beta, first, count, value_head, s);
        float dp[M][M] = {}, da[M][M] = {};
        multiply(dp, memory, s.values, of_dout, of_u);
        multiply(da, memory, s.values, of_db, of_u);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const int row = y * M + m;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < M; n++) {
                const int column = x + n * SIDE;
                const long long pair = (matrix * CHUNK + row) * CHUNK + column;
                const float fade = factors.fade(row, column), both = alike[pair];
                const float error = row > column ? -da[m][n] : 0.0f;
                by_query.at(row, column) = fade * s.scale * dp[m][n];
                by_key.at(row, column) = fade * factors.beta[row] * error;
                pairs.at(row, column) =
                    row > column ? dp[m][n] * scores[pair] + error * factors.beta[row] * both : 0.0f;
                sum = fmaf(error, both, sum);
            }
            sum = group_sum<SIDE>(sum);
            if (x == 0) rows.dbeta[row] = sum;
        }
        float part[M][ROWS] = {};
        // the sum along a row of part * of(row, column)
        const auto along = [&](int m, auto of) {
            float sum = 0;
#pragma unroll
            for (int n = 0; n < ROWS; n++)
                sum = fmaf(of(y * M + m, x + n * SIDE), part[m][n], sum);
            return group_sum<SIDE>(sum);
        };
        const auto clear = [&] {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < ROWS; n++) part[m][n] = 0;
        };
        multiply(part, memory, s.values, of_dout, of_state);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const int row = y * M + m;
            const float factor = s.scale * factors.into[row], sum = factor * along(m, query);
            if (x == 0) rows.after[row] = sum;
#pragma unroll
            for (int n = 0; n < ROWS; n++) sum_q[m][n] = fmaf(factor, part[m][n], sum_q[m][n]);
        }
        clear();
        multiply(part, memory, s.values, of_db, of_state);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const int row = y * M + m;
            const float factor = factors.into[row], read = factor * along(m, key);
            float dot = 0;  // of dB and v
            for (int column = x; column < s.values; column += SIDE) {
                const float own = of_db(row, column);
                if (row >= count) continue;
                dot = fmaf(own, (float)v[token + row * down + column], dot);
                dv[token + row * down + column] = (T)(factors.beta[row] * own);
            }
            dot = group_sum<SIDE>(dot);
            if (x == 0) {
                rows.after[row] -= factors.beta[row] * read;
                rows.dbeta[row] += dot - read;
            }
#pragma unroll
            for (int n = 0; n < ROWS; n++)
                sum_k[m][n] = fmaf(-factors.beta[row] * factor, part[m][n], sum_k[m][n]);
        }
        clear();
        multiply(part, memory, s.values, of_u, of_dstate);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const int row = y * M + m;
            const float factor = factors.onward[row], sum = factor * along(m, key);
            if (x == 0) rows.before[row] = sum;
#pragma unroll
            for (int n = 0; n < ROWS; n++) sum_k[m][n] = fmaf(factor, part[m][n], sum_k[m][n]);
        }
        const auto turned_key = [&](int column, int row) { return key(row, column); };
        const auto turned_query = [&](int column, int row) { return query(row, column); };
        multiply<true>(sum_q, memory, CHUNK,
                       [&](int row, int j) { return by_query.at(row, j); }, turned_key);
        multiply<true>(sum_k, memory, CHUNK,
                       [&](int row, int j) { return by_query.at(j, row); }, turned_query);
        multiply<true>(sum_k, memory, CHUNK,
                       [&](int row, int j) { return by_key.at(row, j) + by_key.at(j, row); },
                       turned_key);
        float passing = 0;  // from the state before the chunk to that after it
        for (int i = threadIdx.x; i < DIM * s.values; i += THREADS)
            passing = fmaf(own_state[i], own_dstate[i], passing);
        passing = factors.whole * row_sum<THREADS>(passing, exchange);
        if (threadIdx.x < CHUNK) {  // sums along rows
            float sum = 0;
            for (int column = 0; column < (int)threadIdx.x; column++)
                pairs.at(threadIdx.x, column) = sum += pairs.at(threadIdx.x, column);
        }
        __syncthreads();
        const int t = threadIdx.x;
        if (t < count) {
            float sum = passing;
            for (int row = t; row < CHUNK; row++) {
                sum += rows.after[row];
                if (t) sum += pairs.at(row, t - 1);
            }
            for (int row = 0; row < t; row++) sum += rows.before[row];
            const long long to = (first + t) * heads + value_head;
            ddecay[to] = (D)sum;
            dbeta[to] = (E)rows.dbeta[t];
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            const int row = y * M + m, column = x + n * SIDE;
            if (row >= count || column >= DIM) continue;
            dq[at + row * stride + column] = (T)sum_q[m][n];
            dk[at + row * stride + column] = (T)sum_k[m][n];
        }
}
