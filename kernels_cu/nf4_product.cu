// The product of few rows and a 4-bit weight, which is read packed, once.
//
//   out[n, o] = sum over d of x[n, d] * level[code[o, d]] * absmax[block of (o, d)]    + out, if ADD
//
//   traffic     outputs * inputs / 2 + blocks * sizeof(S), or * 1 with DOUBLE and of MXFP4, and again
//               from L2 for every further ROWS rows; x once per block of threads, from L2;
//               rows * outputs * sizeof(O)
//   constants   T, O, S    dtypes of x; of out; of absmax
//               UNIT       columns that always share an absmax: 64, or 32
//               UNITS      units that a warp takes at a time
//               ROWS       rows of x that a block has room for: 8 or 16, in float32 4
//               TILES      tiles of 16 outputs of a block
//               WARPS      warps of a block, which divide up the columns
//               RESIDENT   blocks that an SM must hold
//               WIDE       units of the weight can be read in one access
//               SIDE_BY_SIDE  so can the absmax of the units that a warp takes at a time
//               X_WIDE     rows of x can be read 16 bytes at a time
//               KIND       whose levels: NF4, FP4, MXFP4 or Q4_0
//               DOUBLE     absmax is stored in 8 bits
//               ADD        the product is added to out
//
//   The trick: a byte of two codes selects two levels, in the layout of tensor cores, from a table
//   that each lane has in a bank of its own: one access to shared memory gives two weights.  The
//   order of columns in a product is free as long as x has the same order, so a lane reads
//   neighbouring columns.  Sums of a unit are multiplied by absmax in float32.  Levels are rounded
//   to T, as those of a dense weight are; x of float32 is multiplied in float32.  The next units
//   are loaded meanwhile.  The sums of warps are added in a fixed order.
#include <common/four_bits.cuh>
#include <common/vector.cuh>
#include <common/ptx.cuh>

constexpr bool EXACT = sizeof(T) == 4;  // no tensor cores
constexpr bool POWERS = KIND == MXFP4, IN_BYTES = DOUBLE || POWERS, LOW_FIRST = KIND >= MXFP4;
constexpr int THREADS = 32 * WARPS, OUTPUTS = 16 * TILES;
constexpr int OWN = 2 * TILES;                        // rows of the weight that a lane reads
constexpr int VALUES = UNIT / 4, WORDS = VALUES / 8;  // that a lane reads of a unit of a row
constexpr int GROUPS = EXACT ? 1 : ROWS / 8;
constexpr int PITCH = 16 + 4;  // of sums: lanes write to different banks

// Whether unit + u is one of the units: of those that are SIDE_BY_SIDE, all are, or none.
DEVICE bool exists(int u, unsigned unit, unsigned units) {
    return unit + (SIDE_BY_SIDE ? 0 : u) < units;
}

// The values of a unit that a lane has loaded or is loading.
struct Part {
    unsigned codes[OWN][WORDS];
    float size[OWN];  // absmax; with DOUBLE the scale of its code; of MXFP4 nothing
    unsigned char code[OWN];
};

// One warp's view of the weight.
struct Reader {
    const unsigned char *packed;
    const S *absmax;
    const unsigned char *codes;
    unsigned first[OWN];  // units before each row
    int shift;            // block = unit >> shift

    // Take the rows of the weight from output `top` on.
    DEVICE void take(int top, int outputs, unsigned units) {
#pragma unroll
        for (int i = 0; i < OWN; i++)
            first[i] = min(top + 8 * i + (int)(threadIdx.x % 32 / 4), outputs - 1) * units;
    }

    // Read units from `unit` on; they are at most `units`.
    DEVICE void read(Part (&parts)[UNITS], unsigned unit, unsigned units) const {
        if (!exists(0, unit, units)) return;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const unsigned number = first[i] + unit;
            const unsigned char *from = packed + (unsigned long long)number * (UNIT / 2);
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                if (exists(u, unit, units)) read(parts[u], i, from + u * (UNIT / 2), number + u);
        }
        if constexpr (SIDE_BY_SIDE) read_sizes(parts, unit);
    }

    // Read the absmax of all units of a row in one access.
    DEVICE void read_sizes(Part (&parts)[UNITS], unsigned unit) const {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const unsigned number = first[i] + unit;
            Vector<S, UNITS> sizes;
            Vector<unsigned char, UNITS> bytes;
            if constexpr (IN_BYTES) fetch(bytes, codes + number);
            else fetch(sizes, absmax + number);
            const float scale = DOUBLE ? (float)absmax[SCALES + number / 256] : 0;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if constexpr (!POWERS) parts[u].size[i] = DOUBLE ? scale : (float)sizes.at[u];
                if constexpr (IN_BYTES) parts[u].code[i] = bytes.at[u];
            }
        }
    }

    // Read row i of a unit, and its absmax unless several are read in one access.
    DEVICE void read(Part &part, int i, const unsigned char *from, unsigned number) const {
        if constexpr (WIDE) {
            Vector<unsigned, WORDS> words;
            fetch(words, reinterpret_cast<const unsigned *>(from));
#pragma unroll
            for (int j = 0; j < WORDS; j++) part.codes[i][j] = words.at[j];
        } else {
#pragma unroll
            for (int j = 0; j < WORDS; j++)
                part.codes[i][j] = from[4 * j] | from[4 * j + 1] << 8 | from[4 * j + 2] << 16 |
                                   (unsigned)from[4 * j + 3] << 24;
        }
        if constexpr (!SIDE_BY_SIDE) {
            const unsigned block = number >> shift;
            if constexpr (!POWERS) part.size[i] = (float)absmax[DOUBLE ? SCALES + block / 256 : block];
            if constexpr (IN_BYTES) part.code[i] = codes[block];
        }
    }
};

// Read the N neighbouring values of x that a lane multiplies.
template <int N> DEVICE void read(Vector<T, N> &to, const T *from) {
    if constexpr (X_WIDE) {
        fetch(to, from);
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) to.at[j] = from[j];
    }
}

using Sums = float[4];
using Weights = unsigned[4];
using Rows = unsigned[2];
DEVICE void multiply(Sums &sums, const Weights &w, const Rows &x, __half) {
    mma_m16n8k16_f16(sums, w, x, sums);
}
DEVICE void multiply(Sums &sums, const Weights &w, const Rows &x, __nv_bfloat16) {
    mma_m16n8k16_bf16(sums, w, x, sums);
}
DEVICE void multiply(Sums &, const Weights &, const Rows &, float) {}

KERNEL(32 * WARPS, RESIDENT)
nf4_product_(O *out, const T *__restrict__ x, const unsigned char *__restrict__ packed,
             const S *__restrict__ absmax, const unsigned char *__restrict__ codes, int rows,
             int outputs, int inputs, int shift, unsigned x_pitch, long long pitch) {
    __shared__ __align__(16) unsigned table[EXACT ? 16 : 256 * 32];
    __shared__ float partials[WARPS][ROWS][PITCH];
    __shared__ float levels[16], values[DOUBLE ? TABLE : 1];
    const int lane = threadIdx.x % 32, high = lane / 4, low = lane % 4;
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // known to be the same for all
    const int parts = (rows + ROWS - 1) / ROWS, tasks = (outputs + OUTPUTS - 1) / OUTPUTS * parts;
    const unsigned units = inputs / UNIT, first = warp * UNITS;

    int task = blockIdx.x;
    Reader weight = {packed + low * (VALUES / 2), absmax, codes, {}, shift};
    weight.take(task / parts * OUTPUTS, outputs, units);
    Part now[UNITS], next[UNITS];
    weight.read(now, first, units);

    // the tables: 16 levels; for each byte a pair of them, in 32 copies
    if (threadIdx.x < 16) levels[threadIdx.x] = level_of<KIND>(threadIdx.x);
    if constexpr (DOUBLE)
        for (int i = threadIdx.x; i < TABLE; i += THREADS) values[i] = (float)absmax[i];
    __syncthreads();
    if constexpr (!EXACT) {
#pragma unroll 4
        for (int i = threadIdx.x; i < 256 * 8; i += THREADS) {
            Vector<T, 2> pair;
            pair.at[LOW_FIRST] = T(levels[i / 8 / 16]);  // then the second is in the high bits
            pair.at[!LOW_FIRST] = T(levels[i / 8 % 16]);
            const unsigned word = reinterpret_cast<const unsigned &>(pair);
            reinterpret_cast<uint4 *>(table)[i] = make_uint4(word, word, word, word);
        }
        __syncthreads();
    }
    const unsigned own_bank = opaque(lane * 4);
    const float offset = DOUBLE ? (float)absmax[OFFSET] : 0;

    // A block takes every gridDim.x-th task.  A warp reads the codes of its next units, which may be
    // those of the next task, while it multiplies.
    while (task < tasks) {
        const int top = task % parts * ROWS, own_rows = min(ROWS, rows - top);
        const int own_outputs = task / parts * OUTPUTS;
        const T *const own_x = x + (unsigned long long)top * x_pitch;
        unsigned x_offset[GROUPS];  // offset of the lane's values of x; 16 rows are below 2^32
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
            x_offset[i] =
                opaque((EXACT ? 0 : min(8 * i + high, own_rows - 1) * x_pitch) + low * VALUES);
        task += gridDim.x;

        float sums[EXACT ? 1 : TILES][GROUPS][4] = {};
        float exact[EXACT ? OWN : 1][EXACT ? ROWS : 1] = {};
        unsigned unit = first;
        do {
            const bool more = unit + WARPS * UNITS < units;
            if (!more && task < tasks) weight.take(task / parts * OUTPUTS, outputs, units);
            if (more || task < tasks)
                weight.read(next, more ? unit + WARPS * UNITS : first, units);
            Vector<T, VALUES> xs[EXACT ? 1 : UNITS][GROUPS];
#pragma unroll
            for (int i = 0; i < (EXACT ? 0 : GROUPS); i++) {
                const T *const from = own_x + opaque(x_offset[i] + unit * UNIT);
#pragma unroll
                for (int u = 0; u < UNITS; u++)
                    if (exists(u, unit, units)) read(xs[u][i], from + u * UNIT);
            }
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if (!exists(u, unit, units)) continue;
                const Part &part = now[u];
                float size[OWN];
#pragma unroll
                for (int i = 0; i < OWN; i++)
                    size[i] = POWERS   ? power_of_two(part.code[i])
                              : DOUBLE ? decoded(values[part.code[i]], part.size[i], offset)
                                       : part.size[i];
                if constexpr (EXACT) {
#pragma unroll
                    for (int c = 0; c < VALUES / 4; c++) {
                        float w[OWN][4];
#pragma unroll
                        for (int i = 0; i < OWN; i++)
#pragma unroll
                            for (int j = 0; j < 4; j++) {
                                const int bit = c % 2 * 16 + j / 2 * 8 + (j % 2 == LOW_FIRST) * 4;
                                w[i][j] = levels[part.codes[i][c / 2] >> bit & 15] * size[i];
                            }
#pragma unroll
                        for (int r = 0; r < ROWS; r++) {
                            Vector<T, 4> v;
                            read(v, own_x + (x_offset[0] + min(r, own_rows - 1) * x_pitch + (unit + u) * UNIT +
                                         c * 4));
#pragma unroll
                            for (int i = 0; i < OWN; i++)
#pragma unroll
                                for (int j = 0; j < 4; j++)
                                    exact[i][r] = fmaf(w[i][j], (float)v.at[j], exact[i][r]);
                        }
                    }
                } else {
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        float partial[GROUPS][4] = {};
#pragma unroll
                        for (int c = 0; c < VALUES / 4; c++) {
                            Weights a;
#pragma unroll
                            for (int j = 0; j < 4; j++) {  // rows high and high + 8, of two bytes
                                const unsigned word = part.codes[2 * tile + j % 2][c / 2];
                                const int bit = c % 2 * 16 + j / 2 * 8;
                                const unsigned at = bit ? word >> (bit - 7) : word << 7;
                                a[j] = *reinterpret_cast<const unsigned *>(
                                    reinterpret_cast<const char *>(table) + (at & 0x7f80 | own_bank));
                            }
#pragma unroll
                            for (int i = 0; i < GROUPS; i++) {
                                const unsigned *of_x = reinterpret_cast<const unsigned *>(&xs[u][i]);
                                const Rows b = {of_x[2 * c], of_x[2 * c + 1]};
                                multiply(partial[i], a, b, T());
                            }
                        }
#pragma unroll
                        for (int i = 0; i < GROUPS; i++)
#pragma unroll
                            for (int j = 0; j < 4; j++)
                                sums[tile][i][j] =
                                    fmaf(partial[i][j], size[2 * tile + j / 2], sums[tile][i][j]);
                    }
                }
            }
#pragma unroll
            for (int u = 0; u < UNITS; u++) now[u] = next[u];
            unit += WARPS * UNITS;
        } while (unit < units);

#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            __syncthreads();  // all warps are done with the last sums
            if constexpr (EXACT) {
#pragma unroll
                for (int i = 0; i < OWN; i++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        float sum = exact[i][r];
                        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                        if (low == r % 4) partials[warp][r][8 * i + high] = sum;
                    }
            } else {
#pragma unroll
                for (int i = 0; i < GROUPS; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        partials[warp][8 * i + 2 * low + j % 2][8 * (j / 2) + high] =
                            sums[tile][i][j];
            }
            __syncthreads();
            for (int i = threadIdx.x; i < own_rows * 16; i += THREADS) {
                const int row = i / 16, output = own_outputs + tile * 16 + i % 16;
                if (output >= outputs) continue;
                O *const to = out + (top + row) * pitch + output;
                float sum = ADD ? (float)*to : 0.0f;
#pragma unroll
                for (int w = 0; w < WARPS; w++) sum += partials[w][row][i % 16];
                *to = (O)sum;
            }
        }
    }
}
