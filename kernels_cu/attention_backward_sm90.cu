// Attention backward on Hopper: the gradients of k and v or, without BY_KEYS, of q, or with SUM_DQ
// of all three, with the scores and the sums of attention_backward.cu, by warpgroup products
// (wgmma) of tiles that the tensor memory accelerator (TMA) loads.
//
//   p = exp(score - lse)      ds = p * (dout @ v.T - delta)      delta = rowsum(dout * out) - dlse
//   dv = p.T @ dout           dk = scale * ds.T @ q              dq = scale * ds @ k
//
//   traffic     that of attention_backward.cu
//   constants   those of common/attention.cuh, and
//               T                dtype of q, k, v, dout and the gradients, of 16 bits
//               DIM, VALUE_DIM   columns of q and k, of v: multiples of 8
//               BY_KEYS          a block owns keys; else queries
//               DX, DY           write the gradient of q or k; with BY_KEYS, that of v
//               CONSUMERS        warpgroups that compute, of 64 own rows each
//               TILE, STAGES     rows of a stage of the ring; stages
//               REGISTERS        registers of a thread that computes; PRODUCER, of one that loads
//               SUM, SLOPE       write the sums of ds along rows; of ds times distance
//               SUM_DQ           with BY_KEYS, DX and DY: sum the gradient of q too, without SUM
//                                and BLOCK_MASK; attention_dq_sm90.cu scales and rounds the sums
//   There is no dropout.
//
//   The trick: p and ds never leave registers.  x names the operands of the score products (q and
//   k), y those of the value products (dout and v).  A block owns rows of one x and y and iterates
//   over tiles of the other x and y.  Own rows times other rows give p and ds, or their transposes,
//   in the layout of operands of the products with the other y and x: a warpgroup multiplies its
//   registers by tiles that TMA has loaded.  Tensor cores work on the next products while exp2
//   runs: on those of dout and v after those of the scores, on those of p before ds is known, on
//   those of ds while the next scores are issued.
//
//   With SUM_DQ ds is also written to shared memory, where each warpgroup reads the ds of all keys
//   for its half of the columns of dq.  Separate warps have TMA add the resulting tile to the sums
//   of its queries, in float32.  Blocks of keys add in the order of the keys, so that every run
//   has the same bits.  A block takes jobs from a counter and only waits for earlier jobs: these
//   have begun, and the earliest of all never waits, which excludes a deadlock.  The last queries
//   come first, for all heads that share a key: blocks are then offset in time, and none waits.
#include <common/attention_gradient.cuh>
#include <common/jobs.cuh>
#include <common/dq_sums.cuh>

static_assert(!DROPOUT && sizeof(T) == 2);
constexpr int ROWS = 64 * CONSUMERS, PARTS = TILE / 8, STEPS = TILE / 16;
constexpr int OWN_X = panels(DIM) * ROWS * PANEL_ROW;
constexpr int OWN_Y = DX ? panels(VALUE_DIM) * ROWS * PANEL_ROW : 0;
constexpr int X_BYTES = panels(DIM) * TILE * PANEL_ROW;
constexpr int Y_BYTES = panels(VALUE_DIM) * TILE * PANEL_ROW;
constexpr int STAT_BYTES = BY_KEYS ? TILE * 2 * sizeof(float) : 0;
static_assert(!SUM_DQ || (BY_KEYS && DX && DY && !SUM && !SLOPE && !BLOCK_MASK && CONSUMERS == 2 &&
                          TILE == PANEL && DIM <= 2 * PANEL));
constexpr int DS_BYTES = SUM_DQ ? ROWS * PANEL_ROW : 0;  // of one of two buffers
constexpr int DQ_BYTES = SUM_DQ ? CONSUMERS * TILE * half_columns(DIM) * sizeof(float) : 0;
constexpr int RING_AT = OWN_X + OWN_Y, DS_AT = RING_AT + STAGES * (X_BYTES + Y_BYTES);
constexpr int DQ_AT = DS_AT + 2 * DS_BYTES, STATS_AT = DQ_AT + DQ_BYTES;
constexpr int SHARED_END = STATS_AT + STAGES * STAT_BYTES;
// Warps that add to dq: one waits for its copy, the other for earlier blocks.
constexpr int WRITERS = 2;
using Cursor = Ring<STAGES>;

// The barriers, stored after the tiles.  `full`: the bytes have arrived; `empty`: every warp is
// done with them.
struct Barriers {
    uint64_t own_full, own_empty, landed, full[STAGES], empty[STAGES];
    uint64_t dq_full[WRITERS], dq_empty;  // with SUM_DQ
    Handout job;
};

// The numbers of a call, and the order of its jobs.
struct Work {
    Call call;
    Order order;
};

// Iterates over the tiles of other rows that some own row may be paired with; `head` and `row` are
// the start of the current one.  BY_KEYS: over the tiles of one query head after another.  With
// SUM_DQ the last tile comes first, that of one head after another.
struct Walk {
    int head, row, first, from, stop, stop_head;

    DEVICE Walk(const Scores &scores, const Job &job, int shared_by)
        : head(BY_KEYS ? job.head * shared_by : job.head), first(job.first_row),
          stop_head(head + (BY_KEYS ? shared_by : 1)) {
        const Range seen = scores.seen<BY_KEYS, ROWS>(first);
        row = from = seen.from / TILE * TILE, stop = seen.stop;
        if (first >= (BY_KEYS ? scores.length : job.queries) || from >= stop) head = stop_head;
        if constexpr (SUM_DQ) row = (stop - 1) / TILE * TILE, stop = head;
        seek(scores);
    }
    DEVICE bool active() const { return head < stop_head; }
    DEVICE void step() {
        if constexpr (SUM_DQ) {  // stop is the first head
            if (++head < stop_head || row == from) return;
            row -= TILE, head = stop;
        } else {
            row += TILE;
            if (row >= stop) row = from, head++;
        }
    }
    // How many earlier blocks of keys have a pair with the tile, and add to its sums first.
    DEVICE int predecessors(const Scores &scores) const {
        return first / ROWS - (LEFT ? max(0, row + scores.low) / ROWS : 0);
    }
    DEVICE void seek(const Scores &scores) {
        if constexpr (BLOCK_MASK)
            while (active() && scores.skipped(head, BY_KEYS ? row : first, BY_KEYS ? first : row))
                step();
    }
    DEVICE void next(const Scores &scores) {
        step();
        seek(scores);
    }
};

// Statistics of the queries of a lane's scores: BY_KEYS those of its two columns of each part, else
// those of its two rows.
struct Stats {
    float lse[BY_KEYS ? PARTS : 1][2], delta[BY_KEYS ? PARTS : 1][2];

    DEVICE void read(int part, int which, float2 both) {
        lse[part][which] = both.x, delta[part][which] = both.y;
    }
    DEVICE Stat of(int i) const {
        const int part = BY_KEYS ? i / 4 : 0, which = BY_KEYS ? i % 2 : i / 2 % 2;
        return {lse[part][which], delta[part][which], 0};
    }
};

// own_x, own_y   k and v with BY_KEYS, else q and dout; other_x and other_y are the other two
// stats          as attention_delta.cu writes them
// dx, dy         dk and dv with BY_KEYS, else dq and none
// sums           (batch, heads, rows), zeros on entry      slopes   (batch, heads, rows); with
//                VARLEN both are (heads, rows)
//                With SUM_DQ instead: sums of dq, for each tile of stats as in
//                common/dq_sums.cuh; and how many blocks have added to each tile, ints, zeros on
//                entry.
KERNEL(128 * CONSUMERS + 128, 1)
attention_backward_sm90(
    const __grid_constant__ TensorMap own_x, const __grid_constant__ TensorMap own_y,
    const __grid_constant__ TensorMap other_x, const __grid_constant__ TensorMap other_y,
    const float *__restrict__ stats, T *__restrict__ dx, T *__restrict__ dy,
    float *__restrict__ sums, float *__restrict__ slopes, const L *__restrict__ key_lengths,
    const P *__restrict__ starts, const bool *__restrict__ mask, const B *__restrict__ bias,
    const A *__restrict__ alibi, const bool *__restrict__ block_mask,
    unsigned *__restrict__ counter, const __grid_constant__ Work work) {
    extern __shared__ __align__(1024) unsigned char memory[];
    int *const added = reinterpret_cast<int *>(slopes);
    Barriers &barriers = *reinterpret_cast<Barriers *>(memory + SHARED_END);

    const int warp = own_warp(), lane = threadIdx.x % 32, group = warp / 4;
    const Options &options = work.call.options;
    const int heads = options.heads, shared_by = heads / options.kv_heads;
    const int row_heads = BY_KEYS ? options.kv_heads : heads;
    const Operands operands{key_lengths, starts, mask, bias, alibi, block_mask};
    Jobs<ROWS, BY_KEYS> jobs{work.order, options, key_lengths, starts, counter, barriers.job};
    Job job;
    auto first_stat = [&](const Job &job) {  // first row of stats, of head 0
        return VARLEN ? stats_of(starts, job.batch, options.queries)
                      : (long long)job.batch * heads * work.call.stat_rows;
    };
    if (threadIdx.x == 0) {
        init_handover(&barriers.own_full, &barriers.own_empty, 4 * CONSUMERS);
        mbarrier_init(&barriers.landed, 1);
        for (int stage = 0; stage < STAGES; stage++)
            init_handover(&barriers.full[stage], &barriers.empty[stage], 4 * CONSUMERS);
        init_handover(&barriers.job.full, &barriers.job.empty,
                      4 * CONSUMERS + (SUM_DQ ? WRITERS : 0));
        if constexpr (SUM_DQ) {
            for (int i = 0; i < WRITERS; i++) mbarrier_init(&barriers.dq_full[i], 4 * CONSUMERS);
            mbarrier_init(&barriers.dq_empty, 1);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (group == CONSUMERS) {  // one warp loads
        setmaxnreg_dec<PRODUCER>();
        if constexpr (SUM_DQ) {
            const int writer = warp - 4 * CONSUMERS - 1;
            if (writer >= WRITERS) return;
            if (writer >= 0) {  // two warps add to dq, of every other tile each
                int count = 0;
                while (jobs.read(job)) {
                    const Scores scores(options, operands, job.queries, job.keys, job.batch);
                    for (Walk walk(scores, job, shared_by); walk.active();
                         walk.next(scores), count++) {
                        if (lane != 0 || count % WRITERS != writer) continue;
                        const long long tile =
                            (first_stat(job) + (long long)walk.head * work.call.stat_rows +
                             walk.row) /
                            TILE;
                        const int earlier = walk.predecessors(scores);
                        while (load_acquire(added + tile) != earlier) {}
                        fence_proxy_async_global();
                        mbarrier_wait(&barriers.dq_full[writer], count / WRITERS % 2);
                        float *const to = sums + tile * (DQ_BYTES / (int)sizeof(float));
                        if (earlier == 0) bulk_store(to, memory + DQ_AT, DQ_BYTES);
                        else bulk_add(to, memory + DQ_AT, DQ_BYTES);
                        tma_store_commit();
                        tma_store_wait_read<0>();
                        mbarrier_arrive(&barriers.dq_empty);
                        tma_store_wait<0>();
                        store_release(added + tile, earlier + 1);
                    }
                }
                return;
            }
        } else {
            if (warp > 4 * CONSUMERS) return;
        }
        Cursor at;
        int job_phase = 0;
        Landing landing{&barriers.landed};
        while (jobs.take(job)) {
            const Scores scores(options, operands, job.queries, job.keys, job.batch);
            Walk walk(scores, job, shared_by);
            if (!walk.active()) continue;
            const int batch = VARLEN ? 0 : job.batch;
            const int first_own = BY_KEYS ? job.first_key : job.first_query;
            const int first_other = BY_KEYS ? job.first_query : job.first_key;
            // rows from `real` on are cleared once they have arrived
            auto load = [&](unsigned char *x, const TensorMap &x_map, unsigned char *y,
                            const TensorMap &y_map, bool both, int rows, int bytes, uint64_t *full,
                            int head, int row, int real, auto also) {
                uint64_t *const barrier = real < rows ? &barriers.landed : full;
                if (lane == 0) mbarrier_arrive_expect_tx(barrier, bytes);
                load_panels(x, x_map, barrier, panels(DIM), rows, head, row, batch);
                if (both) load_panels(y, y_map, barrier, panels(VALUE_DIM), rows, head, row, batch);
                also(barrier);
                if (real >= rows) return;
                landing.settle(full, [&] {
                    clear_rows(x, panels(DIM), rows, real);
                    if (both) clear_rows(y, panels(VALUE_DIM), rows, real);
                });
            };

            mbarrier_wait(&barriers.own_empty, job_phase ^ 1);
            job_phase ^= 1;
            load(memory, own_x, memory + OWN_X, own_y, DX, ROWS, OWN_X + OWN_Y, &barriers.own_full,
                 job.head, first_own + job.first_row,
                 BY_KEYS && (LENGTHS || (VARLEN && SUM_DQ)) ? scores.length - job.first_row : ROWS,
                 [](uint64_t *) {});
            for (; walk.active(); walk.next(scores)) {
                unsigned char *const x = memory + RING_AT + at.stage * (X_BYTES + Y_BYTES);
                const bool some = VARLEN || (LENGTHS && !BY_KEYS);
                const int real = BY_KEYS ? job.queries : scores.length;
                const int head = BY_KEYS ? walk.head : walk.head / shared_by;
                mbarrier_wait(&barriers.empty[at.stage], at.phase ^ 1);
                load(x, other_x, x + X_BYTES, other_y, true, TILE, X_BYTES + Y_BYTES + STAT_BYTES,
                     &barriers.full[at.stage], head, first_other + walk.row,
                     some ? real - walk.row : TILE, [&](uint64_t *barrier) {
                         if (BY_KEYS && lane == 0)
                             bulk_load(memory + STATS_AT + at.stage * STAT_BYTES,
                                       stats + 2 * (first_stat(job) + walk.row +
                                                    (long long)walk.head * work.call.stat_rows),
                                       STAT_BYTES, barrier);
                     });
                at.next();
            }
        }
        return;
    }

    setmaxnreg_inc<REGISTERS>();
    const Operand rows_x(memory + group * 64 * PANEL_ROW, 16);
    const Operand rows_y(memory + OWN_X + group * 64 * PANEL_ROW, 16);
    // the columns of k for this warpgroup's columns of dq
    constexpr int COLUMNS = half_columns(DIM);
    const Operand keys(
        memory + (COLUMNS == PANEL ? group * ROWS * PANEL_ROW : group * COLUMNS * (int)sizeof(T)),
        ROWS * PANEL_ROW);
    Cursor at;                     // of the tile whose scores are next
    int job_phase = 0, count = 0;  // count: tiles of dq
    while (jobs.read(job)) {
        const Scores scores(options, operands, job.queries, job.keys, job.batch);
        Walk walk(scores, job, shared_by);
        const int rows = BY_KEYS ? job.keys : job.queries;
        const int first_row = job.first_row + group * 64, top = first_row + warp % 4 * 16;

        float sum_x[product_columns(DIM) / 2] = {};
        float sum_y[product_columns(VALUE_DIM) / 2] = {};
        float s[TILE / 2], g[TILE / 2], steep[1][PARTS][4];
        float part[COLUMNS / 2];  // this warpgroup's columns of a tile of dq
        uint32_t p[STEPS][4], ds[STEPS][4];
        float sum[2] = {}, slope[2] = {};
        Stats known;
        if constexpr (!BY_KEYS)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = min(top + half * 8 + lane / 4, rows - 1);
                const long long from =
                    first_stat(job) + (long long)job.head * work.call.stat_rows + row;
                known.read(0, half, *reinterpret_cast<const float2 *>(stats + from * 2));
            }
        auto put_sums = [&](float *to, float (&from)[2], int head) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = top + half * 8 + lane / 4;
                const float total = quad_sum(from[half]);
                if (lane % 4 == 0 && row < rows)
                    to[VARLEN ? (long long)head * (BY_KEYS ? options.keys : options.queries) +
                                    (BY_KEYS ? job.first_key : job.first_query) + row
                              : (long long)(job.batch * heads + head) * rows + row] = total;
                from[half] = 0;
            }
        };
        auto begin = [&] {  // g starts at -delta: products of dout and v are added to it
            if constexpr (BY_KEYS)
#pragma unroll
                for (int n = 0; n < PARTS; n++) {
                    const float4 both = reinterpret_cast<const float4 *>(
                        memory + STATS_AT + at.stage * STAT_BYTES)[n * 4 + lane % 4];
                    known.read(n, 0, {both.x, both.y});
                    known.read(n, 1, {both.z, both.w});
                }
            if constexpr (DX) {
#pragma unroll
                for (int i = 0; i < TILE / 2; i++) g[i] = -known.of(i).delta;
                wgmma_name(g);
            }
        };
        auto issue_scores = [&] {
            wgmma_fence(s);
            begin_scores<T, padded(DIM), ROWS>(
                s, rows_x, Operand(memory + RING_AT + at.stage * (X_BYTES + Y_BYTES), 16));
        };
        auto issue_gradients = [&] {
            wgmma_fence(g);
            begin_scores<T, padded(VALUE_DIM), ROWS>(
                g, rows_y, Operand(memory + RING_AT + at.stage * (X_BYTES + Y_BYTES) + X_BYTES, 16),
                true);
        };
        auto differentiate = [&](int column) {
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) {
                const int n = i / 4, half = i / 2 % 2;
                g[i] *= s[i];
                if constexpr (SUM) sum[half] += g[i];
                if constexpr (SLOPE) {
                    const int own_row = top + half * 8 + lane / 4;
                    const int other = column + n * 8 + lane % 4 * 2 + i % 2;
                    slope[half] -= g[i] * abs(other - own_row - scores.origin);
                }
                if constexpr (SOFTCAP) g[i] *= steep[0][n][i % 4];
            }
        };
        // store ds for the other warpgroup, multiply the ds of all keys by k, and store the result
        // for the warps that add it to dq
        auto add_queries = [&] {
            unsigned char *const both = memory + DS_AT + count % 2 * DS_BYTES;
            put_operand(both + group * 64 * PANEL_ROW, ds);
            fence_proxy_async();
            wgmma_free<1>(sum_y, p);
            named_barrier_sync(1, 128 * CONSUMERS);
            wgmma_fence(part);
            begin_transposed<T, ROWS / 16>(part, Operand(both, 16), keys);
            wgmma_free<0>(sum_x, ds);
            wgmma_name(part);
            mbarrier_wait(&barriers.dq_empty, count % 2 ^ 1);
            float4 *const to = reinterpret_cast<float4 *>(memory + DQ_AT) +
                               group * TILE * COLUMNS / 4 + threadIdx.x % 128;
#pragma unroll
            for (int i = 0; i < COLUMNS / 8; i++)
                to[i * 128] = {part[i * 4], part[i * 4 + 1], part[i * 4 + 2], part[i * 4 + 3]};
            fence_proxy_async();
            __syncwarp();
            release(&barriers.dq_full[count % WRITERS]);
            count++;
        };
        if (walk.active()) {
            mbarrier_wait(&barriers.own_full, job_phase);
            job_phase ^= 1;
            mbarrier_wait(&barriers.full[at.stage], at.phase);
            int stage;
            begin();
            issue_scores();
            if constexpr (DX) issue_gradients();
            while (true) {
                const int head = walk.head, here = walk.row, last = here + TILE - 1;
                stage = at.stage;
                unsigned char *const x = memory + RING_AT + stage * (X_BYTES + Y_BYTES);
                at.next();
                walk.next(scores);
                wgmma_wait<DX>(s);
                const bool edge =
                    BY_KEYS ? scores.any_hidden(here, last, first_row, first_row + 63)
                            : scores.any_hidden(first_row, first_row + 63, here, last);
                if (edge) {  // a branch, because most tiles need no comparison of positions
                    scores.score<BY_KEYS>(parts_of(s), steep, head, top, here, true);
                    wgmma_name(s);
                } else {
                    scores.score<BY_KEYS>(parts_of(s), steep, head, top, here, false);
                }
#pragma unroll
                for (int i = 0; i < TILE / 2; i++)
                    s[i] = probability(s[i], scores.unit, known.of(i));
                wgmma_name(s);
                // the wait has a branch: exponentials stay before it, and overlap the products
                if (walk.active()) mbarrier_wait(&barriers.full[at.stage], at.phase);
                if constexpr (DX) {
                    wgmma_wait<0>(g);
                    differentiate(here);
                }
                if constexpr (DY) {
                    narrow<T>(p, s);
                    wgmma_fence(sum_y);
                    begin_values<T>(sum_y, p, Operand(x + X_BYTES, TILE * PANEL_ROW));
                }
                if constexpr (DX) {
                    narrow<T>(ds, g);
                    wgmma_fence(sum_x);
                    begin_values<T>(sum_x, ds, Operand(x, TILE * PANEL_ROW));
                }
                if constexpr (SUM_DQ) {
                    add_queries();
                    release(&barriers.empty[stage]);
                }
                if constexpr (SUM && BY_KEYS)
                    if (walk.head != head) put_sums(sums, sum, head);
                if constexpr (BY_KEYS && !SUM_DQ) __syncwarp();  // all lanes have read the stats
                if (!walk.active()) break;

                if constexpr (DX && DY && !SUM_DQ) wgmma_free<1>(sum_y, p);
                begin();
                issue_scores();
                if constexpr (!SUM_DQ) {
                    if constexpr (DX) wgmma_free<1>(sum_x, ds);
                    else wgmma_free<1>(sum_y, p);
                    release(&barriers.empty[stage]);
                }
                if constexpr (DX) issue_gradients();
            }
            release(&barriers.own_empty);
            if constexpr (!SUM_DQ) {
                if constexpr (DX) wgmma_wait<0>(sum_x);
                if constexpr (DY) wgmma_wait<0>(sum_y);
                release(&barriers.empty[stage]);
            }
        }
        if constexpr (SUM && !BY_KEYS) put_sums(sums, sum, job.head);
        if constexpr (SLOPE) put_sums(slopes, slope, job.head);
        const long long first_own =
            !VARLEN   ? (long long)job.batch * rows
            : BY_KEYS ? job.first_key
                      : job.first_query;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = top + half * 8 + lane / 4;
            const long long to = (first_own + row) * row_heads + job.head;
            if constexpr (DX)
                put_row_of_lanes(dx + to * DIM, sum_x, half, work.call.scale, row < rows, DIM);
            if constexpr (DY)
                put_row_of_lanes(dy + to * VALUE_DIM, sum_y, half, 1.0f, row < rows, VALUE_DIM);
        }
    }
}
