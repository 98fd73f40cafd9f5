// Attention of few queries over many keys, which may be in pages; out and lse as attention_forward.
//
//   chunk c of keys:   top_c = max(score)   sum_c = sum(exp(score - top_c))
//                      o_c = exp(score - top_c) @ v
//   all:               out = sum(exp(top_c - top) * o_c) / sum(exp(top_c - top) * sum_c)
//   keys of a chunk    max(seen / call.most, min(KEYS, seen / call.fewest), 2 * BLOCK_KEYS), where
//                      `seen` keys are seen by a row or more; with call.fewest 0 it is KEYS, or
//                      2 * BLOCK_KEYS, and chunks begin at multiples of it
//
//   traffic     k and v once, if the queries of a group fit into 16 rows; q, out and, for every
//               chunk, rows * (VALUE_DIM + 4) floats
//   constants   those of common/attention.cuh, and
//               T, S             dtypes of q, k, v and out; of sinks
//               C, O             dtype of k and v: signed char for 8-bit codes, else T; dtype of
//                                block_mask: float where it holds scales, else bool
//               G, PAGED, PAGE   dtype of page_table; keys are in pages; tokens of a page
//               DIM, VALUE_DIM   columns of q and k, of v: multiples of 8
//               WARPS, RESIDENT  warps of a block; blocks that an SM must hold
//               TILE_KEYS        keys that a warp works on at a time
//               KEYS             keys of a chunk where neither would leave SMs without a block, nor
//                                give a sequence more than call.most
//
//   codes       k = scale * code, and v likewise, with one scale per token and head.  The ring
//               holds codes, half as many bytes; a warp widens a tile of them before its products.
//               Codes of k are exact in T, and their scales are applied to the scores; values are
//               rounded to T, as they would be in a cache of dtype T.  There is no block_mask then:
//               its parameter holds the scales, of all k and, `values` floats later, of all v.
//
//   The trick: the query heads that share a key head are rows of one product, so a key is read
//   once for all of them.  A block finds the length of a chunk from the keys that it sees, so the
//   result of a sequence does not depend on the rest of the batch, on unused room after its keys,
//   or on pages, and one sequence keeps all SMs busy.  The last block to arrive merges the partial
//   results in their order, many reads at a time.  Each warp has a ring of its own and waits for no
//   other warp.
#include <common/attention.cuh>
#include <common/codes.cuh>
#include <common/parts.cuh>

constexpr int THREADS = 32 * WARPS, ROWS = 16;
constexpr bool KEPT = sizeof(T) == 2 && DIM <= 128;  // queries stay in registers
constexpr int STEPS = padded(DIM) / 16, PARTS = TILE_KEYS / 8, VALUE_PARTS = padded(VALUE_DIM) / 8;
using KeyTile = Tile<T, padded(DIM)>;  // also of queries
using ValueTile = Tile<T, padded(VALUE_DIM)>;
constexpr bool CODES = sizeof(C) == 1;
constexpr int BOTH = TILE_KEYS * (KeyTile::PITCH + ValueTile::PITCH);  // a tile of keys and values
constexpr int STAGE = CODES ? TILE_KEYS * (DIM + VALUE_DIM) / (int)sizeof(T) : BOTH;
constexpr int RING = 2 * STAGE + (CODES ? BOTH : 0);  // of one warp
static_assert(!CODES || (DIM % 16 == 0 && VALUE_DIM % 16 == 0 && !BLOCK_MASK), "16 codes a copy");
constexpr int BLOCK_KEYS = WARPS * TILE_KEYS;  // keys that a block works on at a time
static_assert(BLOCK_MASK_TILE % TILE_KEYS == 0, "a tile lies in one of block_mask");
constexpr bool SCATTERED = PAGED && PAGE % TILE_KEYS != 0;  // a tile may extend over several pages
constexpr unsigned NOWHERE = 0xffffffffu;                   // the token of a page that is missing
using Part = Parts<VALUE_DIM>;

// Start copying a warp's TILE_KEYS rows, of which `count` exist.  A token's row is row token *
// kv_heads of `from`.  Tokens are consecutive from `token` on or, if SCATTERED, `token` of lane i
// is that of row i.
template <int USED, int COLUMNS, class E>
DEVICE void gather(const Tile<T, COLUMNS> &to, const E *from, unsigned token, int count,
                   int kv_heads) {
    constexpr int CHUNKS = Tile<T, COLUMNS>::CHUNKS, WIDTH = Tile<T, COLUMNS>::CHUNK;
    static_assert(TILE_KEYS * CHUNKS % 32 == 0, "all lanes of a warp copy equally often");
    const unsigned pitch = kv_heads * USED;
#pragma unroll(sizeof(T) == 2 ? 8 : 4)  // sums of float32 leave few registers for addresses
    for (int first = 0; first < TILE_KEYS * CHUNKS; first += 32) {
        const int i = first % CHUNKS + threadIdx.x % 32, chunk = i % CHUNKS;
        const int row = first / CHUNKS + i / CHUNKS;
        bool in_range = COLUMNS == USED || chunk * WIDTH < USED;
        const E *real = from + chunk * WIDTH;
        if constexpr (SCATTERED) {
            const unsigned source = __shfl_sync(0xffffffffu, token, row);
            in_range &= source != NOWHERE;
            real += (unsigned long long)source * pitch;
        } else {
            in_range &= row < count;
            real += (unsigned long long)token * pitch + (unsigned long long)row * pitch;
        }
        cp_async_16(to.at(row, chunk), real, in_range);
    }
}

// The same for codes, whose rows are packed in shared memory.
template <int USED, class E>
DEVICE void gather_codes(signed char *to, const E *from, unsigned token, int count, int kv_heads) {
    constexpr int CHUNKS = USED / 16;
    const unsigned pitch = kv_heads * USED;
#pragma unroll 4
    for (int first = 0; first < TILE_KEYS * CHUNKS; first += 32) {
        const int i = first + threadIdx.x % 32, row = min(i / CHUNKS, TILE_KEYS - 1);
        const unsigned source = SCATTERED ? __shfl_sync(0xffffffffu, token, row) : token + row;
        const bool in_range = SCATTERED ? source != NOWHERE : row < count;
        if (TILE_KEYS * CHUNKS % 32 != 0 && i >= TILE_KEYS * CHUNKS) continue;
        cp_async_16(to + i * 16,
                    from + (in_range ? (unsigned long long)source * pitch : 0) + i % CHUNKS * 16,
                    in_range);
    }
}

// Convert the codes of a warp's tile to values; if SCALED, times the scale of their row, which is
// `scale` of lane `row`.
template <int USED, bool SCALED, int COLUMNS>
DEVICE void widen_tile(const Tile<T, COLUMNS> &to, const signed char *from, float scale) {
    constexpr int CHUNKS = Tile<T, COLUMNS>::CHUNKS, WIDTH = Tile<T, COLUMNS>::CHUNK;
#pragma unroll 4
    for (int first = 0; first < TILE_KEYS * CHUNKS; first += 32) {
        const int i = first + threadIdx.x % 32, row = i / CHUNKS, chunk = i % CHUNKS;
        const float factor = SCALED ? __shfl_sync(0xffffffffu, scale, row) : 1.0f;
        Vector<signed char, WIDTH> codes;
        float value[WIDTH] = {};
        if (COLUMNS == USED || chunk * WIDTH < USED) {
            fetch(codes, from + row * USED + chunk * WIDTH);
            widen_codes(value, codes);
        }
#pragma unroll
        for (int j = 0; j < WIDTH; j++) value[j] *= factor;
        store(to.at(row, chunk), value);
    }
}

// The second to last parameter of the kernel, as a block mask or as scales.
DEVICE const bool *tiles_of(const bool *block_mask) { return block_mask; }
DEVICE const bool *tiles_of(const float *) { return nullptr; }
DEVICE const float *scales_of(const float *scales) { return scales; }
DEVICE const float *scales_of(const bool *) { return nullptr; }

struct Call {
    Options options;
    int chunks;              // of the grid, of a sequence: as many as there can be
    int fewest, most;        // of chunks of many keys, and of any
    int row_pages, pages;    // pages in a row of page_table, and of k
    long long batch_tokens;  // if not PAGED: tokens from the first key of a batch to the next one's
    long long values;        // for codes: number of scales of k before the first of v
};

// parts      (sequences, chunks, rows, Part::PITCH), with two chunks or more
// arrived    (sequences), zeros on entry and on exit: the last arrival resets a counter
KERNEL(32 * WARPS, RESIDENT)
attention_decode(const T *__restrict__ q, const C *__restrict__ k, const C *__restrict__ v,
                 const G *__restrict__ page_table, const S *__restrict__ sinks, T *__restrict__ out,
                 float *__restrict__ lse, float *parts, unsigned *arrived,
                 const L *__restrict__ key_lengths, const P *__restrict__ starts,
                 const bool *__restrict__ mask, const B *__restrict__ bias,
                 const A *__restrict__ alibi, const O *__restrict__ block_mask,
                 const __grid_constant__ Call call) {
    DYNAMIC_SHARED(T, memory);
    __shared__ bool last;
    const KeyTile query_tile{memory};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T *const ring = memory + ROWS * KeyTile::PITCH + warp * RING;
    const float *scales = scales_of(block_mask);

    const int heads = call.options.heads, kv_heads = call.options.kv_heads;
    const int queries = call.options.queries, keys = call.options.keys, chunks = call.chunks;
    const int group = heads / kv_heads, row_blocks = (group * queries + ROWS - 1) / ROWS;
    const int first_row = blockIdx.x % row_blocks * ROWS;  // a row is query * group + head
    const int rows = min(ROWS, group * queries - first_row);
    const int chunk_of_all = blockIdx.x / row_blocks, head_of_all = chunk_of_all / chunks;
    const int kv_head = head_of_all % kv_heads, batch = head_of_all / kv_heads;
    const Scores scores(call.options,
                        {key_lengths, starts, mask, bias, alibi, tiles_of(block_mask)}, queries,
                        keys, batch);

    // this block's chunk of those that some row sees; at least one block always goes on
    const int top_query = first_row / group, bottom_query = (first_row + rows - 1) / group;
    const int first_key = LEFT ? max(0, top_query + scores.low) : 0;
    const int stop_key = RIGHT ? min(scores.length, bottom_query + scores.high + 1) : scores.length;
    auto divided = [](int keys, int by) { return (keys + by - 1) / by; };
    const bool fixed = call.fewest == 0;  // chunks begin at keys that do not depend on what is seen
    const int unit = fixed ? max(2, divided(KEYS, BLOCK_KEYS)) * BLOCK_KEYS : BLOCK_KEYS;
    const int from_key = first_key / unit * unit, seen = max(0, stop_key - from_key);
    const int fewest = max(1, call.fewest), most = max(divided(seen, call.most), 1);
    const int wanted = fixed ? KEYS : max(most, min(KEYS, divided(seen, fewest)));
    const int length = divided(max(wanted, 2 * BLOCK_KEYS), BLOCK_KEYS) * BLOCK_KEYS;
    const int several = max(1, divided(seen, length)), chunk = chunk_of_all % chunks;
    if (chunk >= several) return;
    const int begin = from_key + chunk * length, end = min(stop_key, begin + length);

    // query, head and slope of the two rows that a lane works on
    int query[2], head[2];
    float slope[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = min(first_row + lane / 4 + half * 8, group * queries - 1);
        query[half] = row / group;
        head[half] = kv_head * group + row % group;
        slope[half] = ALIBI ? (float)alibi[batch * scores.alibi_batch + head[half]] : 0;
    }

    k += kv_head * DIM;
    v += kv_head * VALUE_DIM;
    if constexpr (!PAGED) {
        k += batch * call.batch_tokens * kv_heads * DIM;
        v += batch * call.batch_tokens * kv_heads * VALUE_DIM;
        if constexpr (CODES) scales += batch * call.batch_tokens * kv_heads;
    }
    if constexpr (CODES) scales += kv_head;
    float key_scales[2] = {}, value_scales[2] = {};  // for codes: of row `lane` of both stages
    // the token that holds this key
    auto find = [&](int key) {
        if constexpr (!PAGED) return (unsigned)key;
        const long long number = page_table[(long long)batch * call.row_pages + key / PAGE];
        return number < 0 || number >= call.pages ? NOWHERE : (unsigned)number * PAGE + key % PAGE;
    };
    auto load = [&](int first, int stage) {
        if (first >= end) return;
        const int key = first + (SCATTERED ? lane : 0);
        const unsigned token = SCATTERED && (lane >= TILE_KEYS || key >= end) ? NOWHERE : find(key);
        const int count = token == NOWHERE ? 0 : end - first;
        if constexpr (CODES) {
            signed char *const to = reinterpret_cast<signed char *>(ring + stage * STAGE);
            gather_codes<DIM>(to, k, token, count, kv_heads);
            gather_codes<VALUE_DIM>(to + TILE_KEYS * DIM, v, token, count, kv_heads);
            const bool in_range = SCATTERED ? token != NOWHERE : lane < min(count, TILE_KEYS);
            const float *const from =
                scales + (unsigned long long)(token + (SCATTERED ? 0 : lane)) * kv_heads;
            const float of_key = in_range ? from[0] : 0,
                        of_value = in_range ? from[call.values] : 0;
#pragma unroll
            for (int i = 0; i < 2; i++) {  // registers cannot be indexed
                key_scales[i] = i == stage ? of_key : key_scales[i];
                value_scales[i] = i == stage ? of_value : value_scales[i];
            }
        } else {
            const KeyTile to{ring + stage * STAGE};
            const ValueTile values{to.start + TILE_KEYS * KeyTile::PITCH};
            gather<DIM>(to, k, token, count, kv_heads);
            gather<VALUE_DIM>(values, v, token, count, kv_heads);
        }
    };

    for (int i = threadIdx.x; i < ROWS * KeyTile::CHUNKS; i += THREADS) {
        const int row = i / KeyTile::CHUNKS, column = i % KeyTile::CHUNKS * KeyTile::CHUNK;
        const bool in_range = row < rows && column < DIM;
        const int index = first_row + (in_range ? row : 0);
        const long long token = (long long)batch * queries + index / group;
        cp_async_16(query_tile.at(row, i % KeyTile::CHUNKS),
                    q + (token * heads + kv_head * group + index % group) * DIM +
                        (in_range ? column : 0),
                    in_range);
    }
    auto seen_from = [&](int key) {  // the warp's first tile from `key` on that some row sees
        if constexpr (BLOCK_MASK)
            while (key < end &&
                   !__any_sync(0xffffffffu, !scores.skipped(head[0], query[0], key) ||
                                                !scores.skipped(head[1], query[1], key)))
                key += BLOCK_KEYS;
        return key;
    };
    int here = seen_from(begin + warp * TILE_KEYS);
    load(here, 0);
    cp_async_commit();
    int ahead = seen_from(here + BLOCK_KEYS);  // without BLOCK_MASK simply BLOCK_KEYS keys further
    load(ahead, 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // queries have arrived, for all warps
    uint32_t kept[KEPT ? STEPS : 1][1][4];
    if constexpr (KEPT)
#pragma unroll
        for (int step = 0; step < STEPS; step++) fetch(kept[step], query_tile, 0, step);

    float o[1][VALUE_PARTS][4] = {};
    float top[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0, 0};  // sum: of this lane's columns
    for (int stage = 0; here < end; stage ^= 1) {
        cp_async_wait<1>();
        __syncwarp();  // this tile has arrived, for all lanes
        const KeyTile key_tile{ring + (CODES ? 2 : stage) * STAGE};
        const ValueTile value_tile{key_tile.start + TILE_KEYS * KeyTile::PITCH};
        if constexpr (CODES) {
            const signed char *const from =
                reinterpret_cast<const signed char *>(ring + stage * STAGE);
            widen_tile<DIM, false>(key_tile, from, 0);
            widen_tile<VALUE_DIM, true>(value_tile, from + TILE_KEYS * DIM,
                                        stage == 0 ? value_scales[0] : value_scales[1]);
            __syncwarp();  // all lanes have written the tile
        }
        float s[1][PARTS][4];
        product_abt<KEPT>(s, kept, query_tile, 0, key_tile);
        if constexpr (CODES) {
            const float lane_scale = stage == 0 ? key_scales[0] : key_scales[1];
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float scale =
                        __shfl_sync(0xffffffffu, lane_scale, lane % 4 * 2 + n * 8 + e);
                    s[0][n][e] *= scale, s[0][n][2 + e] *= scale;
                }
        }

        const bool edge = scores.any_hidden(top_query, bottom_query, here, here + TILE_KEYS - 1);
        bool moved = false;
        float rescale[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const bool skipped = scores.skipped(head[half], query[half], here);
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &x = s[0][n][half * 2 + e];
                    const int key = here + lane % 4 * 2 + n * 8 + e;
                    // rounded as in Scores::score, from which backward recomputes p
                    if constexpr (!FOLD) x *= scores.factor;
                    if constexpr (SOFTCAP) x = scores.cap * tanhf(x);
                    if constexpr (BIAS)
                        if (key < keys)
                            x += (float)scores.bias[head[half] * scores.bias_strides.head +
                                                    query[half] * scores.bias_strides.query +
                                                    (long long)key * scores.bias_strides.key];
                    if constexpr (ALIBI)
                        x -= slope[half] * (float)abs(key - query[half] - scores.origin);
                    if constexpr (MASK)
                        if (key < keys && !scores.mask[head[half] * scores.mask_strides.head +
                                                       query[half] * scores.mask_strides.query +
                                                       (long long)key * scores.mask_strides.key])
                            x = NO_SCORE;
                    if (skipped) x = NO_SCORE;
                }
            if (edge) {
                int last = scores.length - 1;
                if constexpr (RIGHT) last = min(last, query[half] + scores.high);
#pragma unroll
                for (int n = 0; n < PARTS; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int key = here + lane % 4 * 2 + n * 8 + e;
                        const bool before = LEFT && key < query[half] + scores.low;
                        if (before || key > last) s[0][n][half * 2 + e] = NO_SCORE;
                    }
            }
            const float before = top[half];
            top[half] = row_max(before, s[0], half);
            moved |= before != top[half];
            const float shift = shift_of(top[half], scores.unit);
            rescale[half] = rescale_of(before, scores.unit, shift);
            const float total = exponentiate(s[0], half, scores.unit, shift);
            sum[half] = sum[half] * rescale[half] + total;
        }
        if (__any_sync(0xffffffffu, moved))
            each_row<1>([&](int m, int half) { scale_row(o[m], half, rescale[half]); });
        if constexpr (DROPOUT) {
            const bool odd = lane % 2;
#pragma unroll
            for (int n = 0; n < PARTS; n++) {
                unsigned words[4];
                scores.share_out(
                    words,
                    philox(batch, odd ? head[1] : head[0], odd ? query[1] : query[0],
                           (here + n * 8 + lane % 4 * 2) / 4, scores.seed_low, scores.seed_high));
#pragma unroll
                for (int i = 0; i < 4; i++)
                    s[0][n][i] = words[i] < scores.drop_threshold ? 0 : s[0][n][i];
            }
        }
        // a warp has few keys of a chunk
        add_product_ab<1>(o, s, value_tile);
        __syncwarp();  // all lanes are done with this tile
        const int later = BLOCK_MASK ? seen_from(ahead + BLOCK_KEYS) : here + 2 * BLOCK_KEYS;
        load(later, stage);
        cp_async_commit();
        here = BLOCK_MASK ? ahead : here + BLOCK_KEYS;
        ahead = later;
    }

    // merge the results of the warps into one part, in the memory of their rings
    __syncthreads();
    float *const results = reinterpret_cast<float *>(memory);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] = quad_sum(sum[half]);
        float *const to = results + (warp * ROWS + lane / 4 + half * 8) * Part::PITCH;
        if (lane % 4 == 0) {
            to[Part::TOP] = level_of(top[half], scores.unit);
            to[Part::SUM] = sum[half];
        }
#pragma unroll
        for (int n = 0; n < VALUE_PARTS; n++) {
            if (VALUE_PARTS * 8 != VALUE_DIM && column<T>(n) >= VALUE_DIM) continue;
            *reinterpret_cast<float2 *>(to + column<T>(n)) =
                make_float2(o[0][n][half * 2], o[0][n][half * 2 + 1]);
        }
    }
    const float *from = results;
    int stride = ROWS * Part::PITCH;
    __syncthreads();

    // The same for the parts of other blocks, which barriers and fences make visible to this one.
    if (several > 1) {
        const int size = min(ROWS, group * queries) * Part::PITCH;  // floats
        const long long sequence = head_of_all * row_blocks + blockIdx.x % row_blocks;
        float *const to = parts + (sequence * chunks + chunk) * size;
        for (int i = threadIdx.x; i < rows * Part::QUADS; i += THREADS) {
            const int row = i / Part::QUADS, column = i % Part::QUADS * 4;
            Part::put(to + row * Part::PITCH, column,
                      Part::merged<WARPS>(results + row * Part::PITCH, column, WARPS,
                                          ROWS * Part::PITCH, scores.unit));
        }
        __syncthreads();
        if (!last_to_arrive(arrived + sequence, several, last)) return;
        from = parts + sequence * chunks * size;
        stride = size;
    }
    // in a fixed order, parts are read together that lie between the same keys
    const int missing = fixed && several > 1 ? from_key / unit % 16 : 0;
    for (int i = threadIdx.x; i < rows * Part::QUADS; i += THREADS) {
        const int row = first_row + i / Part::QUADS, column = i % Part::QUADS * 4;
        Merged m = Part::merged<16>(from + (row - first_row) * Part::PITCH, column,
                                    several > 1 ? several : WARPS, stride, scores.unit, missing);
        const int query_head = kv_head * group + row % group;
        if (sinks != nullptr) {
            const float weight = add_sink(m.top, scores.unit, m.sum, (float)sinks[query_head]);
#pragma unroll
            for (int j = 0; j < 4; j++) m.value[j] *= weight;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            m.value[j] = m.sum == 0 ? 0.0f : m.value[j] / m.sum;
            if constexpr (DROPOUT) m.value[j] *= scores.keep_scale;
        }
        const long long token = (long long)batch * queries + row / group;
        store(out + (token * heads + query_head) * VALUE_DIM + column, m.value);
        if (column == 0)
            lse[((long long)batch * heads + query_head) * queries + row / group] =
                log_sum_exp(m.top, scores.unit, m.sum);
    }
}
