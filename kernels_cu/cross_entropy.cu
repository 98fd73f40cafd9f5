// Cross entropy of a softmax, forward and backward.
//
//   z = softcap * tanh(x / softcap), or x        lse = log(sum(exp(z)))
//   loss = lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse^2
//
//   dx = z' * (exp(z - lse) * (dloss * (1 + 2 z_loss lse) + dlse)
//              - dloss * (smoothing / COLUMNS + (1 - smoothing) * [column == label]))
//   where label == ignore, loss and dloss are 0
//
//   traffic     forward   rows * COLUMNS * sizeof(T)
//               backward  rows * COLUMNS * sizeof(T) * 2
//   constants   T, I          dtypes of the logits, of the labels
//               COLUMNS       words of the vocabulary
//               LANES         values of one access: 16 bytes, or what COLUMNS and the addresses
//                             are multiples of
//               ROW_THREADS   threads of a row: a power of two up to 32, or the block
//               THREADS       of a block
//               SOFTCAP, SMOOTHING
//
//   The trick: forward, a row is read once, whatever its length: every thread keeps the greatest
//   value so far and rescales its sum when that grows.  Backward, lse is known, so every vector is
//   on its own; it is read before it is written, and dx may lie over x.
//   A label that is neither a column nor ignore gives NaN, and no access out of bounds.
#include "common/math.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

constexpr int ROWS = THREADS / ROW_THREADS;  // that a block of the forward kernel holds
constexpr int STEP = ROW_THREADS * LANES;    // columns between two vectors of a thread
constexpr int FLIGHT = 4;                    // vectors of a thread whose loads are in flight
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fffffff); }

__device__ __forceinline__ float capped(float x, float softcap) {
    if constexpr (SOFTCAP) return softcap * tanhf(x / softcap);
    else return x;
}

// ---- forward ----------------------------------------------------------------------------------
KERNEL(THREADS) cross_entropy_forward(
    const T *__restrict__ logits, const I *__restrict__ labels, float *__restrict__ loss,
    float *__restrict__ lse, long long rows, long long ignore, float smoothing, float z_loss,
    float softcap) {
    __shared__ float tops[WARPS], sums[WARPS], totals[WARPS];
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const long long start = row * COLUMNS;
    const int first = threadIdx.x % ROW_THREADS * LANES;

    float top = LOWEST, sum = 0, total = 0;
    for (int from = first; row < rows && from < COLUMNS; from += FLIGHT * STEP) {
        Vector<T, LANES> flight[FLIGHT];
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            if (from + k * STEP < COLUMNS) fetch(flight[k], logits + start + from + k * STEP);
#pragma unroll
        for (int k = 0; k < FLIGHT; k++) {
            if (from + k * STEP >= COLUMNS) continue;
            float z[LANES];
            widen(z, flight[k]);
            const float before = top;
#pragma unroll
            for (int j = 0; j < LANES; j++) {
                z[j] = capped(z[j], softcap);
                top = fmaxf(top, z[j]);
                if constexpr (SMOOTHING) total += z[j];
            }
            sum *= exp_below(before - top);
#pragma unroll
            for (int j = 0; j < LANES; j++) sum += exp_below(z[j] - top);
        }
    }
    const float mine = top;
    top = row_max<ROW_THREADS>(top, tops);
    sum = row_sum<ROW_THREADS>(sum * exp_below(mine - top), sums);
    if constexpr (SMOOTHING) total = row_sum<ROW_THREADS>(total, totals);
    if (row >= rows || first != 0) return;

    if (sum == 0) top = 0;         // nothing but -inf
    const float log = logf(sum);  // lse - top, which does not cancel far from 0
    lse[row] = log + top;
    const long long label = labels[row];
    if (label == ignore) {
        loss[row] = 0;
    } else if (label < 0 || label >= COLUMNS) {
        loss[row] = not_a_number();
    } else {
        float target = capped((float)logits[start + label], softcap);
        if constexpr (SMOOTHING) target = (1 - smoothing) * target + smoothing * (total / COLUMNS);
        const float finite = sum == 0 ? 0 : log;
        loss[row] = finite + (top - target) + z_loss * (finite + top) * (finite + top);
    }
}

// ---- backward ---------------------------------------------------------------------------------
constexpr int TILE = THREADS * LANES;                    // columns of a block
constexpr int TILES = (COLUMNS + TILE - 1) / TILE;  // of a row

KERNEL(THREADS) cross_entropy_backward(
    const float *__restrict__ dloss, const float *__restrict__ dlse, const T *logits,
    const I *__restrict__ labels, const float *__restrict__ lse, T *dlogits, long long ignore,
    float smoothing, float z_loss, float softcap) {
    const long long row = blockIdx.x / TILES, start = row * COLUMNS;
    const int column = blockIdx.x % TILES * TILE + threadIdx.x * LANES;
    if (column >= COLUMNS) return;
    float v[LANES];
    load(v, logits + start + column);

    const long long label = labels[row];
    const bool counts = label != ignore;
    float size = lse[row], weight = counts ? dloss[row] : 0;
    if (size < LOWEST) size = 0;  // nothing but -inf
    if (counts && (label < 0 || label >= COLUMNS)) weight = not_a_number();
    const float share = weight * (1 + 2 * z_loss * size) + (dlse == nullptr ? 0 : dlse[row]);
    const float everywhere = weight * (smoothing / COLUMNS), there = (1 - smoothing) * weight;

#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float z = capped(v[j], softcap);
        float d = exp_below(z - size) * share - everywhere;
        if (counts && column + j == label) d -= there;
        if constexpr (SOFTCAP) d *= 1 - (z / softcap) * (z / softcap);
        // a row without a label is 0, whatever its logits hold, NaN too
        v[j] = counts || dlse != nullptr ? d : 0;
    }
    store(dlogits + start + column, v);
}
