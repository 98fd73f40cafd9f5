// State space duality forward by chunks on tensor cores, with inputs of 16 bits.
//
//   in the notation of ssd.cu, with P = F C B^T r, whose columns have the rates of their tokens:
//   y = exp(g) C S + P X + d X        S' = exp(g[63]) S + B^T (exp(g[63] - g) r X)
//
//   traffic     ssd_states_mma    dt, b and c for each head and tile of 64 columns; x and y once
//   products    of a chunk and 16 columns, in m16n8k16, with DIM 128: C S 128, B^T U 192, P X 40 and
//               a share of 40 in C B^T; in float16, with DIM 64, 96, 160, 60 and 20
//   constants   T           dtype of x, b and c: of 16 bits; columns of x are a multiple of 64
//               INITIAL     there are states before the texts
//               BACKWARD    for backward: the states before chunks are written, not y
//               and those of common/ssd_mma.cuh
//
//   The trick: as in gated_delta_rule_mma.cu, a warp owns 16 columns of a state, transposed, in
//   registers, for a whole text, and a float32 is a sum of bfloat16.  x is an operand as it is: r is
//   a factor of P, and of the two sides only one has parts.  Warps share the blocks of P, which is
//   stored as the operands of lanes.
#include <common/ssd_mma.cuh>
#include <common/ssd_step.cuh>

static_assert(sizeof(OneToken) <= sizeof(Memory<SHORT>));

KERNEL(THREADS, 1)
ssd_states_mma(const T *__restrict__ x, const R *__restrict__ dt, const A *__restrict__ a_log,
               const T *__restrict__ b, const T *__restrict__ c, const O *__restrict__ d,
               const Q *__restrict__ dt_bias, const float *__restrict__ initial,
               const I *__restrict__ offsets, T *__restrict__ y, float *__restrict__ final,
               float *__restrict__ states, const __grid_constant__ Sizes s,
               const __grid_constant__ Strides strides, float least, float most) {
    DYNAMIC_SHARED(char, start);
    Memory<SHORT> &memory = *reinterpret_cast<Memory<SHORT> *>(start);
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
    const int warp = own_warp(), right = warp * 16;  // columns of x
    const int tokens = (int)(text.stop - text.start), down = heads * s.values;
    x += text.start * strides.x + head * s.values + from;
    b += text.start * strides.b + head / s.groups * DIM;
    c += text.start * strides.c + head / s.groups * DIM;
    dt += text.start * heads + head;
    const long long first_value = text.start * down + head * s.values + from + right;
    const Rows reads{memory.reads};
    const auto writes_of = [&](int chunk) { return Rows{memory.writes[chunk % 2]}; };
    const auto values_of = [&](int chunk) { return Values{memory.values[chunk % 2]}; };
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
        if (warp == 0)
            set_rates(memory.factors[chunk % 2], dt, heads, head, dt_bias, speed, chunk * CHUNK,
                      tokens, least, most);
    };
    const long long matrix = (long long)DIM * s.values, own_columns = from + right;
    const long long first_state = ((long long)number * heads + head) * matrix + own_columns;
    float state[SLABS][8][4];
    each_state(state, initial + first_state, s.values, [](const float &from, float &value) {
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
            each_state(state,
                       states + ((text.slot + chunk) * heads + head) * matrix + own_columns,
                       s.values, [](float &to, float value) { to = value; });
        } else {
            score<false, SHORT>(memory.scores, reads, writes, own);
            const auto of_c = lane_of_rows(reads, 0);
#pragma unroll
            for (int slab = 0; slab < SLABS; slab++)
                add_rows<SHORT>(o, state[slab], of_c, slab * 8);
        }
        prepare(chunk + 1);
        if constexpr (!BACKWARD) __syncthreads();  // P is there, and all warps are done with c
        copy_reads(chunk + 1);
        uint32_t of_x[STRIPES][4];
#pragma unroll
        for (int j = 0; j < STRIPES; j++) take_columns(of_x[j], values, right, j);
        if constexpr (!BACKWARD) {
#pragma unroll
            for (int n = 0; n < CHUNK / 8; n++) scale_by(o[n], two_of(own.into, n), 1.0f);
#pragma unroll
            for (int j = 0; j < STRIPES; j++)
                add_scores<false, SHORT>(o, of_x[j], memory.scores, j);
            __syncwarp();  // all lanes have read these columns of x, where y goes
#pragma unroll
            for (int j = 0; j < STRIPES; j++)
                put_columns(y, first_value + (long long)chunk * CHUNK * down, down,
                            tokens - chunk * CHUNK, values, right, j, [&](int n, int i) {
                                const float own = value_of(of_x[j], n * 2 + i / 2, i % 2);
                                return fmaf(skip, own, o[j * 2 + n][i]);
                            });
        }
        grow(state, own.whole, of_x, writes, [&](int n) {
            const float2 onward = two_of(own.onward, n), rate = two_of(own.beta, n);
            return make_float2(onward.x * rate.x, onward.y * rate.y);
        });
    }
    cp_async_wait<0>();
    if constexpr (!BACKWARD)
        each_state(state, final + first_state, s.values,
                   [](float &to, float value) { to = value; });
}
