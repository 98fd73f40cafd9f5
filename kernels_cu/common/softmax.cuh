// Online softmax, tile by tile: each row keeps its largest score so far, and the sum of
// exp(score - largest), which is rescaled when that grows (Milakov and Gimelshein, 2018).
//
// Scores are a product in the layout of tile.cuh: four neighbouring lanes share the upper row (half
// 0) and the lower row (half 1) of each part.  Exponents have base 2: exp(x) is exp2(unit * x).
//
// In float32 the largest score is subtracted before the product with `unit`: its exp is exactly 1,
// and a row that sees one key gets exactly its values.  In 16 bits that is so after rounding, and
// one fma computes an exponent.
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

// The number subtracted from exponents; it is 0 for a row that has seen no key, so that the row
// gives exp2(-inf - 0) = 0, not NaN.
DEVICE float shift_of(float top, float unit) {
    return top == NO_SCORE ? 0.0f : EXACT ? top : __fmul_rn(top, unit);
}

// exp of a score less the largest, with the shift of that.
DEVICE float exp_of(float score, float unit, float shift) {
    return exp2f(EXACT ? (score - shift) * unit : fmaf(score, unit, -shift));
}

// The factor of earlier sums and values when the largest score of a row has grown.
DEVICE float rescale_of(float before, float unit, float shift) {
    return exp2f(EXACT ? (before - shift) * unit : __fmul_rn(before, unit) - shift);
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

// Add exp(sink) to the sum of a row; return the factor of its values.  Here and below, `top` and
// `sink` have been multiplied by log2(e).
DEVICE float add_sink(float &top, float &sum, float sink) {
    const float both = fmaxf(top, sink);
    if (both == NO_SCORE) return 1;
    const float ratio = exp2f(top - both);
    sum = sum * ratio + exp2f(sink - both);
    top = both;
    return ratio;
}

DEVICE float log_sum_exp(float top, float sum) {  // -inf where sum is 0
    return fmaf(top, LN2, log2f(sum) * LN2);
}
