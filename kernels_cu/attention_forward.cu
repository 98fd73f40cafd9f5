// Attention forward: out = softmax(score) @ v and lse = log(sum(exp(score))), row by row.
//
//   score = cap * tanh(scale * q @ k.T / cap) + bias - slope * abs(query position - key position)
//   -inf where mask, window, lengths or block_mask hide a key; dropout after the softmax
//
//   traffic     q and out once; k and v once per block of ROWS queries, which the query heads of a
//               group read from L2; 4 * queries * keys * DIM operations per head
//   constants   those of common/attention.cuh, and
//               T, S             dtypes of q, k, v and out; of sinks
//               DIM, VALUE_DIM   columns of q and k, of v: multiples of 8
//               WARPS, RESIDENT  warps of a block; blocks that an SM must hold
//               WARP_TILES       tiles of 16 queries per warp
//               TILE_KEYS        keys of a stage of the ring
//               STAGES           stages of the ring: 2, or 1 where shared memory holds no more
//               SLICE            columns of v that a block owns: VALUE_DIM, or about half of them
//               KEPT             a warp's queries stay in registers; else they are read again
//
//   The trick: scores never leave registers.  A warp owns whole rows, and the result of a product
//   has the layout that the next product takes.  While one tile is multiplied, cp.async loads the
//   next; with one stage, a tile's values are loaded while its keys are multiplied, and the next
//   keys while its values are.  Tiles that no row sees are never loaded, and positions are compared
//   only in tiles at an edge of the mask.  A sum of more than 256 columns would not fit into
//   registers: two blocks then divide the columns, and each computes the scores.
#include <common/attention.cuh>
#include <common/segment.cuh>

// ---- plain ------------------------------------------------------------------------------------
// The same without options, a thread a query of a head.  In no unit of the library: it is here to
// be read, and as the first step of docs/ladders.md.
#ifdef PLAIN
extern "C" __global__ void attention_plain(const T *q, const T *k, const T *v, T *out, int rows,
                                           int queries, int keys, int heads, int kv_heads) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;  // of q: (batch, query, head)
    if (row >= rows) return;
    const int batch = row / heads / queries, kv_head = row % heads / (heads / kv_heads);
    float top = NO_SCORE, sum = 0, o[VALUE_DIM] = {};  // top: the largest score so far
    for (int key = 0; key < keys; key++) {
        const int at = (batch * keys + key) * kv_heads + kv_head;  // row of k and v
        float score = 0;
        for (int d = 0; d < DIM; d++) score += (float)q[row * DIM + d] * (float)k[at * DIM + d];
        score /= sqrtf(DIM);
        const float above = fmaxf(top, score), rescale = expf(top - above), p = expf(score - above);
        top = above, sum = sum * rescale + p;
        for (int d = 0; d < VALUE_DIM; d++)
            o[d] = o[d] * rescale + p * (float)v[at * VALUE_DIM + d];
    }
    for (int d = 0; d < VALUE_DIM; d++) out[row * VALUE_DIM + d] = (T)(o[d] / sum);
}
#endif

// ---- by tiles ---------------------------------------------------------------------------------
constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = 16 * WARP_TILES, ROWS = WARPS * WARP_ROWS;
constexpr int STEPS = padded(DIM) / 16, PARTS = TILE_KEYS / 8, VALUE_PARTS = padded(SLICE) / 8;
constexpr int REST = VALUE_DIM - SLICE;  // columns before the second of two slices
constexpr int SLICES = REST == 0 ? 1 : 2;
static_assert(0 <= REST && REST <= SLICE && 1 <= STAGES && STAGES <= 2);
using KeyTile = Tile<T, padded(DIM)>;  // also of queries
using ValueTile = Tile<T, padded(SLICE)>;
constexpr int STAGE = TILE_KEYS * (KeyTile::PITCH + ValueTile::PITCH);
constexpr int UNROLLED = DIM > 256 ? 2 : 64;  // a long row takes many iterations to copy

// batch_tokens               tokens from the first key of a batch to that of the next
// key_stride, value_stride   values from a token of k, or of v, to the next
KERNEL(32 * WARPS, RESIDENT)
attention_forward(const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
                  const S *__restrict__ sinks, T *__restrict__ out, float *__restrict__ lse,
                  const L *__restrict__ key_lengths, const P *__restrict__ starts,
                  const bool *__restrict__ mask, const B *__restrict__ bias,
                  const A *__restrict__ alibi, const bool *__restrict__ block_mask,
                  const __grid_constant__ Options options, long long batch_tokens,
                  int key_stride, int value_stride) {
    DYNAMIC_SHARED(T, memory);
    const KeyTile query_tile{memory};
    T *const ring = memory + ROWS * KeyTile::PITCH;

    // the last rows first: with RIGHT they see the most keys
    const int heads = options.heads, kv_heads = options.kv_heads, sequences = options.sequences;
    int queries = options.queries, keys = options.keys;
    const int row_blocks = (queries + ROWS - 1) / ROWS + (VARLEN ? sequences : 0);
    const int slice = blockIdx.x % SLICES, block = blockIdx.x / SLICES;
    const int row_block = row_blocks - 1 - block % row_blocks;
    const int head = block / row_blocks % heads;
    int batch = block / row_blocks / heads, first_row = row_block * ROWS;
    long long first_query = (long long)batch * queries, first_key = batch * batch_tokens;
    const int all_queries = queries;
    if constexpr (VARLEN) {
        const Segment work = segment<ROWS>(starts, sequences, queries, row_block);
        if (work.sequence < 0) return;
        const Run rows = run_of(starts, work.sequence, queries);
        const Run columns = run_of(key_lengths, work.sequence, keys);
        batch = work.sequence, first_row = work.tile * ROWS;
        first_query = rows.first, first_key = columns.first;
        queries = rows.count, keys = columns.count;
    }
    const int kv_head = head / (heads / kv_heads);
    const int query_stride = heads * DIM, out_stride = heads * VALUE_DIM;
    q += first_query * query_stride + head * DIM;
    k += first_key * key_stride + kv_head * DIM;
    v += first_key * value_stride + kv_head * VALUE_DIM + slice * REST;
    const Scores scores(options, {key_lengths, starts, mask, bias, alibi, block_mask}, queries,
                        keys, batch);

    const Range seen = scores.seen<false, ROWS>(first_row);
    const int stop_key = seen.stop;
    auto seen_from = [&](int tile) {  // the first tile from this one on that some row sees
        if constexpr (BLOCK_MASK)
            while (tile * TILE_KEYS < stop_key && scores.skipped(head, first_row, tile * TILE_KEYS))
                tile++;
        return tile;
    };
    auto keys_at = [&](int stage) { return KeyTile{ring + stage * STAGE}; };
    auto values_at = [&](int stage) {
        return ValueTile{ring + stage * STAGE + TILE_KEYS * KeyTile::PITCH};
    };
    auto load_keys = [&](int tile, int stage) {
        keys_at(stage).copy<TILE_KEYS, DIM, THREADS, UNROLLED>(
            k, tile * TILE_KEYS, scores.length, key_stride);
    };
    auto load_values = [&](int tile, int stage) {
        values_at(stage).copy<TILE_KEYS, SLICE, THREADS, UNROLLED>(
            v, tile * TILE_KEYS, scores.length, value_stride);
    };

    int tile = seen_from(seen.from / TILE_KEYS);
    query_tile.copy<ROWS, DIM, THREADS, UNROLLED>(q, first_row, queries, query_stride);
    cp_async_commit();
    if (tile * TILE_KEYS < stop_key) {
        load_keys(tile, 0);
        if constexpr (STAGES == 2) load_values(tile, 0);
    }
    cp_async_commit();

    const int lane = threadIdx.x % 32, warp_row = own_warp() * WARP_ROWS;
    const int top_row = first_row + warp_row;
    Fragment<WARP_TILES> kept[KEPT ? STEPS : 1];
    if constexpr (KEPT) {
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < STEPS; step++) fetch(kept[step], query_tile, warp_row, step);
    }

    float o[WARP_TILES][VALUE_PARTS][4] = {};
    float top[WARP_TILES][2], sum[WARP_TILES][2];  // sum: of this lane's columns
    each_row<WARP_TILES>([&](int m, int half) { top[m][half] = NO_SCORE, sum[m][half] = 0; });
    auto shift = [&](int m, int half) { return shift_of(top[m][half], scores.unit); };

    for (int stage = 0; tile * TILE_KEYS < stop_key; stage ^= STAGES - 1) {
        const int current = tile, here = current * TILE_KEYS, last = here + TILE_KEYS - 1;
        tile = seen_from(tile + 1);
        const bool more = tile * TILE_KEYS < stop_key;
        cp_async_wait<0>();
        __syncthreads();  // this tile's keys have arrived; all warps are done with the previous one
        if constexpr (STAGES == 1) load_values(current, 0);
        else if (more) load_keys(tile, stage ^ 1), load_values(tile, stage ^ 1);
        cp_async_commit();

        const int bottom_row = top_row + WARP_ROWS - 1;
        const bool none = scores.all_hidden(top_row, bottom_row, here, last);
        float s[WARP_TILES][PARTS][4], steep[WARP_TILES][PARTS][4];
        if (!none) {
            const bool edge = scores.any_hidden(top_row, bottom_row, here, last);
            product_abt<KEPT>(s, kept, query_tile, warp_row, keys_at(stage));
            scores.score<false>(s, steep, head, top_row, here, edge);

            bool moved = false;
            float before[WARP_TILES][2];
            each_row<WARP_TILES>([&](int m, int half) {
                before[m][half] = top[m][half];
                top[m][half] = row_max(top[m][half], s[m], half);
                moved |= before[m][half] != top[m][half];
            });
            if (__any_sync(0xffffffffu, moved))  // seldom, once rows have seen many keys
                each_row<WARP_TILES>([&](int m, int half) {
                    const float by = rescale_of(before[m][half], scores.unit, shift(m, half));
                    sum[m][half] *= by;
                    scale_row(o[m], half, by);
                });
        }
        if constexpr (STAGES == 1) {
            cp_async_wait<0>();
            __syncthreads();  // its values have arrived, and all warps are done with the keys
            if (more) load_keys(tile, 0);
            cp_async_commit();
        }
        if (none) continue;
        each_row<WARP_TILES>([&](int m, int half) {
            sum[m][half] += exponentiate(s[m], half, scores.unit, shift(m, half));
        });
        if constexpr (DROPOUT) {
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                for (int n = 0; n < PARTS; n++) {
                    unsigned words[4];
                    scores.draw<false>(words, head, top_row + m * 16, here + n * 8);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        s[m][n][i] = words[i] < scores.drop_threshold ? 0 : s[m][n][i];
                }
        }
        add_product_ab(o, s, values_at(stage));
    }
    cp_async_wait<0>();  // a block that sees no key has not waited for its queries

    out += first_query * out_stride + head * VALUE_DIM + slice * REST;
    lse += (VARLEN ? first_query : first_query * heads) + (long long)head * all_queries;
    each_row<WARP_TILES>([&](int m, int half) {
        const int row = top_row + m * 16 + half * 8 + lane / 4;
        float total = quad_sum(sum[m][half]), most = level_of(top[m][half], scores.unit);
        float weight = 1;
        if (sinks != nullptr) weight = add_sink(most, scores.unit, total, (float)sinks[head]);
        if (row >= queries) return;
        if (lane % 4 == 0 && slice == 0) lse[row] = log_sum_exp(most, scores.unit, total);
        weight = total == 0 ? 0 : weight / total;
        if constexpr (DROPOUT) weight *= scores.keep_scale;
        T *const to = out + (long long)row * out_stride;
        if (slice == SLICES - 1) put_row<SLICE>(to, o[m], half, weight);
        else put_row<REST>(to, o[m], half, weight);  // the other slice writes the columns of both
    });
}
