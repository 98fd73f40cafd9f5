// Gradients of the gated delta rule on tensor cores, with inputs of 16 bits: of the states along a
// text, then of what is in the chunks.
//
//   in the notation of gated_delta_rule_backward.cu, where the others are too:
//   dU = P^T dout + exp(g[63] - g) K dS'          dB = T^T dU          dv = beta dB
//   dS = scale (exp(g) Q)^T dout - (beta exp(g) K)^T dB + exp(g[63]) dS'
//
//   traffic     delta_state_gradients_mma    q, k and 31 KB for each chunk and value head, for each tile
//                                            of 32 values, or of 64 with DIM 64; dout and dv once; dB
//                                            and dS', written
//               delta_chunk_gradients_mma    dS', U and v of each chunk and value head once, S, dB and
//                                            dout twice; q, k and their gradients once
//   products    of a chunk and 16 values, in m16n8k16, with DIM 128: K dS', K^T dB and Q^T dout 192
//               each, T^T dU 120, P^T dout 60; of the second kernel 612, and 1,600 for all values
//   constants   T            dtype of dout, q, k and v: of 16 bits
//               DIM          columns of q and k: 64 or 128; columns of v are a multiple of 64
//               FINAL        there is a gradient of the last states
//               EXACT        parts of what states depend on: 3 or 2
//               and those of common/delta_chunk.cuh; CHANNELS is off
//
//   The trick: as in gated_delta_rule_mma.cu, the gradient of a state stays in registers for a whole
//   text, as exact as in float32.  What the second kernel reads are operands in two parts of 16 bits,
//   as large as float32: S, dS', U and dB are copied as they are.  Its warps have 16 tokens and half of
//   the columns of q and k; the pairs of a chunk are products of what is in shared memory already.
constexpr bool BACKWARD = true;  // read by the next header
#include <common/delta_mma.cuh>
#include <common/reduce.cuh>

constexpr int PAIR = HALF<T> ? 2 : 1;  // parts of a number of 16 bits
// A register of two numbers of 16 bits.
DEVICE float2 both_of(uint32_t pair) {
    const T *const both = reinterpret_cast<const T *>(&pair);
    return make_float2((float)both[0], (float)both[1]);
}
// An operand of such numbers, in parts.
DEVICE void split(uint32_t (&to)[PAIR][4], const uint32_t (&from)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (PAIR == 1) to[0][i] = from[i];
        else split(to, i, both_of(from[i]).x, both_of(from[i]).y);
    }
}

// ---- along a text -------------------------------------------------------------------------------
struct Memory {
    T queries[CHUNK * Rows::PITCH];  // then what warps exchange: 8 float4 of each lane
    T keys[2][CHUNK * Rows::PITCH], douts[CHUNK * Values::PITCH];
    float into[CHUNK], onward[CHUNK], beta[CHUNK];  // from here on as in Pieces
    uint4 scores[2 * EXACT * PLANE];
};
static_assert(HALVES == 1 || CHUNK * Rows::PITCH * sizeof(T) >= THREADS * 8 * sizeof(float4));

KERNEL(THREADS, 1)
delta_state_gradients_mma(const T *__restrict__ dout, const float *__restrict__ dfinal,
                          const T *__restrict__ q, const T *__restrict__ k,
                          const I *__restrict__ offsets, const float *__restrict__ pieces,
                          unsigned *__restrict__ db, unsigned *__restrict__ dstates,
                          T *__restrict__ dv, float *__restrict__ dinitial,
                          const __grid_constant__ Sizes s) {
    DYNAMIC_SHARED(char, start);
    Memory &memory = *reinterpret_cast<Memory *>(start);
    const int heads = s.heads * s.groups, value_head = blockIdx.x / s.tiles % heads;
    const int number = blockIdx.x / (s.tiles * heads), head = value_head / s.groups;
    const int from = blockIdx.x % s.tiles * WIDE;
    const Text text(offsets, number, s);
    const int lane = threadIdx.x % 32, warp = own_warp();
    const int half = HALVES == 2 ? warp & 1 : 0, right = warp / HALVES * 16;  // column of values
    const int tokens = (int)(text.stop - text.start);
    const int stride = s.heads * DIM, down = heads * s.values;
    q += text.start * stride + head * DIM, k += text.start * stride + head * DIM;
    const long long first_value = text.start * down + value_head * s.values + from;
    const Rows queries{memory.queries};
    const Values douts{memory.douts};
    const auto keys_of = [&](int chunk) { return Rows{memory.keys[chunk % 2]}; };
    const auto sum_of = [&](int warp, int n) -> float4 & {
        return reinterpret_cast<float4 *>(memory.queries)[(warp * 8 + n) * 32 + lane];
    };

    // part of the gradient, transposed: its columns lane / 4, and 8 further on
    const long long first_state =
        (((long long)number * heads + value_head) * DIM + half * 64) * s.values + from + right;
    const auto state_at = [&](int n, int i) {
        const int row = n * 8 + lane % 4 * 2 + i % 2, column = lane / 4 + i / 2 * 8;
        return first_state + row * s.values + column;
    };
    float state[8][4];
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) state[n][i] = FINAL ? dfinal[state_at(n, i)] : 0.0f;

    const int chunks = text.chunks();
    if (chunks > 0)
        keys_of(chunks - 1).copy<CHUNK, DIM, THREADS>(k, (chunks - 1) * CHUNK, tokens, stride);
    cp_async_commit();
    for (int chunk = chunks - 1; chunk >= 0; chunk--) {
        const long long matrix = (text.slot + chunk) * heads + value_head;
        const long long slab = matrix * (s.values / 16) + (from + right) / 16;
        const Rows keys = keys_of(chunk);
        cp_async_wait<0>();
        __syncthreads();  // k has arrived, and all warps are done with the chunk after this one
        douts.copy<CHUNK, WIDE, THREADS, 2>(dout + first_value, chunk * CHUNK, tokens, down);
        queries.copy<CHUNK, DIM, THREADS, 2>(q, chunk * CHUNK, tokens, stride);
        constexpr int BYTES = sizeof(Pieces) - sizeof(Pieces::solve);
        const char *const own = reinterpret_cast<const char *>(pieces) + matrix * sizeof(Pieces) +
                                sizeof(Pieces::solve) + threadIdx.x * 16;
        char *const to = reinterpret_cast<char *>(memory.into) + threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < BYTES; i += THREADS * 16)
            if (i + THREADS * 16 <= BYTES || i + threadIdx.x * 16 < BYTES)
                cp_async_16(to + i, own + i);
        cp_async_commit();
        if (chunk > 0)
            keys_of(chunk - 1).copy<CHUNK, DIM, THREADS, 2>(k, (chunk - 1) * CHUNK, tokens, stride);
        cp_async_commit();

        const Slab<DIM> of_state{dstates + slab * Slab<DIM>::WORDS};
#pragma unroll
        for (int n = 0; n < 8; n++) of_state.put(half * 8 + n, state[n]);
        float x[CHUNK / 8][4] = {};  // dU, then dB, transposed
        add_rows<EXACT>(x, state, keys, half);
        cp_async_wait<1>();
        __syncthreads();  // all but the next keys has arrived
        float sum[8][4] = {}, part[OWN * 2][4] = {};
        const auto dout_of = douts.lane(lane % 8 + lane / 16 * 8, right / 8 + lane / 8 % 2);
        const auto query_of = queries.lane(lane % 16, half * 8 + lane / 16);
#pragma unroll
        for (int step = 0; step < STRIPES; step++) {
            uint32_t of_dout[4], left[PAIR][4];
            ldmatrix_x4_trans(of_dout, dout_of.at(step * 16, 0));
            split(left, of_dout);
            add_blocks<true, EXACT>(part, left, memory.scores, step, half);
        }
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++) {
            const int m = n / 4, owner = (n + 2) / 4 % 2;  // stripes 1 and 2 are of the second half
            scale_by(x[n], two_of(memory.onward, n), 1.0f);
#pragma unroll
            for (int i = 0; i < 4; i++)
                x[n][i] += HALVES == 1    ? part[n % (OWN * 2)][i]
                           : half == owner ? part[m * 2 + n % 2][i]
                                           : 0.0f;
        }
        const auto add_queries = [&] {
#pragma unroll 1
            for (int step = 0; step < STRIPES; step++) {
                uint32_t of_dout[4], left[EXACT][4], of_queries[4][4];
                ldmatrix_x4_trans(of_dout, dout_of.at(step * 16, 0));
#pragma unroll
                for (int i = 0; i < 4; i++) {  // columns 8 apart of 8 tokens, then of the next
                    const float2 both = both_of(of_dout[i]);
                    const float2 into = two_of(memory.into, step * 2 + i / 2);
                    split(left, i, both.x * (into.x * s.scale), both.y * (into.y * s.scale));
                }
#pragma unroll
                for (int n = 0; n < 4; n++) ldmatrix_x4_trans(of_queries[n], query_of.at(step * 16, n * 2));
                add(sum, left, of_queries);
            }
        };
        if constexpr (HALVES == 2) {
            add_queries();
            __syncthreads();  // all warps are done with q
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) sum_of(warp, n) = four_of(x[n]);
            __syncthreads();
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) add_four(x[n], sum_of(warp ^ 1, n));
        }
#pragma unroll
        for (int n = 0; n < OWN * 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) part[n][i] = 0;
        add_triangle<EXACT, true>(part, x, memory.scores + EXACT * PLANE, half);
        const Slab<CHUNK> of_b{db + slab * Slab<CHUNK>::WORDS};
#pragma unroll
        for (int n = 0; n < OWN * 2; n++) {
            of_b.put(stripe_of(half, n / 2) * 2 + n % 2, part[n]);
            if constexpr (HALVES == 2)
                sum_of(warp ^ 1, n) = four_of(part[n]);  // only this warp has read them
        }
        if constexpr (HALVES == 2) __syncthreads();
        gather(x, part, half, [&](int owner, int number) {
            return sum_of(warp - half + (owner ^ 1), number);
        });
        if constexpr (HALVES == 1) add_queries();
#pragma unroll
        for (int n = 0; n < OWN * 2; n++)
            scale_by(part[n], two_of(memory.beta, stripe_of(half, n / 2) * 2 + n % 2), 1.0f);
        __syncwarp();
        put_stripes(dv, first_value + right, douts, part, right, half, chunk * CHUNK, tokens, down);
        const auto key_of = keys.lane(lane % 16, half * 8 + lane / 16);
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            uint32_t left[EXACT][4], of_keys[4][4];
#pragma unroll
            for (int n = j * 2; n < j * 2 + 2; n++) {
                scale_by(x[n], two_of(memory.into, n), -1.0f);
                scale_by(x[n], two_of(memory.beta, n), 1.0f);
            }
            split(left, x[j * 2], x[j * 2 + 1]);
#pragma unroll
            for (int n = 0; n < 4; n++) ldmatrix_x4_trans(of_keys[n], key_of.at(j * 16, n * 2));
            add(sum, left, of_keys);
        }
        const float whole = memory.into[CHUNK - 1];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) state[n][i] = fmaf(whole, state[n][i], sum[n][i]);
    }
    cp_async_wait<0>();
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (dinitial) dinitial[state_at(n, i)] = state[n][i];
}

// ---- chunks -------------------------------------------------------------------------------------
constexpr int TALL = 256;         // threads: two warps have 16 tokens, and half of the columns each
constexpr int COUNT = DIM / 16;   // results of a warp
constexpr int PITCH = CHUNK + 8;
using Thin = Tile<T, 16>;         // columns of dout or v
using Pairs = Tile<Part, CHUNK>;  // of tokens

struct Stage {  // 16 columns of values
    T douts[CHUNK * Thin::PITCH], values[CHUNK * Thin::PITCH];
    uint32_t db[Slab<CHUNK>::WORDS], u[Slab<CHUNK>::WORDS];
    uint32_t state[Slab<DIM>::WORDS], dstate[Slab<DIM>::WORDS];
};
struct Squares {
    Part x[SHORT][CHUNK * Pairs::PITCH], y[SHORT][CHUNK * Pairs::PITCH];  // X and Y
    float pairs[CHUNK * PITCH];  // dP P + dA A, then sums along rows
};
struct Room {
    T queries[CHUNK * Rows::PITCH], keys[CHUNK * Rows::PITCH];  // then dq and dk
    union {
        Stage stages[2];
        Squares squares;
    };
};
struct Sums { float after[2][CHUNK], before[2][CHUNK], dbeta[2][CHUNK]; };  // of halves of columns

// d[first ..] += a @ b: parts of both, 16 columns for each b.  Parts below the last are left out.
template <int LEFT, int N, int M>
DEVICE void add_parts(float (&d)[M][4], int first, const uint32_t (&a)[LEFT][4],
                      const uint32_t (&b)[N][SHORT][4]) {
#pragma unroll
    for (int plane = SHORT - 1; plane >= 0; plane--)
#pragma unroll
        for (int part = min(LEFT, SHORT - plane) - 1; part >= 0; part--)
#pragma unroll
            for (int n = 0; n < N; n++) add_two(d, first + n * 2, a[part], b[n][plane]);
}

template <int WORDS> DEVICE void copy_words(uint32_t *to, const uint32_t *from) {
    static_assert(WORDS % (TALL * 4) == 0);
#pragma unroll
    for (int i = 0; i < WORDS; i += TALL * 4)
        cp_async_16(to + i + threadIdx.x * 4, from + i + threadIdx.x * 4);
}

KERNEL(TALL, 1)
delta_chunk_gradients_mma(const T *__restrict__ dout, const T *__restrict__ q,
                          const T *__restrict__ k, const T *__restrict__ v,
                          const D *__restrict__ decay, const E *__restrict__ beta,
                          const I *__restrict__ offsets, const unsigned *__restrict__ u,
                          const unsigned *__restrict__ db, const unsigned *__restrict__ states,
                          const unsigned *__restrict__ dstates, T *__restrict__ dq,
                          T *__restrict__ dk, D *__restrict__ ddecay, E *__restrict__ dbeta,
                          const __grid_constant__ Sizes s) {
    DYNAMIC_SHARED(char, start);
    __shared__ Factors factors;
    __shared__ Sums rows;
    __shared__ Exchange<TALL / 32> exchange;
    Room &room = *reinterpret_cast<Room *>(start);
    const long long slot = blockIdx.x / s.heads;
    const int head = blockIdx.x % s.heads, heads = s.heads * s.groups;
    const Text text = text_of_slot(offsets, slot, s);
    const long long first = text.first(slot - text.slot);
    const int count = text.count(slot - text.slot);
    if (count <= 0) return;
    const int lane = threadIdx.x % 32, warp = own_warp(), side = warp % 2, stripe = warp / 2;
    const int own_row = stripe * 16 + lane / 4;  // and the row 8 below
    const long long at = (first * s.heads + head) * DIM;
    const int stride = s.heads * DIM, down = heads * s.values, slabs = s.values / 16;
    const Rows queries{room.queries}, keys{room.keys};
    queries.copy<CHUNK, DIM, TALL>(q + at, 0, count, stride);
    keys.copy<CHUNK, DIM, TALL>(k + at, 0, count, stride);
    const auto results_of = [&](const Rows &tile) {  // where a tile has a lane's results
        auto from = tile.lane(own_row, side * COUNT);
        from.offset += lane % 4 * 4;
        return from;
    };
    // the sums along the two rows of a lane of part * a tile
    const auto along = [&](float (&sum)[2], const float (&part)[COUNT][4], const Rows &tile) {
        const auto from = results_of(tile);
#pragma unroll
        for (int below = 0; below < 2; below++) {
            sum[below] = 0;
#pragma unroll
            for (int n = 0; n < COUNT; n++) {
                const float2 both =
                    both_of(*reinterpret_cast<const uint32_t *>(from.at(below * 8, n)));
                sum[below] = fmaf(both.x, part[n][below * 2], sum[below]);
                sum[below] = fmaf(both.y, part[n][below * 2 + 1], sum[below]);
            }
            sum[below] = group_sum<4>(sum[below]);
        }
    };
    const auto add_to = [&](float (&sum)[COUNT][4], const float (&part)[COUNT][4], int below,
                            float factor) {
#pragma unroll
        for (int n = 0; n < COUNT; n++)
#pragma unroll
            for (int e = below * 2; e < below * 2 + 2; e++)
                sum[n][e] = fmaf(factor, part[n][e], sum[n][e]);
    };
    float sum_q[COUNT][4] = {}, sum_k[COUNT][4] = {};
#pragma unroll 1
    for (int group = 0; group < s.groups; group++) {
        const int value_head = head * s.groups + group;
        const long long matrix = slot * heads + value_head;
        const long long token = (first * heads + value_head) * s.values;
        // all steps have dout, dB and S, the second half v, U and dS', too
        const auto copy = [&](int step) {
            const bool second = step >= slabs;
            const int slab = second ? step - slabs : step;
            Stage &to = room.stages[step % 2];
            const long long number = matrix * slabs + slab;
            constexpr int OF_TOKENS = Slab<CHUNK>::WORDS, OF_STATE = Slab<DIM>::WORDS;
            Thin{to.douts}.copy<CHUNK, 16, TALL>(dout + token + slab * 16, 0, count, down);
            copy_words<OF_TOKENS>(to.db, db + number * OF_TOKENS);
            copy_words<OF_STATE>(to.state, states + number * OF_STATE);
            if (!second) return;
            Thin{to.values}.copy<CHUNK, 16, TALL>(v + token + slab * 16, 0, count, down);
            copy_words<OF_TOKENS>(to.u, u + number * OF_TOKENS);
            copy_words<OF_STATE>(to.dstate, dstates + number * OF_STATE);
        };
        const auto fetch_rows = [&](uint32_t (&to)[4], T *from) {
            ldmatrix_x4(to, Thin{from}.at(stripe * 16 + lane % 16, lane / 16));
        };
        const auto fetch_state = [&](uint32_t (&to)[2][SHORT][4], uint32_t *from, int n) {
#pragma unroll
            for (int i = 0; i < 2; i++)
                Slab<DIM>{from}.fetch<false>(to[i], side * COUNT + n + i * 2);
        };
        __syncthreads();  // all warps are done with the value head before
        set(factors, decay, beta, first, count, value_head, s);
        copy(0);
        cp_async_commit();
        cp_async_wait<0>();
        float read[2];  // of dB and exp(g) K S
        {
            float of_query[COUNT][4] = {}, of_key[COUNT][4] = {};
#pragma unroll 1
            for (int step = 0; step < slabs; step++) {
                cp_async_wait<0>();
                __syncthreads();
                copy(step + 1);
                cp_async_commit();
                Stage &own = room.stages[step % 2];
                uint32_t of_rows[4], of_dout[PAIR][4], of_b[SHORT][4], right[2][SHORT][4];
                fetch_rows(of_rows, own.douts);
                split(of_dout, of_rows);
                Slab<CHUNK>{own.db}.fetch<true>(of_b, stripe * 2);
#pragma unroll
                for (int n = 0; n < COUNT; n += 4) {
                    fetch_state(right, own.state, n);
                    add_parts(of_query, n, of_dout, right);
                    add_parts(of_key, n, of_b, right);
                }
            }
            float by_query[2], by_key[2];
            along(by_query, of_query, queries);
            along(by_key, of_key, keys);
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const int row = own_row + below * 8;
                const float into = factors.into[row], share = factors.beta[row] * into;
                if (lane % 4 == 0)
                    rows.after[side][row] =
                        s.scale * into * by_query[below] - share * by_key[below];
                add_to(sum_q, of_query, below, s.scale * into);
                add_to(sum_k, of_key, below, -share);
                read[below] = into * by_key[below];
            }
        }
        float dp[2][2][4] = {}, da[2][2][4] = {};  // columns side * 32 ..
        float dot[2] = {}, passing = 0;  // dB and v; from the state before the chunk to that after it
        {
            float part[COUNT][4] = {};
#pragma unroll 1
            for (int step = slabs; step < 2 * slabs; step++) {
                cp_async_wait<0>();
                __syncthreads();
                if (step + 1 < 2 * slabs) copy(step + 1);
                cp_async_commit();
                Stage &own = room.stages[step % 2];
                uint32_t of_rows[4], of_dout[PAIR][4], of_b[SHORT][4], of_u[SHORT][4];
                uint32_t right[2][SHORT][4];  // of 32 columns
                fetch_rows(of_rows, own.douts);
                split(of_dout, of_rows);
                Slab<CHUNK>{own.db}.fetch<true>(of_b, stripe * 2);
                Slab<CHUNK>{own.u}.fetch<true>(of_u, stripe * 2);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    if (side * 2 + n > stripe) continue;
                    uint32_t columns[1][SHORT][4];
                    Slab<CHUNK>{own.u}.fetch<false>(columns[0], side * 4 + n * 2);
                    add_parts(dp[n], 0, of_dout, columns);
                    add_parts(da[n], 0, of_b, columns);
                }
#pragma unroll
                for (int n = 0; n < COUNT; n += 4) {
                    fetch_state(right, own.dstate, n);
                    add_parts(part, n, of_u, right);
                }
                if (step % 2 == side) {
                    fetch_rows(of_rows, own.values);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float2 value = both_of(of_rows[i]);
                        dot[i % 2] = fmaf(value.x, low_of(of_b[0][i]) + low_of(of_b[1][i]),
                                          dot[i % 2]);
                        dot[i % 2] = fmaf(value.y, high_of(of_b[0][i]) + high_of(of_b[1][i]),
                                          dot[i % 2]);
                    }
                }
                constexpr int ALL = Slab<DIM>::WORDS / 2;  // words of a part
                if (threadIdx.x * 4 < ALL) {
                    const uint32_t *const x = own.state + threadIdx.x * 4;
                    const uint32_t *const y = own.dstate + threadIdx.x * 4;
                    Vector<uint32_t, 4> left[SHORT], right[SHORT];
#pragma unroll
                    for (int part = 0; part < SHORT; part++)
                        fetch(left[part], x + part * ALL), fetch(right[part], y + part * ALL);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const uint32_t a = left[0].at[i], b = left[1].at[i];
                        const uint32_t c = right[0].at[i], d = right[1].at[i];
                        passing = fmaf(low_of(a) + low_of(b), low_of(c) + low_of(d), passing);
                        passing = fmaf(high_of(a) + high_of(b), high_of(c) + high_of(d), passing);
                    }
                }
            }
            float sum[2];
            along(sum, part, keys);
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const float factor = factors.onward[own_row + below * 8];
                if (lane % 4 == 0) rows.before[side][own_row + below * 8] = factor * sum[below];
                add_to(sum_k, part, below, factor);
            }
        }
        __syncthreads();  // all warps are done with the stages
        {
            float by_query[1][4][4] = {}, by_key[1][4][4] = {};
            const auto query = queries.lane(stripe * 16 + lane % 16, lane / 16);
            const auto key = keys.lane(stripe * 16 + lane % 16, lane / 16);
            const auto other = keys.lane(side * 32 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll 2
            for (int step = 0; step < DIM / 16; step++) {
                uint32_t left[2][1][4], right[4];
                ldmatrix_x4(left[0][0], query.at(0, step * 2));
                ldmatrix_x4(left[1][0], key.at(0, step * 2));
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    if (side * 2 + n > stripe) continue;
                    ldmatrix_x4(right, other.at(n * 16, step * 2));
                    multiply_two<T>(by_query, n * 2, left[0], right);
                    multiply_two<T>(by_key, n * 2, left[1], right);
                }
            }
            float sum[2] = {};
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int below = 0; below < 2; below++) {
                    const int row = own_row + below * 8, column = side * 32 + n * 8 + lane % 4 * 2;
                    float x[2], y[2], both[2];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int i = below * 2 + e;
                        const bool earlier = row > column + e;
                        const float fade = factors.fade(row, column + e), own = dp[n / 2][n % 2][i];
                        const float error = earlier ? -da[n / 2][n % 2][i] : 0.0f;
                        const float alike = earlier ? fade * by_key[0][n][i] : 0.0f;
                        const float score = fade * by_query[0][n][i] * s.scale;
                        x[e] = fade * s.scale * own;
                        y[e] = fade * factors.beta[row] * error;
                        both[e] =
                            earlier ? own * score + error * factors.beta[row] * alike : 0.0f;
                        sum[below] = fmaf(error, alike, sum[below]);
                    }
                    *reinterpret_cast<float2 *>(room.squares.pairs + row * PITCH + column) =
                        make_float2(both[0], both[1]);
                    uint32_t parts[SHORT][4];
                    split(parts, 0, x[0], x[1]);
                    split(parts, 1, y[0], y[1]);
#pragma unroll
                    for (int part = 0; part < SHORT; part++) {
                        const int chunk = column / 8, e = column % 8;
                        *reinterpret_cast<uint32_t *>(Pairs{room.squares.x[part]}.at(row, chunk) + e) =
                            parts[part][0];
                        *reinterpret_cast<uint32_t *>(Pairs{room.squares.y[part]}.at(row, chunk) + e) =
                            parts[part][1];
                    }
                }
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const float own = group_sum<4>(dot[below] + sum[below]) - read[below];
                if (lane % 4 == 0) rows.dbeta[side][own_row + below * 8] = own;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int step = 0; step < STRIPES; step++) {
            uint32_t of_x[SHORT][4], of_y[SHORT][4], of_keys[COUNT / 2][4];
            const auto key = keys.lane(step * 16 + lane % 16, side * COUNT + lane / 16);
#pragma unroll
            for (int n = 0; n < COUNT / 2; n++) ldmatrix_x4_trans(of_keys[n], key.at(0, n * 2));
            if (step <= stripe) {
#pragma unroll
                for (int part = 0; part < SHORT; part++) {
                    const int row = stripe * 16 + lane % 16, chunk = step * 2 + lane / 16;
                    ldmatrix_x4(of_x[part], Pairs{room.squares.x[part]}.at(row, chunk));
                    ldmatrix_x4(of_y[part], Pairs{room.squares.y[part]}.at(row, chunk));
                }
                add(sum_q, of_x, of_keys);
                add(sum_k, of_y, of_keys);
            }
            if (step >= stripe) {  // turned
                uint32_t of_queries[COUNT / 2][4];
                const auto query = queries.lane(step * 16 + lane % 16, side * COUNT + lane / 16);
#pragma unroll
                for (int n = 0; n < COUNT / 2; n++)
                    ldmatrix_x4_trans(of_queries[n], query.at(0, n * 2));
#pragma unroll
                for (int part = 0; part < SHORT; part++) {
                    const int row = step * 16 + lane % 8 + lane / 16 * 8;
                    const int chunk = stripe * 2 + lane / 8 % 2;
                    ldmatrix_x4_trans(of_x[part], Pairs{room.squares.x[part]}.at(row, chunk));
                    ldmatrix_x4_trans(of_y[part], Pairs{room.squares.y[part]}.at(row, chunk));
                }
                add(sum_k, of_x, of_queries);
                add(sum_k, of_y, of_keys);
            }
        }
        passing = factors.whole * row_sum<TALL>(passing, exchange);
        const int t = threadIdx.x / 4, quarter = threadIdx.x % 4;
        Vector<float, 16> row;
        float *const own_pairs = room.squares.pairs + t * PITCH + quarter * 16;
        fetch(row, own_pairs);
        float sum = 0, before = 0;
#pragma unroll
        for (int i = 0; i < 16; i++) row.at[i] = sum += row.at[i];
#pragma unroll
        for (int away = 1; away < 4; away++) {
            const float other = __shfl_up_sync(0xffffffffu, sum, away, 4);
            if (quarter >= away) before += other;
        }
#pragma unroll
        for (int i = 0; i < 16; i++) row.at[i] += before;
        put(own_pairs, row);
        __syncthreads();
        sum = 0;
#pragma unroll 4
        for (int row = quarter; row < CHUNK; row += 4) {
            if (row < t) sum += rows.before[0][row] + rows.before[1][row];
            else sum += rows.after[0][row] + rows.after[1][row];
            if (row >= t && t) sum += room.squares.pairs[row * PITCH + t - 1];
        }
        sum = group_sum<4>(sum) + passing;
        if (quarter == 0 && t < count) {
            const long long to = (first + t) * heads + value_head;
            ddecay[to] = (D)sum;
            dbeta[to] = (E)(rows.dbeta[0][t] + rows.dbeta[1][t]);
        }
    }
    cp_async_wait<0>();
    __syncthreads();  // all warps are done with q and k
    const auto lay = [&](const Rows &tile, const float (&sum)[COUNT][4]) {
        const auto to = results_of(tile);
#pragma unroll
        for (int n = 0; n < COUNT; n++)
#pragma unroll
            for (int below = 0; below < 2; below++)
                *reinterpret_cast<uint32_t *>(to.at(below * 8, n)) =
                    pair(sum[n][below * 2], sum[n][below * 2 + 1], T());
    };
    lay(queries, sum_q);
    lay(keys, sum_k);
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < CHUNK * DIM / 8; i += TALL) {
        const int row = i / (DIM / 8), chunk = i % (DIM / 8);
        if (row >= count) break;
        Vector<T, 8> line;
        fetch(line, queries.at(row, chunk));
        put(dq, at + row * stride + chunk * 8, line);
        fetch(line, keys.at(row, chunk));
        put(dk, at + row * stride + chunk * 8, line);
    }
}
