// Converts a part of a 4-bit weight to a dense matrix.
//
//   w[r, c] = level[code] * absmax of the block of the value at start + r * columns + c
//
//   traffic     values * (sizeof(T) + 1 / 2) + blocks * sizeof(S), or * 1 with DOUBLE and of MXFP4
//   constants   T, S      dtypes of w, of absmax
//               LANES     values of one access, with one absmax: start and row distance of the part
//                         are multiples of it
//               THREADS   threads of a block
//               KIND      whose levels: NF4, FP4, MXFP4 or Q4_0
//               DOUBLE    absmax is stored in 8 bits
//               GROUPED, I    each row of the part is the matrix of a group; dtype of offsets: the
//                         matrix of a group without rows is not written
//
//   The trick: the 16 levels are in 16 banks of shared memory: lanes that read different levels
//   have no bank conflict, and lanes that read the same level share one access.
#include <common/four_bits.cuh>
#include <common/vector.cuh>

constexpr int DEPTH = 4;  // accesses of a thread, all in flight together
constexpr int BYTES = LANES < 2 ? 1 : LANES / 2;

KERNEL(THREADS, 1536 / THREADS)
nf4_dequantize_(T *__restrict__ w, const unsigned char *__restrict__ packed,
                const S *__restrict__ absmax, const unsigned char *__restrict__ codes,
                const I *__restrict__ offsets, long long start, long long pitch, long long width,
                unsigned tiles, int shift) {
    __shared__ float levels[16];
    if (threadIdx.x < 16) levels[threadIdx.x] = level_of<KIND>(threadIdx.x);
    const long long row = blockIdx.x / tiles;
    if constexpr (GROUPED)
        if (offsets[row] >= offsets[row + 1]) return;
    const long long column =
        ((long long)(blockIdx.x % tiles) * DEPTH * THREADS + threadIdx.x) * LANES;
    const long long offset = start + row * pitch + column;
    const int left = (int)min(width - column, (long long)DEPTH * THREADS * LANES);
    const long long first = row * width + column;  // of w

    Vector<unsigned char, BYTES> pairs[DEPTH];
    float size[DEPTH];
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        const int at = k * THREADS * LANES;
        if (at >= left) continue;
        const unsigned char *from = packed + (offset + at) / 2;
        if (at + LANES <= left) {
            fetch(pairs[k], from);
        } else {
#pragma unroll
            for (int j = 0; j < LANES; j += 2)
                if (at + j < left) pairs[k].at[j / 2] = from[j / 2];
        }
        size[k] = absmax_of<KIND, DOUBLE>((unsigned)((offset + at) >> shift), absmax, codes);
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        const int at = k * THREADS * LANES;
        float value[LANES];
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            const bool low = LANES > 1 ? j % 2 : (offset + at) % 2;
            const unsigned pair = pairs[k].at[j / 2];
            value[j] = levels[low != (KIND >= MXFP4) ? pair & 15 : pair >> 4] * size[k];
        }
        if (left - at >= LANES) store(w, first + at, value);  // not split in four: see vector.cuh
        else store(w + first + at, value, left - at);
    }
}
