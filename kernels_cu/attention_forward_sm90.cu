// Attention forward on Hopper: out = softmax(score) @ v and lse = log(sum(exp(score))), row by row,
// with the scores of attention_forward.cu, by warpgroup products (wgmma) of tiles that the tensor
// memory accelerator (TMA) loads.
//
//   traffic     that of attention_forward.cu
//   constants   those of common/attention.cuh, and
//               T, S             dtypes of q, k, v and out, of 16 bits; of sinks
//               DIM, VALUE_DIM   columns of q and k, of v: multiples of 8 up to 256
//               CONSUMERS        warpgroups that compute, of 64 queries each
//               TILE             keys of a stage
//               STAGES           stages of the rings of keys and of values
//               REGISTERS        registers of a thread that computes; PRODUCER, of one that loads
//   There is no dropout.
//
//   The trick: computing warps never load, and tensor cores never wait for exp2.  A separate warp
//   loads the tiles.  A warpgroup issues the score products of the next tile together with the
//   value products of this one, and works on the former while tensor cores are busy with the
//   latter.  Warpgroups alternate in issuing, so that one has products under way while another
//   exponentiates.  Probabilities are an operand in the registers where they were computed.  Blocks
//   are persistent and take jobs from a counter, the longest first; the queries of the next job are
//   loaded while the last values are multiplied.
#include <common/attention.cuh>
#include <common/jobs.cuh>

static_assert(!DROPOUT);
constexpr int ROWS = 64 * CONSUMERS, PARTS = TILE / 8, STEPS = TILE / 16;
constexpr int COLUMNS = product_columns(VALUE_DIM);
constexpr int QUERY_BYTES = panels(DIM) * ROWS * PANEL_ROW;
constexpr int KEY_BYTES = panels(DIM) * TILE * PANEL_ROW;
constexpr int VALUE_BYTES = panels(VALUE_DIM) * TILE * PANEL_ROW;
constexpr int SHARED_END = QUERY_BYTES + STAGES * (KEY_BYTES + VALUE_BYTES);

// The barriers, stored after the tiles.  `full`: the bytes have arrived; `empty`: every warp is
// done with them.
struct Barriers {
    uint64_t queries_full, queries_empty, landed;
    Handout job;
    uint64_t keys_full[STAGES], keys_empty[STAGES], values_full[STAGES], values_empty[STAGES];
};

using Cursor = Ring<STAGES>;

struct Tiles {
    int first, last;  // iterated from the last one down: masks hide the most pairs in the last ones
    DEVICE Tiles(const Scores &scores, const Job &job) {
        const Range seen = scores.seen<false, ROWS>(job.first_row);
        first = seen.from / TILE;
        last = next(scores, job, (max(seen.stop, 0) + TILE - 1) / TILE);
    }
    // The last tile before this one that some row sees; less than `first` if none is left.
    DEVICE int next(const Scores &scores, const Job &job, int tile) const {
        tile--;
        if constexpr (BLOCK_MASK)
            while (tile >= first && scores.skipped(job.head, job.first_row, tile * TILE)) tile--;
        return tile;
    }
};

KERNEL(128 * CONSUMERS + 128, 1)
attention_forward_sm90(
    const __grid_constant__ TensorMap queries_map, const __grid_constant__ TensorMap keys_map,
    const __grid_constant__ TensorMap values_map, const S *__restrict__ sinks, T *__restrict__ out,
    float *__restrict__ lse, const L *__restrict__ key_lengths, const P *__restrict__ starts,
    const bool *__restrict__ mask, const B *__restrict__ bias, const A *__restrict__ alibi,
    const bool *__restrict__ block_mask, unsigned *__restrict__ counter,
    const __grid_constant__ Options options, const __grid_constant__ Order order) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char *const keys_at = memory + QUERY_BYTES;
    unsigned char *const values_at = keys_at + STAGES * KEY_BYTES;
    Barriers &barriers = *reinterpret_cast<Barriers *>(memory + SHARED_END);

    const int warp = own_warp(), lane = threadIdx.x % 32, group = warp / 4;
    const int heads = options.heads, shared_by = heads / options.kv_heads;
    const Operands operands{key_lengths, starts, mask, bias, alibi, block_mask};
    Jobs<ROWS, false> jobs{order, options, key_lengths, starts, counter, barriers.job};
    Job job;
    if (threadIdx.x == 0) {
        init_handover(&barriers.queries_full, &barriers.queries_empty, 4 * CONSUMERS);
        init_handover(&barriers.job.full, &barriers.job.empty, 4 * CONSUMERS);
        mbarrier_init(&barriers.landed, 1);
        for (int stage = 0; stage < STAGES; stage++) {
            init_handover(&barriers.keys_full[stage], &barriers.keys_empty[stage], 4 * CONSUMERS);
            init_handover(&barriers.values_full[stage], &barriers.values_empty[stage],
                          4 * CONSUMERS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();

    if (group == CONSUMERS) {  // one warp loads
        setmaxnreg_dec<PRODUCER>();
        if (warp > 4 * CONSUMERS) return;
        Cursor at;
        int job_phase = 0;
        Landing landing{&barriers.landed};
        while (jobs.take(job)) {
            const Scores scores(options, operands, job.queries, job.keys, job.batch);
            const Tiles tiles(scores, job);
            if (tiles.last < tiles.first) continue;
            const int batch = VARLEN ? 0 : job.batch, kv_head = job.head / shared_by;

            mbarrier_wait(&barriers.queries_empty, job_phase ^ 1);
            if (lane == 0) mbarrier_arrive_expect_tx(&barriers.queries_full, QUERY_BYTES);
            load_panels(memory, queries_map, &barriers.queries_full, panels(DIM), ROWS, job.head,
                        job.first_query + job.first_row, batch);
            job_phase ^= 1;
            for (int tile = tiles.last; tile >= tiles.first; tile = tiles.next(scores, job, tile)) {
                const int row = job.first_key + tile * TILE;
                uint64_t *const keys_full = &barriers.keys_full[at.stage];
                mbarrier_wait(&barriers.keys_empty[at.stage], at.phase ^ 1);
                if (lane == 0) mbarrier_arrive_expect_tx(keys_full, KEY_BYTES);
                load_panels(keys_at + at.stage * KEY_BYTES, keys_map, keys_full, panels(DIM), TILE,
                            kv_head, row, batch);

                unsigned char *const values = values_at + at.stage * VALUE_BYTES;
                const int real = scores.length - tile * TILE;  // rows of the tile that are keys
                const bool clear = (LENGTHS || VARLEN) && real < TILE;
                uint64_t *const values_full = &barriers.values_full[at.stage];
                uint64_t *const barrier = clear ? &barriers.landed : values_full;
                mbarrier_wait(&barriers.values_empty[at.stage], at.phase ^ 1);
                if (lane == 0) mbarrier_arrive_expect_tx(barrier, VALUE_BYTES);
                load_panels(values, values_map, barrier, panels(VALUE_DIM), TILE, kv_head, row,
                            batch);
                if (clear) {  // rows past the end may hold NaN, and 0 times NaN is NaN
                    landing.settle(values_full,
                                   [&] { clear_rows(values, panels(VALUE_DIM), TILE, real); });
                }
                at.next();
            }
        }
        return;
    }

    setmaxnreg_inc<REGISTERS>();
    const int own_barrier = 1 + group, next_barrier = 1 + (group + 1) % CONSUMERS;
    const unsigned char *const own_rows = memory + group * 64 * PANEL_ROW;
    const Operand own_queries(own_rows, 16);
    constexpr bool ANEW = BLOCK_MASK && DIM > 192;  // recompute own_queries: it would be spilled
    Cursor at;  // of the tile whose scores are next; its values are multiplied an iteration later
    int job_phase = 0;
    if (group == CONSUMERS - 1) named_barrier_arrive(1, 256);  // lets warpgroup 0 issue first
    while (jobs.read(job)) {
        const Scores scores(options, operands, job.queries, job.keys, job.batch);
        const Tiles tiles(scores, job);
        const int top_row = job.first_row + warp * 16, first_row = top_row & ~63;

        float o[COLUMNS / 2] = {}, s[TILE / 2], steep[1][PARTS][4];
        uint32_t p[STEPS][4];
        float top[2] = {NO_SCORE, NO_SCORE}, sum[2] = {0, 0};  // sum: of this lane's columns
        float by[2];
        bool moved = false;
        auto shift = [&](int half) { return shift_of(top[half], scores.unit); };
        // Turn products into probabilities; `moved`: earlier sums must be scaled by `by`.
        auto update_softmax = [&](int tile, bool edge) {
            scores.score<false, LEFT>(parts_of(s), steep, job.head, top_row, tile * TILE, edge);
            const float before[2] = {top[0], top[1]};
#pragma unroll
            for (int half = 0; half < 2; half++)
                top[half] = row_max(top[half], parts_of(s)[0], half);
            const bool grown = before[0] != top[0] || before[1] != top[1];
            moved = __any_sync(0xffffffffu, grown);  // seldom, once rows have seen many keys
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float down = shift(half);
                by[half] = rescale_of(before[half], scores.unit, down);
                sum[half] *= by[half];
                sum[half] += exponentiate(parts_of(s)[0], half, scores.unit, down);
            }
        };
        auto issue_scores = [&] {
            wgmma_fence(s);
            begin_scores<T, padded(DIM), ROWS>(s, ANEW ? Operand(own_rows, 16) : own_queries,
                                               Operand(keys_at + at.stage * KEY_BYTES, 16));
        };
        auto issue_values = [&](Cursor of) {
            wgmma_fence(o);
            begin_values<T>(o, p, Operand(values_at + of.stage * VALUE_BYTES, TILE * PANEL_ROW));
        };
        if (tiles.last >= tiles.first) {
            int tile = tiles.last;
            mbarrier_wait(&barriers.queries_full, job_phase);
            mbarrier_wait(&barriers.keys_full[at.stage], at.phase);
            issue_scores();
            wgmma_wait<0>(s);
            release(&barriers.keys_empty[at.stage]);
            auto edge_of = [&](int tile) {
                return scores.any_hidden(first_row, first_row + 63, tile * TILE,
                                         tile * TILE + TILE - 1);
            };
            update_softmax(tile, edge_of(tile));

            // the tile whose probabilities are in s, not yet multiplied
            Cursor of = at;
            uint64_t *done = nullptr;  // barrier to release after the products of values under way
            at.next();
            auto finish = [&] {
                wgmma_wait<0>(o);
                if (done != nullptr) release(done);
                if (moved) {
                    scale_row(parts_of(o)[0], 0, by[0]);
                    scale_row(parts_of(o)[0], 1, by[1]);
                }
                narrow<T>(p, s);
            };
            auto take = [&](int tile, bool edge) {
                // the wait has a branch: exponentials stay before it, and overlap the products
                mbarrier_wait(&barriers.keys_full[at.stage], at.phase);
                finish();
                named_barrier_sync(own_barrier, 256);
                issue_scores();
                mbarrier_wait(&barriers.values_full[of.stage], of.phase);
                issue_values(of);
                named_barrier_arrive(next_barrier, 256);
                done = &barriers.values_empty[of.stage];
                of = at;
                at.next();
                wgmma_wait<1>(s);
                release(&barriers.keys_empty[of.stage]);
                update_softmax(tile, edge);
                wgmma_name(s);
            };
            // tiles whole_from .. whole_to have no hidden pair; a length ends in the last tile
            const int stop = RIGHT ? first_row + scores.high + 1 : scores.length;
            const int whole_to = stop / TILE - 1;
            const int whole_from = LEFT ? (first_row + 63 + scores.low + TILE - 1) / TILE : 0;
            tile = tiles.next(scores, job, tile);
            for (; tile >= tiles.first && tile > whole_to; tile = tiles.next(scores, job, tile))
                take(tile, true);
            for (; tile >= tiles.first; tile = tiles.next(scores, job, tile))
                take(tile, LEFT && tile < whole_from);
            release(&barriers.queries_empty);
            job_phase ^= 1;

            finish();
            mbarrier_wait(&barriers.values_full[of.stage], of.phase);
            issue_values(of);
            wgmma_wait<0>(o);
            release(&barriers.values_empty[of.stage]);
        }

        if constexpr (VARLEN) job = jobs.again(job);
        const long long query = VARLEN ? job.first_query : (long long)job.batch * job.queries;
        T *const to = out + (query * heads + job.head) * VALUE_DIM;
        float *const to_lse =
            lse + (VARLEN ? query : query * heads) + (long long)job.head * options.queries;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = job.first_row + warp * 16 + half * 8 + lane / 4;
            float total = quad_sum(sum[half]), most = level_of(top[half], scores.unit);
            float weight = 1;
            if (sinks != nullptr)
                weight = add_sink(most, scores.unit, total, (float)sinks[job.head]);
            const bool in_range = row < job.queries;
            if (in_range && lane % 4 == 0) to_lse[row] = log_sum_exp(most, scores.unit, total);
            weight = total == 0 ? 0 : weight / total;
            put_row_of_lanes(to + (long long)row * heads * VALUE_DIM, o, half, weight, in_range,
                             VALUE_DIM);
        }
    }
    if (group == 0) named_barrier_sync(1, 256);  // the last arrival, which lets no warpgroup issue
}
