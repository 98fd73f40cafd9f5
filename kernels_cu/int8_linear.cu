// The product of rows and a weight, both 8-bit integers: exact sums, then scales.
//
//   y[r, o] = (sum of x_codes[r, i] * codes[o, i] over i * scales[r]
//              + sum of x[r, c] * codes[o, c] over the columns c of list) * absmax[o] / 127
//
//   or, with one scale for all outputs, (sum of x_codes[r, i] * codes[o, i]) * (scales[r] * scale)
//   + bias[o]; LARGEST stands for 127
//
//   traffic     (rows + outputs) * inputs of codes, again for each column or row of tiles, from L2;
//               rows * outputs * sizeof(T)
//   constants   T, A, B        dtypes of x and y, of absmax, of bias
//               TILE_ROWS, TILE_OUTPUTS    rows and columns of y that a block computes
//               DEPTH, STAGES  inputs of a stage, and stages of the ring
//               DOWN, RIGHT    warps of a block, along rows and outputs
//               RESIDENT       blocks that an SM must hold
//               WIDE           inputs, and addresses, are multiples of 16
//               OUTLIERS       a list is given
//               PAIRS          the number of outputs is even
//               LARGEST        the code of absmax: 127, or 1 for codes -1, 0 and 1
//               ONE            absmax is one scale
//               BIAS           a bias is given, with one scale
//
//   The trick: both operands are contiguous along the axis that is summed, as mma m16n8k32 takes
//   them: ldmatrix loads 16 codes of a row where it would load 8 values of 16 bits.  Sums are
//   integers until the end: equal bits in any order.  The list has few columns; their codes are 0
//   in x_codes, and x itself is multiplied by the weight's codes of these columns, in float32,
//   before the only rounding.
#include <common/math.cuh>
#include <common/tile.cuh>
#include <common/vector.cuh>

constexpr int THREADS = 32 * DOWN * RIGHT;
constexpr int M = TILE_ROWS / DOWN / 16, N = TILE_OUTPUTS / RIGHT / 8;
using Codes = Tile<signed char, DEPTH>;
constexpr int STAGE = (TILE_ROWS + TILE_OUTPUTS) * Codes::PITCH;
static_assert(N % 2 == 0 && DEPTH % 32 == 0, "ldmatrix brings 16 outputs of 32 inputs");

// Start copying COUNT rows from `row` on, DEPTH inputs from `first` on, with zeros past either end.
template <int COUNT>
DEVICE void copy(const Codes &to, const signed char *from, long long row, long long rows, int first,
                 int inputs) {
    constexpr int TURNS = COUNT * Codes::CHUNKS / THREADS;  // the same number for all threads
    static_assert(TURNS * THREADS == COUNT * Codes::CHUNKS, "a turn has a chunk for each thread");
#pragma unroll(WIDE ? 1 : 2)  // cp.async waits for nothing; loads of bytes for each other
    for (int turn = 0; turn < TURNS; turn++) {
        const int i = turn * THREADS + threadIdx.x;
        const int down = i / Codes::CHUNKS, chunk = i % Codes::CHUNKS, at = first + chunk * 16;
        const bool in_range = row + down < rows && at < inputs;
        const signed char *real = from + (in_range ? (row + down) * inputs + at : 0);
        if constexpr (WIDE) {
            cp_async_16(to.at(down, chunk), real, in_range);
        } else {
            Vector<signed char, 16> codes;
#pragma unroll
            for (int j = 0; j < 16; j++) codes.at[j] = in_range && at + j < inputs ? real[j] : 0;
            put(to.at(down, chunk), codes);
        }
    }
}

KERNEL(THREADS, RESIDENT)
int8_linear(const signed char *__restrict__ x_codes, const float *__restrict__ scales,
            const signed char *__restrict__ codes, const A *__restrict__ absmax,
            const T *__restrict__ x, const int *__restrict__ list, const int *__restrict__ count,
            const B *__restrict__ bias, T *__restrict__ y, long long rows, int outputs,
            int inputs) {
    DYNAMIC_SHARED(signed char, memory);
    const int lane = threadIdx.x % 32, warp = own_warp();
    const int tiles = (outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    const long long row = (long long)(blockIdx.x / tiles) * TILE_ROWS;
    const int output = blockIdx.x % tiles * TILE_OUTPUTS;
    const int down = warp / RIGHT * M * 16, right = warp % RIGHT * N * 8;
    const int steps = (inputs + DEPTH - 1) / DEPTH;

    auto load = [&](int step) {
        if (step < steps) {
            const Codes left{memory + step % STAGES * STAGE};
            const Codes top{left.start + TILE_ROWS * Codes::PITCH};
            copy<TILE_ROWS>(left, x_codes, row, rows, step * DEPTH, inputs);
            copy<TILE_OUTPUTS>(top, codes, output, outputs, step * DEPTH, inputs);
        }
        cp_async_commit();
    };
    int sum[M][N][4] = {};
    for (int step = 0; step < STAGES - 1; step++) load(step);
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this stage has arrived, and all warps are done with the previous one
        load(step + STAGES - 1);
        const Codes left{memory + step % STAGES * STAGE};
        const Codes top{left.start + TILE_ROWS * Codes::PITCH};
        const auto from = top.lane(right + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int k = 0; k < DEPTH / 32; k++) {
            Fragment<M> a;
            fetch(a, left, down, k);
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t b[4];
                ldmatrix_x4(b, from.at(n * 8, k * 2));
                const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
                for (int m = 0; m < M; m++) {
                    mma_m16n8k32_s8(sum[m][n], a[m], b0, sum[m][n]);
                    mma_m16n8k32_s8(sum[m][n + 1], a[m], b1, sum[m][n + 1]);
                }
            }
        }
    }

    const int column = output + right + lane % 4 * 2;
    each_row<M>([&](int m, int half) {
        const long long own_row = row + down + m * 16 + half * 8 + lane / 4;
        if (own_row >= rows) return;
        const float scale = ONE ? scales[own_row] * (float)*absmax : scales[own_row];
        float result[N][2];
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) result[n][e] = (float)sum[m][n][half * 2 + e] * scale;
        if constexpr (OUTLIERS) {
            const int last = *count;
#pragma unroll 1
            for (int i = 0; i < last; i++) {
                const int c = list[i];
                const float value = (float)x[own_row * inputs + c];
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int o = min(column + n * 8 + e, outputs - 1);
                        const float code = (float)codes[(long long)o * inputs + c];
                        result[n][e] = fmaf(value, code, result[n][e]);
                    }
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int o = column + n * 8;
            if (o >= outputs) continue;
            T *const to = y + own_row * outputs + o;
            float both[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = min(o + e, outputs - 1);
                both[e] = ONE ? result[n][e] : result[n][e] * divided_by<LARGEST>((float)absmax[at]);
                if constexpr (BIAS) both[e] += (float)bias[at];
            }
            if constexpr (PAIRS) store(to, both);
            else {
                to[0] = (T)both[0];
                if (o + 1 < outputs) to[1] = (T)both[1];
            }
        }
    });
}
