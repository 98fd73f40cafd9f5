// Gradients of state space duality: of the states along a text, then of what is in the chunks.
//
//   in the notation of ssd.cu, with P = F C B^T and dS' the gradient of the state after a chunk:
//   dU = P^T dY + exp(g[63] - g) B dS'      dx = r dU + d dY      dd = sum of dY X
//   dS = exp(g[63]) dS' + (exp(g) C)^T dY    W = F (dY U^T), summed over the heads of a group
//   dc = exp(g) dY S^T + W B                 db = exp(g[63] - g) U dS'^T + W^T C, likewise
//   dg[t] = all that passes from before t to t or later, as exp of t's decay is a factor of it
//   dr = rows of dU X - exp(a_log) dg        da_log = sum of dg decay       ddt = dr sigmoid(dt + ..)
//
//   traffic     ssd_state_gradients    as ssd_states; dS' and dx are written, and two floats for each
//                                      token, head and tile
//               ssd_chunk_gradients    the states before and after each chunk, x and dy for each head;
//                                      b and c once, their gradients once for each HEADS heads
//               ssd_rate_gradients     a few floats for each token and head
//   constants   see common/ssd.cuh
//               FINAL    there is a gradient of the last states
//               HEADS    heads whose gradients of b and c a block adds
//               G        dtype of these sums: that of b, unless there are more heads in a group
//
//   The trick: as in forward, only the gradient of the state passes along a text.  Heads of a group
//   are added in registers, HEADS at a time, whatever the number of tokens: no atomics, and packed
//   texts have the bits of each alone.  W is multiplied by b and c once for all of these heads.
#include <common/reduce.cuh>
#include <common/ssd.cuh>

KERNEL(THREADS, 2)
ssd_state_gradients(const T *__restrict__ dy, const float *__restrict__ dfinal,
                    const T *__restrict__ x, const float *__restrict__ decay,
                    const float *__restrict__ rate, const T *__restrict__ b,
                    const T *__restrict__ c, const O *__restrict__ d,
                    const I *__restrict__ offsets, const float *__restrict__ scores,
                    T *__restrict__ dx, float *__restrict__ drates, float *__restrict__ skips,
                    float *__restrict__ dstates, float *__restrict__ dinitial,
                    const __grid_constant__ Sizes s, const __grid_constant__ Strides strides) {
    DYNAMIC_SHARED(float, memory);
    __shared__ Factors factors;
    const Keys keys{memory};
    const Square square{keys.start + Keys::SIZE};
    const Whole state{square.start + Square::SIZE};
    const Values douts{state.start + Whole::SIZE};
    const Place place(offsets, s);
    const int heads = s.heads * s.groups, head = place.head, from = place.from;
    const int width = s.values - from, tile = blockIdx.x % s.tiles;
    for (int i = threadIdx.x; i < PARTS * DEPTH * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const bool inside = FINAL && row < DIM && column < width;
        state.at(row, column) = inside ? dfinal[place.own + row * s.values + column] : 0.0f;
    }
    const int row = thread_y() * M, column = thread_x() * N;
    const float skip = d ? (float)d[head] : 0.0f;
    for (int chunk = place.text.chunks() - 1; chunk >= 0; chunk--) {
        const long long first = place.text.first(chunk), slot = place.text.slot + chunk;
        const int count = place.text.count(chunk);
        __syncthreads();
        set(factors, decay, rate, first, count, head, s);
        square.load<4>(scores + (slot * s.heads + place.group) * CHUNK * CHUNK, CHUNK, CHUNK,
                       CHUNK);
        douts.load<LANES>(dy + first * strides.dy + head * s.values + from, strides.dy, count,
                          width);
        float *const to = dstates + (slot * heads + head) * DIM * s.values + from;
        for (int i = threadIdx.x; i < DIM * COLUMNS; i += THREADS)
            if (i % COLUMNS < width)
                to[i / COLUMNS * s.values + i % COLUMNS] = state.at(i / COLUMNS, i % COLUMNS);
        float part[M][N] = {};
        const T *const own_b = b + first * strides.b + place.group * DIM;
#pragma unroll 1
        for (int slab = 0; slab < PARTS; slab++) {
            if (slab) __syncthreads();
            keys.load<LANES>(own_b + slab * DEPTH, strides.b, count, DIM - slab * DEPTH);
            __syncthreads();
            add_rows(part, keys, slab_of(state, slab), DEPTH);
        }
        for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS)
            square.at(i / CHUNK, i % CHUNK) *= factors.fade(i / CHUNK, i % CHUNK);
        __syncthreads();
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++) part[m][n] *= factors.onward[row + m];
        add_columns(part, square, douts, row, [](int) { return 1.0f; });  // of a triangle
#pragma unroll
        for (int m = 0; m < M; m++) {
            float drate = 0, dskip = 0;
            const long long token = first + row + m;
            const long long at = (token * heads + head) * s.values + from;
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (row + m >= count || column + n >= width) continue;
                const float own = (float)x[token * strides.x + head * s.values + from + column + n];
                const float out = douts.at(row + m, column + n);
                dx[at + column + n] = (T)fmaf(skip, out, factors.beta[row + m] * part[m][n]);
                drate = fmaf(own, part[m][n], drate);
                dskip = fmaf(own, out, dskip);
            }
            drate = group_sum<SIDE>(drate), dskip = group_sum<SIDE>(dskip);
            if (thread_x() || row + m >= count) continue;
            drates[(tile * s.tokens + token) * heads + head] = drate;
            skips[(tile * s.tokens + token) * heads + head] = dskip;
        }
        const T *const own_c = c + first * strides.c + place.group * DIM;
#pragma unroll 1
        for (int slab = 0; slab < PARTS; slab++) {
            __syncthreads();
            keys.load<LANES>(own_c + slab * DEPTH, strides.c, count, DIM - slab * DEPTH);
            __syncthreads();
            grow(slab_of(state, slab), factors.whole, keys, douts,
                 [&](int row) { return factors.into[row]; });
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; dinitial && i < DIM * COLUMNS; i += THREADS)
        if (i % COLUMNS < width)
            dinitial[place.own + i / COLUMNS * s.values + i % COLUMNS] =
                state.at(i / COLUMNS, i % COLUMNS);
}

// Block: a chunk, a group, DEPTH columns of b and c, and HEADS heads.
KERNEL(THREADS, 1)
ssd_chunk_gradients(const T *__restrict__ dy, const T *__restrict__ x,
                    const float *__restrict__ decay, const float *__restrict__ rate,
                    const T *__restrict__ b, const T *__restrict__ c,
                    const I *__restrict__ offsets, const float *__restrict__ scores,
                    const float *__restrict__ states, const float *__restrict__ dstates,
                    G *__restrict__ db, G *__restrict__ dc, float *__restrict__ ddecays,
                    const __grid_constant__ Sizes s, const __grid_constant__ Strides strides) {
    DYNAMIC_SHARED(float, memory);
    __shared__ Factors factors;
    __shared__ float after[CHUNK], before[CHUNK];
    __shared__ Exchange<THREADS / 32> exchange;
    const Square pairs{memory + Left::SIZE + Right::SIZE};  // dY U^T P, then sums along rows; W
    const int team = blockIdx.z, from = blockIdx.y * DEPTH, wide = DIM - from;
    const long long slot = blockIdx.x / s.heads;
    const int group = blockIdx.x % s.heads, heads = s.heads * s.groups;
    const Text text = text_of_slot(offsets, slot, s);
    const long long first = text.first(slot - text.slot);
    const int count = text.count(slot - text.slot);
    if (count <= 0) return;
    const int xs = thread_x(), ys = thread_y();
    const T *const own_b = b + first * strides.b + group * DIM + from;
    const T *const own_c = c + first * strides.c + group * DIM + from;
    const auto of_b = [&](int row, int column) {
        return row < count && column < wide ? (float)own_b[row * strides.b + column] : 0.0f;
    };
    const auto of_c = [&](int row, int column) {
        return row < count && column < wide ? (float)own_c[row * strides.c + column] : 0.0f;
    };
    float sum_b[M][ROWS] = {}, sum_c[M][ROWS] = {}, both[M][M] = {};  // both: W
    const float *const score = scores + blockIdx.x * (long long)(CHUNK * CHUNK);
    const int last = min(s.groups, (team + 1) * HEADS);
#pragma unroll 1
    for (int number = team * HEADS; number < last; number++) {
        const int head = group * s.groups + number;
        const long long matrix = slot * heads + head;
        const T *const own_x = x + first * strides.x + head * s.values;
        const T *const own_dy = dy + first * strides.dy + head * s.values;
        const float *const own_state = states + (matrix * DIM + from) * s.values;
        const float *const own_dstate = dstates + (matrix * DIM + from) * s.values;
        // readers of arrays by (row, column of x), k of `multiply`
        const auto of_dy = [&](int row, int column) {
            const bool inside = row < count && column < s.values;
            return inside ? (float)own_dy[row * strides.dy + column] : 0.0f;
        };
        const auto of_u = [&](int row, int column) {
            const bool inside = row < count && column < s.values;
            return inside ? factors.beta[row] * (float)own_x[row * strides.x + column] : 0.0f;
        };
        const auto of_state = [&](int row, int column) {
            const bool inside = row < wide && column < s.values;
            return inside ? own_state[row * s.values + column] : 0.0f;
        };
        const auto of_dstate = [&](int row, int column) {
            const bool inside = row < wide && column < s.values;
            return inside ? own_dstate[row * s.values + column] : 0.0f;
        };
        __syncthreads();
        set(factors, decay, rate, first, count, head, s);
        float part[M][ROWS] = {};
        // the sum along a row of part * of(row, column)
        const auto along = [&](int m, auto of) {
            float sum = 0;
#pragma unroll
            for (int n = 0; n < ROWS; n++)
                sum = fmaf(of(ys * M + m, xs + n * SIDE), part[m][n], sum);
            return group_sum<SIDE>(sum);
        };
        {
            float dp[M][M] = {};
            multiply(dp, memory, s.values, of_dy, of_u);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < M; n++) {
                    const int row = ys * M + m, column = xs + n * SIDE;
                    const float faded = factors.fade(row, column) * dp[m][n];
                    both[m][n] += faded;
                    pairs.at(row, column) =
                        row > column && !from ? faded * score[row * CHUNK + column] : 0.0f;
                }
        }
        multiply(part, memory, s.values, of_dy, of_state);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const float factor = factors.into[ys * M + m], sum = factor * along(m, of_c);
            if (xs == 0) after[ys * M + m] = sum;
#pragma unroll
            for (int n = 0; n < ROWS; n++) {
                sum_c[m][n] = fmaf(factor, part[m][n], sum_c[m][n]);
                part[m][n] = 0;
            }
        }
        multiply(part, memory, s.values, of_u, of_dstate);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const float factor = factors.onward[ys * M + m], sum = factor * along(m, of_b);
            if (xs == 0) before[ys * M + m] = sum;
#pragma unroll
            for (int n = 0; n < ROWS; n++) sum_b[m][n] = fmaf(factor, part[m][n], sum_b[m][n]);
        }
        float passing = 0;  // from the state before the chunk to that after it
        for (int i = threadIdx.x; i < min(wide, DEPTH) * s.values; i += THREADS)
            passing = fmaf(own_state[i], own_dstate[i], passing);
        passing = factors.whole * row_sum<THREADS>(passing, exchange);
        if (threadIdx.x < CHUNK) {  // sums along rows
            float sum = 0;
            for (int column = 0; column < (int)threadIdx.x; column++)
                pairs.at(threadIdx.x, column) = sum += pairs.at(threadIdx.x, column);
        }
        __syncthreads();
        const int t = threadIdx.x;
        if (t >= count) continue;
        float sum = passing;
        for (int row = t; row < CHUNK; row++) {
            sum += after[row];
            if (t) sum += pairs.at(row, t - 1);
        }
        for (int row = 0; row < t; row++) sum += before[row];
        ddecays[(blockIdx.y * s.tokens + first + t) * heads + head] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < M; n++) pairs.at(ys * M + m, xs + n * SIDE) = both[m][n];
    multiply<true>(sum_c, memory, CHUNK, [&](int row, int j) { return pairs.at(row, j); },
                   [&](int column, int row) { return of_b(row, column); });
    multiply<true>(sum_b, memory, CHUNK, [&](int row, int j) { return pairs.at(j, row); },
                   [&](int column, int row) { return of_c(row, column); });
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            const int row = ys * M + m, column = xs + n * SIDE;
            if (row >= count || column >= wide) continue;
            const long long at =
                ((team * s.tokens + first + row) * s.heads + group) * DIM + from + column;
            db[at] = (G)sum_b[m][n];
            dc[at] = (G)sum_c[m][n];
        }
}

// ddt, and what is summed over tokens: the gradients of a_log and of dt_bias.
KERNEL(256)
ssd_rate_gradients(const R *__restrict__ dt, const A *__restrict__ a_log,
                   const Q *__restrict__ dt_bias, const float *__restrict__ rate,
                   const float *__restrict__ drates, const float *__restrict__ ddecays,
                   R *__restrict__ ddt, float *__restrict__ sums, long long count, int heads,
                   int tiles, float least, float most) {
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    const int head = i % heads;
    float drate = 0, ddecay = 0;
    for (int tile = 0; tile < tiles; tile++) drate += drates[tile * count + i];
    for (int part = 0; part < PARTS; part++) ddecay += ddecays[part * count + i];
    const float raw = raw_rate((float)dt[i], dt_bias, head), a = -expf((float)a_log[head]);
    const float own = softplus(raw);
    float slope = sigmoid(raw);
    if constexpr (LOW) slope = own < least ? 0.0f : slope;
    if constexpr (HIGH) slope = own > most ? 0.0f : slope;
    slope *= fmaf(a, ddecay, drate);
    ddt[i] = (R)slope;
    sums[i] = ddecay * (a * rate[i]);
    sums[count + i] = slope;
}
