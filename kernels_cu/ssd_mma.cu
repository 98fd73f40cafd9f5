// State space duality forward by chunks on tensor cores, with inputs of 16 bits.
//
//   in the notation of ssd.cu, with P = F C B^T r, whose columns have the rates of their tokens:
//   y = exp(g) C S + P X + d X        S' = exp(g[63]) S + B^T (exp(g[63] - g) r X)
//
//   traffic     ssd_states_mma    dt, b and c for each head and tile of 64 columns; x and y once
//   products    of a chunk and 16 columns, in m16n8k16, with DIM 128: C S 128, B^T U 192, P X 40 and
//               a share of 40 in C B^T; in float16 192, 320, 60 and 40
//   constants   T           dtype of x, b and c: of 16 bits
//               DIM         rows of a state: 64 or 128; columns of x are a multiple of 64
//               INITIAL     there are states before the texts
//               BACKWARD    for backward: the states before chunks are written, not y
//               and those of common/ssd_chunk.cuh
//
//   The trick: as in gated_delta_rule_mma.cu, a warp owns 16 columns of a state, transposed, in
//   registers, for a whole text, and a float32 is a sum of bfloat16.  x is an operand as it is: r is
//   a factor of P, and of the two sides only one has parts.  Warps share the blocks of P, which is
//   stored as the operands of lanes.
#include <common/ssd_chunk.cuh>  // first: it says what CHANNELS is
#include <common/chunk_mma.cuh>
#include <common/ssd_step.cuh>
#include <common/vector.cuh>

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int WIDE = 16 * WARPS;  // columns of x of a block
constexpr int SLABS = DIM / 64;   // of 64 rows of a state
constexpr int OWN = (BLOCKS + WARPS - 1) / WARPS;  // blocks of P that a warp computes
using Values = Tile<T, WIDE>;     // x, then y
static_assert(sizeof(T) == 2 && DIM % 64 == 0);

struct alignas(16) OfChunk : Factors {};
struct Memory {  // shared
    T c[CHUNK * Rows::PITCH], b[2][CHUNK * Rows::PITCH], x[2][CHUNK * Values::PITCH];
    uint4 scores[SHORT * PLANE];  // P
    OfChunk factors[2];
};
static_assert(sizeof(OneToken) <= sizeof(Memory));

// This warp's blocks of P = F C B^T r, in parts.
DEVICE void score(uint4 *scores, const Rows &c, const Rows &b, const Factors &factors) {
    const int lane = threadIdx.x % 32, warp = own_warp();
    const auto left_of = c.lane(lane % 16, lane / 16);
    const auto right_of = lane_of_rows(b, 0);
    int rows[OWN], columns[OWN];
    float sum[OWN][1][2][4] = {};
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int block = min(warp + n * WARPS, BLOCKS - 1);
        const int row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
        rows[n] = row * 16, columns[n] = (block - block_of(row, 0)) * 16;
    }
#pragma unroll 1
    for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
        for (int step = 0; step < 4; step++)
#pragma unroll
            for (int n = 0; n < OWN; n++) {
                uint32_t left[1][4], right[4];
                const int down = slab * 128;  // bytes
                ldmatrix_x4(left[0], left_of.at(0, step * 2) + rows[n] * Rows::PITCH_BYTES + down);
                ldmatrix_x4(right, right_of.at(0, step * 2) + columns[n] * Rows::PITCH_BYTES + down);
                multiply_two<T>(sum[n], 0, left, right);
            }
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        const int block = warp + n * WARPS;
        if (block >= BLOCKS) continue;
        uint32_t parts[SHORT][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = rows[n] + lane / 4 + i / 2 * 8;
            const int column = columns[n] + i % 2 * 8 + lane % 4 * 2;
            float both[2];
#pragma unroll
            for (int e = 0; e < 2; e++)
                both[e] = factors.fade(row, column + e) * factors.beta[column + e] *
                          sum[n][0][i % 2][i / 2 * 2 + e];
            split(parts, i, both[0], both[1]);
        }
#pragma unroll
        for (int part = 0; part < SHORT; part++)
            scores[part * PLANE + block * 32 + lane] =
                make_uint4(parts[part][0], parts[part][1], parts[part][2], parts[part][3]);
    }
}

// d += x^T @ scores^T, where x are 16 columns of stripe j.
DEVICE void add_scores(float (&d)[CHUNK / 8][4], const uint32_t (&x)[4], const uint4 *scores,
                       int j) {
    constexpr int PARTS = HALF<T> ? 2 : 1;  // of x: exact
    uint32_t left[PARTS][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const T *const both = reinterpret_cast<const T *>(&x[i]);
        if constexpr (HALF<T>) split(left, i, (float)both[0], (float)both[1]);
        else left[0][i] = x[i];
    }
#pragma unroll
    for (int plane = SHORT - 1; plane >= 0; plane--) {
        uint32_t right[STRIPES][4];
#pragma unroll
        for (int m = j; m < STRIPES; m++) {
            const uint4 own = scores[plane * PLANE + block_of(m, j) * 32 + threadIdx.x % 32];
            right[m][0] = own.x, right[m][1] = own.y;
            right[m][2] = own.z, right[m][3] = own.w;
        }
#pragma unroll
        for (int part = min(PARTS, SHORT - plane) - 1; part >= 0; part--)
#pragma unroll
            for (int m = j; m < STRIPES; m++) add_two(d, m * 2, left[part], right[m]);
    }
}

KERNEL(THREADS, 1)
ssd_states_mma(const T *__restrict__ x, const R *__restrict__ dt, const A *__restrict__ a_log,
               const T *__restrict__ b, const T *__restrict__ c, const O *__restrict__ d,
               const Q *__restrict__ dt_bias, const float *__restrict__ initial,
               const I *__restrict__ offsets, T *__restrict__ y, float *__restrict__ final,
               float *__restrict__ states, const __grid_constant__ Sizes s,
               const __grid_constant__ Strides strides, float least, float most) {
    DYNAMIC_SHARED(char, start);
    Memory &memory = *reinterpret_cast<Memory *>(start);
    const int heads = s.heads * s.groups, head = blockIdx.x / s.tiles % heads;
    const int number = blockIdx.x / (s.tiles * heads), from = blockIdx.x % s.tiles * WIDE;
    const Text text(offsets, number, s);
    if (!BACKWARD && text.stop - text.start == 1) {
        for (int part = 0; part < WIDE; part += OneToken::WIDE) {
            __syncthreads();
            reinterpret_cast<OneToken *>(start)->run<THREADS>(
                x, dt, a_log, b, c, d, dt_bias, initial, y, final, number, text.start, head,
                from + part, s, strides, least, most);
        }
        return;
    }
    const int lane = threadIdx.x % 32, warp = own_warp(), right = warp * 16;  // columns of x
    const int tokens = (int)(text.stop - text.start), down = heads * s.values;
    x += text.start * strides.x + head * s.values + from;
    b += text.start * strides.b + head / s.groups * DIM;
    c += text.start * strides.c + head / s.groups * DIM;
    dt += text.start * heads + head;
    const long long first_value = text.start * down + head * s.values + from;
    const Rows reads{memory.c};
    const auto writes_of = [&](int chunk) { return Rows{memory.b[chunk % 2]}; };
    const auto values_of = [&](int chunk) { return Values{memory.x[chunk % 2]}; };
    const auto copy_reads = [&](int chunk) {
        if (!BACKWARD && chunk * CHUNK < tokens)
            reads.copy<CHUNK, DIM, THREADS, 4>(c, chunk * CHUNK, tokens, strides.c);
        cp_async_commit();
    };
    const auto copy_writes = [&](int chunk) {
        if (chunk * CHUNK < tokens) {
            writes_of(chunk).copy<CHUNK, DIM, THREADS, 4>(b, chunk * CHUNK, tokens, strides.b);
            values_of(chunk).copy<CHUNK, WIDE, THREADS>(x, chunk * CHUNK, tokens, strides.x);
        }
        cp_async_commit();
    };
    const float speed = -expf((float)a_log[head]), skip = d ? (float)d[head] : 0.0f;
    const auto prepare = [&](int chunk) {
        if (warp != 0) return;
        Factors &to = memory.factors[chunk % 2];
        Exact own[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = lane * 2 + i, token = chunk * CHUNK + row;
            const bool inside = token < tokens;
            const float raw = inside ? (float)dt[(long long)token * heads] : 0.0f;
            const float rate = inside ? rate_of(raw, dt_bias, head, least, most) : 0.0f;
            own[i] = {inside ? fmaxf(speed * rate, -800.0f) : 0.0f, 0.0f};
            to.beta[row] = rate;
        }
        add_up(to, own, lane);
    };

    // Call use(element, value) for what this lane has of the state, transposed: its columns lane / 4,
    // and 8 further on.
    float state[SLABS][8][4];
    const auto each_state = [&](auto *at, auto use) {
        at += lane % 4 * 2 * s.values + from + right + lane / 4;
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    use(at[i % 2 * s.values + i / 2 * 8], state[slab][n][i]);
                at += 8 * s.values;
            }
    };
    const long long matrix = (long long)DIM * s.values;
    const long long first_state = ((long long)number * heads + head) * matrix;
    each_state(initial + first_state, [](const float &from, float &value) {
        value = INITIAL ? from : 0.0f;
    });

    copy_reads(0);
    copy_writes(0);
    prepare(0);
    for (int chunk = 0; chunk * CHUNK < tokens; chunk++) {
        const Rows writes = writes_of(chunk);
        const Values values = values_of(chunk);
        const Factors &own = memory.factors[chunk % 2];
        cp_async_wait<0>();
        __syncthreads();  // the chunk has arrived, and all warps are done with the one before it
        copy_writes(chunk + 1);
        float o[CHUNK / 8][4] = {};
        if constexpr (BACKWARD) {
            each_state(states + ((text.slot + chunk) * heads + head) * matrix,
                       [](float &to, float value) { to = value; });
        } else {
            score(memory.scores, reads, writes, own);
            const auto of_c = lane_of_rows(reads, 0);
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++)
                add_rows<SHORT>(o, state[slab], of_c, slab * 8);
        }
        prepare(chunk + 1);
        if constexpr (!BACKWARD) __syncthreads();  // P is there, and all warps are done with c
        copy_reads(chunk + 1);
        uint32_t of_x[STRIPES][4];  // i: tokens 8 * (i / 2) further, columns 8 * (i % 2) further
        const auto value = values.lane(lane % 8 + lane / 16 * 8, right / 8 + lane / 8 % 2);
#pragma unroll
        for (int j = 0; j < STRIPES; j++) ldmatrix_x4_trans(of_x[j], value.at(j * 16, 0));
        const auto x_of = [&](int j, int i, int e) {
            return (float)reinterpret_cast<const T *>(&of_x[j][i])[e];
        };
        if constexpr (!BACKWARD) {
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) scale_by(o[n], two_of(own.into, n), 1.0f);
#pragma unroll
            for (int j = 0; j < STRIPES; j++) add_scores(o, of_x[j], memory.scores, j);
            auto line_of = values.lane(lane % 4 * 2, right / 8);
            line_of.offset += lane / 4 * sizeof(T);
            __syncwarp();  // all lanes have read these columns of x, where y goes
#pragma unroll
            for (int stripe = 0; stripe < STRIPES; stripe++) {
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        *reinterpret_cast<T *>(line_of.at(n * 8 + i % 2, i / 2) +
                                               stripe * 16 * Values::PITCH_BYTES) =
                            (T)fmaf(skip, x_of(stripe, n * 2 + i / 2, i % 2), o[stripe * 2 + n][i]);
                __syncwarp();
                Vector<T, 8> line;  // half of a warp's columns
                const int row = stripe * 16 + lane / 2, token = chunk * CHUNK + row;
                fetch(line, values.at(row, right / 8 + lane % 2));
                const long long to = first_value + (long long)token * down + right + lane % 2 * 8;
                if (token < tokens) put(y, to, line);
            }
        }
        const auto turned = writes.lane(lane % 16, lane / 16);
        float sum[SLABS][8][4] = {};  // tensor cores cut what they add; a state is rounded, once
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            uint32_t left[EXACT][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 rate = two_of(own.beta, j * 2 + i / 2);
                const float2 onward = two_of(own.onward, j * 2 + i / 2);
                split(left, i, onward.x * (rate.x * x_of(j, i, 0)),
                      onward.y * (rate.y * x_of(j, i, 1)));
            }
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++) {
                uint32_t of_b[4][4];
#pragma unroll
                for (int n = 0; n < 4; n++)
                    ldmatrix_x4_trans(of_b[n], turned.at(j * 16, slab * 8 + n * 2));
                add(sum[slab], left, of_b);
            }
        }
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++)
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    state[slab][n][i] = fmaf(own.whole, state[slab][n][i], sum[slab][n][i]);
    }
    cp_async_wait<0>();
    if constexpr (!BACKWARD)
        each_state(final + first_state, [](float &to, float value) { to = value; });
}
