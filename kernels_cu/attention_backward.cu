// Attention backward: the gradients of k and v or, without BY_KEYS, of q.
//
//   p = exp(score - lse)      ds = p * (dout @ v.T - delta)      delta = rowsum(dout * out) - dlse
//   dv = p.T @ dout           dk = scale * ds.T @ q              dq = scale * ds @ k
//
//   traffic     q, dout, k and v once; the two arrays that a block does not own once per block of
//               ROWS rows, from L2; 8 * queries * keys * DIM operations per head with BY_KEYS, 6
//               without
//   constants   those of common/attention.cuh, and
//               T                dtype of q, k, v, dout and the gradients
//               DIM, VALUE_DIM   columns of q and k, of v: multiples of 8
//               BY_KEYS          a block owns keys; else queries
//               DX, DY           write the gradient of q or k; with BY_KEYS, that of v
//               WARPS            warps of a block
//               WARP_TILES       tiles of 16 rows per warp
//               KEPT             operands whose own rows a warp keeps in registers: 1 x, 2 x and y;
//                                the others are read again for every tile
//               TILE, STAGES     rows of a stage of the ring; stages, 1 or 2
//               RESIDENT         blocks resident on an SM
//               PART             rows of a tile that are summed first, in float32: see tile.cuh
//               SUM, SLOPE       write the sums of ds along rows; of ds times distance
//
//   The trick: one kernel for both cases.  x names the operands of the score products (q and k), y
//   those of the value products (dout and v).  A block owns rows of one x and y, and iterates over
//   tiles of the other x and y, for all query heads of a group.  Own rows times other rows give p
//   and ds, or their transposes, in the layout of operands of the products with the other y and x.
//   Every sum has one owner and one order.
#include <common/attention_gradient.cuh>
#include <common/segment.cuh>

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = 16 * WARP_TILES, ROWS = WARPS * WARP_ROWS, PARTS = TILE / 8;
using X = Tile<T, padded(DIM)>;
using Y = Tile<T, padded(VALUE_DIM)>;
constexpr int STAGE = TILE * (X::PITCH + Y::PITCH);

// stats   as attention_delta.cu writes them; without BY_KEYS, rests become the log2 of the sum of p
// dx      dk with BY_KEYS, else dq      dy   dv
// sums    (batch, heads, rows), zeros on entry      slopes   (batch, heads, rows); with VARLEN both
//         are (heads, rows)
KERNEL(32 * WARPS, RESIDENT)
attention_backward(const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
                   const T *__restrict__ dout, float *__restrict__ stats, T *__restrict__ dx,
                   T *__restrict__ dy, float *__restrict__ sums, float *__restrict__ slopes,
                   const L *__restrict__ key_lengths, const P *__restrict__ starts,
                   const bool *__restrict__ mask, const B *__restrict__ bias,
                   const A *__restrict__ alibi, const bool *__restrict__ block_mask,
                   const __grid_constant__ Call call) {
    DYNAMIC_SHARED(T, memory);
    const X own_x{memory};
    const Y own_y{memory + ROWS * X::PITCH};
    T *const ring = own_y.start + ROWS * Y::PITCH;

    const int heads = call.options.heads, kv_heads = call.options.kv_heads;
    const int stat_rows = call.stat_rows, sequences = call.options.sequences;
    int queries = call.options.queries, keys = call.options.keys;
    float *const rests = stats + call.rests_start;

    // with RIGHT, the rows that form the most pairs come first
    int rows = BY_KEYS ? keys : queries;
    const int all_rows = rows;
    const int row_heads = BY_KEYS ? kv_heads : heads;
    const int row_blocks = (rows + ROWS - 1) / ROWS + (VARLEN ? sequences : 0);
    const int index = blockIdx.x % row_blocks, block = BY_KEYS ? index : row_blocks - 1 - index;
    const int row_head = blockIdx.x / row_blocks % row_heads, group = heads / kv_heads;
    int batch = blockIdx.x / row_blocks / row_heads, first_row = block * ROWS;
    long long first_query = (long long)batch * queries, first_key = (long long)batch * keys;
    long long first_stat = (long long)batch * heads * stat_rows;
    if constexpr (VARLEN) {
        Segment work;
        if constexpr (BY_KEYS) work = segment<ROWS>(key_lengths, sequences, keys, block);
        else work = segment<ROWS>(starts, sequences, queries, block);
        if (work.sequence < 0) return;
        batch = work.sequence, first_row = work.tile * ROWS;
        first_stat = stats_of(starts, batch, queries);
        const Run some = run_of(starts, batch, queries), seen = run_of(key_lengths, batch, keys);
        first_query = some.first, first_key = seen.first;
        queries = some.count, keys = seen.count;
        rows = BY_KEYS ? keys : queries;
    }
    const Scores scores(call.options, {key_lengths, starts, mask, bias, alibi, block_mask}, queries,
                        keys, batch);

    // the tiles to iterate over: for each head the other rows that an own row may be paired with
    const int real_rows = BY_KEYS ? scores.length : queries;
    const int stop_other = BY_KEYS ? queries : scores.length;
    const Range seen = scores.seen<BY_KEYS, ROWS>(first_row);
    const int from = seen.from / TILE * TILE, stop = seen.stop;
    struct Position {  // where a tile begins
        int head, row;
    };
    const int first_head = BY_KEYS ? row_head * group : row_head;
    const int stop_head = first_head + (BY_KEYS ? group : 1);
    auto after = [&](Position at) -> Position {
        if (at.row + TILE < stop) return {at.head, at.row + TILE};
        return {at.head + 1, from};
    };
    auto seen_from = [&](Position at) {  // the first tile from this one on with a visible pair
        if constexpr (BLOCK_MASK)
            while (at.head < stop_head && scores.skipped(at.head, BY_KEYS ? at.row : first_row,
                                                         BY_KEYS ? first_row : at.row))
                at = after(at);
        return at;
    };
    const int query_stride = heads * DIM, out_stride = heads * VALUE_DIM;
    const int x_stride = BY_KEYS ? query_stride : call.key_stride;
    const int y_stride = BY_KEYS ? out_stride : call.value_stride;
    const long long first_other = BY_KEYS ? first_query : first_key;
    const T *const x = (BY_KEYS ? q : k + row_head / group * DIM) + first_other * x_stride;
    const T *const y =
        (BY_KEYS ? dout : v + row_head / group * VALUE_DIM) + first_other * y_stride;
    auto load = [&](Position at, int stage) {
        const X to{ring + stage * STAGE};
        const Y values{to.start + TILE * X::PITCH};
        const int head = BY_KEYS ? at.head : 0;
        to.template copy<TILE, DIM, THREADS, UNROLLED>(x + head * DIM, at.row, stop_other,
                                                       x_stride);
        values.template copy<TILE, VALUE_DIM, THREADS, UNROLLED>(y + head * VALUE_DIM, at.row,
                                                                 stop_other, y_stride);
    };

    const long long first = (BY_KEYS ? first_key : first_query) * row_heads + row_head;
    const long long first_own = BY_KEYS ? first_key : first_query;
    const bool any = first_row < real_rows && from < stop;
    Position next = any ? seen_from({first_head, from}) : Position{stop_head, 0};
    if (next.head < stop_head) {
        const int stride = BY_KEYS ? call.key_stride : query_stride;
        own_x.copy<ROWS, DIM, THREADS, UNROLLED>(
            (BY_KEYS ? k : q) + first_own * stride + row_head * DIM, first_row, real_rows, stride);
        if constexpr (DX) {
            const int stride = BY_KEYS ? call.value_stride : out_stride;
            own_y.copy<ROWS, VALUE_DIM, THREADS, UNROLLED>(
                (BY_KEYS ? v : dout) + first_own * stride + row_head * VALUE_DIM, first_row,
                real_rows, stride);
        }
        load(next, 0);
    }
    cp_async_commit();

    const int lane = threadIdx.x % 32, warp_row = own_warp() * WARP_ROWS;
    const int top = first_row + warp_row, bottom = top + WARP_ROWS - 1;
    auto stat_at = [&](int head, int query) {
        return first_stat + (long long)head * stat_rows + query;
    };
    RowStats<WARP_TILES> own_stats;
    if constexpr (!BY_KEYS) {
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                own_stats.read(m, half,
                               stats + stat_at(row_head, top + m * 16 + half * 8 + lane / 4) * 2,
                               nullptr);
    }

    Fragment<WARP_TILES> kept_x[KEPT > 0 ? padded(DIM) / 16 : 1];
    Fragment<WARP_TILES> kept_y[KEPT > 1 && DX ? padded(VALUE_DIM) / 16 : 1];
    if constexpr (KEPT > 0)
        if (next.head < stop_head) {
            cp_async_wait<0>();
            __syncthreads();
#pragma unroll
            for (int step = 0; step < padded(DIM) / 16; step++)
                fetch(kept_x[step], own_x, warp_row, step);
            if constexpr (KEPT > 1 && DX)
#pragma unroll
                for (int step = 0; step < padded(VALUE_DIM) / 16; step++)
                    fetch(kept_y[step], own_y, warp_row, step);
        }

    float sum_x[WARP_TILES][DX ? padded(DIM) / 8 : 1][4] = {};
    float sum_y[WARP_TILES][DY ? padded(VALUE_DIM) / 8 : 1][4] = {};
    float sum[WARP_TILES][2] = {}, slope[WARP_TILES][2] = {};
    float all_p[WARP_TILES][2] = {}, correction[WARP_TILES][2];  // correction: makes p sum to 1
    auto put_sums = [&](float *to, const float (&from)[WARP_TILES][2], int head) {
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = top + m * 16 + half * 8 + lane / 4;
                const float total = quad_sum(from[m][half]) * (BY_KEYS ? 1 : correction[m][half]);
                if (lane % 4 == 0 && row < rows)
                    to[VARLEN ? (long long)head * all_rows + first_own + row
                              : (long long)(batch * heads + head) * rows + row] = total;
            }
    };
    for (int stage = 0; next.head < stop_head; stage ^= STAGES - 1) {
        const int head = next.head, here = next.row, last = here + TILE - 1;
        next = seen_from(after(next));
        cp_async_wait<0>();
        __syncthreads();  // this tile has arrived, and all warps are done with the previous one
        if (STAGES == 2 && next.head < stop_head) {
            load(next, stage ^ 1);
            cp_async_commit();
        }

        const bool none = BY_KEYS ? scores.all_hidden(here, last, top, bottom)
                                  : scores.all_hidden(top, bottom, here, last);
        if (!none) {
            const bool edge = BY_KEYS ? scores.any_hidden(here, last, top, bottom)
                                      : scores.any_hidden(top, bottom, here, last);
            const X other_x{ring + stage * STAGE};
            const Y other_y{other_x.start + TILE * X::PITCH};
            float s[WARP_TILES][PARTS][4], g[WARP_TILES][PARTS][4], steep[WARP_TILES][PARTS][4];
            product_abt<(KEPT > 0), WIDEST>(s, kept_x, own_x, warp_row, other_x);
            scores.score<BY_KEYS>(s, steep, head, top, here, edge);
            if constexpr (DX) product_abt<(KEPT > 1), WIDEST>(g, kept_y, own_y, warp_row, other_y);
            auto each = [&](int m, int half, int other, float p, float ds) {
                if constexpr (RESTS && !BY_KEYS) all_p[m][half] += p;
                if constexpr (SUM) sum[m][half] += ds;
                const int own_row = top + m * 16 + half * 8 + lane / 4;
                if constexpr (SLOPE) slope[m][half] -= ds * abs(other - own_row - scores.origin);
            };
            if constexpr (BY_KEYS) {
                ColumnStats<PARTS> other_stats;
#pragma unroll
                for (int n = 0; n < PARTS; n++) {
                    const long long at = stat_at(head, here + n * 8 + lane % 4 * 2);
                    other_stats.read(n, stats + at * 2, rests + at);
                }
                differentiate<DX, true>(scores, s, g, other_stats, head, top, here, each);
            } else {
                differentiate<DX, false>(scores, s, g, own_stats, head, top, here, each);
            }
            if constexpr (SOFTCAP && DX) {
#pragma unroll
                for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                    for (int n = 0; n < PARTS; n++)
#pragma unroll
                        for (int i = 0; i < 4; i++) g[m][n][i] *= steep[m][n][i];
            }
            if constexpr (DY) add_product_ab<PART>(sum_y, s, other_y);
            if constexpr (DX) add_product_ab<PART>(sum_x, g, other_x);
        }
        if constexpr (STAGES == 1) {
            __syncthreads();
            if (next.head < stop_head) load(next, 0);
            cp_async_commit();
        }
        if constexpr (SUM && BY_KEYS)
            if (next.head != head) {
                put_sums(sums, sum, head);
#pragma unroll
                for (int m = 0; m < WARP_TILES; m++) sum[m][0] = sum[m][1] = 0;
            }
    }
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            correction[m][half] = 1;
            if constexpr (RESTS && !BY_KEYS) {
                const float own_lse = own_stats.of(m, 0, half * 2).lse;
                float &sum_of_row = rests[stat_at(row_head, top + m * 16 + half * 8 + lane / 4)];
                const float total = quad_sum(all_p[m][half]) + sum_of_row;  // with its sink's part
                const float rest = rest_of(total, own_lse);
                if (rest != 0) correction[m][half] = 1 / total;
                __syncwarp();  // all four lanes have read
                if (lane % 4 == 0) sum_of_row = rest;
            }
        }
    if constexpr (SUM && !BY_KEYS) put_sums(sums, sum, row_head);
    if constexpr (SLOPE) put_sums(slopes, slope, row_head);
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = top + m * 16 + half * 8 + lane / 4;
            if (row >= rows) continue;
            const long long at = first + (long long)row * row_heads;
            if constexpr (DX)
                put_row<DIM>(dx + at * DIM, sum_x[m], half, call.scale * correction[m][half]);
            if constexpr (DY) put_row<VALUE_DIM>(dy + at * VALUE_DIM, sum_y[m], half, 1.0f);
        }
}
