// The stable order of assignments by their expert, and where each expert's part begins.
//
//   experts[order[p]] does not decrease with p, and order increases where it stays the same
//   offsets[e] is the first p of expert e, offsets[COUNT] the number of valid assignments
//   places[order[p]] = p, or -1 if the expert is outside of 0 .. COUNT - 1: those come last
//
//   traffic     assignments * (2 * sizeof(I) + 8) bytes, + blocks * COUNT * 4 read by each block
//   constants   I         dtype of experts
//               COUNT     experts
//               STEPS     times 32 assignments of a warp
//               WARPS     warps of a block
//               PLACES    whether places are written
//               PARTS     whether there are several blocks, whose counts a first kernel wrote
//
//   The trick: a warp owns a run of assignments and a counter of each expert in shared memory.  The
//   lanes of a step that have the same expert find each other by one vote for each bit of its
//   number, so that each knows how many come before it: no atomics, and the order is that of the
//   run.  Counters start at the sum of all that comes before, which each block adds up itself.
#include <common/device.cuh>
#include <common/faults.cuh>

constexpr int THREADS = 32 * WARPS, BINS = COUNT + 1;  // the last bin: experts that do not exist

constexpr int bits(int bins) { return bins <= 1 ? 0 : 1 + bits((bins + 1) / 2); }

// The lanes of this warp that have the same bin.
DEVICE unsigned same(int bin) {
    unsigned mask = 0xffffffffu;
#pragma unroll
    for (int bit = 0; bit < bits(BINS + 1); bit++) {
        const bool set = bin >> bit & 1;
        const unsigned those = __ballot_sync(0xffffffffu, set);
        mask &= set ? those : ~those;
    }
    return mask;
}

// The bin of an assignment; BINS past the end.
DEVICE int bin_of(const I *experts, long long at, int assignments) {
    if (at >= assignments) return BINS;
    const long long expert = experts[at];
    return expert >= 0 && expert < COUNT ? (int)expert : COUNT;
}

// Count the assignments of each warp's run, in counters[warp][bin].
DEVICE void count(int (&counters)[WARPS][BINS], const I *experts, int assignments) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int i = threadIdx.x; i < WARPS * BINS; i += THREADS) counters[i / BINS][i % BINS] = 0;
    __syncthreads();
    const long long first = ((long long)blockIdx.x * WARPS + warp) * (STEPS * 32);
    for (int step = 0; step < STEPS && first + step * 32 < assignments; step++) {
        const int bin = bin_of(experts, first + step * 32 + lane, assignments);
        const unsigned mates = same(bin);
        const bool lowest = (mates & ((1u << lane) - 1)) == 0;
        if (bin < BINS && lowest) counters[warp][bin] += __popc(mates);
        __syncwarp();
    }
    __syncthreads();
}

KERNEL(THREADS)
sort_counts(const I *__restrict__ experts, int *__restrict__ counts, int assignments) {
    __shared__ int counters[WARPS][BINS];
    count(counters, experts, assignments);
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += counters[w][bin];
        counts[blockIdx.x * BINS + bin] = sum;
    }
}

KERNEL(THREADS)
sort_by_expert(const I *__restrict__ experts, const int *__restrict__ counts,
               int *__restrict__ order, int *__restrict__ offsets, int *__restrict__ places,
               long long *__restrict__ faults, long long who, int assignments) {
    __shared__ int counters[WARPS][BINS], totals[BINS], sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    count(counters, experts, assignments);
    // counters become the number of assignments of the bin in earlier runs; totals those of all
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
        int before = 0, total = 0;
        if constexpr (PARTS)
            for (int block = 0; block < gridDim.x; block++) {
                const int some = counts[block * BINS + bin];
                if (block < blockIdx.x) before += some;
                total += some;
            }
        for (int w = 0; w < WARPS; w++) {
            const int own = counters[w][bin];
            counters[w][bin] = before;
            before += own;
        }
        totals[bin] = PARTS ? total : before;
    }
    // where each bin begins: the sum of totals before it; a thread reads those that it wrote
    int start = 0;
    for (int top = 0; top < BINS; top += THREADS) {
        const int bin = top + threadIdx.x, own = bin < BINS ? totals[bin] : 0;
        int sum = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) sums[warp] = sum;
        __syncthreads();
        int all = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            if (w == warp) sum += start + all;
            all += sums[w];
        }
        start += all;
        if (bin < BINS) {
            totals[bin] = sum - own;
            if (blockIdx.x == 0) offsets[bin] = sum - own;
        }
        __syncthreads();
    }
    const long long first = ((long long)blockIdx.x * WARPS + warp) * (STEPS * 32);
    for (int step = 0; step < STEPS && first + step * 32 < assignments; step++) {
        const long long at = first + step * 32 + lane;
        const int bin = bin_of(experts, at, assignments);
        const unsigned mates = same(bin), earlier = mates & ((1u << lane) - 1);
        const int start_of_bin = bin < BINS ? totals[bin] + counters[warp][bin] : 0;
        __syncwarp();  // all lanes have read the counter
        if (bin < BINS) {
            const int place = start_of_bin + __popc(earlier);
            if (earlier == 0) counters[warp][bin] += __popc(mates);
            order[place] = (int)at;
            if constexpr (PLACES) places[at] = bin < COUNT ? place : -1;
            if (bin == COUNT) report(faults, who, at, experts[at], COUNT);
        }
        __syncwarp();
    }
}
