// The experts of each row of logits and their weights, and the gradient of the logits.
//
//   scores        SOFTMAX        p = exp(l - lse)        SIGMOID    1 / (1 + exp(-l))
//                 SOFTMAX_OF_K   l + bias                SQRT_SOFTPLUS    sqrt(log(1 + exp(l)))
//   choice        the TOP largest of scores + bias, of equal ones those with the lowest index, in
//                 the GROUPS_KEPT groups whose two largest have the largest sum; SOFTMAX: whose
//                 largest is the largest; a NaN is the last
//   weights       NaN in a row with a NaN; scale * s of the chosen, NORMALIZE: divided by their sum; SOFTMAX_OF_K: scale *
//                 softmax of their l + bias, which is SOFTMAX with NORMALIZE if there is no bias
//
//   du = scale * dw, NORMALIZE: scale / sum(s) * (dw - sum(dw * s) / sum(s));     dl = du * s'
//   SOFTMAX       dl[e] = p[e] * (du[e] if chosen - sum(du * p)); NORMALIZE, SOFTMAX_OF_K: only of
//                 the chosen, p of them alone
//
//   unrounded, if passed, is the same gradient in float32, whose column sums are that of bias
//
//   traffic     forward    rows * (EXPERTS * sizeof(T) + TOP * (4 + sizeof(T)))
//               backward   rows * (2 * EXPERTS * sizeof(T) + TOP * (4 + sizeof(T)))
//   constants   T, B       dtypes of logits and weights, of bias
//               EXPERTS, TOP, SCORES, NORMALIZE, BIAS
//               GROUPS, GROUPS_KEPT    1 and 1 without groups
//               ROW_THREADS    threads of a row: a power of two up to 32
//               THREADS    threads of a block
//
//   The trick: a lane holds the scores of a few experts in registers.  A score and its expert are
//   one 64-bit number, whose largest is the choice with ties as defined; TOP rounds of shuffles
//   find the TOP largest.  Without bias and groups all scores have the order of the logits, which
//   are compared instead, as no rounding makes two of them equal.
#include <common/device.cuh>
#include <common/math.cuh>
#include <common/reduce.cuh>

enum { SOFTMAX, SOFTMAX_OF_K, SIGMOID, SQRT_SOFTPLUS };  // SCORES
constexpr int ROWS = THREADS / ROW_THREADS, HELD = (EXPERTS + ROW_THREADS - 1) / ROW_THREADS;
constexpr bool LOCAL = SCORES == SOFTMAX_OF_K || (SCORES == SOFTMAX && NORMALIZE);
constexpr bool SHIFTED = SCORES == SOFTMAX_OF_K && BIAS;  // bias is a part of the weights
constexpr bool RAW = SCORES == SOFTMAX_OF_K || (!BIAS && GROUPS == 1);  // logits are compared
constexpr bool WHOLE = SCORES == SOFTMAX && !(RAW && LOCAL);  // needs the softmax of the row
constexpr float LEAST = 1e-20f;  // added to the sum of weights, as DeepSeek's router does
constexpr float TINY = 1.2e-38f;  // in place of a sum that is 0, of logits of -inf

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

// Lanes beyond the rows of the last block read its last row, and write nothing.
struct Row {
    long long number;
    int lane;
    bool real;
};
DEVICE Row row_of_thread(long long rows) {
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    return {row < rows ? row : rows - 1, (int)threadIdx.x % ROW_THREADS, row < rows};
}


DEVICE float score_of(float x) {
    if constexpr (SCORES == SIGMOID) return sigmoid(x);
    else if constexpr (SCORES == SQRT_SOFTPLUS) return sqrtf(softplus(x));
    else return x;
}

// The derivative of a score that is not a softmax.
DEVICE float slope_of(float x, float score) {
    if constexpr (SCORES == SIGMOID) return score * (1 - score);
    else return score == 0 ? 0 : __fdividef(sigmoid(x), 2 * score);
}

// The largest logit of the row, and the sum of exp(logit - largest).
DEVICE void measure(const float (&x)[HELD], int lane, float &top, float &sum) {
    top = LOWEST;
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (i * ROW_THREADS + lane < EXPERTS) top = fmaxf(top, x[i]);
    top = group_max<ROW_THREADS>(top);
    sum = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++)
        if (i * ROW_THREADS + lane < EXPERTS) sum += exp_below(x[i] - top);
    sum = group_sum<ROW_THREADS>(sum);
    sum = sum < TINY ? TINY : sum;  // NaN stays NaN
}

// A number that is larger the larger the score is, and for equal ones the lower the expert; that of
// NaN, which stands for an expert of no kept group, is the smallest.
DEVICE unsigned long long key_of(float score, int expert) {
    if (score == 0) score = 0;  // -0 is no less
    const unsigned bits = (unsigned)__float_as_int(score);
    unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    if (score != score) ordered = 0;
    return (unsigned long long)ordered << 32 | (unsigned)(EXPERTS - expert);
}

DEVICE void read(float (&x)[HELD], const T *logits, int lane) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int expert = i * ROW_THREADS + lane;
        x[i] = expert < EXPERTS ? (float)logits[expert] : minus_infinity();
    }
}

KERNEL(THREADS, 4)
route_forward(const T *__restrict__ logits, const B *__restrict__ bias, int *__restrict__ experts,
              T *__restrict__ weights, long long rows, float scale) {
    __shared__ float shared[GROUPS > 1 ? ROWS : 1][GROUPS > 1 ? EXPERTS + GROUPS : 1];
    const Row row = row_of_thread(rows);
    const int lane = row.lane;
    float x[HELD], choice[HELD], top = 0, sum = 1, broken = 0;
    read(x, logits + row.number * EXPERTS, lane);
    if constexpr (WHOLE) measure(x, lane, top, sum);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int expert = i * ROW_THREADS + lane;
        choice[i] = x[i];
        if constexpr (!RAW) choice[i] = WHOLE ? exp_below(x[i] - top) / sum : score_of(x[i]);
        if constexpr (BIAS)
            if (expert < EXPERTS) choice[i] += (float)bias[expert];
        if (choice[i] != choice[i]) {
            broken = expert < EXPERTS ? 1 : broken;
            choice[i] = minus_infinity();
        }
    }
    broken = group_max<ROW_THREADS>(broken);
    if constexpr (GROUPS > 1) {
        constexpr int SIZE = EXPERTS / GROUPS;
        float *const own = shared[threadIdx.x / ROW_THREADS], *const sums = own + EXPERTS;
#pragma unroll
        for (int i = 0; i < HELD; i++)
            if (i * ROW_THREADS + lane < EXPERTS) own[i * ROW_THREADS + lane] = choice[i];
        __syncwarp();
        for (int group = lane; group < GROUPS; group += ROW_THREADS) {
            float first = minus_infinity(), second = minus_infinity();
            for (int i = 0; i < SIZE; i++) {
                const float value = own[group * SIZE + i];
                second = fmaxf(second, fminf(first, value));
                first = fmaxf(first, value);
            }
            sums[group] = SIZE > 1 && SCORES != SOFTMAX ? first + second : first;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int group = min((i * ROW_THREADS + lane) / SIZE, GROUPS - 1);
            int better = 0;  // groups
            for (int other = 0; other < GROUPS; other++)
                better += key_of(sums[other], 0) > key_of(sums[group], 0) ||
                          (key_of(sums[other], 0) == key_of(sums[group], 0) && other < group);
            if (better >= GROUPS_KEPT) choice[i] = __int_as_float(0x7fffffff);
        }
    }

    float chosen[TOP], total = 0;  // logits, with the bias where it is a part of the weights
    int number[TOP];
    unsigned long long last = ~0ull;
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        unsigned long long best = 0;
        float value = 0;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            const int expert = i * ROW_THREADS + lane;
            const unsigned long long key = key_of(choice[i], expert);
            if (expert < EXPERTS && key < last && key > best) {
                best = key;
                value = SHIFTED ? choice[i] : x[i];
            }
        }
#pragma unroll
        for (int d = ROW_THREADS / 2; d > 0; d /= 2) {
            const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, d);
            best = other > best ? other : best;
        }
        last = best;
        number[k] = EXPERTS - (int)(unsigned)best;
        chosen[k] = __shfl_sync(0xffffffffu, value, number[k] % ROW_THREADS, ROW_THREADS);
    }
    if constexpr (LOCAL) {
        float most = LOWEST;
#pragma unroll
        for (int k = 0; k < TOP; k++) most = fmaxf(most, chosen[k]);
#pragma unroll
        for (int k = 0; k < TOP; k++) total += chosen[k] = exp_below(chosen[k] - most);
        total = total == 0 ? TINY : total;
    } else {
#pragma unroll
        for (int k = 0; k < TOP; k++) {
            chosen[k] = WHOLE ? exp_below(chosen[k] - top) / sum : score_of(chosen[k]);
            total += chosen[k];
        }
        total = NORMALIZE ? total + LEAST : 1;
    }
    if (broken > 0) total = __int_as_float(0x7fffffff);
    if (!row.real) return;
#pragma unroll
    for (int k = 0; k < TOP; k++)
        if (k % ROW_THREADS == lane) {
            experts[row.number * TOP + k] = number[k];
            weights[row.number * TOP + k] = (T)(scale * chosen[k] / total);
        }
}

KERNEL(THREADS)
route_backward(const T *__restrict__ dweights, const T *__restrict__ logits,
               const B *__restrict__ bias, const int *__restrict__ experts,
               T *__restrict__ dlogits, float *__restrict__ unrounded, long long rows,
               float scale) {
    const Row row = row_of_thread(rows);
    const int lane = row.lane;
    logits += row.number * EXPERTS;
    float x[HELD], top = 0, sum = 1;
    if constexpr (SCORES == SOFTMAX && !LOCAL) {
        read(x, logits, lane);
        measure(x, lane, top, sum);
    }
    int number[TOP];
    float d[TOP], score[TOP], slope[TOP], total = 0, product = 0, most = LOWEST;
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        number[k] = experts[row.number * TOP + k];
        d[k] = scale * (float)dweights[row.number * TOP + k];
        score[k] = (float)logits[number[k]];
        if constexpr (SHIFTED) score[k] += (float)bias[number[k]];
        slope[k] = score[k];
        most = fmaxf(most, score[k]);
    }
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        if constexpr (LOCAL) score[k] = exp_below(score[k] - most);
        else if constexpr (SCORES == SOFTMAX) score[k] = exp_below(score[k] - top) / sum;
        else score[k] = score_of(score[k]);
        total += score[k];
    }
    if constexpr (!LOCAL) total += LEAST;
    else total = total == 0 ? TINY : total;
#pragma unroll
    for (int k = 0; k < TOP; k++) {
        if constexpr (LOCAL) score[k] /= total;
        product += d[k] * score[k];
    }
#pragma unroll
    for (int k = 0; k < TOP; k++) {  // d becomes the gradient of the chosen logit
        if constexpr (LOCAL) d[k] = score[k] * (d[k] - product);
        else if constexpr (SCORES == SOFTMAX) d[k] = score[k] * (d[k] - product);
        else if constexpr (NORMALIZE)
            d[k] = slope_of(slope[k], score[k]) * (d[k] - product / total) / total;
        else d[k] *= slope_of(slope[k], score[k]);
    }
    if (!row.real) return;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        const int expert = i * ROW_THREADS + lane;
        if (expert >= EXPERTS) continue;
        float value = 0;
        if constexpr (SCORES == SOFTMAX && !LOCAL)
            value = -product * (exp_below(x[i] - top) / sum);
#pragma unroll
        for (int k = 0; k < TOP; k++)
            if (number[k] == expert) value = d[k];
        dlogits[row.number * EXPERTS + expert] = (T)value;
        if (unrounded != nullptr) unrounded[row.number * EXPERTS + expert] = value;
    }
}
