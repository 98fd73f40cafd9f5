// Jobs of attention on warpgroups: rows of a head that a block owns, and tiles that pass by.  A
// block stays for many jobs, the longest first, and one warp of it brings what they read.
#pragma once
#include "common/segment.cuh"
#include "common/warpgroup.cuh"

// A place in a ring of stages, and how often it came round, modulo 2.
template <int STAGES> struct Ring {
    int stage = 0, phase = 0;
    __device__ __forceinline__ void next() {
        stage++;
        if (stage == STAGES) stage = 0, phase ^= 1;
    }
};

// Which job comes when.
struct Order {
    int row_blocks;  // of a head, over all sequences
    int heads;       // whose rows are owned, of all batches; of one with VARLEN
    int together;    // heads that are worked on until all their rows are done: what passes by them
                     // stays in L2
};
// One way and back: who had the longest of a round has the shortest of the next.
__device__ __forceinline__ int turn_of(int round) {
    const int place = round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * (int)gridDim.x + place;
}

// ROWS queries of a head or, BY_KEYS, ROWS keys; the sequence that they are of.
struct Job {
    int head, batch, first_row, queries, keys, first_query, first_key, index;
    bool there;
};
template <int ROWS, bool BY_KEYS>
__device__ __forceinline__ Job job_of(int index, const Order &order, const Options &options,
                                      const L *key_lengths, const P *starts) {
    const int group = index / (order.together * order.row_blocks);
    const int own = index - group * order.together * order.row_blocks;
    const int first_head = group * order.together;
    const int heads = min(order.together, order.heads - first_head);
    // with RIGHT the last queries see most keys, and the first keys are seen by most queries
    const int row_block = BY_KEYS ? own / heads : order.row_blocks - 1 - own / heads;
    const int head = first_head + own % heads;
    const int of_batch = BY_KEYS ? options.kv_heads : options.heads;
    Job job{head % of_batch, head / of_batch, row_block * ROWS, options.queries, options.keys,
            0,               0,               index, true};
    if constexpr (VARLEN) {
        const Segment found =
            BY_KEYS ? segment<ROWS>(key_lengths, options.sequences, options.keys, row_block)
                    : segment<ROWS>(starts, options.sequences, options.queries, row_block);
        job.there = found.sequence >= 0;
        if (job.there) {
            const Run rows = run_of(starts, found.sequence, options.queries);
            const Run columns = run_of(key_lengths, found.sequence, options.keys);
            job.batch = found.sequence, job.first_row = found.tile * ROWS;
            job.first_query = rows.first, job.first_key = columns.first;
            job.queries = rows.count, job.keys = columns.count;
        }
    }
    return job;
}

// The jobs of a block, one after another.
template <int ROWS, bool BY_KEYS> struct Jobs {
    const Order &order;
    const Options &options;
    const L *key_lengths;
    const P *starts;
    int round = 0;

    // The next job that there is, by the numbers that `number` gives; false where none is left.
    template <class F> __device__ __forceinline__ bool next(Job &job, F number) {
        const int jobs = order.row_blocks * order.heads;
        for (int at; (at = number()) < jobs;) {
            job = job_of<ROWS, BY_KEYS>(at, order, options, key_lengths, starts);
            if (job.there) return true;
        }
        return false;
    }
    __device__ __forceinline__ bool next(Job &job) {
        return next(job, [&] { return turn_of(round++); });
    }
    // The same job, found once more: what is known of it fills no registers in between.
    __device__ __forceinline__ Job again(const Job &job) const {
        const int index = (int)opaque((uint32_t)job.index);
        return job_of<ROWS, BY_KEYS>(index, order, options, key_lengths, starts);
    }
};

// One barrier counts the bytes of a tile that come, the other the warps that have done with it.
__device__ __forceinline__ void init_handover(uint64_t *full, uint64_t *empty, int warps) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, warps);
}
__device__ __forceinline__ void release(uint64_t *empty) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// Ask for the panels of a tile of `rows` rows, by the first lane of a warp.
__device__ __forceinline__ void load_panels(unsigned char *to, const TensorMap &map, uint64_t *full,
                                            int count, int rows, int head, int row, int batch) {
    if (threadIdx.x % 32 == 0)
        for (int panel = 0; panel < count; panel++)
            tma_load_4d(to + panel * rows * PANEL_ROW, &map, full, panel * PANEL, head, row, batch);
}

// Write 0 over the rows of a tile that nobody may see, once they are there: 0 times NaN is NaN.
__device__ __forceinline__ void clear_rows(unsigned char *tile, int count, int rows, int real) {
    for (int panel = 0; panel < count; panel++)
        for (int i = real * 8 + threadIdx.x % 32; i < rows * 8; i += 32)
            reinterpret_cast<uint4 *>(tile)[panel * rows * 8 + i] = {};
}

// Where tiles land of which a part is cleared before those who compute may see them.
struct Landing {
    uint64_t *landed;
    int phase = 0;

    // Once the bytes are there, clear what `clear` clears, and say that the tile is full.
    template <class F> __device__ __forceinline__ void settle(uint64_t *full, F clear) {
        mbarrier_wait(landed, phase);
        phase ^= 1;
        clear();
        fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full);
    }
};
