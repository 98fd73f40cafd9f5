// Layer normalisation, forward and backward.
//
//   h = x + residual      mean = sum(h) / HIDDEN      rstd = 1 / sqrt(mean((h - mean)^2) + eps)
//   hhat = (h - mean) * rstd      y = hhat * w + bias
//
//   g = dy * w      dx = rstd * (g - mean(g) - hhat * mean(g * hhat)) + dh
//   dw = sum(dy * hhat)      dbias = sum(dy)
//
//   traffic     forward   rows * HIDDEN * sizeof(T) * (RESIDUAL ? 4 : 2)
//               backward  rows * HIDDEN * sizeof(T) * (RESIDUAL ? 4 : 3)
//               w and bias stay in L1, the partial sums of dw and dbias in L2
//   constants   those of rms_norm.cu
//
//   The trick: that of rms_norm.cu, with two reductions of a row.  Forward, a row in registers is
//   centred before it is squared.  In a row too long for that, every thread merges the mean and
//   the centred squares of one vector after the other (Chan et al., 1979): no digits are lost far
//   from zero, and the row is read twice, not three times.
#include "common/reduce.cuh"
#include "common/vector.cuh"

constexpr int ROWS = THREADS / ROW_THREADS;  // that a block holds at a time
constexpr int STEP = ROW_THREADS * LANES;    // columns between two vectors of a thread
constexpr int DEPTH = (HIDDEN + STEP - 1) / STEP;
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ bool inside(int column) { return HIDDEN % STEP == 0 || column < HIDDEN; }

// ---- forward ----------------------------------------------------------------------------------
constexpr int HELD = (1024 + THREADS - 1) / THREADS;  // blocks of an SM: 64 registers a thread

// v = x + residual; the sum goes to h where `keep` asks for it.
__device__ __forceinline__ void load_sum(float (&v)[LANES], const T *x, const T *residual, T *h,
                                         bool keep) {
    load(v, x);
    if constexpr (RESIDUAL) {
        float r[LANES];
        load(r, residual);
#pragma unroll
        for (int j = 0; j < LANES; j++) v[j] += r[j];
        if (keep) store(h, v);
    }
}

KERNEL(THREADS, HELD) layer_norm_forward(
    const T *__restrict__ x, const W *__restrict__ weight, const T *__restrict__ residual,
    const B *__restrict__ bias, T *__restrict__ y, T *__restrict__ h, float *__restrict__ mean,
    float *__restrict__ rstd, long long rows, float eps) {
    __shared__ float sums[WARPS], squares_of[WARPS];
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const long long start = row * HIDDEN;
    const int first = threadIdx.x % ROW_THREADS * LANES;

    float kept[KEEP ? DEPTH : 1][LANES], sum = 0, count = 0, own = 0, squares = 0;
#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        const int column = first + k * STEP;
        if (row >= rows || !inside(column)) continue;
        const long long at = start + column;
        float(&v)[LANES] = kept[KEEP ? k : 0], part = 0;
        load_sum(v, x + at, residual + at, h + at, true);
#pragma unroll
        for (int j = 0; j < LANES; j++) part += v[j];
        sum += part;
        if constexpr (!KEEP) {  // merge: own is the mean of the `count` values so far
            const float apart = part / LANES - own, share = LANES / (count + LANES);
#pragma unroll
            for (int j = 0; j < LANES; j++)
                squares += (v[j] - part / LANES) * (v[j] - part / LANES);
            squares += apart * apart * count * share;
            own += apart * share;
            count += LANES;
        }
    }
    const float centre = row_sum<ROW_THREADS>(sum, sums) / HIDDEN;
    if constexpr (KEEP) {
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            if (row >= rows || !inside(first + k * STEP)) continue;
#pragma unroll
            for (int j = 0; j < LANES; j++) {
                kept[k][j] -= centre;
                squares += kept[k][j] * kept[k][j];
            }
        }
    } else {
        squares += count * (own - centre) * (own - centre);
    }
    const float scale = 1 / sqrtf(row_sum<ROW_THREADS>(squares, squares_of) / HIDDEN + eps);
    if (row >= rows) return;
    if (first == 0) {
        mean[row] = centre;
        rstd[row] = scale;
    }

#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        const int column = first + k * STEP;
        if (!inside(column)) continue;
        const long long at = start + column;
        float(&v)[LANES] = kept[KEEP ? k : 0];
        if constexpr (!KEEP) {
            load_sum(v, x + at, residual + at, h + at, false);
#pragma unroll
            for (int j = 0; j < LANES; j++) v[j] -= centre;
        }
        float w[LANES], b[LANES] = {};
        load(w, weight + column);
        if constexpr (BIAS) load(b, bias + column);
#pragma unroll
        for (int j = 0; j < LANES; j++) v[j] = v[j] * scale * w[j] + b[j];
        store(y + at, v);
    }
}

// ---- backward ---------------------------------------------------------------------------------
constexpr int GROUP = 4;  // long rows whose gradients meet before they go to `partial`

struct Sums { float dw[LANES], dbias[LANES]; };
struct Row { float centre, scale, mean_g, mean_ghhat; };

// One vector of a row: add g and g * hhat to their sums, or, when their means are known, make dx.
__device__ __forceinline__ void dot(float (&sum)[2], const float (&dy)[LANES],
                                    const float (&h)[LANES], const W *weight, const Row &row) {
    float w[LANES];
    load(w, weight);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float g = dy[j] * w[j];
        sum[0] += g;
        sum[1] += g * ((h[j] - row.centre) * row.scale);
    }
}
__device__ __forceinline__ void gradients(T *dx, Sums &sums, const float (&dy)[LANES],
                                          const float (&h)[LANES], const float (&dh)[LANES],
                                          const W *weight, const Row &row) {
    float w[LANES], d[LANES];
    load(w, weight);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float hhat = (h[j] - row.centre) * row.scale;
        d[j] = row.scale * (dy[j] * w[j] - row.mean_g - hhat * row.mean_ghhat) + dh[j];
        sums.dw[j] += dy[j] * hhat;
        sums.dbias[j] += dy[j];
    }
    store(dx, d);
}

KERNEL(THREADS, RESIDENT) layer_norm_backward(
    const T *__restrict__ dy, const T *__restrict__ dh, const T *__restrict__ h,
    const W *__restrict__ weight, const float *__restrict__ mean, const float *__restrict__ rstd,
    T *__restrict__ dx, float *__restrict__ partial, long long rows) {
    __shared__ float exchange[2][WARPS];  // in turns: a slow warp may still read the other
    const int first = threadIdx.x % ROW_THREADS * LANES;
    float *dw = partial + (long long)blockIdx.x * HIDDEN;
    float *dbias = dw + (long long)gridDim.x * HIDDEN;

    if constexpr (KEEP_BACKWARD) {
        Sums sums[DEPTH] = {};
        for (long long top = (long long)blockIdx.x * ROWS; top < rows; top += gridDim.x * ROWS) {
            const long long row = top + threadIdx.x / ROW_THREADS, start = row * HIDDEN;
            Row at_hand = {};
            if (row < rows) at_hand = {mean[row], rstd[row]};
            Vector<T, LANES> kept_dy[DEPTH], kept_h[DEPTH], kept_dh[RESIDUAL ? DEPTH : 1];
            float share[2] = {};
#pragma unroll
            for (int k = 0; k < DEPTH; k++) {
                const int column = first + k * STEP;
                if (row >= rows || !inside(column)) continue;
                fetch(kept_dy[k], dy + start + column);
                fetch(kept_h[k], h + start + column);
                if constexpr (RESIDUAL) fetch(kept_dh[k], dh + start + column);
            }
#pragma unroll
            for (int k = 0; k < DEPTH; k++) {
                const int column = first + k * STEP;
                if (row >= rows || !inside(column)) continue;
                float a[LANES], b[LANES];
                widen(a, kept_dy[k]);
                widen(b, kept_h[k]);
                dot(share, a, b, weight + column, at_hand);
            }
            at_hand.mean_g = row_sum<ROW_THREADS>(share[0], exchange[0]) / HIDDEN;
            at_hand.mean_ghhat = row_sum<ROW_THREADS>(share[1], exchange[1]) / HIDDEN;
#pragma unroll
            for (int k = 0; k < DEPTH; k++) {
                const int column = first + k * STEP;
                if (row >= rows || !inside(column)) continue;
                float a[LANES], b[LANES], c[LANES] = {};
                widen(a, kept_dy[k]);
                widen(b, kept_h[k]);
                if constexpr (RESIDUAL) widen(c, kept_dh[k]);
                gradients(dx + start + column, sums[k], a, b, c, weight + column, at_hand);
            }
        }
        if constexpr (ROW_THREADS > 32) {  // every column has one owner in the block
#pragma unroll
            for (int k = 0; k < DEPTH; k++) {
                const int column = first + k * STEP;
                if (!inside(column)) continue;
                store(dw + column, sums[k].dw);
                if constexpr (BIAS) store(dbias + column, sums[k].dbias);
            }
        } else {  // add the rows of a warp by shuffles, then the warps through shared memory
            __shared__ float meet[1 + BIAS][WARPS][ROW_THREADS > 32 ? 1 : HIDDEN];
#pragma unroll
            for (int k = 0; k < DEPTH; k++)
#pragma unroll
                for (int j = 0; j < LANES; j++) {
                    const int column = first + k * STEP + j;
#pragma unroll
                    for (int d = ROW_THREADS; d < 32; d *= 2) {
                        sums[k].dw[j] += __shfl_xor_sync(0xffffffffu, sums[k].dw[j], d);
                        if constexpr (BIAS)
                            sums[k].dbias[j] += __shfl_xor_sync(0xffffffffu, sums[k].dbias[j], d);
                    }
                    if (threadIdx.x % 32 < ROW_THREADS && inside(column)) {
                        meet[0][threadIdx.x / 32][column] = sums[k].dw[j];
                        if constexpr (BIAS) meet[1][threadIdx.x / 32][column] = sums[k].dbias[j];
                    }
                }
            __syncthreads();
            for (int column = threadIdx.x; column < HIDDEN; column += THREADS)
                for (int which = 0; which <= BIAS; which++) {
                    float sum = 0;
#pragma unroll
                    for (int warp = 0; warp < WARPS; warp++) sum += meet[which][warp][column];
                    (which ? dbias : dw)[column] = sum;
                }
        }
    } else {  // one row at a time does not fit: GROUP rows are read twice
        for (long long top = (long long)blockIdx.x * GROUP; top < rows; top += gridDim.x * GROUP) {
            Row at_hand[GROUP];
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                if (top + i >= rows) continue;
                const long long start = (top + i) * HIDDEN;
                float share[2] = {};
                at_hand[i] = {mean[top + i], rstd[top + i]};
#pragma unroll 2
                for (int column = first; column < HIDDEN; column += STEP) {
                    float a[LANES], b[LANES];
                    load(a, dy + start + column);
                    load(b, h + start + column);
                    dot(share, a, b, weight + column, at_hand[i]);
                }
                at_hand[i].mean_g = row_sum<ROW_THREADS>(share[0], exchange[0]) / HIDDEN;
                at_hand[i].mean_ghhat = row_sum<ROW_THREADS>(share[1], exchange[1]) / HIDDEN;
                }
            for (int column = first; column < HIDDEN; column += STEP) {
                Sums sums = {};
                if (top >= GROUP * gridDim.x) {  // not the first group: go on with what is there
                    load(sums.dw, dw + column);
                    if constexpr (BIAS) load(sums.dbias, dbias + column);
                }
#pragma unroll
                for (int i = 0; i < GROUP; i++) {
                    if (top + i >= rows) continue;
                    const long long at = (top + i) * HIDDEN + column;
                    float a[LANES], b[LANES], c[LANES] = {};
                    load(a, dy + at);
                    load(b, h + at);
                    if constexpr (RESIDUAL) load(c, dh + at);
                    gradients(dx + at, sums, a, b, c, weight + column, at_hand[i]);
                }
                store(dw + column, sums.dw);
                if constexpr (BIAS) store(dbias + column, sums.dbias);
            }
        }
    }
}
