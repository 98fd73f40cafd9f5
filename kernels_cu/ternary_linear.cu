// The product of rows and a weight of codes -1, 0 and 1, read packed, once for all rows of a tile.
//
//   y[n, o] = x_scale[n] * sum over groups of scale[o, group] * sum over d of x[n, d] * code[o, d]
//
//   traffic     tiles of rows * outputs * inputs / 4 bytes of planes; x once per block, from L2;
//               rows * outputs * sizeof(T)
//   constants   X         dtype in which x is multiplied: signed char, for codes with a scale per
//                         row, or T, for up to 16 rows
//               T, S      dtypes of y and of the scales
//               N_TILES   tiles of 8 rows of a block
//               ROWS      rows of x in shared memory: 8 * N_TILES, or fewer where there are fewer
//               WHOLE     x fits into shared memory, and a block takes many tiles of outputs
//               RESIDENT  blocks that an SM must hold, or 0
//               WM, WK    warps that divide up the outputs of a block, 16 each, and the columns
//               GROUPED   a row has several scales
//               WIDE      rows of the planes allow accesses of 16 bytes
//               X_WIDE    rows of x do
//               MARKED    marks say which 256 columns of a row are not all 0; others are not read
//
//   The trick: a code is a nibble that selects a byte, so that one instruction expands 4 codes to
//   bytes, or 2 to 16-bit floats.  The order of columns in a product is free as long as x has the
//   same order.  As a 16-bit float a code needs only its high byte: 1 in float16, and one half in
//   bfloat16.  A float32 is the sum of three bfloat16, so its products with codes are exact too.
//   Their sums are taken over 512 columns at a time and then added, so that few small terms meet a
//   large sum and lose digits.  One row takes the same path as eight: an mma does 512 of its
//   products, and dp4a would do 128; its lanes of other rows read that row, and their sums are
//   dropped.  If x is WHOLE, the weights of the next columns, or outputs, are loaded meanwhile, and
//   a tile takes one barrier; else they are loaded while x is written to shared memory.
#include <common/vector.cuh>
#include <common/ptx.cuh>

constexpr bool INT8 = sizeof(X) == 1;
constexpr int PARTS = sizeof(X) == 4 ? 3 : 1;  // bfloat16 parts of a value of x
constexpr int WARPS = WM * WK, THREADS = 32 * WARPS, N = 8 * N_TILES, M = 16 * WM;
constexpr int COLUMNS = 512, WORDS = COLUMNS / 32;  // that the warp takes at a time
constexpr int VALUES = INT8 ? 16 : 8;               // of a chunk: 16 bytes in shared memory
constexpr int CHUNKS = COLUMNS / VALUES, WORD_CHUNKS = 32 / VALUES;
constexpr int HALVES = INT8 ? 1 : 2;          // parts of a word, of four products each
constexpr int PITCH = M + 4;                  // of sums: lanes write to different banks
constexpr int SPAN = GROUPED ? 1 : 4;         // neighbouring words of a lane
constexpr bool SHORT = GROUPED || PARTS > 1;  // sums of few columns are added to a total

template <class E> struct Codes;  // (high) bytes of 0, 1 and -1; the factor that their sums need
template <> struct Codes<signed char> { static constexpr unsigned BYTES = 0x00ff0100, FACTOR = 1; };
template <> struct Codes<__half> { static constexpr unsigned BYTES = 0x00bc3c00, FACTOR = 1; };
template <> struct Codes<__nv_bfloat16> {
    static constexpr unsigned BYTES = 0x00bf3f00, FACTOR = 2;
};
template <> struct Codes<float> : Codes<__nv_bfloat16> {};

template <bool I> struct Sum { using type = float; };
template <> struct Sum<true> { using type = int; };
using Acc = Sum<INT8>::type;

struct alignas(16) Four { unsigned at[4]; };

// The word, among those of 512 columns, that a lane takes in a step.
DEVICE int word_of(int lane, int step) {
    return SPAN == 4 ? lane % 4 * 4 + step : step * 4 + lane % 4;
}

// The index of chunk j of a word of row n: each lane of a quarter warp has another group of banks.
DEVICE int index_of(int n, int word, int j) {
    const int owner = SPAN == 4 ? word / 4 : word % 4;
    const int mixed = (SPAN == 4 ? owner * 2 : owner / 2 * 2) ^ (n & 1);
    return n * CHUNKS + ((word * WORD_CHUNKS + j) ^ mixed);
}

// The transpose of four by four bytes: byte j of word c is byte c of word j.
DEVICE Four turned(const Four &w) {
    const unsigned a = __byte_perm(w.at[0], w.at[1], 0x5140),
                   b = __byte_perm(w.at[0], w.at[1], 0x7362);
    const unsigned c = __byte_perm(w.at[2], w.at[3], 0x5140),
                   d = __byte_perm(w.at[2], w.at[3], 0x7362);
    return {{__byte_perm(a, c, 0x5410), __byte_perm(a, c, 0x7632), __byte_perm(b, d, 0x5410),
             __byte_perm(b, d, 0x7632)}};
}

template <class E>
DEVICE Four as_four(const Vector<E, 16 / sizeof(E)> &v) {
    return reinterpret_cast<const Four &>(v);
}

// Write a chunk of x, with 0 past its last column, in the layout that the products read.
DEVICE void stage(Four *to, const signed char *x, int left) {
    Vector<signed char, 16> v;
    if (X_WIDE && left >= 16) {
        fetch(v, x);
    } else {
#pragma unroll
        for (int j = 0; j < 16; j++) v.at[j] = j < left ? x[j] : 0;
    }
    *to = turned(as_four(v));
}
template <class E> DEVICE void stage(Four *to, const E *x, int left) {
    constexpr int STRIDE = ROWS * CHUNKS;  // from one part to the next
    Vector<E, 8> v;
    if (X_WIDE && left >= 8) {
        fetch(v, x);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) v.at[j] = j < left ? x[j] : E(0.0f);
    }
    if constexpr (sizeof(E) == 2) {
        *to = as_four(v);
    } else {
        Vector<__nv_bfloat16, 8> part[3];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float rest = v.at[j];
            const bool whole = fabsf(rest) <= 3.3e38f;  // does not round to infinity
#pragma unroll
            for (int p = 0; p < 3; p++) {
                part[p].at[j] = __nv_bfloat16(p == 0 || whole ? rest : 0.0f);
                rest -= (float)part[p].at[j];
            }
        }
#pragma unroll
        for (int p = 0; p < 3; p++) to[p * STRIDE] = as_four(part[p]);
    }
}

// A lane's words of the planes, for rows `output` and `output + 8`: [row][plane][step].
struct Weights { unsigned at[2][2][4]; };

DEVICE void fetch(Weights &w, const unsigned char *planes, const unsigned char *marks, int output,
                  int outputs, int first, int words, int lane) {
    const int mark_bytes = ((words + 7) / 8 + 7) / 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = output + 8 * half;
#pragma unroll
        for (int step = 0; step < 4; step += SPAN) {
            const int word = first + word_of(lane, step);
            bool needed = row < outputs && word < words;
            if (MARKED && needed)
                needed = marks[(long long)row * mark_bytes + word / 64] >> (word / 8 % 8) & 1;
#pragma unroll
            for (int plane = 0; plane < 2; plane++) {
                const unsigned *from = reinterpret_cast<const unsigned *>(planes) +
                                       ((long long)row * 2 + plane) * words;
                if constexpr (WIDE && SPAN == 4) {
                    const Four four =
                        needed ? *reinterpret_cast<const Four *>(from + word) : Four{};
#pragma unroll
                    for (int i = 0; i < 4; i++) w.at[half][plane][i] = four.at[i];
                } else {
#pragma unroll
                    for (int i = 0; i < SPAN; i++)
                        w.at[half][plane][step + i] =
                            needed && word + i < words ? from[word + i] : 0;
                }
            }
        }
    }
}

// Turn the codes of a word into byte selectors, one nibble per code.  For signed char, word c has
// columns c, c + 4, .. c + 28; for 16-bit floats columns 2 c, 2 c + 1 and those 16 further on, in
// the odd nibbles.
DEVICE void select(unsigned (&codes)[4], unsigned plus, unsigned minus, int half) {
    const unsigned even = plus & 0x55555555u | minus << 1 & 0xaaaaaaaau;
    const unsigned odd = plus >> 1 & 0x55555555u | minus & 0xaaaaaaaau;
    if constexpr (INT8) {
        codes[0] = even & 0x33333333u;
        codes[1] = odd & 0x33333333u;
        codes[2] = even >> 2 & 0x33333333u;
        codes[3] = odd >> 2 & 0x33333333u;
    } else {
        const unsigned both = half == 0 ? even & 0x00ff00ffu | odd << 8 & 0xff00ff00u
                                        : even >> 8 & 0x00ff00ffu | odd & 0xff00ff00u;
        codes[0] = both << 4 & 0x30303030u;
        codes[1] = both << 2 & 0x30303030u;
        codes[2] = both & 0x30303030u;
        codes[3] = both >> 2 & 0x30303030u;
    }
}

DEVICE void multiply(int (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], signed char) {
    mma_m16n8k32_s8(d, a, b, d);
}
DEVICE void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
    mma_m16n8k16_f16(d, a, b, d);
}
template <class E>
DEVICE void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], E) {
    mma_m16n8k16_bf16(d, a, b, d);
}

// sums += codes of a step times x; the chunks of x for this warp's columns start at `tile`.
DEVICE void add(Acc (&sums)[N_TILES][4], const Weights &w, const Four *tile, int step, int lane) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        unsigned low[4], high[4], a[4][4];
        select(low, w.at[0][0][step], w.at[0][1][step], half);
        select(high, w.at[1][0][step], w.at[1][1][step], half);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            a[q][0] = __byte_perm(Codes<X>::BYTES, 0, low[q] & 0xffff);
            a[q][1] = __byte_perm(Codes<X>::BYTES, 0, high[q] & 0xffff);
            a[q][2] = __byte_perm(Codes<X>::BYTES, 0, low[q] >> 16);
            a[q][3] = __byte_perm(Codes<X>::BYTES, 0, high[q] >> 16);
        }
#pragma unroll
        for (int tiles = 0; tiles < N_TILES; tiles++)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const int n = min(tiles * 8 + lane / 4, ROWS - 1), word = word_of(lane, step);
                const Four *from = tile + part * ROWS * CHUNKS;
                const Four first = from[index_of(n, word, half)];
                const Four second = from[index_of(n, word, half + HALVES)];
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    const unsigned b[2] = {first.at[q], second.at[q]};
                    multiply(sums[tiles], a[q], b, X());
                }
            }
    }
}

constexpr int TURN = WK * COLUMNS;              // columns that a block takes at a time
constexpr int HELD = PARTS * ROWS * CHUNKS;     // chunks of x of a warp's columns
constexpr int SUMS = WK * ROWS * PITCH;         // of a tile of outputs

// Write the columns of x from `top` on to shared memory.
DEVICE void stage_turn(Four *to, const X *x, long long first_row, long long rows, int inputs,
                       int top) {
    for (int i = threadIdx.x; i < WK * ROWS * CHUNKS; i += THREADS) {
        const int chunk = i % CHUNKS, n = i / CHUNKS % ROWS, k = i / (CHUNKS * ROWS);
        const int at = top + k * COLUMNS + chunk * VALUES;
        const int left = first_row + n < rows ? inputs - at : 0;
        stage(to + k * HELD + index_of(n, chunk / WORD_CHUNKS, chunk % WORD_CHUNKS),
              x + (left > 0 ? (first_row + n) * inputs + at : 0), left);
    }
}

KERNEL(32 * WM * WK, RESIDENT)
ternary_linear(const X *x, const float *x_scale, const unsigned char *planes, const S *scale,
               const unsigned char *marks, T *y, long long rows, int inputs, int outputs, int words,
               int group, int groups, int scale_step, int tiles) {
    DYNAMIC_SHARED(Four, memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp / WM;
    const long long first_row = (long long)(blockIdx.x % tiles) * N;
    const int turns = (inputs + TURN - 1) / TURN, tasks = (outputs + M - 1) / M;
    int task = blockIdx.x / tiles;
    float *const buffers = reinterpret_cast<float *>(memory + (WHOLE ? turns * WK * HELD : 0));
    auto output_of = [&](int task) { return task * M + warp % WM * 16 + lane / 4; };
    auto read = [&](Weights &to, int task, int turn) {
        const int column = turn * TURN + part * COLUMNS;
        fetch(to, planes, marks, output_of(task), outputs, column / 32, words, lane);
    };

    Weights w, next;
    if constexpr (WHOLE) {
        read(w, task, 0);
        for (int turn = 0; turn < turns; turn++)
            stage_turn(memory + turn * WK * HELD, x, 0, rows, inputs, turn * TURN);
        __syncthreads();
    }
    int side = 0;  // of two buffers of sums: past a barrier, all threads have read the other one
    do {
        const int output = output_of(task), first = task * M;
        Acc sums[N_TILES][4] = {};
        float total[SHORT ? N_TILES : 1][4] = {};
        for (int turn = 0; turn < turns; turn++) {
            if constexpr (WHOLE) {
                const bool more = turn + 1 < turns;
                const int later = task + (more ? 0 : (int)gridDim.x);
                if (later < tasks) read(next, later, more ? turn + 1 : 0);
            } else {
                read(w, task, turn);
                __syncthreads();  // all warps are done with the previous columns of x
                stage_turn(memory, x, first_row, rows, inputs, turn * TURN);
                __syncthreads();
            }
            const Four *const chunks = memory + ((WHOLE ? turn * WK : 0) + part) * HELD;
#pragma unroll
            for (int step = 0; step < 4; step++) {
                if constexpr (MARKED) {  // a product with zeros only adds 0
                    const unsigned any =
                        w.at[0][0][step] | w.at[0][1][step] | w.at[1][0][step] | w.at[1][1][step];
                    if (!__any_sync(0xffffffffu, any != 0)) continue;  // only to save time
                }
                add(sums, w, chunks, step, lane);
                if constexpr (GROUPED) {  // 128 columns, all of one group
                    const int at = (turn * TURN + part * COLUMNS + step * 128) / group;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int row = output + 8 * half;
                        const bool in_range = row < outputs && at < groups;
                        const float factor =
                            in_range ? (float)scale[(long long)row * scale_step + at] : 0;
#pragma unroll
                        for (int t = 0; t < N_TILES; t++)
#pragma unroll
                            for (int i = 2 * half; i < 2 * half + 2; i++) {
                                total[t][i] += factor * (float)sums[t][i];
                                sums[t][i] = 0;
                            }
                    }
                }
            }
            if constexpr (SHORT && !GROUPED) {
#pragma unroll
                for (int t = 0; t < N_TILES; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        total[t][i] += sums[t][i];
                        sums[t][i] = 0;
                    }
            }
            if constexpr (WHOLE) w = next;
        }
        if constexpr (!WHOLE) __syncthreads();  // sums take the memory of x
        float *const partial = buffers + side * SUMS;
#pragma unroll
        for (int t = 0; t < N_TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int n = t * 8 + lane % 4 * 2 + i % 2;
                const int m = warp % WM * 16 + lane / 4 + i / 2 * 8;
                if (n < ROWS)
                    partial[(part * ROWS + n) * PITCH + m] =
                        SHORT ? total[SHORT ? t : 0][i] : (float)sums[t][i];
            }
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * M; i += THREADS) {
            const int n = i / M, to = first + i % M;
            if (first_row + n >= rows || to >= outputs) continue;
            float sum = 0;
#pragma unroll
            for (int k = 0; k < WK; k++) sum += partial[(k * ROWS + n) * PITCH + i % M];
            const float factor = GROUPED ? 1.0f : (float)scale[(long long)to * scale_step];
            if constexpr (INT8) {  // the order of int8_linear.cu, which computes many rows
                const float own = x_scale[first_row + n];
                sum = GROUPED || scale_step == 0 ? sum * (own * factor) : sum * own * factor;
            } else {
                sum *= factor;
            }
            y[(first_row + n) * outputs + to] = (T)(sum * Codes<X>::FACTOR);
        }
        if constexpr (!WHOLE) return;
        side ^= 1;
        task += gridDim.x;
    } while (task < tasks);
}
