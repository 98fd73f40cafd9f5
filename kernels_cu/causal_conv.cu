// Causal convolution of each channel along the tokens of a text, forward and backward.
//
//   u[t] = bias + sum over i of w[i] x[t - WIDTH + 1 + i]      y = SILU ? silu(u) : u
//   du[t] = dy[t] * y'(u[t])      dx[t] = sum over i of w[i] du[t + WIDTH - 1 - i]
//   dw[i] = sum over t of du[t] x[t - WIDTH + 1 + i]           dbias = sum of du
//
//   Inputs before a text are those of `initial` or 0; `final` has the last WIDTH - 1 of each text.
//
//   traffic     forward   tokens * channels * sizeof(T) * 2
//               backward  tokens * channels * sizeof(T) * 3, and 4 bytes for each tap, bias and
//                         tile of tokens
//   constants   T, W, B   dtypes of x, weight and bias
//               WIDTH     number of taps
//               LANES     channels of a thread
//               THREADS   threads of a block
//               BIAS, INITIAL, SILU
//               PACKED, I    see common/texts.cuh
//
//   The trick: a thread walks along a tile of tokens and keeps the last WIDTH inputs of its
//   channels in registers, so that each is read once; so it does with du in backward, for which it
//   walks WIDTH - 1 tokens beyond its tile.  Sums for dw are kept in registers too; those of tiles
//   are added in a fixed order by another kernel.
#include <common/math.cuh>
#include <common/vector.cuh>
#include <common/texts.cuh>

constexpr int BEFORE = WIDTH - 1;  // inputs before a token that it needs
using Values = float[LANES];

struct Sizes {
    long long tokens, each, tiles;  // of all texts; of a text, unless PACKED
    int texts, channels, blocks, tile;  // blocks along the channels; tokens of a tile
};

// What a thread reads: its channels, and its place in the grid.
struct Part {
    const T *x, *initial;
    const I *offsets;
    const Sizes &s;
    long long number;  // of the tile; from s.tiles on, that of a text
    int channel;
    int text = 0;
    long long start = 0, stop = 0;  // tokens of the text

    DEVICE Part(const T *x, const T *initial, const I *offsets, const Sizes &s)
        : x(x), initial(initial), offsets(offsets), s(s), number(blockIdx.x / s.blocks),
          channel((blockIdx.x % s.blocks * THREADS + threadIdx.x) * LANES) {}

    DEVICE void go_to(int next) {
        text = next;
        start = text_start(offsets, text, s.each, s.tokens);
        stop = text_start(offsets, text + 1, s.each, s.tokens);
    }
    DEVICE void find(long long token) {
        go_to(last_text(s.texts, [&](int each) {
            return text_start(offsets, each, s.each, s.tokens) <= token;
        }));
    }
    // The inputs at a token of this text, or before it.
    DEVICE void read(Values &to, long long token) const {
        if (token >= start) return load(to, x + token * s.channels + channel);
#pragma unroll
        for (int j = 0; j < LANES; j++)
            to[j] = INITIAL ? (float)initial[kept(j) + BEFORE - (int)(start - token)] : 0.0f;
    }
    DEVICE long long kept(int j) const {  // where the state of a channel begins
        return ((long long)text * s.channels + channel + j) * BEFORE;
    }
    // The inputs before a token, in window[1 ..].
    DEVICE void open(Values (&window)[WIDTH], long long token) const {
#pragma unroll
        for (int i = 0; i < BEFORE; i++) read(window[i + 1], token - BEFORE + i);
    }
};

DEVICE void move_on(Values (&window)[WIDTH]) {
#pragma unroll
    for (int i = 0; i < BEFORE; i++)
#pragma unroll
        for (int j = 0; j < LANES; j++) window[i][j] = window[i + 1][j];
}

// The taps of a thread's channels, and their sums with the inputs in a window.
struct Taps {
    float w[WIDTH][LANES], b[LANES];

    DEVICE Taps(const W *weight, const B *bias, int channel) {
#pragma unroll
        for (int j = 0; j < LANES; j++) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) w[i][j] = (float)weight[(channel + j) * WIDTH + i];
            b[j] = BIAS ? (float)bias[channel + j] : 0.0f;
        }
    }
    DEVICE float sum(const Values (&window)[WIDTH], int j) const {
        float u = window[BEFORE][j] * w[BEFORE][j];
#pragma unroll
        for (int i = BEFORE - 1; i >= 0; i--) u = fmaf(window[i][j], w[i][j], u);
        return BIAS ? u + b[j] : u;
    }
};

KERNEL(THREADS, 4)
causal_conv(const T *__restrict__ x, const W *__restrict__ weight, const B *__restrict__ bias,
            const T *__restrict__ initial, const I *__restrict__ offsets, T *__restrict__ y,
            T *__restrict__ final, const __grid_constant__ Sizes s) {
    Part part(x, initial, offsets, s);
    const int channel = part.channel;
    if (channel >= s.channels) return;
    if (part.number >= s.tiles) {
        part.go_to((int)(part.number - s.tiles));
#pragma unroll
        for (int i = 0; i < BEFORE; i++) {
            Values last;
            part.read(last, part.stop - BEFORE + i);
#pragma unroll
            for (int j = 0; j < LANES; j++) final[part.kept(j) + i] = (T)last[j];
        }
        return;
    }
    const Taps taps(weight, bias, channel);
    long long token = part.number * s.tile;
    const long long end = min(token + s.tile, s.tokens);
    Values window[WIDTH];
    Vector<T, LANES> next;
    part.find(token);
    part.open(window, token);
    fetch(next, x + token * s.channels + channel);
#pragma unroll WIDTH
    for (; token < end; token++) {
        if (token >= part.stop) {
            part.find(token);
            part.open(window, token);
        }
        move_on(window);
        widen(window[BEFORE], next);
        if (token + 1 < end) fetch(next, x + (token + 1) * s.channels + channel);
        Values sums;
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            const float u = taps.sum(window, j);
            sums[j] = SILU ? u * sigmoid(u) : u;
        }
        store(y + token * s.channels + channel, sums);
    }
}

// du of a token, whose inputs are in the window.
DEVICE void slopes(Values &du, const Values (&window)[WIDTH], const Taps &taps, const T *dy) {
    load(du, dy);
#pragma unroll
    for (int j = 0; SILU && j < LANES; j++) {
        const float u = taps.sum(window, j), s = sigmoid(u);
        du[j] *= s + u * s * (1 - s);
    }
}

KERNEL(THREADS, 4)
causal_conv_backward(const T *__restrict__ dy, const T *__restrict__ dfinal,
                     const T *__restrict__ x, const W *__restrict__ weight,
                     const B *__restrict__ bias, const T *__restrict__ initial,
                     const I *__restrict__ offsets, T *__restrict__ dx, T *__restrict__ dinitial,
                     float *__restrict__ tap_sums, float *__restrict__ bias_sums,
                     const __grid_constant__ Sizes s) {
    Part part(x, initial, offsets, s);
    const int channel = part.channel;
    if (channel >= s.channels) return;
    const Taps taps(weight, bias, channel);
    Values window[WIDTH];
    if (part.number >= s.tiles) {  // dinitial of a text: of its first tokens, and of a short one
        if constexpr (!INITIAL) return;
        part.go_to((int)(part.number - s.tiles));
        part.open(window, part.start);
        const long long length = part.stop - part.start;
        float sums[BEFORE > 0 ? BEFORE : 1][LANES] = {};
#pragma unroll
        for (int place = 0; place < BEFORE; place++) {
            if (place >= length) continue;
            const long long token = part.start + place;
            Values du;
            move_on(window);
            part.read(window[BEFORE], token);
            slopes(du, window, taps, dy + token * s.channels + channel);
#pragma unroll
            for (int i = place; i < BEFORE; i++)
#pragma unroll
                for (int j = 0; j < LANES; j++)
                    sums[i][j] = fmaf(taps.w[i - place][j], du[j], sums[i][j]);
        }
#pragma unroll
        for (int i = 0; i < BEFORE; i++)
#pragma unroll
            for (int j = 0; j < LANES; j++) {
                if (dfinal && i >= length) sums[i][j] += (float)dfinal[part.kept(j) + i - length];
                dinitial[part.kept(j) + i] = (T)sums[i][j];
            }
        return;
    }
    float dw[WIDTH][LANES] = {}, db[LANES] = {};
    long long token = part.number * s.tile;
    const long long end = min(token + s.tile, s.tokens);
    while (token < end) {  // each text of the tile
        part.find(token);
        part.open(window, token);
        const long long first = token, own = min(part.stop, end);
        Values later[WIDTH] = {};  // du of the tokens up to this one
#pragma unroll WIDTH
        for (; token < own + BEFORE; token++) {
            move_on(later);
#pragma unroll
            for (int j = 0; j < LANES; j++) later[BEFORE][j] = 0;
            if (token < part.stop) {
                move_on(window);
                part.read(window[BEFORE], token);
                slopes(later[BEFORE], window, taps, dy + token * s.channels + channel);
            }
            if (token < own) {
#pragma unroll
                for (int j = 0; j < LANES; j++) {
#pragma unroll
                    for (int i = 0; i < WIDTH; i++)
                        dw[i][j] = fmaf(later[BEFORE][j], window[i][j], dw[i][j]);
                    db[j] += later[BEFORE][j];
                }
            }
            const long long at = token - BEFORE;
            if (at < first) continue;
            Values sums;
            const int left = (int)min(part.stop - at, (long long)WIDTH);
#pragma unroll
            for (int j = 0; j < LANES; j++) {
                sums[j] = later[0][j] * taps.w[BEFORE][j];
#pragma unroll
                for (int i = BEFORE - 1; i >= 0; i--)
                    sums[j] = fmaf(later[BEFORE - i][j], taps.w[i][j], sums[j]);
                if (dfinal && left <= BEFORE)
                    sums[j] += (float)dfinal[part.kept(j) + BEFORE - left];
            }
            store(dx + at * s.channels + channel, sums);
        }
        token = own;
    }
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const long long row = part.number * s.channels + channel + j;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) tap_sums[row * WIDTH + i] = dw[i][j];
        if constexpr (BIAS) bias_sums[row] = db[j];
    }
}
