// Before attention backward: the statistics of every query.  After it: sums over batches, heads or
// rows.
//
//   delta = rowsum(dout * out) - dlse
//   sum = sum over batches, heads or rows of numbers that each batch and head has for every row;
//   with SINKS, of -exp(sink - lse) * delta
//
//   traffic     delta: dout and out once; 12 to 16 bytes per row
//   constants   T                    dtype of dout and out
//               G, S                 dtypes of the sum, of sinks
//               VALUE_DIM            columns of dout and out: a multiple of 8
//               ROW_THREADS          a power of two up to 32
//               THREADS              threads of a block
//               FOLD                 lse is stored times log2(e)
//               VARLEN, P            sequences are concatenated, each with its own tiles of stats;
//                                    dtype of their offsets
//               SINKS                the sum is the gradient of the sinks
//               KEEP_BATCH, KEEP_HEADS, KEEP_ROWS   axes that are not summed
#include <common/reduce.cuh>
#include <common/segment.cuh>
#include <common/vector.cuh>

constexpr int LANES = 16 / sizeof(T);
constexpr float LOG2E = 1.4426950408889634f, UNIT = FOLD ? LOG2E : 1.0f;

// stats   (batch, heads, stat_rows, 2): lse * UNIT, +inf where a query sees no key, and delta;
//         in the padding beyond `queries` +inf and 0, so that p is 0
//         for float32, then (batch, heads, stat_rows): rests, which start as the contribution of a
//         query's sink to the sum of its p
KERNEL(THREADS)
attention_delta(const T *__restrict__ dout, const T *__restrict__ out,
                const float *__restrict__ lse, const float *__restrict__ dlse,
                const S *__restrict__ sinks, float *__restrict__ stats, int heads, int queries,
                int stat_rows, long long count, const P *__restrict__ offsets, int sequences) {
    const long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) / ROW_THREADS;
    const int lane = threadIdx.x % ROW_THREADS;
    const int head = i % heads, row = i / heads % stat_rows;
    const long long batch = i / heads / stat_rows, here = batch * heads + head;
    int query = row, stop = queries;
    if constexpr (VARLEN) {
        const int sequence = sequence_of(offsets, sequences, queries, row);
        const Run run = run_of(offsets, sequence, queries);
        query = run.first + row - stats_of(offsets, sequence, queries);
        stop = run.first + run.count;
    }
    const bool real = i < count && query < stop;
    float sum = 0;
    if (real) {
        const long long from = ((batch * queries + query) * heads + head) * VALUE_DIM;
#pragma unroll 1  // two loads at once would need more registers, with half as many warps resident
        for (int at = lane * LANES; at < VALUE_DIM; at += ROW_THREADS * LANES) {
            float a[LANES], b[LANES];
            load(a, dout + from + at);
            load(b, out + from + at);
#pragma unroll
            for (int j = 0; j < LANES; j++) sum = fmaf(a[j], b[j], sum);
        }
    }
    sum = group_sum<ROW_THREADS>(sum);
    if (i >= count || lane > 0) return;
    const float none = __int_as_float(0x7f800000);
    float total = none;
    if (real) {
        total = __fmul_rn(lse[here * queries + query], UNIT);
        if (total == -none) total = none;
        if (dlse != nullptr) sum -= dlse[here * queries + query];
    }
    *reinterpret_cast<float2 *>(stats + (here * stat_rows + row) * 2) = make_float2(total, sum);
    if constexpr (sizeof(T) == 4)
        stats[2 * count + here * stat_rows + row] =
            sinks == nullptr ? 0 : exp2f(((float)sinks[head] * UNIT - total) * (LOG2E / UNIT));
}

// from   (batch, heads, rows); with VARLEN (heads, rows), and a batch has the rows between its
//        offsets, at most padded_rows; with SINKS stats
// rests  with SINKS, the index of the first rest in stats; 0 for none
// With KEEP_ROWS each thread sums alone; else the threads of a block divide up the rows.
KERNEL(THREADS)
attention_sum(const float *__restrict__ from, const S *__restrict__ sinks, G *__restrict__ to,
              long long rests, int batch, int heads, int rows, const P *__restrict__ offsets,
              int padded_rows) {
    __shared__ Exchange<32> exchange;
    const int kept_rows = VARLEN ? padded_rows : rows;
    const int blocks = KEEP_ROWS ? (kept_rows + THREADS - 1) / THREADS : 1;
    const int own_head = KEEP_HEADS ? blockIdx.x / blocks % heads : 0;
    const int own_batch = KEEP_BATCH ? blockIdx.x / blocks / (KEEP_HEADS ? heads : 1) : 0;
    const int first = KEEP_ROWS ? blockIdx.x % blocks * THREADS + threadIdx.x : threadIdx.x;
    float sum = 0;
    for (int b = own_batch; b < (KEEP_BATCH ? own_batch + 1 : batch); b++)
        for (int h = own_head; h < (KEEP_HEADS ? own_head + 1 : heads); h++) {
            long long start = (long long)(VARLEN ? h : b * heads + h) * rows;
            int stop = KEEP_ROWS ? min(first + 1, kept_rows) : rows;
            if constexpr (VARLEN) {
                const Run run = run_of(offsets, b, rows);
                start += run.first, stop = KEEP_ROWS ? min(stop, run.count) : run.count;
            }
            for (int row = first; row < stop; row += THREADS) {
                if constexpr (SINKS) {
                    const float2 stat = *reinterpret_cast<const float2 *>(from + (start + row) * 2);
                    const float rest = rests == 0 ? 0 : from[rests + start + row];
                    const float power = ((float)sinks[h] * UNIT - stat.x) * (LOG2E / UNIT) - rest;
                    sum -= exp2f(power) * stat.y;
                } else {
                    sum += from[start + row];
                }
            }
        }
    if constexpr (!KEEP_ROWS) {
        sum = row_sum<THREADS>(sum, exchange);
        if (threadIdx.x == 0) to[blockIdx.x] = (G)sum;
    } else if (first < kept_rows) {
        to[(long long)(blockIdx.x / blocks) * kept_rows + first] = (G)sum;
    }
}
