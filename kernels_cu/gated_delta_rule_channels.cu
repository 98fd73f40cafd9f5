// What chunks of the gated delta rule need where each channel has a decay of its own.
//
//   in the notation of gated_delta_rule.cu, with g of each channel, so that F has channels too:
//   A[i, j] = beta[i] sum over c of k[i, c] k[j, c] F[i, j, c]        j < i; P as it is, with q[i]
//   dq[i, c] += sum over j of X[i, j] F[i, j, c] k[j, c]              X = scale dP, Y = beta dA
//   dk[i, c] += sum over j of Y[i, j] F[i, j, c] k[j, c]
//   dk[j, c] += sum over i of F[i, j, c] (X[i, j] q[i, c] + Y[i, j] k[i, c])
//
//   traffic     delta_channel_chunks     3 tokens heads DIM sizeof(T), and for each chunk and value
//                                        head 2 or 3 matrices of 64 x 64 floats and 2 of 64 x DIM
//               delta_pair_gradients     U, dB, dout, v and the error once; three such matrices
//               delta_channel_gradients  the states before and after each chunk; for each tile of
//                                        32 channels U, dB, dout, X and Y
//   constants   see common/delta.cuh and gated_delta_rule.cu
//
//   The trick: a chunk is halved, its halves are, down to single tokens.  Between two halves F is
//   exp(g[i] - g[m]) exp(g[m] - g[j]), where m is the last of the lower one: a product of matrices,
//   of which no factor is above 1.  Of halves of twice the length these are products of what is
//   known; no logarithms are summed, so that no digits are lost, however strong decays are.
#include <common/delta.cuh>

constexpr int WARPS = THREADS / 32, EACH = CHUNK / WARPS;     // tokens of a warp, a lane's channel
constexpr int PARTS = DIM > 0 ? (DIM + SLAB - 1) / SLAB : 1;  // of channels
using Slab = Tile<CHUNK, SLAB>;

DEVICE int lane_of() { return threadIdx.x % 32; }
DEVICE int row_of(int e) { return threadIdx.x / 32 * EACH + e; }

// A number of each warp and channel.
struct Of { float warp[WARPS][32]; };

// Of a channel of a warp's tokens, in halves of H tokens: the product of the factors of their half
// up to a token, its own included, and of those after it.
struct Fades {
    float upto[EACH], after[EACH];

    template <int H> static DEVICE bool upper(int e) { return row_of(e) / H % 2; }
    // exp(g[i] - g[m]) of an upper half, exp(g[m] - g[j]) of a lower one
    template <int H> DEVICE float at(int e) const { return upper<H>(e) ? upto[e] : after[e]; }

    // From halves of H tokens to those of 2 H; `whole` has the product of each warp's factors.
    template <int H> DEVICE void widen(Of &whole) {
        if constexpr (H < EACH) {
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (e / H % 2 == 0) after[e] *= upto[e / (2 * H) * 2 * H + 2 * H - 1];
#pragma unroll
            for (int e = 0; e < EACH; e++)
                if (e / H % 2) upto[e] *= upto[e / (2 * H) * 2 * H + H - 1];
            if constexpr (2 * H == EACH) whole.warp[threadIdx.x / 32][lane_of()] = upto[EACH - 1];
        } else {
            constexpr int W = H / EACH;  // warps of a half
            const int other = (threadIdx.x / 32 / W ^ 1) * W;
            float factor = 1;
#pragma unroll
            for (int w = 0; w < W; w++) factor *= whole.warp[other + w][lane_of()];
#pragma unroll
            for (int e = 0; e < EACH; e++) (upper<H>(e) ? upto[e] : after[e]) *= factor;
        }
    }
};

// A channel of a warp's tokens: rows of q and k from `at` on; 0 and no decay past the text.
struct Own {
    float query[EACH], key[EACH];

    DEVICE void load(const T *q, const T *k, long long at, int stride, int count, int channel) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const bool inside = row_of(e) < count && channel < DIM;
            const long long from = at + row_of(e) * stride + channel;
            query[e] = inside ? (float)q[from] : 0.0f;
            key[e] = inside ? (float)k[from] : 0.0f;
        }
    }
};

DEVICE void begin(Fades &fades, const D *decay, int stride, int count, int channel) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        const bool inside = row_of(e) < count && channel < DIM;
        fades.upto[e] = inside ? expf((float)decay[row_of(e) * stride + channel]) : 1.0f;
        fades.after[e] = 1.0f;
    }
}

// The sums of a thread over the pairs of an upper half of H tokens and the lower one before it.
template <int H> struct Pairs {
    static constexpr int ALL = CHUNK / 2 * H, PER = ALL < THREADS ? 1 : ALL / THREADS;
    float by_query[PER], by_key[PER];

    template <class Use> DEVICE void each(Use use) {
#pragma unroll
        for (int n = 0; n < PER; n++) {
            const int pair = threadIdx.x + n * THREADS, top = pair / (H * H) * 2 * H;
            if (pair < ALL) use(top + H + pair / H % H, top + pair % H, by_query[n], by_key[n]);
        }
    }
    DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < PER; n++) by_query[n] = by_key[n] = 0;
    }
    DEVICE void add(const Slab &queries, const Slab &keys, const Own &own, Fades &fades,
                    Of &whole) {
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float factor = fades.at<H>(e);
            keys.at(row_of(e), lane_of()) = own.key[e] * factor;
            if (Fades::upper<H>(e)) queries.at(row_of(e), lane_of()) = own.query[e] * factor;
        }
        __syncthreads();
        each([&](int row, int column, float &query, float &key) {
#pragma unroll 2
            for (int c = 0; c < SLAB; c += 4) {
                const Vector<float, 4> a = queries.four(row, c), b = keys.four(row, c);
                const Vector<float, 4> right = keys.four(column, c);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    query = fmaf(a.at[i], right.at[i], query);
                    key = fmaf(b.at[i], right.at[i], key);
                }
            }
        });
        fades.widen<H>(whole);
    }
};

// As delta_chunks, and exp(g) and exp(g[63] - g) of each channel.
KERNEL(THREADS, 1)
delta_channel_chunks(const T *__restrict__ q, const T *__restrict__ k, const D *__restrict__ decay,
                     const E *__restrict__ beta, const I *__restrict__ offsets,
                     float *__restrict__ scores, float *__restrict__ solve,
                     float *__restrict__ alike, float *__restrict__ into,
                     float *__restrict__ onward, const __grid_constant__ Sizes s) {
    __shared__ __align__(16) float memory[2 * Square::SIZE];
    __shared__ Of whole;
    const int heads = s.heads * s.groups, value_head = blockIdx.x % heads;
    const long long slot = blockIdx.x / heads, matrix = blockIdx.x;
    const Text text = text_of_slot(offsets, slot, s);
    const long long first = text.first(slot - text.slot);
    const int count = text.count(slot - text.slot);
    if (count <= 0) return;
    const Slab queries{memory}, keys{memory + Slab::SIZE};
    Pairs<32> by_32;
    Pairs<16> by_16;
    Pairs<8> by_8;
    Pairs<4> by_4;
    Pairs<2> by_2;
    Pairs<1> by_1;
    by_32.clear(), by_16.clear(), by_8.clear(), by_4.clear(), by_2.clear(), by_1.clear();
    float diagonal = 0;  // of a query and its own key
#pragma unroll 1
    for (int part = 0; part < PARTS; part++) {
        const int channel = part * SLAB + lane_of();
        Own own;
        Fades fades;
        const long long at = (first * s.heads + value_head / s.groups) * DIM;
        own.load(q, k, at, s.heads * DIM, count, channel);
        begin(fades, decay + (first * heads + value_head) * DIM, heads * DIM, count, channel);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            queries.at(row_of(e), lane_of()) = own.query[e];
            keys.at(row_of(e), lane_of()) = own.key[e];
        }
        __syncthreads();
        if (threadIdx.x < CHUNK)
#pragma unroll 4
            for (int c = 0; c < SLAB; c++)
                diagonal = fmaf(queries.at(threadIdx.x, c), keys.at(threadIdx.x, c), diagonal);
        by_1.add(queries, keys, own, fades, whole);
        by_2.add(queries, keys, own, fades, whole);
        by_4.add(queries, keys, own, fades, whole);
        by_8.add(queries, keys, own, fades, whole);
        by_16.add(queries, keys, own, fades, whole);
        by_32.add(queries, keys, own, fades, whole);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (channel >= DIM) continue;
            const long long to = (matrix * CHUNK + row_of(e)) * DIM + channel;
            into[to] = fades.upto[e];
            onward[to] = fades.after[e];
        }
    }
    const Square a{memory}, t{memory + Square::SIZE};
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * Square::SIZE; i += THREADS) memory[i] = 0;
    __syncthreads();
    const auto put = [&](int row, int column, float &query, float &key) {
        t.at(row, column) = query * s.scale;
        a.at(row, column) = key;
    };
    by_32.each(put), by_16.each(put), by_8.each(put);
    by_4.each(put), by_2.each(put), by_1.each(put);
    if (threadIdx.x < CHUNK) t.at(threadIdx.x, threadIdx.x) = diagonal * s.scale;
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS) {
        const int row = i / CHUNK, column = i % CHUNK;
        const long long to = matrix * CHUNK * CHUNK + i;
        scores[to] = t.at(row, column);
        if constexpr (BACKWARD) alike[to] = a.at(row, column);
        a.at(row, column) *= row < count ? (float)beta[(first + row) * heads + value_head] : 0.0f;
        t.at(row, column) = row == column;
    }
    __syncthreads();
    invert(a, t);
    for (int i = threadIdx.x; i < CHUNK * CHUNK; i += THREADS) {
        const int row = i / CHUNK, column = i % CHUNK;
        solve[matrix * CHUNK * CHUNK + i] = column <= row ? t.at(row, column) : 0.0f;
    }
}

// X and Y, which are 0 above the diagonal, and the gradients of v and beta.
KERNEL(THREADS, 2)
delta_pair_gradients(const T *__restrict__ dout, const E *__restrict__ beta,
                     const I *__restrict__ offsets, const float *__restrict__ alike,
                     const float *__restrict__ u, const float *__restrict__ db,
                     const float *__restrict__ rest, float *__restrict__ by_query,
                     float *__restrict__ by_key, T *__restrict__ dv, E *__restrict__ dbeta,
                     const __grid_constant__ Sizes s) {
    __shared__ __align__(16) float memory[Left::SIZE + Right::SIZE];
    const int heads = s.heads * s.groups, value_head = blockIdx.x % heads;
    const long long slot = blockIdx.x / heads, matrix = blockIdx.x;
    const Text text = text_of_slot(offsets, slot, s);
    const long long first = text.first(slot - text.slot);
    const int count = text.count(slot - text.slot);
    if (count <= 0) return;
    const long long token = (first * heads + value_head) * s.values;
    const long long own = matrix * CHUNK * s.values;
    const int x = thread_x(), y = thread_y(), down = heads * s.values;
    const auto of_dout = [&](int row, int column) {
        const bool inside = row < count && column < s.values;
        return inside ? (float)dout[token + row * down + column] : 0.0f;
    };
    const auto of_u = [&](int row, int column) {
        return column < s.values ? u[own + row * s.values + column] : 0.0f;
    };
    const auto of_db = [&](int row, int column) {
        return column < s.values ? db[own + row * s.values + column] : 0.0f;
    };
    float dp[M][M] = {}, da[M][M] = {};
    multiply(dp, memory, s.values, of_dout, of_u);
    multiply(da, memory, s.values, of_db, of_u);
#pragma unroll
    for (int m = 0; m < M; m++) {
        const int row = y * M + m;
        const long long at = (first + row) * heads + value_head;
        const float share = row < count ? (float)beta[at] : 0.0f;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < M; n++) {
            const int column = x + n * SIDE;
            const long long pair = (matrix * CHUNK + row) * CHUNK + column;
            const float error = row > column ? -da[m][n] : 0.0f;
            by_query[pair] = row >= column ? s.scale * dp[m][n] : 0.0f;
            by_key[pair] = share * error;
            sum = fmaf(error, alike[pair], sum);
        }
        for (int column = x; column < s.values; column += SIDE) {
            const float value = of_db(row, column);
            sum = fmaf(value, rest[own + row * s.values + column], sum);
            if (row < count) dv[token + row * down + column] = (T)(share * value);
        }
        sum = group_sum<SIDE>(sum);
        if (x == 0 && row < count) dbeta[at] = (E)sum;
    }
}

// to[t] += the sum of `values` from t on, or unless `upper` of those before t, within halves of
// W warps.
template <int W>
DEVICE void pass(float (&to)[EACH], const float (&values)[EACH], bool upper, Of &total) {
    const int warp = threadIdx.x / 32, start = warp / W * W;
    float sum = 0;
#pragma unroll
    for (int e = 0; e < EACH; e++) sum += values[e];
    __syncthreads();
    total.warp[warp][lane_of()] = sum;
    __syncthreads();
    sum = 0;
    for (int w = start; w < start + W; w++)
        if (upper ? w > warp : w < warp) sum += total.warp[w][lane_of()];
    if (upper) {
#pragma unroll
        for (int e = EACH - 1; e >= 0; e--) to[e] += sum += values[e];
    } else {
#pragma unroll
        for (int e = 0; e < EACH; e++) to[e] += sum, sum += values[e];
    }
}

// Gradients of a channel of a warp's tokens.
struct Gradients {
    float query[EACH], key[EACH], decay[EACH];

    // Of pairs of halves of H tokens, which are a warp's own.
    template <int H>
    DEVICE void near(const Square &x, const Square &y, const Own &own, Fades &fades, Of &whole) {
#pragma unroll
        for (int top = 0; top < EACH; top += 2 * H) {
            float early[H] = {}, late[H];
#pragma unroll
            for (int i = 0; i < H; i++) {
                const int row = top + H + i;
                const float factor = fades.upto[row];
                float by_query = 0, by_key = 0;
#pragma unroll
                for (int j = 0; j < H; j++) {
                    const int column = top + j;
                    const float left = x.at(row_of(row), row_of(column));
                    const float right = y.at(row_of(row), row_of(column));
                    const float before = own.key[column] * fades.after[column];
                    by_query = fmaf(left, before, by_query);
                    by_key = fmaf(right, before, by_key);
                    early[j] = fmaf(left, own.query[row] * factor, early[j]);
                    early[j] = fmaf(right, own.key[row] * factor, early[j]);
                }
                by_query *= factor, by_key *= factor;
                query[row] += by_query, key[row] += by_key;
                late[i] = fmaf(own.query[row], by_query, own.key[row] * by_key);
            }
            float sum = 0;
#pragma unroll
            for (int i = H - 1; i >= 0; i--) decay[top + H + i] += sum += late[i];
            sum = 0;
#pragma unroll
            for (int j = 0; j < H; j++) {
                const float own_key = early[j] * fades.after[top + j];
                key[top + j] += own_key;
                decay[top + j] += sum;
                sum = fmaf(own.key[top + j], own_key, sum);
            }
        }
        fades.widen<H>(whole);
    }

    // Of those of halves of several warps.
    template <int H>
    DEVICE void far(const Square &x, const Square &y, const Slab &queries, const Slab &keys,
                    const Own &own, Fades &fades, Of &whole, Of &total) {
        const bool upper = Fades::upper<H>(0);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float factor = fades.at<H>(e);
            keys.at(row_of(e), lane_of()) = own.key[e] * factor;
            if (upper) queries.at(row_of(e), lane_of()) = own.query[e] * factor;
        }
        __syncthreads();
        const int other = (row_of(0) / H ^ 1) * H;
        float by_query[EACH] = {}, by_key[EACH] = {}, passing[EACH];
        if (upper) {
#pragma unroll
            for (int from = 0; from < EACH; from += 4)  // of fewer rows at once: registers
#pragma unroll 1
                for (int j = other; j < other + H; j += 4) {
                    float before[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) before[i] = keys.at(j + i, lane_of());
#pragma unroll
                    for (int e = from; e < from + 4; e++) {
                        const Vector<float, 4> left = x.four(row_of(e), j);
                        const Vector<float, 4> right = y.four(row_of(e), j);
#pragma unroll
                        for (int i = 0; i < 4; i++) {
                            by_query[e] = fmaf(left.at[i], before[i], by_query[e]);
                            by_key[e] = fmaf(right.at[i], before[i], by_key[e]);
                        }
                    }
                }
        } else {
#pragma unroll 1
            for (int row = other; row < other + H; row++) {
                const float late_query = queries.at(row, lane_of());
                const float late_key = keys.at(row, lane_of());
#pragma unroll
                for (int from = 0; from < EACH; from += 4) {
                    const Vector<float, 4> left = x.four(row, row_of(from));
                    const Vector<float, 4> right = y.four(row, row_of(from));
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        by_key[from + i] = fmaf(left.at[i], late_query, by_key[from + i]);
                        by_key[from + i] = fmaf(right.at[i], late_key, by_key[from + i]);
                    }
                }
            }
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            by_query[e] *= fades.at<H>(e), by_key[e] *= fades.at<H>(e);
            query[e] += by_query[e], key[e] += by_key[e];
            passing[e] = fmaf(own.query[e], by_query[e], own.key[e] * by_key[e]);
        }
        pass<H / EACH>(decay, passing, upper, total);
        fades.widen<H>(whole);
    }
};

// sum[e] += left[row of e] . right[lane], over `depth` columns.
template <class A, class B>
DEVICE void add_products(float (&sum)[EACH], const Slab &a, const Slab &b, int depth, A left,
                         B right) {
#pragma unroll 1
    for (int from = 0; from < depth; from += SLAB) {
        __syncthreads();
#pragma unroll 2
        for (int i = threadIdx.x; i < CHUNK * SLAB; i += THREADS)
            a.at(i / SLAB, i % SLAB) = left(i / SLAB, from + i % SLAB);
#pragma unroll 2
        for (int i = threadIdx.x; i < SLAB * SLAB; i += THREADS)
            b.at(i / SLAB, i % SLAB) = right(i / SLAB, from + i % SLAB);
        __syncthreads();
#pragma unroll 1
        for (int k = 0; k < SLAB; k += 4) {
            const Vector<float, 4> column = b.four(lane_of(), k);
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const Vector<float, 4> row = a.four(row_of(e), k);
#pragma unroll
                for (int i = 0; i < 4; i++) sum[e] = fmaf(row.at[i], column.at[i], sum[e]);
            }
        }
    }
}

// dq, dk and ddecay of 32 channels.
KERNEL(THREADS, 1)
delta_channel_gradients(const T *__restrict__ dout, const T *__restrict__ q,
                        const T *__restrict__ k, const D *__restrict__ decay,
                        const E *__restrict__ beta, const I *__restrict__ offsets,
                        const float *__restrict__ by_query, const float *__restrict__ by_key,
                        const float *__restrict__ u, const float *__restrict__ db,
                        const float *__restrict__ states, const float *__restrict__ dstates,
                        T *__restrict__ dq, T *__restrict__ dk, D *__restrict__ ddecay,
                        const __grid_constant__ Sizes s) {
    DYNAMIC_SHARED(float, memory);
    __shared__ Of whole, total;
    __shared__ float both[SLAB];  // of a channel, what passes from the state before to that after
    const Slab queries{memory}, keys{memory + Slab::SIZE};
    const Square x{keys.start + Slab::SIZE}, y{x.start + Square::SIZE};
    const int heads = s.heads * s.groups, part = blockIdx.x % PARTS;
    const int head = blockIdx.x / PARTS % s.heads;
    const long long slot = blockIdx.x / (PARTS * s.heads);
    const Text text = text_of_slot(offsets, slot, s);
    const long long first = text.first(slot - text.slot);
    const int count = text.count(slot - text.slot);
    if (count <= 0) return;
    const int channel = part * SLAB + lane_of(), warp = threadIdx.x / 32;
    const long long at = (first * s.heads + head) * DIM;
    Own own;
    own.load(q, k, at, s.heads * DIM, count, channel);
    Gradients sums;
#pragma unroll
    for (int e = 0; e < EACH; e++) sums.query[e] = sums.key[e] = 0;
#pragma unroll 1
    for (int group = 0; group < s.groups; group++) {
        const int value_head = head * s.groups + group, down = heads * s.values;
        const long long matrix = slot * heads + value_head;
        const long long token = (first * heads + value_head) * s.values;
        const float *const own_u = u + matrix * CHUNK * s.values;
        const float *const own_db = db + matrix * CHUNK * s.values;
        const float *const own_state = states + (matrix * DIM + part * SLAB) * s.values;
        const float *const own_dstate = dstates + (matrix * DIM + part * SLAB) * s.values;
        const long long factors = (first * heads + value_head) * DIM;
        Fades fades;
        begin(fades, decay + factors, heads * DIM, count, channel);
        __syncthreads();
        x.load<4>(by_query + matrix * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK);
        y.load<4>(by_key + matrix * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float alone = x.at(row_of(e), row_of(e));  // of a query and its own key
            sums.query[e] = fmaf(alone, own.key[e], sums.query[e]);
            sums.key[e] = fmaf(alone, own.query[e], sums.key[e]);
            sums.decay[e] = 0;
        }
        sums.near<1>(x, y, own, fades, whole);
        sums.near<2>(x, y, own, fades, whole);
        sums.near<4>(x, y, own, fades, whole);
        sums.far<8>(x, y, queries, keys, own, fades, whole, total);
        sums.far<16>(x, y, queries, keys, own, fades, whole, total);
        sums.far<32>(x, y, queries, keys, own, fades, whole, total);
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
            const bool inside = part * SLAB + row < DIM && column < s.values;
            return inside ? own_state[row * s.values + column] : 0.0f;
        };
        const auto of_dstate = [&](int row, int column) {
            const bool inside = part * SLAB + row < DIM && column < s.values;
            return inside ? own_dstate[row * s.values + column] : 0.0f;
        };
        // fades.upto and .after are exp(g) and exp(g[63] - g) now
        float part_of[EACH] = {}, after[EACH];
        add_products(part_of, queries, keys, s.values, of_dout, of_state);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float value = s.scale * fades.upto[e] * part_of[e];
            sums.query[e] += value;
            after[e] = own.query[e] * value;
            part_of[e] = 0;
        }
        add_products(part_of, queries, keys, s.values, of_db, of_state);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const bool inside = row_of(e) < count;
            const float share =
                inside ? (float)beta[(first + row_of(e)) * heads + value_head] : 0.0f;
            const float value = -share * fades.upto[e] * part_of[e];
            sums.key[e] += value;
            after[e] = fmaf(own.key[e], value, after[e]);
            part_of[e] = 0;
        }
        pass<WARPS>(sums.decay, after, true, total);
        add_products(part_of, queries, keys, s.values, of_u, of_dstate);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const float value = fades.after[e] * part_of[e];
            sums.key[e] += value;
            after[e] = own.key[e] * value;
        }
        pass<WARPS>(sums.decay, after, false, total);
        for (int row = warp; row < SLAB; row += WARPS) {
            float sum = 0;
            for (int column = lane_of(); column < s.values; column += 32)
                sum = fmaf(of_state(row, column), of_dstate(row, column), sum);
            sum = group_sum<32>(sum);
            if (lane_of() == 0) both[row] = sum;
        }
        __syncthreads();
        if (warp == WARPS - 1) both[lane_of()] *= fades.upto[EACH - 1];
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (row_of(e) >= count || channel >= DIM) continue;
            ddecay[factors + (long long)row_of(e) * heads * DIM + channel] =
                (D)(sums.decay[e] + both[lane_of()]);
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        if (row_of(e) >= count || channel >= DIM) continue;
        dq[at + row_of(e) * s.heads * DIM + channel] = (T)sums.query[e];
        dk[at + row_of(e) * s.heads * DIM + channel] = (T)sums.key[e];
    }
}
