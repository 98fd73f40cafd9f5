// Scheduling of attention on warpgroups.  A job is a tile of rows of one head, which a block owns,
// and all the tiles of columns that the rows are multiplied with.  A block is persistent: it takes
// one job after another from a counter, the longest first, so that all blocks end at about the same
// time; one of its warps loads the tiles.
#pragma once
#include <common/ring.cuh>
#include <common/segment.cuh>
#include <common/warpgroup.cuh>

// The order of the jobs.
struct Order {
    int row_blocks;   // tiles of rows of a head, over all sequences
    int heads;        // heads that rows are taken from, of all batches; with VARLEN of one
    int heads_in_l2;  // heads of a group; the jobs of a group come before those of the next, so
                      // that the tiles of their columns stay in L2
};
// A job: ROWS queries of a head or, with BY_KEYS, ROWS keys, and the sequence that they belong to.
struct Job {
    int head, batch, first_row, queries, keys, first_query, first_key, index;
    bool exists;
};
template <int ROWS, bool BY_KEYS>
DEVICE Job job_of(int index, const Order &order, const Options &options, const L *key_lengths,
                  const P *starts) {
    const int group = index / (order.heads_in_l2 * order.row_blocks);
    const int index_in_group = index - group * order.heads_in_l2 * order.row_blocks;
    const int first_head = group * order.heads_in_l2;
    const int heads = min(order.heads_in_l2, order.heads - first_head);
    // with RIGHT the last queries see the most keys, and the most queries see the first keys
    const int row_block =
        BY_KEYS ? index_in_group / heads : order.row_blocks - 1 - index_in_group / heads;
    const int head = first_head + index_in_group % heads;
    const int of_batch = BY_KEYS ? options.kv_heads : options.heads;
    Job job{head % of_batch, head / of_batch, row_block * ROWS, options.queries, options.keys};
    job.index = index, job.exists = true;
    if constexpr (VARLEN) {
        const Segment segment_of_rows =
            BY_KEYS ? segment<ROWS>(key_lengths, options.sequences, options.keys, row_block)
                    : segment<ROWS>(starts, options.sequences, options.queries, row_block);
        job.exists = segment_of_rows.sequence >= 0;
        if (job.exists) {
            const Run rows = run_of(starts, segment_of_rows.sequence, options.queries);
            const Run columns = run_of(key_lengths, segment_of_rows.sequence, options.keys);
            job.batch = segment_of_rows.sequence, job.first_row = segment_of_rows.tile * ROWS;
            job.first_query = rows.first, job.first_key = columns.first;
            job.queries = rows.count, job.keys = columns.count;
        }
    }
    return job;
}

// The index of a block's next job, in shared memory: the warp that loads takes it from the counter,
// the other warps read it.
struct Handout {
    uint64_t full, empty;
    int index;
};

// The jobs of a block, one after another.
template <int ROWS, bool BY_KEYS> struct Jobs {
    const Order &order;
    const Options &options;
    const L *key_lengths;
    const P *starts;
    unsigned *counter;  // of jobs that blocks have taken: 0 before a launch and after it
    Handout &handout;
    int phase = 0;

    // Take the next non-empty job from the counter; return false where none is left.  For the warp
    // that loads.
    DEVICE bool take(Job &job) {
        return next(job, [&] {
            mbarrier_wait(&handout.empty, phase ^ 1);
            phase ^= 1;
            int index = 0;
            if (threadIdx.x % 32 == 0) {
                handout.index = index = (int)atomicAdd(counter, 1u);
                // each block takes one index past the end, of which this is the last
                if (index == count() + (int)gridDim.x - 1) *counter = 0;
                mbarrier_arrive(&handout.full);
            }
            return __shfl_sync(0xffffffffu, index, 0);
        });
    }
    // Read which job the block has taken; return false where none is left.  For the other warps.
    DEVICE bool read(Job &job) {
        return next(job, [&] {
            mbarrier_wait(&handout.full, phase);
            phase ^= 1;
            const int index = handout.index;
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(&handout.empty);
            return index;
        });
    }
    template <class F> DEVICE bool next(Job &job, F next_index) {
        for (int index; (index = next_index()) < count();) {
            job = job_of<ROWS, BY_KEYS>(index, order, options, key_lengths, starts);
            if (job.exists) return true;
        }
        return false;
    }
    DEVICE int count() const { return order.row_blocks * order.heads; }
    // The same job, computed again, so that its fields need no registers in between.
    DEVICE Job again(const Job &job) const {
        const int index = (int)opaque((uint32_t)job.index);
        return job_of<ROWS, BY_KEYS>(index, order, options, key_lengths, starts);
    }
};

// Start the TMA loads of a tile of `rows` rows, panel by panel, from the first lane of a warp.
DEVICE void load_panels(unsigned char *to, const TensorMap &map, uint64_t *full, int count,
                        int rows, int head, int row, int batch) {
    if (threadIdx.x % 32 == 0)
        for (int panel = 0; panel < count; panel++)
            tma_load_4d(to + panel * rows * PANEL_ROW, &map, full, panel * PANEL, head, row, batch);
}

// Write 0 over the rows of a tile from `real` on, which are outside of the sequence, once they have
// arrived: a probability of 0 times NaN would be NaN.
DEVICE void clear_rows(unsigned char *tile, int count, int rows, int real) {
    for (int panel = 0; panel < count; panel++)
        for (int i = real * 8 + threadIdx.x % 32; i < rows * 8; i += 32)
            reinterpret_cast<uint4 *>(tile)[panel * rows * 8 + i] = {};
}

// A barrier for tiles of which a part is cleared before the computing warps may read them.
struct Landing {
    uint64_t *landed;
    int phase = 0;

    // Wait for the bytes, call clear(), and signal that the tile is full.
    template <class F> DEVICE void settle(uint64_t *full, F clear) {
        mbarrier_wait(landed, phase);
        phase ^= 1;
        clear();
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    }
};
