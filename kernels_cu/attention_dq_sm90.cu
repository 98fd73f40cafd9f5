// The gradient of q from the sums of attention_backward_sm90.cu with SUM_DQ: dq = scale * sums.
//
//   traffic     the sums once, of 4 bytes; dq once
//   constants   T              dtype of dq, of 16 bits
//               DIM            columns of q: a multiple of 8 up to 128
//               VARLEN, P      sequences are concatenated; dtype of their offsets
#include <common/segment.cuh>
#include <common/tile.cuh>
#include <common/dq_sums.cuh>

constexpr int TILE = 64, COLUMNS = half_columns(DIM);

// sums    for each tile of stats (batch, heads, stat_rows), in the layout of common/dq_sums.cuh
// added   ints in a float array: how many blocks have added to each tile; where
//         none has, the sums are not initialized and dq is 0
KERNEL(256)
attention_dq_sm90(const float *__restrict__ sums, const float *__restrict__ added,
                  T *__restrict__ dq, float scale, int heads, int queries, int stat_rows,
                  const P *__restrict__ offsets, int sequences) {
    const int tiles = stat_rows / TILE, half_of = threadIdx.x / 128;
    const int head = blockIdx.x / tiles % heads;
    const int row = (int)(blockIdx.x % tiles) * TILE;
    long long first = (long long)(blockIdx.x / tiles / heads) * queries + row;
    int real = queries - row;
    if constexpr (VARLEN) {
        const int sequence = sequence_of(offsets, sequences, queries, row);
        const Run run = run_of(offsets, sequence, queries);
        const int inside = row - stats_of(offsets, sequence, queries);
        first = run.first + inside, real = run.count - inside;
    }
    float part[COLUMNS / 2] = {};
    if (__float_as_int(added[blockIdx.x]) > 0) {
        const float4 *const from =
            reinterpret_cast<const float4 *>(sums) +
            ((long long)blockIdx.x * 2 + half_of) * TILE * COLUMNS / 4 + threadIdx.x % 128;
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; i++) {
            const float4 four = from[i * 128];
            part[i * 4] = four.x, part[i * 4 + 1] = four.y;
            part[i * 4 + 2] = four.z, part[i * 4 + 3] = four.w;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = threadIdx.x % 128 / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
        const long long at = ((first + row) * heads + head) * (DIM / 8) + half_of * (COLUMNS / 8);
        T *const to = reinterpret_cast<T *>(reinterpret_cast<uint4 *>(dq) + at);  // see vector.cuh
        put_row_of_lanes(to, part, half, scale, row < real, half_of == 0 ? COLUMNS : DIM - COLUMNS);
    }
}
