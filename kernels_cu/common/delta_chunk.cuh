// Chunks of the gated delta rule: where they are, and their decays.
//
//   constants   D, E         dtypes of decay and of beta
//               DIM          columns of q and k
//               CHANNELS     each column of q and k has a decay of its own
//               PACKED, I    see common/texts.cuh
//
// Matrices of chunks that pass from kernel to kernel have a slot for each chunk.  Chunk c of text i,
// which begins at token s, has slot s / CHUNK + i + c: no two have the same, and no kernel needs a
// list of chunks.  Some slots stay empty.
#pragma once
#include <common/device.cuh>
#include <common/texts.cuh>

constexpr int CHUNK = 64;
constexpr int DEPTH = DIM <= 16 ? 16 : DIM <= 32 ? 32 : DIM <= 64 ? 64 : 128;  // DIM and zeros

struct Sizes {
    long long tokens, each;  // of all texts; of a text, unless PACKED
    int texts, heads, groups, values, tiles;  // groups: value heads of a head; tiles of COLUMNS
    float scale;
};

// The tokens first .. first + count - 1 of a text; its first chunk has slot `slot`.
struct Text {
    long long start, stop, slot;

    DEVICE Text(const I *offsets, int text, const Sizes &s)
        : start(text_start(offsets, text, s.each, s.tokens)),
          stop(text_start(offsets, text + 1, s.each, s.tokens)), slot(start / CHUNK + text) {}

    DEVICE int chunks() const {
        return stop > start ? (int)((stop - start + CHUNK - 1) / CHUNK) : 0;
    }
    DEVICE long long first(long long chunk) const { return start + chunk * CHUNK; }
    DEVICE int count(long long chunk) const {  // of tokens; 0 or less where there is no such chunk
        return (int)max(-1ll, min((long long)CHUNK, stop - first(chunk)));
    }
};

DEVICE Text text_of_slot(const I *offsets, long long slot, const Sizes &s) {
    return Text(offsets, last_text(s.texts, [&](int text) {
        return text_start(offsets, text, s.each, s.tokens) / CHUNK + text <= slot;
    }), s);
}

// ---- decays -------------------------------------------------------------------------------------
// A sum and what rounding took from it: differences of sums of large decays keep their digits.
struct Exact { float high, low; };

DEVICE Exact plus(const Exact &a, const Exact &b) {
    const float sum = a.high + b.high, more = sum - a.high;
    return {sum, a.low + b.low + ((a.high - (sum - more)) + (b.high - more))};
}
// exp(a - b), of which only pairs that do not grow are asked for: no overflow in masked corners
DEVICE float ratio(const Exact &a, const Exact &b) {
    return expf((a.high - b.high) + (a.low - b.low));
}

// Of each token of a chunk: g, the sum of decays; exp(g); exp(g of the last - g); beta.
struct Factors {
    Exact g[CHUNK];
    float into[CHUNK], onward[CHUNK], beta[CHUNK], whole;

    DEVICE float fade(int row, int column) const {
        return row >= column ? ratio(g[row], g[column]) : 0.0f;
    }
};

// Factors but beta, by a warp, of whose lanes each has the decays of two tokens.
DEVICE void add_up(Factors &to, Exact (&own)[2], int lane) {
    Exact sum = plus(own[0], own[1]);
#pragma unroll
    for (int away = 1; away < 32; away *= 2) {
        const Exact before = {__shfl_up_sync(0xffffffffu, sum.high, away),
                              __shfl_up_sync(0xffffffffu, sum.low, away)};
        if (lane >= away) sum = plus(before, sum);
    }
    const Exact last = {__shfl_sync(0xffffffffu, sum.high, 31),
                        __shfl_sync(0xffffffffu, sum.low, 31)};
    Exact before = {__shfl_up_sync(0xffffffffu, sum.high, 1),
                    __shfl_up_sync(0xffffffffu, sum.low, 1)};
    if (lane == 0) before = {0.0f, 0.0f};
    own[0] = plus(before, own[0]), own[1] = sum;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane * 2 + i;
        to.g[row] = own[i];
        to.into[row] = expf(own[i].high + own[i].low);
        to.onward[row] = ratio(last, own[i]);
    }
    if (lane == 0) to.whole = expf(last.high + last.low);
}

// By the first warp; barriers are around it.  With CHANNELS only beta: the others are 1.
DEVICE void set(Factors &to, const D *decay, const E *beta, long long first, int count, int head,
                const Sizes &s) {
    if (threadIdx.x >= 32) return;
    const int lane = threadIdx.x, heads = s.heads * s.groups;
    Exact own[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = lane * 2 + i;
        const long long at = (first + row) * heads + head;
        own[i] = {!CHANNELS && row < count ? fmaxf((float)decay[at], -800.0f) : 0.0f, 0.0f};
        to.beta[row] = row < count ? (float)beta[at] : 0.0f;
    }
    add_up(to, own, lane);
}

// With CHANNELS: exp(g of the last) of a column of q and k, from exp(g) of all tokens of a chunk.
DEVICE float whole_of(const float *into, int column) {
    return column < DIM ? into[(CHUNK - 1) * DIM + column] : 0.0f;
}
