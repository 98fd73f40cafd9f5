// Attention backward: the gradient of a bias that has a value for every query and key.
//
//   dbias = ds = p * (dout @ v.T - delta), summed over the batches and heads that share a bias
//
//   traffic     dbias once; q, dout, k and v once per tile of pairs, from L2
//   constants   those of common/attention.cuh, and
//               T                dtype of q, k, v and dout
//               DIM, VALUE_DIM   columns of q and k, of v: multiples of 8
//               WARPS            warps of a block
//               WARP_TILES       tiles of 16 queries per warp
//               TILE             keys of a tile
//               RESIDENT         blocks resident on an SM
//
//   The trick: a block owns a tile of pairs and sums the contributions of all batches and heads in
//   a fixed order.  Other blocks on its SM compute while it loads.
#include <common/attention_gradient.cuh>
#include <common/segment.cuh>

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = 16 * WARP_TILES, ROWS = WARPS * WARP_ROWS, PARTS = TILE / 8;
using X = Tile<T, padded(DIM)>;
using Y = Tile<T, padded(VALUE_DIM)>;

// stats   as attention_backward.cu leaves them
KERNEL(32 * WARPS, RESIDENT)
attention_bias(const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
               const T *__restrict__ dout, const float *__restrict__ stats, B *__restrict__ dbias,
               const L *__restrict__ key_lengths, const P *__restrict__ starts,
               const bool *__restrict__ mask, const B *__restrict__ bias,
               const A *__restrict__ alibi, const bool *__restrict__ block_mask,
               const __grid_constant__ Call call, int batches) {
    DYNAMIC_SHARED(T, memory);
    const X query_x{memory}, key_x{query_x.start + ROWS * X::PITCH};
    const Y query_y{key_x.start + TILE * X::PITCH}, key_y{query_y.start + ROWS * Y::PITCH};

    const Options &options = call.options;
    const Strides &to = options.bias_strides;
    const int heads = options.heads, kv_heads = options.kv_heads;
    const int all_queries = options.queries, all_keys = options.keys;
    int queries = all_queries, keys = all_keys;
    if constexpr (VARLEN) {  // rows and columns of the bias
        queries = options.padded_queries, keys = options.padded_keys;
        batches = options.sequences;
    }
    const int tiles = (keys + TILE - 1) / TILE, row_blocks = (queries + ROWS - 1) / ROWS;
    const int here = blockIdx.x % tiles * TILE, first_row = blockIdx.x / tiles % row_blocks * ROWS;
    const int owner = blockIdx.x / tiles / row_blocks;
    const int shared_heads = to.head ? 1 : heads, shared_batches = to.batch ? 1 : batches;
    const int own_head = to.head ? owner % heads : 0;
    const int own_batch = to.batch ? owner / (to.head ? heads : 1) : 0;

    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS;
    const int top = first_row + warp_row, last = here + TILE - 1;
    const int query_stride = heads * DIM, out_stride = heads * VALUE_DIM;
    const int key_stride = call.key_stride, value_stride = call.value_stride;
    float sum[WARP_TILES][PARTS][4] = {};
    for (int i = 0; i < shared_batches * shared_heads; i++) {
        const int batch = own_batch + i / shared_heads, head = own_head + i % shared_heads;
        const int kv_head = head / (heads / kv_heads);
        long long row = (long long)batch * queries, key = (long long)batch * keys;
        long long stat = (long long)(batch * heads + head) * call.stat_rows;
        int own_queries = queries, own_keys = keys;
        if constexpr (VARLEN) {
            const Run rows = run_of(starts, batch, all_queries);
            const Run columns = run_of(key_lengths, batch, all_keys);
            row = rows.first, key = columns.first;
            own_queries = rows.count, own_keys = columns.count;
            stat = stats_of(starts, batch, all_queries) + (long long)head * call.stat_rows;
            if (first_row >= own_queries) continue;
        }
        const Scores scores(options, {key_lengths, starts, mask, bias, alibi, block_mask},
                            own_queries, own_keys, batch);
        if (scores.all_hidden(first_row, first_row + ROWS - 1, here, last)) continue;
        if (scores.skipped(head, first_row, here)) continue;

        __syncthreads();  // all warps are done with the tiles of the previous batch and head
        query_x.copy<ROWS, DIM, THREADS, UNROLLED>(q + row * query_stride + head * DIM, first_row,
                                                   own_queries, query_stride);
        query_y.copy<ROWS, VALUE_DIM, THREADS, UNROLLED>(dout + row * out_stride + head * VALUE_DIM,
                                                         first_row, own_queries, out_stride);
        key_x.copy<TILE, DIM, THREADS, UNROLLED>(k + key * key_stride + kv_head * DIM, here,
                                                 scores.length, key_stride);
        key_y.copy<TILE, VALUE_DIM, THREADS, UNROLLED>(v + key * value_stride + kv_head * VALUE_DIM,
                                                       here, scores.length, value_stride);
        cp_async_commit();
        RowStats<WARP_TILES> own_stats;
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const long long at = stat + top + m * 16 + half * 8 + lane / 4;
                own_stats.read(m, half, stats + at * 2, stats + call.rests_start + at);
            }
        cp_async_wait<0>();
        __syncthreads();

        float s[WARP_TILES][PARTS][4], g[WARP_TILES][PARTS][4], steep[WARP_TILES][PARTS][4];
        Fragment<WARP_TILES> unkept[1];
        product_abt<false, WIDEST>(s, unkept, query_x, warp_row, key_x);
        scores.score<false>(s, steep, head, top, here, true);
        product_abt<false, WIDEST>(g, unkept, query_y, warp_row, key_y);
        differentiate<true, false>(scores, s, g, own_stats, head, top, here,
                                   [](int, int, int, float, float) {});
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[m][n][j] += g[m][n][j];
    }
    dbias += own_batch * to.batch + own_head * to.head;
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int n = 0; n < PARTS; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = top + m * 16 + j / 2 * 8 + lane / 4;
                const int key = here + n * 8 + lane % 4 * 2 + j % 2;
                if (row < queries && key < keys)
                    dbias[row * to.query + (long long)key * to.key] = (B)sum[m][n][j];
            }
}
