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
//   x may be columns of a wider array.
//
//   The trick: a thread walks along a tile of tokens and keeps the last WIDTH inputs of its
//   channels in a ring of registers, so that each is read once, some tokens before it is needed; so
//   it does with du in backward, for which it walks WIDTH - 1 tokens beyond its tile.  Sums for dw
//   are kept in registers too; those of tiles are added in a fixed order by another kernel.
#include <common/math.cuh>
#include <common/vector.cuh>
#include <common/texts.cuh>

constexpr int BEFORE = WIDTH - 1;  // inputs before a token that it needs
// Tokens of a round: after a multiple of WIDTH, an input has the register of the one that it
// replaces in the window, so that moving on costs nothing.  Inputs are fetched AHEAD tokens before
// they are needed: a divisor of a round, with few enough registers.
constexpr int ROUND = WIDTH < 3 ? 4 : WIDTH;
constexpr int AHEAD = WIDTH < 5 ? ROUND : WIDTH % 2 == 0 ? 2 : 1;
constexpr int AHEAD_BACKWARD = sizeof(T) == 4 && AHEAD % 2 == 0 ? AHEAD / 2 : AHEAD;
using Values = float[LANES];

// The sigmoid for a result in T: 4 instructions for 16 bits, and 11 for float32.
DEVICE float sigmoid_in_t(float u) {
    return sizeof(T) == 2 ? __fdividef(1.0f, 1 + exp_below(-u)) : sigmoid(u);
}

struct Sizes {
    long long tokens, each, tiles;  // of all texts; of a text, unless PACKED
    int texts, channels, blocks, tile;  // blocks along the channels; tokens of a tile
    int pitch;                          // values from a token of x to the next
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
        stop = max(start, text_start(offsets, text + 1, s.each, s.tokens));
    }
    // The text of a token, which has this token whatever the offsets are, so that a walk ends.
    DEVICE void find(long long token) {
        go_to(last_text(s.texts, [&](int each) {
            return text_start(offsets, each, s.each, s.tokens) <= token;
        }));
        start = min(start, token);
        stop = max(stop, token + 1);
    }
    // The inputs at a token of this text, or before it.
    DEVICE void read(Values &to, long long token) const {
        if (token >= start) return load(to, x + token * s.pitch + channel);
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

// The values of the next COUNT tokens, or of those that are left.
template <int COUNT>
DEVICE void fetch_some(Vector<T, LANES> (&to)[COUNT], const T *from, int left, int pitch) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (i < left) fetch(to[i], from + i * pitch);
}

// The place in a window of the input that is multiplied by tap i, for the n-th token of a walk.
DEVICE constexpr int place(int n, int i) { return (n + 1 + i) % WIDTH; }

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
    DEVICE float sum(const Values (&window)[WIDTH], int n, int j) const {
        float u = window[place(n, BEFORE)][j] * w[BEFORE][j];
#pragma unroll
        for (int i = BEFORE - 1; i >= 0; i--) u = fmaf(window[place(n, i)][j], w[i][j], u);
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
    while (token < end) {  // each text of the tile
        Values window[WIDTH];
        part.find(token);
        part.open(window, token);
        const T *from = x + token * s.pitch + channel;
        T *to = y + token * s.channels + channel;
        int left = (int)(min(part.stop, end) - token);
        token += left;
        Vector<T, LANES> next[AHEAD];
        fetch_some(next, from, left, s.pitch);
        for (; left > 0; left -= ROUND) {
#pragma unroll
            for (int i = 0; i < ROUND; i++) {
                if (i >= left) break;
                widen(window[place(i, BEFORE)], next[i % AHEAD]);
                if (i + AHEAD < left) fetch(next[i % AHEAD], from + (i + AHEAD) * s.pitch);
                Values sums;
#pragma unroll
                for (int j = 0; j < LANES; j++) {
                    const float u = taps.sum(window, i, j);
                    sums[j] = SILU ? u * sigmoid_in_t(u) : u;
                }
                store(to + i * s.channels, sums);
            }
            from += ROUND * s.pitch;
            to += ROUND * s.channels;
        }
    }
}

// Turns dy of the n-th token of a walk, whose inputs are in the window, into du.
DEVICE void slopes(Values &dy, const Values (&window)[WIDTH], int n, const Taps &taps) {
#pragma unroll
    for (int j = 0; SILU && j < LANES; j++) {
        const float u = taps.sum(window, n, j), s = sigmoid_in_t(u);
        dy[j] *= s + u * s * (1 - s);
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
        for (int n = 0; n < BEFORE; n++) {
            if (n >= length) break;
            Values du;
            load(du, dy + (part.start + n) * s.channels + channel);
            part.read(window[place(n, BEFORE)], part.start + n);
            slopes(du, window, n, taps);
#pragma unroll
            for (int i = n; i < BEFORE; i++)
#pragma unroll
                for (int j = 0; j < LANES; j++)
                    sums[i][j] = fmaf(taps.w[i - n][j], du[j], sums[i][j]);
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
        const long long at = token * s.channels + channel;
        const T *from = x + token * s.pitch + channel, *dy_from = dy + at;
        T *to = dx + at - BEFORE * s.channels;
        // Tokens whose dw is of this tile, and dx; those that it walks along; those of the text.
        const int own = (int)(min(part.stop, end) - token), steps = own + BEFORE;
        const int inside = (int)min(part.stop - token, (long long)steps);
        token += own;
        Values later[WIDTH];  // du of the last tokens
        Vector<T, LANES> next[AHEAD_BACKWARD], next_dy[AHEAD_BACKWARD];
        fetch_some(next, from, inside, s.pitch);
        fetch_some(next_dy, dy_from, inside, s.channels);
        for (int round = 0; round < steps; round += ROUND) {
#pragma unroll
            for (int i = 0; i < ROUND; i++) {
                const int n = round + i, ahead = i + AHEAD_BACKWARD;
                if (n >= steps) break;
                Values &du = later[place(i, BEFORE)];
                if (n < inside) {
                    widen(window[place(i, BEFORE)], next[i % AHEAD_BACKWARD]);
                    widen(du, next_dy[i % AHEAD_BACKWARD]);
                    if (round + ahead < inside) {
                        fetch(next[i % AHEAD_BACKWARD], from + ahead * s.pitch);
                        fetch(next_dy[i % AHEAD_BACKWARD], dy_from + ahead * s.channels);
                    }
                    slopes(du, window, i, taps);
                } else {
#pragma unroll
                    for (int j = 0; j < LANES; j++) du[j] = 0;
                }
                if (n < own) {
#pragma unroll
                    for (int j = 0; j < LANES; j++) {
#pragma unroll
                        for (int tap = 0; tap < WIDTH; tap++)
                            dw[tap][j] = fmaf(du[j], window[place(i, tap)][j], dw[tap][j]);
                        db[j] += du[j];
                    }
                }
                if (n < BEFORE) continue;
                Values sums;
#pragma unroll
                for (int j = 0; j < LANES; j++) {
                    sums[j] = later[place(i, 0)][j] * taps.w[BEFORE][j];
#pragma unroll
                    for (int tap = BEFORE - 1; tap >= 0; tap--)
                        sums[j] = fmaf(later[place(i, BEFORE - tap)][j], taps.w[tap][j], sums[j]);
                    if (dfinal && n >= inside) sums[j] += (float)dfinal[part.kept(j) + n - inside];
                }
                store(to + i * s.channels, sums);
            }
            from += ROUND * s.pitch;
            dy_from += ROUND * s.channels;
            to += ROUND * s.channels;
        }
    }
#pragma unroll
    for (int j = 0; j < LANES; j++) {
        const long long row = part.number * s.channels + channel + j;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) tap_sums[row * WIDTH + i] = dw[i][j];
        if constexpr (BIAS) bias_sums[row] = db[j];
    }
}
