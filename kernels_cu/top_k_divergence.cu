// How far a student's softmax s is from a teacher of whom a few tokens of a row were kept, and the
// gradient.
//
//   z = inner * (x + bias), or outer * tanh(inner * (x + bias))
//   s = softmax(z), t = exp(log_t)                  share = sum(t) of the tokens that were kept
//   rest = sum(s) of all others                     left = max(1 - share, 0), 0 without TAIL
//
//   loss = sum(t (log_t - log(s))) of the kept + left * log(left / rest)
//   dloss / dz = (share + left) s - t of a kept one, (share + left) s - left s / rest of another
//
//   traffic     forward   rows * COLUMNS * sizeof(T)
//               backward  rows * COLUMNS * (2 sizeof(T) + sizeof(G))
//   constants   T, G, I, L, B    dtypes of the logits (float), of their gradient, of the tokens, of
//                                their log-probabilities, of the bias
//               COLUMNS, LANES, RAGGED, SOFTCAP    see common/logits.cuh
//               ROW_THREADS      threads of a row: a power of two up to 32, or the block
//               THREADS          threads of a block
//               BIAS, TAIL       whether there is a bias; whether all others are one token
//
//   The trick: z of a kept token moves to a workspace, and a mark takes the place of its logit. So
//   the row is read without asking of each column whether it was kept, and sums of all others are
//   exact, not a difference. The logits are lost: they are a chunk that nobody else reads.
//   A token that is not a column, or that stands twice in its row, gives NaN and a report; so does,
//   without a report, a share above MOST.
#include <common/faults.cuh>
#include <common/math.cuh>
#include <common/logits.cuh>
#include <common/reduce.cuh>

constexpr int ROWS = THREADS / ROW_THREADS;
constexpr int STEP = ROW_THREADS * LANES;  // columns between two vectors of a thread
constexpr int WARPS = THREADS / 32;
constexpr int BLOCKS = 1024 / THREADS;  // that an SM must hold: 64 registers a thread
constexpr float MOST = 1.03125f;  // share: bfloat16 rounds log_t by 2^-9 of it, see the definition
constexpr int MARK = 0x7fe;  // the first 12 bits of a NaN that no arithmetic returns

static_assert(sizeof(T) == sizeof(float), "a mark is a float");

struct Options { float inner, outer; };

// A row: its logits, its tokens, and the workspace with z of each.
struct Row {
    T *logits;
    const I *tokens;
    const L *log_probs;
    float *kept;
    long long number;
    int few, lane;  // tokens; number of this thread among those of the row
};

// The mark of the i-th token, which differs from those of its row's others.
DEVICE float mark(int i) { return __int_as_float(MARK << 20 | (i & 0xfffff)); }
DEVICE bool marked(float x) { return __float_as_int(x) >> 20 == MARK; }

// All threads of a row have read and written.
DEVICE void row_sync() {
    if constexpr (ROW_THREADS > 32) __syncthreads();
    else __syncwarp();
}

// z of the tokens that were not kept; -inf in place of others.
DEVICE void fetch_others(float (&z)[LANES], const T *logits, const B *bias, int column,
                         const Options &o) {
    Values v;
    fetch_row(v, logits, column);
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        z[j] = z_of<SOFTCAP, BIAS>(v.at[j], bias, column + j, o.inner, o.outer);
        if (marked(v.at[j]) || !inside(column + j)) z[j] = __int_as_float(0xff800000);
    }
}

// softmax(z) = exp(z - top) / sum; of all others it is exp(z - rest_top) / rest times their part.
// `cross` is the sum of t (log_t - log(s)) of the tokens that were kept.
struct Sums { float top, sum, rest_top, rest, share, left, cross; };

// The sums of a row, in all of its threads; NaN where a token is wrong, which goes to `faults`.
DEVICE Sums sums_of(bool any, const Row &row, const B *bias, const Options &o, long long *faults,
                    long long who) {
    __shared__ Exchange<2 * WARPS> tops, others;
    __shared__ Exchange<3 * WARPS> exchange;
    const int few = any ? row.few : 0;
    float top = LOWEST, sum = 0, rest_top = LOWEST, rest = 0;
    for (int i = row.lane; i < few; i += ROW_THREADS) {
        const long long token = row.tokens[i];
        if (token < 0 || token >= COLUMNS) continue;
        const float z[1] = {z_of<SOFTCAP, BIAS>(row.logits[token], bias, (int)token, o.inner,
                                                o.outer)};
        row.kept[i] = z[0];
        row.logits[token] = mark(i);
        absorb(top, sum, z);
    }
    row_exp_sum<ROW_THREADS>(top, sum, tops);
    row_sync();  // all marks stand

    float sums[3] = {};  // share, cross, whether a token is wrong
    long long strange = 0;
    for (int i = row.lane; i < few; i += ROW_THREADS) {
        const long long token = row.tokens[i];
        const bool fits = token >= 0 && token < COLUMNS;
        if (!fits || __float_as_int(row.logits[token]) != __float_as_int(mark(i))) {
            sums[2] = 1;
            strange = token;
            continue;
        }
        const float log_t = (float)row.log_probs[i], t = expf(log_t);
        sums[0] += t;
        sums[1] += t == 0 ? 0 : t * (log_t - (row.kept[i] - top));
    }
    if (faults != nullptr && sums[2] > 0) report(faults, who, row.number, strange, COLUMNS);
    if (any)
        for (int column = row.lane * LANES - lead(row.number * COLUMNS); column < COLUMNS;
             column += STEP) {
            float z[LANES];
            fetch_others(z, row.logits, bias, column, o);
            absorb(rest_top, rest, z);
        }
    row_exp_sum<ROW_THREADS>(rest_top, rest, others);
    row_sums<ROW_THREADS>(sums, exchange);
    if constexpr (ROW_THREADS <= 32) row_sync();  // all marks are read; else it has waited

    Sums s = {fmaxf(top, rest_top), 0, rest_top, rest, sums[0], 0, sums[1]};
    if (sums[2] > 0 || s.share > MOST) s.share = __int_as_float(0x7fffffff);
    s.sum = sum * exp_below(top - s.top) + rest * exp_below(rest_top - s.top);
    if constexpr (TAIL)
        if (rest != 0 && !(s.share >= 1)) s.left = 1 - s.share;  // NaN stays NaN
    s.cross += s.share * ((s.top - top) + logf(s.sum));
    return s;
}

KERNEL(THREADS, BLOCKS)
top_k_divergence_forward(T *logits, const I *__restrict__ tokens, const L *__restrict__ log_probs,
                         const B *__restrict__ bias, const bool *__restrict__ mask, float *kept,
                         float *__restrict__ loss, long long *__restrict__ faults, long long who,
                         long long rows, int few, const __grid_constant__ Options o) {
    const long long number = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const Row row = {logits + number * COLUMNS, tokens + number * few, log_probs + number * few,
                     kept + number * few, number, few, (int)threadIdx.x % ROW_THREADS};
    const bool counts = number < rows && (mask == nullptr || mask[number]);
    const Sums s = sums_of(counts, row, bias, o, faults, who);
    if (number >= rows || row.lane != 0) return;
    float sum = s.cross;
    if (s.left != 0)
        sum += s.left * ((logf(s.left) - logf(s.rest)) + ((s.top - s.rest_top) + logf(s.sum)));
    loss[number] = counts ? sum : 0;
}

KERNEL(THREADS, BLOCKS)
top_k_divergence_backward(T *logits, const I *__restrict__ tokens, const L *__restrict__ log_probs,
                          const B *__restrict__ bias, const bool *__restrict__ mask, float *kept,
                          const float *__restrict__ dloss, G *dlogits, long long rows, int few,
                          const __grid_constant__ Options o) {
    const long long number = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const Row row = {logits + number * COLUMNS, tokens + number * few, log_probs + number * few,
                     kept + number * few, number, few, (int)threadIdx.x % ROW_THREADS};
    const bool any = number < rows, counts = any && (mask == nullptr || mask[number]);
    const Sums s = sums_of(counts, row, bias, o, nullptr, 0);
    const float by = counts ? dloss[number] : 0, inverse = 1 / s.sum, all = s.share + s.left;
    // exp(z - rest_top) of another token, times this, is its gradient.
    float factor = all * (exp_below(s.rest_top - s.top) * inverse);
    if (s.left != 0) factor -= s.left / s.rest;
    if (any)
        for (int column = row.lane * LANES - lead(number * COLUMNS); column < COLUMNS;
             column += STEP) {
            float d[LANES] = {};
            if (counts) {
                fetch_others(d, row.logits, bias, column, o);
#pragma unroll
                for (int j = 0; j < LANES; j++) {
                    const float e = exp_below(d[j] - s.rest_top);
                    d[j] = e == 0 ? 0 : e * factor * by * slope_of(d[j], o.inner, o.outer);
                }
            }
            store_row(dlogits, number * COLUMNS, column, d);
        }
    row_sync();  // a kept token's gradient comes last
    for (int i = row.lane; counts && i < few; i += ROW_THREADS) {
        const long long token = row.tokens[i];
        if (token < 0 || token >= COLUMNS) continue;
        const float z = row.kept[i], p = exp_below(z - s.top) * inverse;
        const float d = all * p - expf((float)row.log_probs[i]);
        dlogits[number * COLUMNS + token] = (G)(d * by * slope_of(z, o.inner, o.outer));
    }
}
