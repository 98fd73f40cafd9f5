// Log-probability, entropy and relatives of a softmax in one pass over the logits, and the gradient.
//
//   z = softcap * tanh(u / softcap) / temperature, u = scale * (x + bias); without a cap u itself
//   lse = log(sum(exp(z)))       log_prob = z[label] - lse       p = exp(z - lse)
//   entropy = lse - sum(p z)     log_sum_squares = log(sum(p^2))     mean_logit = sum(z) / COLUMNS
//   top1: no column has a larger z than the label, and none before it an equal one
//
//   where label == ignore, every result and the gradient are 0, and the row is not read
//   dx = z' * (dlog_prob * ([column == label] - p) - dentropy * p * (log(p) + entropy) + dlse * p)
//
//   traffic     forward   rows * COLUMNS * sizeof(T)
//               backward  rows * COLUMNS * (sizeof(T) + sizeof(G))
//   constants   T, G, I, B    dtypes of the logits, of their gradient, of the labels, of the bias
//               COLUMNS, LANES, RAGGED, SOFTCAP    see common/logits.cuh
//               ROW_THREADS   threads of a row: a power of two up to 32, or the block
//               THREADS       threads of a block
//               BIAS          whether there is a bias
//
//   The trick: sums of exp(z - top), of its square and of its product with z - top are rescaled when
//   the running maximum grows; entropy is then log(sum) less a mean of terms that are all 0 or
//   less, and loses no digits to a large lse.
#include <common/faults.cuh>
#include <common/math.cuh>
#include <common/logits.cuh>
#include <common/reduce.cuh>

constexpr int ROWS = THREADS / ROW_THREADS;
constexpr int STEP = ROW_THREADS * LANES;  // columns between two vectors of a thread
constexpr int WARPS = THREADS / 32;

struct Options {
    long long ignore;
    float scale, softcap, inverse_temperature;
};

DEVICE float z_of(float x, const B *bias, int column, const Options &o) {
    if constexpr (BIAS) x += inside(column) ? (float)bias[column] : 0.0f;
    return capped(o.scale * x, o.softcap) * o.inverse_temperature;
}

// Of the columns of a thread: `top` is the largest z; with e = exp(z - top), `sum` is that of e,
// `products` of e * (z - top), `squares` of e * e; `total` is the sum of z, `beaten` 1 if a column
// wins against the label.
struct Sums { float top, sum, products, squares, total, beaten; };

DEVICE void rescale(Sums &s, float top) {
    const float delta = s.top - top, factor = exp_below(delta);
    s.products = s.sum == 0 ? 0 : factor * (s.products + delta * s.sum);
    s.squares *= factor * factor;
    s.sum *= factor;
    s.top = top;
}

DEVICE void absorb(Sums &s, const Values &v, const B *bias, int column, int label, float target,
                   const Options &o) {
    float z[LANES], top = s.top;
    widen(z, v);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        z[j] = inside(column + j) ? z_of(z[j], bias, column + j, o) : __int_as_float(0xff800000);
        top = fmaxf(top, z[j]);
    }
    if (top > s.top) rescale(s, top);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float e = exp_below(z[j] - s.top);
        s.sum += e;
        s.products += e == 0 ? 0 : e * (z[j] - s.top);
        s.squares += e * e;
        s.total += inside(column + j) ? z[j] : 0;
        if (z[j] > target || (z[j] == target && column + j < label)) s.beaten = 1;
    }
}

KERNEL(THREADS)
log_probs_forward(const T *__restrict__ logits, const I *__restrict__ labels,
                  const B *__restrict__ bias, float *__restrict__ log_probs,
                  float *__restrict__ entropy, float *__restrict__ log_sum_squares,
                  float *__restrict__ mean_logit, bool *__restrict__ top1, float *__restrict__ lse,
                  float *__restrict__ largest, long long *__restrict__ faults, long long who,
                  long long rows, const __grid_constant__ Options o) {
    __shared__ Exchange<2 * WARPS> tops;
    __shared__ Exchange<4 * WARPS> others;
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const long long start = row * COLUMNS;
    const int first = threadIdx.x % ROW_THREADS * LANES;
    const long long label = row < rows ? labels[row] : o.ignore;
    const bool counts = label != o.ignore, wrong = counts && (label < 0 || label >= COLUMNS);
    float target = 0;
    if (counts && !wrong) target = z_of((float)logits[start + label], bias, (int)label, o);

    Sums s = {LOWEST, 0, 0, 0, 0, 0};
    if (counts)
        for (int column = first - lead(start); column < COLUMNS; column += STEP) {
            Values v;
            fetch_row(v, logits + start, column);
            absorb(s, v, bias, column, (int)label, target, o);
        }
    float top = s.top, sum = s.sum;
    row_exp_sum<ROW_THREADS>(top, sum, tops);
    rescale(s, top);
    float sums[4] = {s.products, s.squares, s.total, s.beaten};
    row_sums<ROW_THREADS>(sums, others);
    if (row >= rows || first != 0) return;

    const float log = sum == 0 ? 0 : logf(sum), inverse = sum == 0 ? 0 : 1 / sum;
    if (sum == 0) top = 0;  // all logits are -inf
    largest[row] = sum == 0 ? counts ? __int_as_float(0xff800000) : 0 : top;
    lse[row] = sum == 0 ? counts ? __int_as_float(0xff800000) : 0 : log + top;
    log_probs[row] = wrong ? __int_as_float(0x7fffffff) : counts ? (target - top) - log : 0;
    entropy[row] = log - sums[0] * inverse;
    log_sum_squares[row] = counts ? logf(sums[1]) - 2 * log : 0;
    mean_logit[row] = divided_by<COLUMNS>(sums[2]);
    top1[row] = counts && !wrong && sums[3] == 0;
    if (wrong) report(faults, who, row, label, COLUMNS);
}

constexpr int TILE = THREADS * LANES;             // columns of a block
constexpr int TILES = (WIDTH + TILE - 1) / TILE;  // tiles of a row

KERNEL(THREADS)
log_probs_backward(const T *logits, const I *__restrict__ labels, const B *__restrict__ bias,
                   const float *__restrict__ dlog_probs, const float *__restrict__ dentropy,
                   const float *__restrict__ dlse, const float *__restrict__ entropy,
                   const float *__restrict__ lse, G *dlogits, const __grid_constant__ Options o) {
    const long long row = blockIdx.x / TILES, start = row * COLUMNS;
    const int column = blockIdx.x % TILES * TILE + threadIdx.x * LANES - lead(start);
    if (column >= COLUMNS) return;
    Values v;
    fetch_row(v, logits + start, column);

    const long long label = labels[row];
    const bool counts = label != o.ignore;
    float on_label = dlog_probs == nullptr ? 0 : dlog_probs[row];
    if (counts && (label < 0 || label >= COLUMNS)) on_label = __int_as_float(0x7fffffff);
    const float of_entropy = dentropy == nullptr ? 0 : dentropy[row];
    const float of_lse = on_label - (dlse == nullptr ? 0 : dlse[row]);
    const float row_lse = lse[row] < LOWEST ? 0 : lse[row], row_entropy = entropy[row];
    float d[LANES];
    widen(d, v);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const float z = z_of(d[j], bias, column + j, o), p = exp_below(z - row_lse);
        float slope = o.scale * o.inverse_temperature;
        if constexpr (SOFTCAP) {
            const float tanh = z / (o.softcap * o.inverse_temperature);
            slope *= 1 - tanh * tanh;
        }
        d[j] = p == 0 ? 0 : -p * (of_lse + of_entropy * (z - row_lse + row_entropy));
        if (column + j == label) d[j] += on_label;
        d[j] = counts ? d[j] * slope : 0;
    }
    store_row(dlogits, start, column, d);
}
