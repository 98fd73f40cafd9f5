// Scores of attention: which pairs of a query and a key are visible, and how the options turn a
// product of q and k into a score.
//
//   constants   B, A             dtypes of bias and alibi
//               L, P             dtypes of key_lengths and starts
//               LEFT, RIGHT      a limit on how far before and after its own position a query sees
//               BLOCK_MASK       tiles of 128 x 128 are skipped
//               LENGTHS, STARTS  each batch has its own number of keys, position of its first query
//               MASK, BIAS, ALIBI, SOFTCAP, DROPOUT
//               FOLD             no option acts between the product and exp2, so exp2 also applies
//                                the scale
//               VARLEN           sequences are concatenated: queries and keys count the tokens of
//                                all; mask, bias and block_mask have the rows and columns of a
//                                padded batch
#pragma once
#include <common/philox.cuh>
#include <common/softmax.cuh>
#include <common/tile.cuh>

constexpr int BLOCK_MASK_TILE = 128;

// Distances between neighbours along each axis, in elements; 0 where an array is broadcast.
struct Strides {
    long long batch, head, query;
    int key;
};

// The options of a call.  A number that all variants read never has another such number as its
// neighbour: the compiler loads two neighbours at once and keeps both in registers, but reads a
// single one from parameter memory where it is used.
struct Options {
    int heads, starts_batch, kv_heads, alibi_batch;
    int queries, padded_queries, keys, padded_keys;  // with VARLEN, pairs beyond padded_queries and
                                                     // padded_keys have no mask and no bias
    float factor;   // scale; with FOLD scale * log2(e), with SOFTCAP scale / cap
    int sequences;  // with VARLEN
    float cap;
    bool has_start;  // without STARTS: the position of the first query is `start`
    long long start;
    long long left, right;  // keys seen before and after a query's own position
    Strides mask_strides, bias_strides, block_mask_strides;
    unsigned seed_low, seed_high, drop_threshold;  // a random word below it drops a probability
    float keep_scale;  // scale of the other probabilities: 1 / (1 - dropout)
};

// The operands beside q, k and v, in the order of the kernels' parameters.
struct Operands {
    const L *key_lengths;  // with LENGTHS; with VARLEN, the offsets of the keys of each sequence
    const P *starts;       // with STARTS, positions of the first query; with VARLEN, the offsets of
                           // the queries of each sequence
    const bool *mask;
    const B *bias;
    const A *alibi;
    const bool *block_mask;
};

DEVICE int clipped(long long offset) {  // no query or key is that far away
    return (int)max(-(1ll << 29), min(1ll << 29, offset));
}

// Rows from .. stop - 1.
struct Range { int from, stop; };

// The scores of one batch.  A warp's part of a product begins at (row, column): queries by keys or,
// with BY_KEYS, keys by queries.  A lane holds float[M][N][4] of it, in the layout of tile.cuh.
struct Scores : Options, Operands {
    int batch, length;      // keys that exist
    int low, high, origin;  // query r has position r + origin and sees keys r + low .. r + high
    float unit;             // exp(score) = exp2(unit * result of `score`)

    // `queries` and `keys` are those of this batch; with VARLEN options count those of all.
    DEVICE Scores(const Options &options, const Operands &operands, int queries, int keys,
                  int batch)
        : Options(options), Operands(operands), batch(batch), length(keys),
          unit(FOLD ? options.factor : LOG2E) {
        this->queries = queries, this->keys = keys;
        if constexpr (LENGTHS)
            length = (int)max(0ll, min((long long)keys, (long long)key_lengths[batch]));
        long long first = length - queries;
        if constexpr (STARTS) first = starts[batch * starts_batch];
        else if (has_start) first = start;
        low = clipped(first - left), high = clipped(first + right), origin = clipped(first);
        if constexpr (MASK) mask += batch * mask_strides.batch;
        if constexpr (BIAS) bias += batch * bias_strides.batch;
        if constexpr (BLOCK_MASK) block_mask += batch * block_mask_strides.batch;
    }

    // The range of keys that at least one of the ROWS queries from `first` on may see; with BY_KEYS
    // the range of queries that may see at least one of the ROWS keys from `first` on.
    template <bool BY_KEYS, int ROWS> DEVICE Range seen(int first) const {
        const int last = min(first + ROWS, BY_KEYS ? length : queries) - 1;
        Range range{0, BY_KEYS ? queries : length};
        if constexpr (BY_KEYS ? RIGHT : LEFT)
            range.from = max(0, BY_KEYS ? first - high : first + low);
        if constexpr (BY_KEYS ? LEFT : RIGHT)
            range.stop = min(range.stop, (BY_KEYS ? last - low : last + high) + 1);
        return range;
    }
    // Whether the queries top .. bottom see none of the keys first .. last; whether at least one
    // pair of them is hidden.
    DEVICE bool all_hidden(int top, int bottom, int first, int last) const {
        return first >= length || (LEFT && last < top + low) || (RIGHT && first > bottom + high);
    }
    DEVICE bool any_hidden(int top, int bottom, int first, int last) const {
        return last >= length || (LEFT && first < bottom + low) || (RIGHT && last > top + high);
    }
    // block_mask skips the tile of this query and this key.
    DEVICE bool skipped(int head, int query, int key) const {
        if constexpr (!BLOCK_MASK) return false;
        if (VARLEN && (query >= padded_queries || key >= padded_keys)) return false;
        const int wide = VARLEN ? padded_keys : keys;
        const int columns = (wide + BLOCK_MASK_TILE - 1) / BLOCK_MASK_TILE;
        return !block_mask[head * block_mask_strides.head +
                           (long long)(query / BLOCK_MASK_TILE) * columns + key / BLOCK_MASK_TILE];
    }

    // Turn products into scores, in place; `edge`: some pair may be hidden.  With SOFTCAP, steep
    // becomes the derivative of the capped score with respect to the score.  FROM_LANE: bounds are
    // relative to a lane's first column and are compared with constants, because registers that
    // hold column numbers would spill.
    template <bool BY_KEYS, bool FROM_LANE = false, int M, int N>
    DEVICE void score(float (&s)[M][N][4], float (&steep)[M][N][4], int head, int row, int column,
                      bool edge) const {
        const int lane = threadIdx.x % 32;
        const bool *const seen = MASK ? mask + head * mask_strides.head : nullptr;
        const B *const added = BIAS ? bias + head * bias_strides.head : nullptr;
        float slope = 0;
        if constexpr (ALIBI) slope = (float)alibi[batch * alibi_batch + head];
        const int real_queries = VARLEN ? min(queries, padded_queries) : queries;
        const int real_keys = VARLEN ? min(keys, padded_keys) : keys;
        row += lane / 4, column += lane % 4 * 2;
        auto hide = [&](int m, int half) {  // a row sees its columns first .. last
            constexpr bool BEFORE = BY_KEYS ? RIGHT : LEFT;
            const int own_row = row + m * 16 + half * 8;
            int first = -(1 << 30), last = 1 << 30;
            if constexpr (BY_KEYS) {
                if constexpr (RIGHT) first = own_row - high;
                if constexpr (LEFT) last = own_row - low;
                if (own_row >= length) last = -1;
            } else {
                if constexpr (LEFT) first = own_row + low;
                last = length - 1;
                if constexpr (RIGHT) last = min(last, own_row + high);
            }
            if constexpr (FROM_LANE) first -= column, last -= column;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int other = (FROM_LANE ? 0 : column) + n * 8 + e;
                    if (other > last || (BEFORE && other < first)) s[m][n][half * 2 + e] = NO_SCORE;
                }
        };
        if constexpr (FOLD && !MASK) {  // no other work: one branch for all rows
            if (edge) each_row<M>(hide);
        } else {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int own_row = row + m * 16 + half * 8;
#pragma unroll
                    for (int n = 0; n < N; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float &x = s[m][n][half * 2 + e];
                            const int other = column + n * 8 + e;
                            const int query = BY_KEYS ? other : own_row,
                                      key = BY_KEYS ? own_row : other;
                            const bool real = query < real_queries && key < real_keys;
                            if constexpr (!FOLD) x *= factor;
                            if constexpr (SOFTCAP) {
                                const float ratio = tanhf(x);
                                steep[m][n][half * 2 + e] = 1 - ratio * ratio;
                                x = cap * ratio;
                            }
                            if constexpr (BIAS)
                                if (real)
                                    x += (float)added[query * bias_strides.query +
                                                      (long long)key * bias_strides.key];
                            if constexpr (ALIBI) x -= slope * (float)abs(key - query - origin);
                            if constexpr (MASK)
                                if (real && !seen[query * mask_strides.query +
                                                  (long long)key * mask_strides.key])
                                    x = NO_SCORE;
                        }
                    if (edge) hide(m, half);
                }
        }
    }

    // The random words of the four pairs of one [m][n], which begins at (row, column).
    // One call of philox gives the words of four keys of a query, and several lanes hold these
    // keys: each lane draws for a part of the pairs, and the lanes exchange words by shuffles.
    template <bool BY_KEYS>
    DEVICE void draw(unsigned (&words)[4], int head, int row, int column) const {
        const int lane = threadIdx.x % 32;
        row += lane / 4, column += lane % 4 * 2;
        if constexpr (BY_KEYS) {  // four lanes hold four keys: each draws for a query and four keys
            const int mine = lane / 4 % 4;
            const uint4 w =
                philox(batch, head, column + mine % 2, row / 4 + mine / 2 * 2, seed_low, seed_high);
            unsigned received[4];
#pragma unroll
            for (int away = 0; away < 4; away++) {
                const int to = mine ^ away;
                const unsigned word = to & 2 ? (to & 1 ? w.w : w.z) : (to & 1 ? w.y : w.x);
                received[away] = __shfl_xor_sync(0xffffffffu, word, 4 * away);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int away = mine ^ i;
                words[i] = away & 2 ? (away & 1 ? received[3] : received[2])
                                    : (away & 1 ? received[1] : received[0]);
            }
        } else {  // two lanes hold four keys: one draws for the upper row, the other for the lower
            const int odd = lane % 2;
            share_out(words, philox(batch, head, row + odd * 8, column / 4, seed_low, seed_high));
        }
    }
    // The odd lane of a pair drew for the lower row of both lanes, the even one for the upper row.
    static DEVICE void share_out(unsigned (&words)[4], uint4 w) {
        const int odd = threadIdx.x % 2;
        const unsigned x = __shfl_xor_sync(0xffffffffu, odd ? w.x : w.z, 1);
        const unsigned y = __shfl_xor_sync(0xffffffffu, odd ? w.y : w.w, 1);
        words[0] = odd ? x : w.x, words[1] = odd ? y : w.y;
        words[2] = odd ? w.z : x, words[3] = odd ? w.w : y;
    }
};
