// Cross entropy of a softmax, forward, backward and both in one launch.
//
//   z = softcap * tanh(x / softcap), or x        lse = log(sum(exp(z)))
//   loss = lse - (1 - smoothing) * z[label] - smoothing * mean(z) + z_loss * lse^2
//        = w[label] * (lse - z[label]) + z_loss * lse^2, with WEIGHTED
//
//   dx = z' * (exp(z - lse) * (dloss * (1 + 2 z_loss lse) + dlse)
//              - dloss * (smoothing / COLUMNS + (1 - smoothing) * [column == label]))
//   with WEIGHTED, w[label] stands for 1 in both lines
//   where label == ignore, loss and dloss are 0; with both in one launch, dlse is 0, and dloss is
//   `scale` times the array dloss, if it is given
//
//   traffic     forward   rows * COLUMNS * sizeof(T)
//               backward  rows * COLUMNS * (sizeof(T) + sizeof(G))
//               both      rows * COLUMNS * (sizeof(T) + sizeof(G)), where a row fits on chip;
//                         the rest of a longer row is read once more, from the L2 cache
//   constants   T, G, I       dtypes of the logits, of their gradient, of the labels
//               COLUMNS       size of the vocabulary
//               LANES         values of one access
//               RAGGED        rows may begin anywhere, not only at multiples of LANES
//               ROW_THREADS   threads of a row: a power of two up to 32, or the block
//               THREADS       threads of a block;  BLOCKS, both: blocks that an SM must hold
//               HELD, STORED  both: accesses that a thread keeps in registers, in shared memory
//               SOFTCAP, SMOOTHING, WEIGHTED   the options; not the last two together
//               W             dtype of the weights of classes
//
//   The trick: a row is read once, whatever its length: every thread keeps the maximum so far and
//   rescales its sum when that grows.  With both in one launch, values stay on chip until the sum
//   is known, so the gradient may overwrite the logits; a row without a label is not even read.
//   Accesses are 16 bytes wide for any vocabulary: they begin at aligned addresses, which may be
//   before the row, and values outside of the row are ignored.
//   A label that is neither a column nor `ignore` gives NaN and a report, and no access out of
//   bounds.
#include <common/faults.cuh>
#include <common/math.cuh>
#include <common/logits.cuh>
#include <common/reduce.cuh>

constexpr int ROWS = THREADS / ROW_THREADS;  // rows of a block in kernels whose threads share rows
constexpr int STEP = ROW_THREADS * LANES;    // columns between two vectors of a thread
constexpr int FLIGHT = 4;                    // vectors of a thread whose loads are in flight
constexpr int WARPS = THREADS / 32;
constexpr bool REST = HELD * STEP < WIDTH;                 // registers do not hold the whole row

static_assert(!(SMOOTHING && WEIGHTED), "the definition sums w * z over the classes");

DEVICE float not_a_number() { return __int_as_float(0x7fffffff); }

// The factor of a row's loss; 1 for a label that is no column, NaN in place of a negative weight.
DEVICE float weight_of(const W *class_weights, long long label) {
    if constexpr (WEIGHTED) {
        const float weight = label < 0 || label >= COLUMNS ? 1.0f : (float)class_weights[label];
        return weight >= 0 ? weight : not_a_number();
    }
    return 1.0f;
}

// ---- losses -----------------------------------------------------------------------------------
// Sums of a row: `top` is its maximum z, `sum` that of exp(z - top), `total` that of z.
struct Sums { float top, sum, total; };

DEVICE void absorb(Sums &s, const Values &v, int column, float softcap) {
    float z[LANES];
    widen(z, v);
    const float before = s.top;
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        z[j] = inside(column + j) ? capped(z[j], softcap) : __int_as_float(0xff800000);  // -inf
        s.top = fmaxf(s.top, z[j]);
        if constexpr (SMOOTHING) s.total += inside(column + j) ? z[j] : 0;
    }
    s.sum *= exp_below(before - s.top);
#pragma unroll
    for (int j = 0; j < LANES; j++) s.sum += exp_below(z[j] - s.top);
}

// Absorb the vectors of a thread from `column` on, and keep the first KEEP of them in `stored`.
template <int KEEP>
DEVICE void absorb_row(Sums &s, const T *row, int column, float softcap, Values *stored) {
    for (int from = 0; column + from * STEP < COLUMNS; from += FLIGHT) {
        Values flight[FLIGHT];
#pragma unroll
        for (int k = 0; k < FLIGHT; k++) {
            const int at = column + (from + k) * STEP;
            if (at < COLUMNS) fetch_row(flight[k], row, at);
        }
#pragma unroll
        for (int k = 0; k < FLIGHT; k++) {
            const int at = column + (from + k) * STEP;
            if (at >= COLUMNS) continue;
            if (from + k < KEEP) stored[(from + k) * THREADS + threadIdx.x] = flight[k];
            absorb(s, flight[k], at, softcap);
        }
    }
}

// Combine the sums of a row's threads into those of the row, in all of its threads.
DEVICE void reduce_row(Sums &s) {
    __shared__ Exchange<2 * WARPS> exchange;
    __shared__ Exchange<WARPS> totals;
    row_exp_sum<ROW_THREADS>(s.top, s.sum, exchange);
    if constexpr (SMOOTHING) s.total = row_sum<ROW_THREADS>(s.total, totals);
    if (s.sum == 0) s.top = 0;  // all logits are -inf
}

// The loss of a row whose label is valid; `target` is the logit of the label.
DEVICE float loss_of(const Sums &s, float target, float factor, float smoothing, float z_loss,
                     float softcap) {
    target = capped(target, softcap);
    if constexpr (SMOOTHING)
        target = (1 - smoothing) * target + smoothing * divided_by<COLUMNS>(s.total);
    const float log = s.sum == 0 ? 0 : logf(s.sum);  // lse - top; far from 0, lse would cancel
    return factor * (log + (s.top - target)) + z_loss * (log + s.top) * (log + s.top);
}

KERNEL(THREADS)
cross_entropy_forward(const T *__restrict__ logits, const I *__restrict__ labels,
                      const W *__restrict__ class_weights, float *__restrict__ loss, float *__restrict__ lse,
                      long long *__restrict__ faults, long long who, long long rows,
                      long long ignore, float smoothing, float z_loss, float softcap) {
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const long long start = row * COLUMNS;
    const int first = threadIdx.x % ROW_THREADS * LANES;

    Sums s = {LOWEST, 0, 0};
    if (row < rows) absorb_row<0>(s, logits + start, first - lead(start), softcap, nullptr);
    reduce_row(s);
    if (row >= rows || first != 0) return;

    lse[row] = logf(s.sum) + s.top;
    const long long label = labels[row];
    if (label == ignore) {
        loss[row] = 0;
    } else if (label < 0 || label >= COLUMNS) {
        loss[row] = not_a_number();
        report(faults, who, row, label, COLUMNS);
    } else {
        loss[row] = loss_of(s, (float)logits[start + label], weight_of(class_weights, label),
                            smoothing, z_loss, softcap);
    }
}

// ---- gradients --------------------------------------------------------------------------------
// The coefficients of a row's gradient: z' * (exp(z - lse) * weight - uniform - on_label).
struct LogitGradient {
    float lse, weight, uniform, on_label;
    long long label;
};

DEVICE void gradient_of(float (&d)[LANES], const Values &v, int column, const LogitGradient &g,
                        float softcap) {
    widen(d, v);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float z = capped(d[j], softcap);
        d[j] = exp_below(z - g.lse) * g.weight - g.uniform;
        if (column + j == g.label) d[j] -= g.on_label;
        if constexpr (SOFTCAP) d[j] *= 1 - (z * (1 / softcap)) * (z * (1 / softcap));
    }
}

constexpr int TILE = THREADS * LANES;             // columns of a block
constexpr int TILES = (WIDTH + TILE - 1) / TILE;  // tiles of a row

KERNEL(THREADS)
cross_entropy_backward(const float *__restrict__ dloss, const float *__restrict__ dlse,
                       const T *logits, const I *__restrict__ labels,
                       const W *__restrict__ class_weights, const float *__restrict__ lse,
                       G *dlogits, long long ignore, float smoothing, float z_loss, float softcap) {
    const long long row = blockIdx.x / TILES, start = row * COLUMNS;
    const int column = blockIdx.x % TILES * TILE + threadIdx.x * LANES - lead(start);
    if (column >= COLUMNS) return;
    Values v;
    fetch_row(v, logits + start, column);

    const long long label = labels[row];
    const bool counts = label != ignore;
    float row_lse = lse[row], row_dloss = counts ? dloss[row] : 0;
    if (row_lse < LOWEST) row_lse = 0;  // all logits are -inf
    if (counts && (label < 0 || label >= COLUMNS)) row_dloss = not_a_number();
    const float factor = weight_of(class_weights, label);
    const float weight =
        row_dloss * (factor + 2 * z_loss * row_lse) + (dlse == nullptr ? 0 : dlse[row]);
    const LogitGradient g = {row_lse, weight, row_dloss * divided_by<COLUMNS>(smoothing),
                             (1 - smoothing) * row_dloss * factor, label};
    float d[LANES] = {};
    // the gradient of a row without a label is 0 whatever its logits are, NaN included
    if (counts || dlse != nullptr) gradient_of(d, v, column, g, softcap);
    store_row(dlogits, start, column, d);
}

// ---- both -------------------------------------------------------------------------------------
KERNEL(THREADS, BLOCKS)
cross_entropy_over_(const T *logits, const I *__restrict__ labels,
                    const W *__restrict__ class_weights, const float *__restrict__ dloss,
                    G *dlogits, float *__restrict__ loss, long long *__restrict__ faults,
                    long long who, long long rows, float scale, long long ignore, float smoothing,
                    float z_loss, float softcap) {
    DYNAMIC_SHARED(Values, stored);
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const long long start = row * COLUMNS;
    const int first = threadIdx.x % ROW_THREADS * LANES, column = first - lead(start);
    const long long label = row < rows ? labels[row] : ignore;
    const bool counts = label != ignore, wrong = counts && (label < 0 || label >= COLUMNS);
    // read now: the gradient may overwrite it
    const float target = counts && !wrong ? (float)logits[start + label] : 0;

    Sums s = {LOWEST, 0, 0};
    Values held[HELD];
    if (counts) {
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (column + k * STEP < COLUMNS) fetch_row(held[k], logits + start, column + k * STEP);
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (column + k * STEP < COLUMNS) absorb(s, held[k], column + k * STEP, softcap);
        if constexpr (REST)
            absorb_row<STORED>(s, logits + start, column + HELD * STEP, softcap, stored);
    }
    reduce_row(s);
    if constexpr (ROW_THREADS > 1 && ROW_THREADS <= 32) __syncwarp();  // all have read the target
    if (row >= rows) return;

    const float factor = weight_of(class_weights, label);
    if (first == 0) {
        loss[row] = counts ? loss_of(s, target, factor, smoothing, z_loss, softcap) : 0;
        if (wrong) loss[row] = not_a_number();
        if (wrong) report(faults, who, row, label, COLUMNS);
    }
    float row_dloss = counts ? scale * (dloss == nullptr ? 1 : dloss[row]) : 0;
    if (wrong) row_dloss = not_a_number();
    const float log = s.sum == 0 ? 0 : logf(s.sum), reciprocal = s.sum == 0 ? 0 : 1 / s.sum;
    // exp(z - lse) is exp(z - top) / sum
    const LogitGradient g = {s.top, reciprocal * row_dloss * (factor + 2 * z_loss * (log + s.top)),
                             row_dloss * divided_by<COLUMNS>(smoothing),
                             (1 - smoothing) * row_dloss * factor, label};
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const int at = column + k * STEP;
        if (at >= COLUMNS) continue;
        float d[LANES] = {};
        if (counts) gradient_of(d, held[k], at, g, softcap);
        store_row(dlogits, start, at, d);
    }
    Values v;
#pragma unroll 2
    for (int k = 0; REST && column + (HELD + k) * STEP < COLUMNS; k++) {
        const int at = column + (HELD + k) * STEP;
        if (counts && k < STORED) v = stored[k * THREADS + threadIdx.x];
        else if (counts) fetch_row(v, logits + start, at);
        float d[LANES] = {};
        if (counts) gradient_of(d, v, at, g, softcap);
        store_row(dlogits, start, at, d);
    }
}
