// Root-mean-square, gated root-mean-square and layer normalisation, forward and backward.
//
//   h = x + residual      mean = CENTRED ? sum(h) / HIDDEN : 0      hhat = (h - mean) * rstd
//   rstd = 1 / sqrt(sum((h - mean)^2) / HIDDEN + eps)      y = hhat * (w + offset) + bias
//
//   g = dy * (w + offset)      dw = sum(dy * hhat)      dbias = sum(dy)
//   dx = rstd * (g - hhat * mean(g * hhat) - (CENTRED ? mean(g) : 0)) + dh
//
//   GATED: y is multiplied by silu(gate); dgate = dy * hhat * (w + offset) * silu'(gate), and the
//   other gradients have dy * silu(gate) in place of dy
//
//   traffic     forward   rows * HIDDEN * sizeof(T) * (RESIDUAL ? 4 : GATED ? 3 : 2)
//               backward  rows * HIDDEN * sizeof(T) * (GATED ? 5 : RESIDUAL ? 4 : 3)
//               and 4 bytes each for a row's rstd and mean; w and bias stay in L1, the partial sums
//               of dw and dbias in L2, and so do, without KEEP, the arrays that are read twice
//   constants   CENTRED           layer norm, whose offset is 0; else RMS norm, whose mean is null
//               T, W, B           dtypes of x, weight and bias
//               HIDDEN            length of a row
//               LANES             values of one access: 16 bytes, or fewer as HIDDEN, the distances
//                                 of rows and the addresses allow
//               ROW_THREADS       threads of a block that share a row: a power of two up to 32,
//                                 or all
//               THREADS           threads of a block
//               CLUSTER           blocks that share a row: 1, or up to 8 from sm_90 on
//               RESIDENT          blocks that an SM must hold
//               KEEP              a row stays on chip
//               RESIDUAL, BIAS    a residual, or in backward a dh, is given; a bias is given
//               WEIGHTS           backward computes dw and dbias
//               GATED             there is a gate, in the place of residual or dh
//
//   The trick: a row is read once and kept in registers across its reduction.  Narrow rows share a
//   warp and need no barrier; the blocks of a cluster share a wide one, and exchange their sums
//   through shared memory.  In backward, a block takes many rows, and every thread adds the
//   contributions of its columns to dw and dbias in shared memory, in float32, at addresses that no
//   other thread uses.  A block writes one row of partial sums, which column_sum.cu adds in a fixed
//   order: equal bits.  The last blocks to end could add them without another launch, but an SM
//   reads too slowly for that: it took 7 to 18 us more on an H200.
//
//   A row in registers is centred before it is squared.  In a row too long for registers, every
//   thread merges the mean and the centred squares of one vector after the other: no digits are
//   lost far from zero, and the row is read twice instead of three times.
constexpr int COLUMNS = HIDDEN;
#include <common/row_threads.cuh>
#include <common/rows.cuh>
#include <common/vector.cuh>

// ---- plain ------------------------------------------------------------------------------------
// RMS norm as one would first write it, a thread a row.  In no unit of the library: it is here to
// be read, and as the first step of docs/ladders.md.
#ifdef PLAIN
extern "C" __global__ void rms_norm_plain(const T *x, const W *weight, T *y, long long rows,
                                          float eps) {
    const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    x += row * HIDDEN, y += row * HIDDEN;
    float squares = 0;
    for (int i = 0; i < HIDDEN; i++) squares += (float)x[i] * (float)x[i];
    const float rstd = 1 / sqrtf(squares / HIDDEN + eps);
    for (int i = 0; i < HIDDEN; i++) y[i] = (T)((float)x[i] * rstd * (float)weight[i]);
}
#endif

// ---- forward ----------------------------------------------------------------------------------
// v = x + residual
DEVICE void read(float (&v)[LANES], const T *x, const T *residual) {
    load(v, x);
    if constexpr (RESIDUAL) {
        float r[LANES];
        load(r, residual);
#pragma unroll
        for (int j = 0; j < LANES; j++) v[j] += r[j];
    }
}

// Mean and centred squares of the values so far, vector by vector (Chan et al., 1979).
struct Moments {
    float count, mean, squares;
    DEVICE void add(const float (&v)[LANES], float sum) {
        const float delta = sum / LANES - mean, weight = LANES / (count + LANES);
#pragma unroll
        for (int j = 0; j < LANES; j++) squares += (v[j] - sum / LANES) * (v[j] - sum / LANES);
        squares += delta * delta * count * weight;
        mean += delta * weight;
        count += LANES;
    }
};

DEVICE void forward(const T *x, const W *weight, const T *residual, const B *bias, T *y, T *h,
                    float *mean, float *rstd, long long rows, const Layout &of_x,
                    const Layout &of_residual, float eps, float offset) {
    constexpr bool AHEAD = KEEP && GATED && sizeof(T) == 2;  // registers for the gate are free
    __shared__ Exchange<WARPS, CLUSTER> exchange[2];
    const long long row = (long long)(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / ROW_THREADS;
    const bool in_range = row < rows;
    x += start(row, of_x);
    if constexpr (RESIDUAL || GATED) residual += start(row, of_residual);
    cluster_start<CLUSTER>(exchange[0], exchange[1]);

    Vector<T, LANES> gates[AHEAD ? DEPTH : 1];
    float kept[KEEP ? DEPTH : 1][LANES], sum[1] = {}, squares[1] = {};
    Moments moments = {};
#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        const int column = column_of(k);
        if (!in_range || !inside(column)) continue;
        float (&v)[LANES] = kept[KEEP ? k : 0], part = 0;
        read(v, x + column, residual + column);
        if constexpr (AHEAD) fetch(gates[k], residual + column);
        if constexpr (RESIDUAL) store(h, row * HIDDEN + column, v);
#pragma unroll
        for (int j = 0; j < LANES; j++) part += CENTRED ? v[j] : v[j] * v[j];
        (CENTRED ? sum : squares)[0] += part;
        if constexpr (CENTRED && !KEEP) moments.add(v, part);
    }
    float centre = 0;
    if constexpr (CENTRED) {
        row_sums<ROW_THREADS, CLUSTER>(sum, exchange[0]);
        centre = divided_by<HIDDEN>(sum[0]);
        const float delta = moments.mean - centre;
        squares[0] = moments.squares + moments.count * delta * delta;
#pragma unroll
        for (int k = 0; KEEP && k < DEPTH; k++) {
            if (!in_range || !inside(column_of(k))) continue;
#pragma unroll
            for (int j = 0; j < LANES; j++) {
                kept[k][j] -= centre;
                squares[0] += kept[k][j] * kept[k][j];
            }
        }
    }
    row_sums<ROW_THREADS, CLUSTER>(squares, exchange[1]);
    const float scale = 1 / sqrtf(divided_by<HIDDEN>(squares[0]) + eps);
    if (!in_range) return;
    if (column_of(0) == 0) {
        if constexpr (CENTRED) mean[row] = centre;
        rstd[row] = scale;
    }

#pragma unroll(KEEP ? DEPTH : RESIDUAL && BIAS ? 1 : 2)
    for (int k = 0; k < DEPTH; k++) {
        const int column = column_of(k);
        if (!inside(column)) continue;
        float (&v)[LANES] = kept[KEEP ? k : 0];
        if constexpr (!KEEP) {
            read(v, x + column, residual + column);
#pragma unroll
            for (int j = 0; CENTRED && j < LANES; j++) v[j] -= centre;
        }
        float w[LANES], b[LANES] = {};
        load(w, weight + column);
        if constexpr (BIAS) load(b, bias + column);
#pragma unroll
        for (int j = 0; j < LANES; j++) v[j] = v[j] * scale * (w[j] + offset) + b[j];
        if constexpr (GATED) {
            float gate[LANES];
            if constexpr (!AHEAD) fetch(gates[0], residual + column);
            widen(gate, gates[AHEAD ? k : 0]);
#pragma unroll
            for (int j = 0; j < LANES; j++) v[j] *= gate[j] * sigmoid(gate[j]);
        }
        store(y, row * HIDDEN + column, v);
    }
}

CLUSTER_KERNEL(CLUSTER, THREADS, RESIDENT)
norm_forward(const T *__restrict__ x, const W *__restrict__ weight, const T *__restrict__ residual,
             const B *__restrict__ bias, T *__restrict__ y, T *__restrict__ h,
             float *__restrict__ mean, float *__restrict__ rstd, long long rows,
             const __grid_constant__ Layouts of, float eps, float offset) {
    forward(x, weight, residual, bias, y, h, mean, rstd, rows, layout(of, 0), layout(of, 1), eps,
            CENTRED ? 0 : offset);
}

// ---- backward ---------------------------------------------------------------------------------
constexpr int GROUP = KEEP ? 1 : CENTRED || BIAS || GATED ? 2 : 4;  // rows read before again
constexpr int MEANS = 1 + CENTRED;                         // means of a row: of g * hhat; of g
constexpr int SUMS = WEIGHTS ? 1 + BIAS : 0;               // sums of a column: dw; dbias
// Whether dh, or the gate, fits into registers beside dy and h before the means are known.
constexpr bool THIRD = RESIDUAL || GATED;
constexpr bool EARLY = KEEP && THIRD && !CENTRED && !BIAS && sizeof(T) == 2;
constexpr int QUAD = LANES < 4 ? LANES : 4;  // floats of one access to shared memory

struct Row { float scale, centre, mean[MEANS]; };

// widen, of a pair of bfloat16 in two instructions, where the compiler needs three.
template <int N, class E> DEVICE void widen_pairs(float (&to)[N], const Vector<E, N> &from) {
    widen(to, from);
}
template <int N> DEVICE void widen_pairs(float (&to)[N], const Vector<__nv_bfloat16, N> &from) {
    if constexpr (N % 2 == 0) {
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            const unsigned pair = *reinterpret_cast<const unsigned *>(&from.at[j]);
            to[j] = __uint_as_float(pair << 16);
            to[j + 1] = __uint_as_float(pair & 0xffff0000u);
        }
    } else {
        widen(to, from);
    }
}

// The same of values in memory.
DEVICE void load_pairs(float (&to)[LANES], const W *from) {
    Vector<W, LANES> v;
    fetch(v, from);
    widen_pairs(to, v);
}

// A centred norm has no offset, and the compiler keeps an addition of 0, which turns -0 into 0.
DEVICE float shifted(float w, float offset) { return CENTRED ? w : w + offset; }

// Add one vector's g * (h - centre), and g, to the sums of its row.
DEVICE void dot(float (&sum)[MEANS], const Vector<T, LANES> &of_dy, const Vector<T, LANES> &of_h,
                const Vector<T, LANES> &of_gate, const W *weight, float offset, const Row &row) {
    float dy[LANES], h[LANES], w[LANES], gate[LANES];
    widen_pairs(dy, of_dy);
    widen_pairs(h, of_h);
    load_pairs(w, weight);
    if constexpr (GATED) widen_pairs(gate, of_gate);
#pragma unroll
    for (int j = 0; GATED && j < LANES; j++) dy[j] *= gate[j] * sigmoid(gate[j]);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float g = dy[j] * shifted(w[j], offset);
        sum[0] += g * (h[j] - row.centre);
        if constexpr (CENTRED) sum[1] += g;
    }
}

// Write one vector of dx and of dgate, at `at`, and add its contributions to dw and dbias.
DEVICE void gradients(T *dx, T *dgate, long long at, float (&sums)[1 + BIAS][LANES],
                      const Vector<T, LANES> &of_dy, const Vector<T, LANES> &of_h,
                      const Vector<T, LANES> &of_dh, const float (&w)[LANES], float offset,
                      const Row &row) {
    float dy[LANES], h[LANES], d[LANES], slope[LANES];
    widen_pairs(dy, of_dy);
    widen_pairs(h, of_h);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float hhat = (h[j] - row.centre) * row.scale;
        if constexpr (GATED) {
            const float gate = (float)of_dh.at[j], s = sigmoid(gate), silu = gate * s;
            slope[j] = dy[j] * hhat * shifted(w[j], offset) * (s + silu * (1 - s));
            dy[j] *= silu;
        }
        float part = -hhat * row.mean[0];
        if constexpr (CENTRED) part -= row.mean[1];
        d[j] = row.scale * fmaf(dy[j], shifted(w[j], offset), part);
        if constexpr (WEIGHTS) sums[0][j] += dy[j] * hhat;
        if constexpr (BIAS) sums[1][j] += dy[j];
        if constexpr (RESIDUAL) d[j] += (float)of_dh.at[j];
    }
    store(dx, at, d);
    if constexpr (GATED) store(dgate, at, slope);
}

// partial[0, i] is the sum over the rows of the i-th block, or cluster, for dw; partial[1, i] that
// for dbias.
DEVICE void backward(const T *dy, const T *dh, const T *h, const W *weight, const float *mean,
                     const float *rstd, T *dx, T *dgate, float *partial, long long rows,
                     const Layout &of_dy, const Layout &of_dh, const Layout &of_h, float offset) {
    DYNAMIC_SHARED(float, held);
    __shared__ Exchange<MEANS * WARPS, CLUSTER> exchange[2];
    const int group = blockIdx.x / CLUSTER, groups = gridDim.x / CLUSTER;
    int use = 0;
    cluster_start<CLUSTER>(exchange[0], exchange[1]);
    // The address of four sums of a thread; neighbouring threads are 16 bytes apart, which avoids
    // bank conflicts.  Without KEEP the sums are too many for shared memory, and are in `partial`.
    const auto address = [&](int which, int k, int q, int thread) {
        if constexpr (KEEP)
            return held + (((which * DEPTH + k) * (LANES / QUAD) + q) * THREADS + thread) * QUAD;
        else
            return partial + ((long long)which * groups + group) * HIDDEN + column_of(k) + q * QUAD;
    };
    const auto set = [&](int which, int k, const float (&v)[LANES]) {
#pragma unroll
        for (int q = 0; q < LANES / QUAD; q++) {
            float four[QUAD];
#pragma unroll
            for (int j = 0; j < QUAD; j++) four[j] = v[q * QUAD + j];
            store(address(which, k, q, threadIdx.x), four);
        }
    };
    const auto get = [&](float (&v)[LANES], int which, int k, int thread, bool add) {
#pragma unroll
        for (int q = 0; q < LANES / QUAD; q++) {
            float four[QUAD];
            load(four, address(which, k, q, thread));
#pragma unroll
            for (int j = 0; j < QUAD; j++)
                v[q * QUAD + j] = add ? v[q * QUAD + j] + four[j] : four[j];
        }
    };
    // Where a row is of a block, sums that are read first are added to at once; with a third array
    // registers suffice for this only after it.
    constexpr bool LATER = ROWS == 1 && THIRD;

    for (int i = 0; i < SUMS * DEPTH; i++)
        if (inside(column_of(i % DEPTH))) set(i / DEPTH, i % DEPTH, {});
    for (long long top = (long long)group * ROWS * GROUP; top < rows;
         top += groups * ROWS * GROUP) {
        Vector<T, LANES> kept_dy[KEEP ? DEPTH : 1], kept_h[KEEP ? DEPTH : 1];
        Vector<T, LANES> kept_dh[EARLY ? DEPTH : 1];
        const auto read_dh = [&](int k, long long at) {
            fetch(kept_dh[EARLY ? k : 0], dh + start(at, of_dh) + column_of(k));
        };
        Row row[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            const long long at = top + i * ROWS + threadIdx.x / ROW_THREADS;
            float sum[MEANS] = {};
            if (at < rows) row[i] = {rstd[at], CENTRED ? mean[at] : 0};
            const T *const dys = dy + start(at, of_dy), *const hs = h + start(at, of_h);
            const auto read = [&](int k) {
                if (at >= rows || !inside(column_of(k))) return;
                fetch(kept_dy[KEEP ? k : 0], dys + column_of(k));
                fetch(kept_h[KEEP ? k : 0], hs + column_of(k));
            };
#pragma unroll
            for (int k = 0; KEEP && k < DEPTH; k++) read(k);  // all loads in flight at once
#pragma unroll
            for (int k = 0; GATED && EARLY && k < DEPTH; k++)
                if (at < rows && inside(column_of(k))) read_dh(k, at);
#pragma unroll(KEEP ? DEPTH : 2)
            for (int k = 0; k < DEPTH; k++) {
                if constexpr (CENTRED && RESIDUAL && !EARLY) __syncwarp();  // or registers spill
                if constexpr (!KEEP) read(k);
                if (at >= rows || !inside(column_of(k))) continue;
                if constexpr (GATED && !EARLY) read_dh(k, at);
                dot(sum, kept_dy[KEEP ? k : 0], kept_h[KEEP ? k : 0], kept_dh[EARLY ? k : 0],
                    weight + column_of(k), offset, row[i]);
            }
#pragma unroll
            for (int k = 0; RESIDUAL && EARLY && k < DEPTH; k++)
                if (at < rows && inside(column_of(k))) read_dh(k, at);
            if (at < rows) sum[0] *= row[i].scale;
            row_sums<ROW_THREADS, CLUSTER>(sum, exchange[use & 1], use >> 1);
            use++;
#pragma unroll
            for (int m = 0; m < MEANS; m++) row[i].mean[m] = divided_by<HIDDEN>(sum[m]);
        }
#pragma unroll(KEEP ? DEPTH : 1)
        for (int k = 0; k < DEPTH; k++) {
            const int column = column_of(k);
            if (!inside(column)) continue;
            float w[LANES], sums[1 + BIAS][LANES] = {};
            load_pairs(w, weight + column);
#pragma unroll
            for (int which = 0; !LATER && which < SUMS; which++)
                get(sums[which], which, k, threadIdx.x, ROWS > 1);
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                const long long at = top + i * ROWS + threadIdx.x / ROW_THREADS;
                if (at >= rows) continue;
                if constexpr (!KEEP) {
                    fetch(kept_dy[0], dy + start(at, of_dy) + column);
                    fetch(kept_h[0], h + start(at, of_h) + column);
                }
                if constexpr (THIRD && !EARLY) read_dh(k, at);
                const int kept = KEEP ? k : 0;
                gradients(dx, dgate, at * HIDDEN + column, sums, kept_dy[kept], kept_h[kept],
                          kept_dh[EARLY ? k : 0], w, offset, row[i]);
            }
#pragma unroll
            for (int which = 0; which < SUMS; which++) {
                if constexpr (LATER) get(sums[which], which, k, threadIdx.x, true);
                set(which, k, sums[which]);
            }
        }
    }
    if constexpr (KEEP) {
        if constexpr (ROWS > 1) __syncthreads();
        for (int i = threadIdx.x; i < SUMS * DEPTH * ROW_THREADS; i += THREADS) {
            const int which = i / (DEPTH * ROW_THREADS), k = i / ROW_THREADS % DEPTH;
            const int thread = i % ROW_THREADS, column = column_of(k, thread);
            if (!inside(column)) continue;
            float sum[LANES] = {};
#pragma unroll(ROWS > 4 ? 4 : ROWS)
            for (int r = 0; r < ROWS; r++) get(sum, which, k, thread + r * ROW_THREADS, true);
            store(partial + ((long long)which * groups + group) * HIDDEN + column, sum);
        }
    }
}

CLUSTER_KERNEL(CLUSTER, THREADS, RESIDENT)
norm_backward(const T *__restrict__ dy, const T *__restrict__ dh, const T *__restrict__ h,
              const W *weight, const float *__restrict__ mean, const float *__restrict__ rstd,
              T *__restrict__ dx, T *__restrict__ dgate, float *__restrict__ partial, long long rows,
              const __grid_constant__ Layouts of, float offset) {
    backward(dy, dh, h, weight, mean, rstd, dx, dgate, partial, rows, layout(of, 0), layout(of, 1),
             layout(of, 2), offset);
}
