// The gated delta rule by chunks on tensor cores, with inputs of 16 bits.
//
//   in the notation of gated_delta_rule.cu, with P = scale F Q K^T, T = (I + A)^-1:
//   B = beta (V - exp(g) K S)    U = T B    out = scale exp(g) Q S + P U
//   S' = exp(g[63]) S + K^T (exp(g[63] - g) U)
//
//   traffic     delta_chunks_mma    q and k; 26 KB for each chunk and value head, written; with
//                                   BACKWARD 47 KB
//               delta_states_mma    those, q and k, for each tile of 32 values, or of 64 with DIM 64;
//                                   v and out once; with BACKWARD k alone and 16 KB, and U and
//                                   states, written
//   products    of a chunk and 16 values, in m16n8k16, with DIM 128: K S and K^T U 192 each, Q S 128,
//               T B 120, P U 60; in float16 320, 320, 192, 120, 60; with EXACT 2, in bfloat16 128,
//               128, 128, 60, 60
//   constants   T            dtype of q, k and v: of 16 bits
//               DIM          columns of q and k: 64 or 128; columns of v are a multiple of 64
//               INITIAL      there are states before the texts
//               BACKWARD     for backward: P^T and T^T are written, not P; U and the states before
//                            chunks, not out
//               EXACT        parts of what states depend on: 3 or 2
//               and those of common/delta_chunk.cuh; CHANNELS is off
//
//   The trick: a warp owns 16 columns and 64 rows of a state, transposed, in registers, for a whole
//   text; with DIM 128, two warps exchange sums of a chunk.  The results of each product are the
//   first operand of the next, so that states are never in shared memory.  They are as exact as in
//   float32: a float32 is the sum of three bfloat16, and products of such parts are exact.  Three
//   are multiplied with k (two parts if it is float16), six pairs with T; parts below the last bit
//   are left out, and those of out are two.  With EXACT 2 the lowest part of a state is left out.  T and P are stored as the operands of lanes.
#include <common/delta_mma.cuh>
#include <common/delta_step.cuh>

// ---- chunks -------------------------------------------------------------------------------------
constexpr int PITCH = CHUNK + 8;
struct Square {
    float *start;

    DEVICE float *at(int row, int column) const { return start + row * PITCH + column; }
};

// d += a @ b, blocks of 16 x 16 that begin at these addresses.
DEVICE void add_block(float (&d)[2][4], const float *a, const float *b) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    uint32_t left[EXACT][4], right[EXACT][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *const own = a + (row + i % 2 * 8) * PITCH + column + i / 2 * 8;
        split(left, i, own[0], own[1]);
        const float *const other = b + (column + i % 2 * 8) * PITCH + row + i / 2 * 8;
        split(right, i, other[0], other[PITCH]);
    }
#pragma unroll
    for (int plane = EXACT - 1; plane >= 0; plane--)
#pragma unroll
        for (int part = EXACT - 1 - plane; part >= 0; part--)
            add_two(d, 0, left[part], right[plane]);
}
DEVICE void put_block(float *to, const float (&d)[2][4], float sign) {
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[(row + i / 2 * 8) * PITCH + column + n * 8 + i % 2] = sign * d[n][i];
}

// t becomes the inverse of I + A, of which a has A below its diagonal; above that of t are sums.
DEVICE void invert(const Square &a, const Square &t) {
    const int warp = own_warp(), own = warp * 16, column = threadIdx.x % 16;
    float x[16];  // a column of the inverse of a block on the diagonal
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; j++) sum = fmaf(-*a.at(own + i, own + j), x[j], sum);
        x[i] = sum;
    }
#pragma unroll
    for (int i = 0; i < 16; i++)
        if (threadIdx.x % 32 < 16) *t.at(own + i, own + column) = x[i];
    __syncthreads();
    // with blocks T11 and T22 of the diagonal, the other is -T22 A21 T11
    if (warp < 2) {
        const int top = warp * 32, low = top + 16;
        float sum[2][4] = {}, next[2][4] = {};
        add_block(sum, a.at(low, top), t.at(top, top));
        put_block(t.at(top, low), sum, 1.0f);
        __syncwarp();
        add_block(next, t.at(low, low), t.at(top, low));
        put_block(t.at(low, top), next, -1.0f);
    }
    __syncthreads();
    const int down = warp / 2 * 16, right = warp % 2 * 16;
    float sum[2][4] = {}, next[2][4] = {};
    for (int j = right; j < 32; j += 16)
        add_block(sum, a.at(32 + down, j), t.at(j, right));
    put_block(t.at(down, 32 + right), sum, 1.0f);
    __syncthreads();
    for (int j = 0; j <= down; j += 16)
        add_block(next, t.at(32 + down, 32 + j), t.at(j, 32 + right));
    put_block(t.at(32 + down, right), next, -1.0f);
    __syncthreads();
}

// Write the parts of a block of a triangle.
template <int PARTS>
DEVICE void put_operand(uint4 *to, int row, int column, const uint32_t (&x)[PARTS][4]) {
#pragma unroll
    for (int part = 0; part < PARTS; part++)
        to[part * PLANE + block_of(row, column) * 32 + threadIdx.x % 32] =
            make_uint4(x[part][0], x[part][1], x[part][2], x[part][3]);
}
// The same, turned.
DEVICE void put_turned(uint4 *to, int row, int column, const Square &from) {
    const int lane = threadIdx.x % 32;
    uint32_t x[EXACT][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *const own = from.at(row * 16 + lane % 4 * 2 + i % 2 * 8,
                                         column * 16 + lane / 4 + i / 2 * 8);
        split(x, i, own[0], own[PITCH]);
    }
    put_operand<EXACT>(to, row, column, x);
}

KERNEL(THREADS, 3)
delta_chunks_mma(const T *__restrict__ q, const T *__restrict__ k, const D *__restrict__ decay,
                 const E *__restrict__ beta, const I *__restrict__ offsets,
                 float *__restrict__ pieces, const __grid_constant__ Sizes s) {
    __shared__ __align__(128) float memory[2 * CHUNK * PITCH];
    static_assert(sizeof(memory) >= 2 * CHUNK * Rows::PITCH_BYTES);
    __shared__ Factors factors;
    const long long slot = blockIdx.x / s.heads;
    const int head = blockIdx.x % s.heads, heads = s.heads * s.groups;
    const Text text = text_of_slot(offsets, slot, s);
    const long long first = text.first(slot - text.slot);
    const int count = text.count(slot - text.slot);
    if (count <= 0) return;
    const int lane = threadIdx.x % 32, warp = own_warp(), own = warp * 16;
    const Rows queries{reinterpret_cast<T *>(memory)};
    const Rows keys{queries.start + CHUNK * Rows::PITCH};
    const long long at = (first * s.heads + head) * DIM;
    queries.copy<CHUNK, DIM, THREADS>(q + at, 0, count, s.heads * DIM);
    keys.copy<CHUNK, DIM, THREADS>(k + at, 0, count, s.heads * DIM);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    float by_query[1][CHUNK / 8][4], by_key[1][CHUNK / 8][4];
    uint32_t none[1][1][4];
    product_abt<false>(by_query, none, queries, own, keys);
    product_abt<false>(by_key, none, keys, own, keys);
    const Square a{memory}, t{memory + CHUNK * PITCH};
    for (int group = 0; group < s.groups; group++) {
        const int value_head = head * s.groups + group;
        Pieces &to = reinterpret_cast<Pieces *>(pieces)[slot * heads + value_head];
        __syncthreads();
        set(factors, decay, beta, first, count, value_head, s);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            if (j > warp) continue;
            uint32_t own_scores[SHORT][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = own + lane / 4 + i / 2 * 8, n = j * 2 + i % 2;
                const int column = n * 8 + lane % 4 * 2;
                float both[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float fade = factors.fade(row, column + e);
                    const float key = row > column + e ? fade * by_key[0][n][i / 2 * 2 + e] : 0.0f;
                    *a.at(row, column + e) = factors.beta[row] * key;
                    both[e] = fade * by_query[0][n][i / 2 * 2 + e] * s.scale;
                }
                if constexpr (!BACKWARD) split(own_scores, i, both[0], both[1]);
                else *t.at(row, column) = both[0], *t.at(row, column + 1) = both[1];
            }
            if constexpr (!BACKWARD) put_operand<SHORT>(to.scores, warp, j, own_scores);
        }
        __syncwarp();
        if constexpr (BACKWARD) {
            for (int j = 0; j <= warp; j++) put_turned(to.scores, warp, j, t);
            __syncwarp();
        }
        invert(a, t);
        for (int block = warp; block < BLOCKS; block += WARPS) {
            const int row = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
            const int column = block - block_of(row, 0);
            uint32_t own_solve[EXACT][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *const from = t.at(row * 16 + lane / 4 + i / 2 * 8,
                                               column * 16 + lane % 4 * 2 + i % 2 * 8);
                split(own_solve, i, from[0], from[1]);
            }
            put_operand<EXACT>(to.solve, row, column, own_solve);
            if constexpr (BACKWARD) put_turned(to.scores + TURNED, row, column, t);
        }
        const int token = threadIdx.x;
        if (token < CHUNK) {
            to.into[token] = factors.into[token];
            to.onward[token] = factors.onward[token];
            to.beta[token] = factors.beta[token];
        }
    }
}

// ---- along a text -------------------------------------------------------------------------------
struct Memory {  // shared, of delta_states_mma
    T queries[BACKWARD ? 8 : CHUNK * Rows::PITCH];
    T keys[2][CHUNK * Rows::PITCH], values[CHUNK * Values::PITCH];
    float4 sums[HALVES == 2 ? WARPS * 8 * 32 : 1];  // 8 of each lane
    Pieces pieces;  // with BACKWARD, up to scores
};
static_assert(BACKWARD || sizeof(OneToken) <= sizeof(Memory));

// out and the last states; with BACKWARD, U and the state before each chunk instead.
KERNEL(THREADS, 1)
delta_states_mma(const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v,
                 const D *__restrict__ decay, const E *__restrict__ beta,
                 const float *__restrict__ initial, const I *__restrict__ offsets,
                 const float *__restrict__ pieces, T *__restrict__ out, float *__restrict__ final,
                 unsigned *__restrict__ solved, unsigned *__restrict__ states,
                 const __grid_constant__ Sizes s) {
    DYNAMIC_SHARED(char, start);
    Memory &memory = *reinterpret_cast<Memory *>(start);
    const int heads = s.heads * s.groups, value_head = blockIdx.x / s.tiles % heads;
    const int number = blockIdx.x / (s.tiles * heads), head = value_head / s.groups;
    const int from = blockIdx.x % s.tiles * WIDE;
    const Text text(offsets, number, s);
    if (!BACKWARD && text.stop - text.start == 1) {
        for (int part = 0; part < WIDE; part += OneToken::WIDE) {
            __syncthreads();
            reinterpret_cast<OneToken *>(start)->run<THREADS>(
                q, k, v, decay, beta, initial, out, final, number, text.start, value_head,
                from + part, s);
        }
        return;
    }
    const int lane = threadIdx.x % 32, warp = own_warp();
    const int half = HALVES == 2 ? warp & 1 : 0, right = warp / HALVES * 16;  // column of values
    const int tokens = (int)(text.stop - text.start);
    const int stride = s.heads * DIM, down = heads * s.values;
    q += text.start * stride + head * DIM, k += text.start * stride + head * DIM;
    const long long first_value = text.start * down + value_head * s.values + from;
    const char *const first_pieces =
        reinterpret_cast<const char *>(pieces) + (text.slot * heads + value_head) * sizeof(Pieces);
    const Rows queries{memory.queries};
    const Values values{memory.values};
    const auto keys_of = [&](int chunk) { return Rows{memory.keys[chunk % 2]}; };
    const auto copy_rows = [&](const Rows &to, const T *rows, int chunk) {
        if (chunk * CHUNK < tokens)
            to.copy<CHUNK, DIM, THREADS>(rows, chunk * CHUNK, tokens, stride);
    };
    const auto copy_pieces = [&](int chunk, int first, int stop) {  // bytes of Pieces
        if (chunk * CHUNK >= tokens) return;
        const char *const own =
            first_pieces + (long long)chunk * heads * sizeof(Pieces) + threadIdx.x * 16;
        char *const to = reinterpret_cast<char *>(&memory.pieces) + threadIdx.x * 16;
#pragma unroll
        for (int i = first; i < stop; i += THREADS * 16)
            if (i + THREADS * 16 <= stop || i + threadIdx.x * 16 < stop) cp_async_16(to + i, own + i);
    };
    constexpr int SOLVE = sizeof(Pieces::solve);
    constexpr int ALL = BACKWARD ? SOLVE + 3 * CHUNK * sizeof(float) : sizeof(Pieces);

    // part of the state, transposed: its columns lane / 4, and 8 further on
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
        for (int i = 0; i < 4; i++) state[n][i] = INITIAL ? initial[state_at(n, i)] : 0.0f;
    const auto sum_of = [&](int warp, int n) -> float4 & {
        return memory.sums[(warp * 8 + n) * 32 + lane];
    };

    copy_rows(keys_of(0), k, 0);
    if constexpr (!BACKWARD) copy_rows(queries, q, 0);
    cp_async_commit();
    copy_pieces(0, 0, SOLVE);
    cp_async_commit();
    for (int chunk = 0; chunk * CHUNK < tokens; chunk++) {
        const Rows keys = keys_of(chunk);
        cp_async_wait<1>();
        __syncthreads();  // q and k have arrived, and all warps are done with the previous chunk
        values.copy<CHUNK, WIDE, THREADS>(v + first_value, chunk * CHUNK, tokens, down);
        copy_pieces(chunk, SOLVE, ALL);
        cp_async_commit();
        copy_rows(keys_of(chunk + 1), k, chunk + 1);
        cp_async_commit();

        const long long matrix = (text.slot + chunk) * heads + value_head;
        const long long slab = matrix * (s.values / 16) + (from + right) / 16;
        if constexpr (BACKWARD) {
            const Slab<DIM> to{states + slab * Slab<DIM>::WORDS};
#pragma unroll
            for (int n = 0; n < 8; n++) to.put(half * 8 + n, state[n]);
        }
        float b[CHUNK / 8][4] = {};
        add_rows<EXACT>(b, state, keys, half);
        if constexpr (HALVES == 2) {
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) sum_of(warp, n) = four_of(b[n]);
        }
        cp_async_wait<1>();
        __syncthreads();  // all but the next keys has arrived, and so have sums
        const Pieces &own = memory.pieces;
        const auto value = values.lane(lane % 8 + lane / 16 * 8, right / 8 + lane / 8 % 2);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++) {
            if constexpr (HALVES == 2) add_four(b[n], sum_of(warp ^ 1, n));
        }
#pragma unroll
        for (int n = 0; n < STRIPES; n++) {
            uint32_t of_values[4];
            ldmatrix_x4_trans(of_values, value.at(n * 16, 0));
#pragma unroll
            for (int below = 0; below < 2; below++) {
                const float2 into = two_of(own.into, n * 2 + below);
                const float2 share = two_of(own.beta, n * 2 + below);
#pragma unroll
                for (int i = 0; i < 2; i++) {  // columns 8 apart
                    const T *const both = reinterpret_cast<const T *>(&of_values[below * 2 + i]);
                    float *const sum = &b[n * 2 + below][i * 2];
                    sum[0] = share.x * fmaf(-into.x, sum[0], (float)both[0]);
                    sum[1] = share.y * fmaf(-into.y, sum[1], (float)both[1]);
                }
            }
        }
        float u[CHUNK / 8][4], o[OWN * 2][4], part[OWN * 2][4] = {}, read[CHUNK / 8][4] = {};
        add_triangle<EXACT>(part, b, own.solve, half);
        if constexpr (!BACKWARD) add_rows<SHORT>(read, state, queries, half);
        // of out, each half has read a part of all stripes; it keeps its own
#pragma unroll
        for (int n = 0; n < OWN * 2; n++) {
            const int outer = n / 2 * 6 + n % 2, inner = 2 + n;  // stripes 0 and 3, 1 and 2
#pragma unroll
            for (int i = 0; i < 4; i++)
                o[n][i] = HALVES == 1 ? read[n][i] : half ? read[inner][i] : read[outer][i];
            if constexpr (HALVES == 2) {
                float other[4];
#pragma unroll
                for (int i = 0; i < 4; i++) other[i] = half ? read[outer][i] : read[inner][i];
                sum_of(warp ^ 1, n) = four_of(part[n]);  // only this warp has read them
                if constexpr (!BACKWARD) sum_of(warp ^ 1, 4 + n) = four_of(other);
            }
        }
        __syncthreads();  // all warps are done with q and T, and sums have arrived
        if constexpr (!BACKWARD) copy_rows(queries, q, chunk + 1);
        cp_async_commit();
        copy_pieces(chunk + 1, 0, SOLVE);
        cp_async_commit();
        gather(u, part, half, [&](int owner, int number) {
            return sum_of(warp - half + (owner ^ 1), number);
        });
        if constexpr (BACKWARD) {
            const Slab<CHUNK> to{solved + slab * Slab<CHUNK>::WORDS};
#pragma unroll
            for (int n = 0; n < OWN * 2; n++)
                to.put(stripe_of(half, n / 2) * 2 + n % 2, part[n]);
        } else {
#pragma unroll
            for (int n = 0; n < OWN * 2; n++) {
                if constexpr (HALVES == 2) add_four(o[n], sum_of(warp, 4 + n));
                scale_by(o[n], two_of(own.into, stripe_of(half, n / 2) * 2 + n % 2), s.scale);
            }
            add_triangle<SHORT>(o, u, own.scores, half);
            put_stripes(out, first_value + right, values, o, right, half, chunk * CHUNK, tokens, down);
        }
        if (BACKWARD && (chunk + 1) * CHUNK >= tokens) break;
        const auto turned = keys.lane(lane % 16, half * 8 + lane / 16);
        const float whole = own.into[CHUNK - 1];
        float sum[8][4] = {};  // tensor cores cut what they add; a state is rounded, once
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            uint32_t left[EXACT][4], of_keys[4][4];
            scale_by(u[j * 2], two_of(own.onward, j * 2), 1.0f);
            scale_by(u[j * 2 + 1], two_of(own.onward, j * 2 + 1), 1.0f);
            split(left, u[j * 2], u[j * 2 + 1]);
#pragma unroll
            for (int n = 0; n < 4; n++) ldmatrix_x4_trans(of_keys[n], turned.at(j * 16, n * 2));
            add(sum, left, of_keys);
        }
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
            if constexpr (!BACKWARD) final[state_at(n, i)] = state[n][i];
}
