// Online softmax, tile by tile: each row keeps its largest score so far, and the sum of
// exp(score - largest), which is rescaled when that grows (Milakov and Gimelshein, 2018).
//
// Scores are a product in the layout of tile.cuh: four neighbouring lanes share the upper row (half
// 0) and the lower row (half 1) of each part.  Exponents have base 2: exp(x) is exp2(unit * x).
//
// In float32 the largest score is subtracted before the product with `unit`: its exp is exactly 1,
// a row that sees one key gets exactly its values, and no product rounds lse.  In 16 bits a row
// gets them after rounding, and one fma computes an exponent.
#pragma once

constexpr bool EXACT = sizeof(T) == sizeof(float);
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define NO_SCORE __int_as_float(0xff800000)  // -inf

// Sum and maximum over the four lanes of a row.
DEVICE float quad_sum(float v) {
    v += __shfl_xor_sync(0xffffffffu, v, 1);
    return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
DEVICE float quad_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// The largest score of a row, or `top` if that is larger.
template <int N>
DEVICE float row_max(float top, const float (&s)[N][4], int half) {
#pragma unroll
    for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
    return quad_max(top);
}

// A score as it is subtracted from others, and exp of such a difference.
DEVICE float level_of(float score, float unit) {
    return EXACT ? score : __fmul_rn(score, unit);
}
DEVICE float exp_between(float difference, float unit) {
    return exp2f(EXACT ? difference * unit : difference);
}

// The level that is subtracted from scores; it is 0 for a row that has seen no key, so that the row
// gives exp2(-inf - 0) = 0, not NaN.
DEVICE float shift_of(float top, float unit) {
    return top == NO_SCORE ? 0.0f : level_of(top, unit);
}

// exp of a score less the largest, with the shift of that.
DEVICE float exp_of(float score, float unit, float shift) {
    return exp2f(EXACT ? (score - shift) * unit : fmaf(score, unit, -shift));
}

// The factor of earlier sums and values when the largest score of a row has grown.
DEVICE float rescale_of(float before, float unit, float shift) {
    return exp_between(level_of(before, unit) - shift, unit);
}

// Turn the scores of a row into exp(score - top); return the sum over this lane's columns.
template <int N>
DEVICE float exponentiate(float (&s)[N][4], int half, float unit, float shift) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float &x = s[n][half * 2 + e];
            x = exp_of(x, unit, shift);
            sum += x;
        }
    return sum;
}

template <int N>
DEVICE void scale_row(float (&o)[N][4], int half, float by) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) o[n][half * 2 + e] *= by;
}

// Add exp(sink) to the sum of a row; return the factor of its values.  Here and below, `top` is the
// level of the largest score.
DEVICE float add_sink(float &top, float unit, float &sum, float sink) {
    sink *= EXACT ? LOG2E / unit : LOG2E;
    const float both = fmaxf(top, sink);
    if (both == NO_SCORE) return 1;
    const float ratio = exp_between(top - both, unit);
    sum = sum * ratio + exp_between(sink - both, unit);
    top = both;
    return ratio;
}

DEVICE float log_sum_exp(float top, float unit, float sum) {  // -inf where sum is 0
    static_assert(LOG2E * LN2 == 1, "in float32 `top` is multiplied by the scale, or by 1");
    return fmaf(top, EXACT ? unit * LN2 : LN2, log2f(sum) * LN2);
}
