// Gradients of state space duality along a text on tensor cores, with inputs of 16 bits.
//
//   in the notation of ssd_backward.cu, with P = F C B^T:
//   dU = P^T dY + exp(g[63] - g) B dS'      dx = r dU + d dY      dd = sum of dY X
//   dS = exp(g[63]) dS' + (exp(g) C)^T dY
//
//   traffic     ssd_state_gradients_mma    dt, b and c for each head and tile of 64 columns; x, dy and
//                                          dx once; dS' of each chunk, and two floats for each token,
//                                          head and tile, written
//   products    of a chunk and 16 columns, in m16n8k16, with DIM 128: B dS' 192, C^T dY 192, P^T dY 60
//               and a share of 40 in B C^T
//   constants   those of common/ssd_mma.cuh
//               FINAL    there is a gradient of the last states
//               DIM 128 is for bfloat16 alone: in float16 it would spill
//
//   The trick: it is the walk of ssd_mma.cu from the last chunk to the first, with b and c, and x and
//   dy, in each other's place.  Of a token, dU is also summed with x, for the gradient of its rate.
#include <common/ssd_mma.cuh>

struct Gradients : Memory<EXACT> {
    T x[CHUNK * Values::PITCH];
    float sums[2][WARPS][CHUNK];  // of x dU and x dY, along a warp's columns
};

KERNEL(THREADS, 1)
ssd_state_gradients_mma(const T *__restrict__ dy, const float *__restrict__ dfinal,
                        const T *__restrict__ x, const R *__restrict__ dt,
                        const A *__restrict__ a_log, const T *__restrict__ b,
                        const T *__restrict__ c, const O *__restrict__ d,
                        const Q *__restrict__ dt_bias, const I *__restrict__ offsets,
                        T *__restrict__ dx, float *__restrict__ drates, float *__restrict__ skips,
                        float *__restrict__ dstates, float *__restrict__ dinitial,
                        const __grid_constant__ Sizes s, const __grid_constant__ Strides strides,
                        float least, float most) {
    DYNAMIC_SHARED(char, start);
    Gradients &memory = *reinterpret_cast<Gradients *>(start);
    const int heads = s.heads * s.groups, head = blockIdx.x / s.tiles % heads;
    const int number = blockIdx.x / (s.tiles * heads), tile = blockIdx.x % s.tiles;
    const int warp = own_warp(), lane = threadIdx.x % 32, right = warp * 16;
    const Text text(offsets, number, s);
    const int tokens = (int)(text.stop - text.start), down = heads * s.values;
    dy += text.start * strides.dy + head * s.values + tile * WIDE;
    x += text.start * strides.x + head * s.values + tile * WIDE;
    b += text.start * strides.b + head / s.groups * DIM;
    c += text.start * strides.c + head / s.groups * DIM;
    dt += text.start * heads + head;
    const long long first_value = text.start * down + head * s.values + tile * WIDE + right;
    const long long first_sum = (tile * s.tokens + text.start) * heads + head;
    const Rows reads{memory.reads};
    const Values own_x{memory.x};
    const auto writes_of = [&](int chunk) { return Rows{memory.writes[chunk % 2]}; };
    const auto values_of = [&](int chunk) { return Values{memory.values[chunk % 2]}; };
    const auto copy_reads = [&](int chunk) {
        if (chunk >= 0)
            reads.copy<CHUNK, DIM, THREADS, 4>(b, chunk * CHUNK, tokens, strides.b);
        cp_async_commit();
    };
    const auto copy_writes = [&](int chunk) {
        if (chunk >= 0) {
            writes_of(chunk).copy<CHUNK, DIM, THREADS, 4>(c, chunk * CHUNK, tokens, strides.c);
            values_of(chunk).copy<CHUNK, WIDE, THREADS>(dy, chunk * CHUNK, tokens, strides.dy);
        }
        cp_async_commit();
    };
    const float speed = -expf((float)a_log[head]), skip = d ? (float)d[head] : 0.0f;
    const auto prepare = [&](int chunk) {
        if (warp == 0 && chunk >= 0)
            set_rates(memory.factors[chunk % 2], dt, heads, head, dt_bias, speed, chunk * CHUNK,
                      tokens, least, most);
    };
    const auto write_sums = [&](int chunk) {  // all warps have theirs
        const int kind = threadIdx.x / CHUNK, row = threadIdx.x % CHUNK;
        const int token = chunk * CHUNK + row;
        if (token >= tokens) return;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += memory.sums[kind][i][row];
        (kind ? skips : drates)[first_sum + (long long)token * heads] = sum;
    };
    static_assert(THREADS == 2 * CHUNK);

    const long long matrix = (long long)DIM * s.values, own_columns = tile * WIDE + right;
    const long long first_state = ((long long)number * heads + head) * matrix + own_columns;
    float state[SLABS][8][4];
    each_state(state, dfinal + first_state, s.values, [](const float &from, float &value) {
        value = FINAL ? from : 0.0f;
    });

    const int last = text.chunks() - 1;
    copy_reads(last);
    copy_writes(last);
    prepare(last);
    for (int chunk = last; chunk >= 0; chunk--) {
        const Rows writes = writes_of(chunk);
        const Values values = values_of(chunk);
        const Factors &own = memory.factors[chunk % 2];
        cp_async_wait<0>();
        __syncthreads();  // the chunk has arrived, and all warps are done with the one after it
        own_x.copy<CHUNK, WIDE, THREADS>(x, chunk * CHUNK, tokens, strides.x);
        cp_async_commit();
        copy_writes(chunk - 1);
        if (chunk < last) write_sums(chunk + 1);
        each_state(state, dstates + ((text.slot + chunk) * heads + head) * matrix + own_columns,
                   s.values, [](float &to, float value) { to = value; });
        score<true, EXACT>(memory.scores, reads, writes, own);
        float o[CHUNK / 8][4] = {};
        const auto of_b = lane_of_rows(reads, 0);
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) add_rows<EXACT>(o, state[slab], of_b, slab * 8);
        prepare(chunk - 1);
        cp_async_wait<1>();
        __syncthreads();  // P and x are there, and all warps are done with b
        copy_reads(chunk - 1);
        uint32_t of_dy[STRIPES][4];
#pragma unroll
        for (int j = 0; j < STRIPES; j++) take_columns(of_dy[j], values, right, j);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++) scale_by(o[n], two_of(own.onward, n), 1.0f);
#pragma unroll
        for (int j = 0; j < STRIPES; j++)
            add_scores<true, EXACT>(o, of_dy[j], memory.scores, j);
#pragma unroll
        for (int j = 0; j < STRIPES; j++) {
            uint32_t of_x[4];
            take_columns(of_x, own_x, right, j);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int n = i / 2, e = i % 2;  // one of the lane's tokens
                float drate = 0, dskip = 0;
#pragma unroll
                for (int half = 0; half < 2; half++) {  // columns 8 apart
                    const float value = value_of(of_x, n * 2 + half, e);
                    drate = fmaf(value, o[j * 2 + n][half * 2 + e], drate);
                    dskip = fmaf(value, value_of(of_dy[j], n * 2 + half, e), dskip);
                }
#pragma unroll
                for (int away = 4; away < 32; away *= 2) {
                    drate += __shfl_xor_sync(0xffffffffu, drate, away);
                    dskip += __shfl_xor_sync(0xffffffffu, dskip, away);
                }
                if (lane >= 4) continue;
                memory.sums[0][warp][j * 16 + n * 8 + lane * 2 + e] = drate;
                memory.sums[1][warp][j * 16 + n * 8 + lane * 2 + e] = dskip;
            }
        }
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++) scale_by(o[n], two_of(own.beta, n), 1.0f);
        __syncwarp();  // all lanes have read these columns of dy, where dx goes
#pragma unroll
        for (int j = 0; j < STRIPES; j++)
            put_columns(dx, first_value + (long long)chunk * CHUNK * down, down,
                        tokens - chunk * CHUNK, values, right, j, [&](int n, int i) {
                            const float out = value_of(of_dy[j], n * 2 + i / 2, i % 2);
                            return fmaf(skip, out, o[j * 2 + n][i]);
                        });
        grow(state, own.whole, of_dy, writes, [&](int n) { return two_of(own.into, n); });
    }
    cp_async_wait<0>();
    __syncthreads();
    if (last >= 0) write_sums(0);
    if (dinitial)
        each_state(state, dinitial + first_state, s.values,
                   [](float &to, float value) { to = value; });
}
