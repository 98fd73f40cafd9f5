// How far a student's distribution is from a teacher's, row by row, and the gradient.
//
//   z = inner * (x + bias), or outer * tanh(inner * (x + bias))
//   s = softmax(z), and t that of the teacher        m = (1 - beta) s + beta t
//
//   KIND  loss                                              dloss / dz
//   0     sum(t log(t / s))                                 s - t
//   1     sum(s log(s / t))                                 s * (f - sum(s f)), f = log(s / t)
//   2     beta sum(t log(t / m))                            (1 - beta) s * (f - sum(s f)),
//         + (1 - beta) sum(s log(s / m))                    f = log(s / m)
//   3     sum(abs(s - t)) / 2                               s * (f - sum(s f)) / 2, f = sign(s - t)
//   4     1 - a b, a = z / max(|z|, 1e-8), b that of the    (a b * a - b) / |z|, or
//         teacher                                           -b / 1e-8 if |z| is less
//
//   a token that a distribution excludes adds nothing to the sum over that distribution
//
//   traffic     a pass reads rows * COLUMNS * (sizeof(T) + sizeof(U)); the gradient is written once
//               forward 1 pass (KIND 0, 1, 4) or 2, backward 2 or 3 (KIND 2, 3)
//   constants   T, U, B, C      dtypes of the logits, of the teacher's, and of both biases
//               G               that of the gradient
//               COLUMNS, LANES, RAGGED, SOFTCAP    see common/logits.cuh
//               TEACHER_SOFTCAP, BIAS, TEACHER_BIAS   whether there is one
//               ROW_THREADS     threads of a row: a power of two up to 32, or the block
//               THREADS         threads of a block
//               KIND
//
//   The trick: KIND 0 and 1 are the mean of a - b + log(sum(exp(b)) / sum(exp(a))) over the softmax
//   of a, where a and b are logits less their maxima.  A thread sums exp(a) (a - b) beside both
//   softmaxes, and rescales it as their maxima grow: one pass.  Other functions of both
//   distributions need both sums first, so the row is read again, and nothing between the passes
//   goes to memory.  The gradient may overwrite the logits: each thread writes what no other reads.
#include <common/math.cuh>
#include <common/logits.cuh>
#include <common/reduce.cuh>

constexpr int ROWS = THREADS / ROW_THREADS;
constexpr int STEP = ROW_THREADS * LANES;  // columns between two vectors of a thread
constexpr int WARPS = THREADS / 32;
// Blocks that an SM must hold: long rows need threads in flight, short ones registers.  A cosine has
// the units of both rows, too, for which 40 registers are too few.
constexpr int BLOCKS =
    ROW_THREADS <= 32 ? 1 : THREADS < 96 ? 16 : (KIND == 4 ? 1024 : 1536) / THREADS;
constexpr bool FORWARD = KIND == 0, REVERSE = KIND == 1, BETWEEN = KIND == 2, TVD = KIND == 3;
constexpr bool COSINE = KIND == 4;
constexpr float LEAST = 1e-8f;     // length of a row by which it is divided, as torch divides
constexpr float UNIT = 0x1p-27f;   // the power of two below that
constexpr float MOST = 0x1p126f;   // its reciprocal is the smallest that is not flushed to 0

struct Options {
    float inner, outer, teacher_inner, teacher_outer;
    float beta, rest;  // rest = 1 - beta
};

// A row of both sides, and the columns of a thread.
struct Sides {
    const T *logits;
    const U *teacher;
    const B *bias;
    const C *teacher_bias;
    long long start;  // of the row
    int first;        // column
};

template <bool CAP, bool ADD, class E, class A>
DEVICE void fetch_z(float (&z)[LANES], const E *row, const A *bias, int column, float inner,
                    float outer) {
    Vector<E, LANES> v;
    fetch_row(v, row, column);
    widen(z, v);
#pragma unroll
    for (int j = 0; j < LANES; j++) z[j] = z_of<CAP, ADD>(z[j], bias, column + j, inner, outer);
    if (!cut(column)) return;
#pragma unroll
    for (int j = 0; j < LANES; j++)
        if (!inside(column + j)) z[j] = COSINE ? 0.0f : __int_as_float(0xff800000);  // -inf
}

// Call `use(column, z, z of the teacher)` for each access of a thread to its row.
template <class Use>
DEVICE void over_row(const Sides &of, const Options &o, Use use) {
    for (int column = of.first - lead(of.start); column < COLUMNS; column += STEP) {
        float z[LANES], teacher[LANES];
        fetch_z<SOFTCAP, BIAS>(z, of.logits + of.start, of.bias, column, o.inner, o.outer);
        fetch_z<TEACHER_SOFTCAP, TEACHER_BIAS>(teacher, of.teacher + of.start, of.teacher_bias,
                                               column, o.teacher_inner, o.teacher_outer);
        use(column, z, teacher);
    }
}

// softmax(z) = exp(z - top) * reciprocal
struct Softmax { float top, reciprocal; };

// Both softmaxes of a row; with them log(s / t) = (z - s.top) - (z of the teacher - t.top) + shift.
// With KIND 0 and 1, `loss` is that of the row.
struct Pair { Softmax s, t; float shift, loss; };

// Values whose softmax is needed: the largest so far, and the sum of exp(value - top).
struct Sum { float top = LOWEST, sum = 0; };

// The sum of exp(a) (a - b) for other maxima: a and b are values of `over` and `under` less their
// maxima, which were `old` and `before`.  A weight of 0 is no product with an infinite difference.
DEVICE float moved(float dot, const Sum &old, const Sum &before, float top, float under_top) {
    const float by = exp_below(old.top - top);
    return by > 0 ? by * (dot + old.sum * ((old.top - top) - (before.top - under_top))) : 0.0f;
}

// The softmaxes of a row and, with LOSS, the loss of KIND 0 or 1, in all of its threads.
template <bool LOSS>
DEVICE Pair softmaxes(bool any, const Sides &of, const Options &o) {
    __shared__ Exchange<2 * WARPS> exchange, other;
    __shared__ Exchange<LOSS ? WARPS : 1> dots;
    Sum over, under;  // of the distribution that weights the logarithms, and of the other one
    float dot = 0;
    if (any)
        over_row(of, o, [&](int, const float (&z)[LANES], const float (&teacher)[LANES]) {
            const float (&a)[LANES] = REVERSE ? z : teacher, (&b)[LANES] = REVERSE ? teacher : z;
            const Sum old = over, before = under;
            absorb(over.top, over.sum, a);
            absorb(under.top, under.sum, b);
            if constexpr (LOSS) {
                dot = moved(dot, old, before, over.top, under.top);
#pragma unroll
                for (int j = 0; j < LANES; j++) {
                    const float weight = exp_below(a[j] - over.top);
                    if (weight > 0) dot += weight * ((a[j] - over.top) - (b[j] - under.top));
                }
            }
        });
    const Sum old = over, before = under;
    row_exp_sum<ROW_THREADS>(over.top, over.sum, exchange);
    row_exp_sum<ROW_THREADS>(under.top, under.sum, other);
    float loss = 0;
    if constexpr (LOSS) {
        dot = row_sum<ROW_THREADS>(moved(dot, old, before, over.top, under.top), dots);
        loss = dot / over.sum + logf(under.sum / over.sum);
    }
    const Sum &s = REVERSE ? over : under, &t = REVERSE ? under : over;
    return {{s.top, 1 / s.sum}, {t.top, 1 / t.sum}, logf(t.sum / s.sum), loss};
}

// One token: its probabilities, and log(s / t), which is NaN or infinite if one of them is 0.
struct Token { float s, t, log_ratio; };

DEVICE Token token_of(float z, float teacher, const Pair &pair) {
    const float a = z - pair.s.top, b = teacher - pair.t.top;
    return {exp_below(a) * pair.s.reciprocal, exp_below(b) * pair.t.reciprocal,
            (a - b) + pair.shift};
}

// log(p / ((1 - beta) s + beta t)), 0 where p is.
DEVICE float log_of_mean(float p, const Token &of, const Options &o) {
    const float m = o.rest * of.s + o.beta * of.t;
    return p > 0 && m != 0 ? logf(__fdividef(p, m)) : 0.0f;
}

// What a token adds to the loss of its row, with KIND 2 and 3.
DEVICE float loss_of(const Token &of, const Options &o) {
    if constexpr (BETWEEN) {
        return o.beta * of.t * log_of_mean(of.t, of, o) + o.rest * of.s * log_of_mean(of.s, of, o);
    } else {
        return 0.5f * fabsf(of.s - of.t);
    }
}

// f of the table above.
DEVICE float factor_of(const Token &of, const Options &o) {
    if constexpr (REVERSE) {
        return of.s > 0 ? of.log_ratio : 0.0f;
    } else if constexpr (BETWEEN) {
        return log_of_mean(of.s, of, o);
    } else {
        const float apart = of.s - of.t;
        return apart > 0 ? 1.0f : apart < 0 ? -1.0f : apart;
    }
}

// The length of a row as a multiple of `unit`, a power of two near its largest value, so that no
// square overflows.
struct Scaled {
    float unit, length;

    DEVICE bool is_short() const { return length * unit < LEAST; }
    DEVICE float divisor() const { return is_short() ? LEAST / unit : length; }
};

// Both rows of an access in growing units, and the sums of z^2, of the teacher's and of products.
struct Squares {
    float units[2] = {UNIT, UNIT}, sums[3] = {};

    // Go over to larger units.
    DEVICE void grow(float unit, float other) {
        const float a = units[0] / unit, b = units[1] / other;
        sums[0] *= a * a;
        sums[1] *= b * b;
        sums[2] *= a * b;
        units[0] = unit;
        units[1] = other;
    }
};

// The power of two below the largest of some values, between `unit` and MOST.
DEVICE float unit_of(const float (&v)[LANES], float unit) {
#pragma unroll
    for (int j = 0; j < LANES; j++) unit = fmaxf(unit, fabsf(v[j]));
    return fminf(__int_as_float(__float_as_int(unit) & 0x7f800000), MOST);
}

// Both rows, and the cosine.
struct Angle { Scaled z, teacher; float cosine; };

DEVICE Angle angle_of(bool any, const Sides &of, const Options &o) {
    __shared__ Exchange<WARPS> greatest, other_greatest;
    __shared__ Exchange<3 * WARPS> exchange;
    Squares s;
    if (any)
        over_row(of, o, [&](int, const float (&z)[LANES], const float (&teacher)[LANES]) {
            const float unit = unit_of(z, s.units[0]), other = unit_of(teacher, s.units[1]);
            if (unit > s.units[0] || other > s.units[1]) s.grow(unit, other);
            const float a = 1 / unit, b = 1 / other;
#pragma unroll
            for (int j = 0; j < LANES; j++) {
                const float x = z[j] * a, y = teacher[j] * b;
                s.sums[0] += x * x;
                s.sums[1] += y * y;
                s.sums[2] += x * y;
            }
        });
    s.grow(row_greatest<ROW_THREADS>(s.units[0], greatest),
           row_greatest<ROW_THREADS>(s.units[1], other_greatest));
    row_sums<ROW_THREADS>(s.sums, exchange);
    const Scaled z = {s.units[0], sqrtf(s.sums[0])}, teacher = {s.units[1], sqrtf(s.sums[1])};
    const float cosine = s.sums[2] / z.divisor() / teacher.divisor();
    return {z, teacher, cosine > 1 ? 1 : cosine < -1 ? -1 : cosine};
}

KERNEL(THREADS, BLOCKS)
divergence_forward(const T *__restrict__ logits, const U *__restrict__ teacher,
                   const B *__restrict__ bias, const C *__restrict__ teacher_bias,
                   float *__restrict__ loss, long long rows, const __grid_constant__ Options o) {
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const int first = threadIdx.x % ROW_THREADS * LANES;
    const Sides of = {logits, teacher, bias, teacher_bias, row * COLUMNS, first};
    float sum = 0;
    if constexpr (COSINE) {
        sum = 1 - angle_of(row < rows, of, o).cosine;
    } else if constexpr (FORWARD || REVERSE) {
        sum = softmaxes<true>(row < rows, of, o).loss;
    } else {
        __shared__ Exchange<WARPS> exchange;
        const Pair pair = softmaxes<false>(row < rows, of, o);
        if (row < rows)
            over_row(of, o, [&](int, const float (&z)[LANES], const float (&teacher)[LANES]) {
#pragma unroll
                for (int j = 0; j < LANES; j++)
                    sum += loss_of(token_of(z[j], teacher[j], pair), o);
            });
        sum = row_sum<ROW_THREADS>(sum, exchange);
    }
    if (row < rows && first == 0) loss[row] = sum;
}

KERNEL(THREADS, BLOCKS)
divergence_backward(const T *logits, const U *__restrict__ teacher, const B *__restrict__ bias,
                    const C *__restrict__ teacher_bias, const float *__restrict__ dloss,
                    G *dlogits, long long rows, const __grid_constant__ Options o) {
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    const int first = threadIdx.x % ROW_THREADS * LANES;
    const Sides of = {logits, teacher, bias, teacher_bias, row * COLUMNS, first};
    if constexpr (COSINE) {
        const Angle angle = angle_of(row < rows, of, o);
        if (row >= rows) return;
        const float unit = 1 / angle.z.unit, other = 1 / angle.teacher.unit, by = dloss[row];
        const float a = 1 / angle.z.divisor(), b = 1 / angle.teacher.divisor();
        const float turn = angle.z.is_short() ? 0 : angle.cosine * a;
        over_row(of, o, [&](int column, float (&z)[LANES], const float (&teacher)[LANES]) {
#pragma unroll
            for (int j = 0; j < LANES; j++) {
                const float d = (turn * (z[j] * unit) - b * (teacher[j] * other)) * a * unit;
                z[j] = d * by * slope_of(z[j], o.inner, o.outer);
            }
            store_row(dlogits, of.start, column, z);
        });
    } else {
        const Pair pair = softmaxes<REVERSE>(row < rows, of, o);
        float mean = pair.loss;  // of f
        if constexpr (BETWEEN || TVD) {
            __shared__ Exchange<WARPS> exchange;
            if (row < rows)
                over_row(of, o, [&](int, const float (&z)[LANES], const float (&teacher)[LANES]) {
#pragma unroll
                    for (int j = 0; j < LANES; j++) {
                        const Token token = token_of(z[j], teacher[j], pair);
                        mean += token.s * factor_of(token, o);
                    }
                });
            mean = row_sum<ROW_THREADS>(mean, exchange);
        }
        if (row >= rows) return;
        const float by = dloss[row] * (BETWEEN ? o.rest : TVD ? 0.5f : 1.0f);
        over_row(of, o, [&](int column, float (&z)[LANES], const float (&teacher)[LANES]) {
#pragma unroll
            for (int j = 0; j < LANES; j++) {
                const Token token = token_of(z[j], teacher[j], pair);
                float d = token.s - token.t;
                if constexpr (!FORWARD) d = token.s * (factor_of(token, o) - mean);
                z[j] = d * by * slope_of(z[j], o.inner, o.outer);
            }
            store_row(dlogits, of.start, column, z);
        });
    }
}
