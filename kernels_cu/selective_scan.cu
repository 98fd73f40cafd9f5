// Selective scan, the recurrence of Mamba, along the tokens of each text, forward and backward.
//
//   r = softplus(dt + dt_bias)   a = exp(-exp(a_log) r)   h = a h + r x b   y = c . h + d x
//   dh = a' dh' + dy c           dx = r (dh . b) + d dy   dr = x (dh . b) + A . q, q = dh a h_before
//   db = sum over channels of dh r x, dc = of h dy        da_log = A times the sum over tokens of r q
//
//   where A = -exp(a_log), and ' is the next token's.
//
//   traffic     forward   x, dt and y once; b and c once for each tile of channels
//               backward  x, dt and dy, dx and ddt once; states before chunks, channels * DIM floats
//                         for each CHUNK tokens, written and read; two rows of DIM floats for each
//                         token and tile of channels, written
//   constants   T, R, A, O, Q    dtypes of x, dt, a_log, d and dt_bias
//               DIM              states of a channel
//               BACKWARD         for backward: states before chunks are written, not y
//               PACKED, I        see common/texts.cuh
//
//   The trick: SHARE neighbouring threads hold the states of a channel in registers along a text.
//   The next chunk of tokens is read while this one is computed.  Backward walks back along chunks:
//   it computes the states of a chunk again, in shared memory.  Products for db and dc are summed
//   over the channels of a warp while they are divided among its lanes: 7 shuffles for 8 products.
#include <common/math.cuh>
#include <common/reduce.cuh>
#include <common/texts.cuh>
#include <common/vector.cuh>

constexpr int THREADS = 128, CHUNK = 16;
constexpr int EACH = 4;                                        // states of a thread
constexpr int SHARE = DIM <= 16 ? 4 : DIM <= 32 ? 8 : 16;      // threads of a channel
constexpr int ROWS = EACH * SHARE;                             // states: DIM, and zeros
constexpr int CHANNELS = THREADS / SHARE;                      // of a block
constexpr int OWN = CHUNK * CHANNELS / THREADS;                // values of a chunk: of x, by thread
constexpr int WIDE = CHUNK * ROWS / THREADS;                   // of b, by thread
constexpr int KEPT = 2 * EACH * SHARE / 32;  // sums of a lane, of products that a warp divides up
static_assert(DIM <= ROWS, "a channel has too many states");
using Four = Vector<float, EACH>;

struct Sizes {
    long long tokens, each;      // of all texts; of a text, unless PACKED
    int texts, channels, tiles;  // tiles of CHANNELS
};

// What a block walks along: CHANNELS channels of a text; a thread has EACH states of one.
struct Place {
    int text, first, own, from, column;  // own: channel in the block; column: of the rows of x
    long long start, stop, slot, state;  // slot: of the text's first chunk, as in delta_chunk.cuh
    int states;                          // of the thread: 0 in channels that do not exist

    DEVICE Place(const I *offsets, const Sizes &s)
        : text(blockIdx.x / s.tiles), first(blockIdx.x % s.tiles * CHANNELS),
          own(threadIdx.x / SHARE), from(threadIdx.x % SHARE * EACH),
          column(first + threadIdx.x % CHANNELS),
          start(text_start(offsets, text, s.each, s.tokens)),
          stop(text_start(offsets, text + 1, s.each, s.tokens)), slot(start / CHUNK + text),
          state((first + own) * (long long)DIM + from),
          states(first + own < s.channels ? min(EACH, max(DIM - from, 0)) : 0) {}

    DEVICE int chunks() const {
        return stop > start ? (int)((stop - start + CHUNK - 1) / CHUNK) : 0;
    }
    DEVICE int count(int chunk) const {  // of tokens
        return (int)min((long long)CHUNK, stop - start - chunk * (long long)CHUNK);
    }
    // The state's first number in row `row` of an array (rows, channels, DIM).
    DEVICE long long at(long long row, const Sizes &s) const {
        return row * s.channels * DIM + state;
    }
    // Read the state from an array of the caller, which may be null or at any address.
    DEVICE void begin(float (&to)[EACH], const float *row) const {
#pragma unroll
        for (int j = 0; j < EACH; j++) to[j] = row && j < states ? row[j] : 0.0f;
    }
    // Read the state from an array of the launch.
    DEVICE void read(float (&to)[EACH], const float *row) const {
        if (DIM % EACH == 0 && states) return load(to, row);
        begin(to, row);
    }
    // Write the state to row `row` of an array (rows, channels, DIM).
    DEVICE void write(float *array, long long row, const Sizes &s,
                      const float (&values)[EACH]) const {
        if constexpr (DIM % EACH == 0) {
            if (states) store(array, at(row, s), values);
        } else {
#pragma unroll
            for (int j = 0; j < EACH; j++)
                if (j < states) array[at(row, s) + j] = values[j];
        }
    }
};

struct Tile {  // a chunk in shared memory; 0 beyond the text and the channels
    float x[CHUNK][CHANNELS], rate[CHUNK][CHANNELS];
    alignas(16) float b[CHUNK][ROWS], c[CHUNK][ROWS];
};

// The part of a chunk that a thread reads ahead.
struct Ahead {
    T x[OWN], b[WIDE], c[WIDE];
    R dt[OWN];

    DEVICE void fetch(const T *all_x, const R *all_dt, const T *all_b, const T *all_c,
                      const Place &place, int chunk, const Sizes &s) {
        const long long token = place.start + chunk * (long long)CHUNK;
        const int count = place.count(chunk);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int row = threadIdx.x / CHANNELS + i * SHARE;
            const bool inside = row < count && place.column < s.channels;
            const long long at = (token + row) * s.channels + place.column;
            x[i] = inside ? all_x[at] : (T)0.0f;
            dt[i] = inside ? all_dt[at] : (R)0.0f;
        }
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
            const int row = (threadIdx.x + i * THREADS) / ROWS, column = threadIdx.x % ROWS;
            const bool inside = row < count && column < DIM;
            const long long at = (token + row) * DIM + column;
            b[i] = inside ? all_b[at] : (T)0.0f;
            c[i] = inside ? all_c[at] : (T)0.0f;
        }
    }
    DEVICE void put(Tile &tile, float bias) const {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int row = threadIdx.x / CHANNELS + i * SHARE, column = threadIdx.x % CHANNELS;
            tile.x[row][column] = (float)x[i];
            tile.rate[row][column] = softplus((float)dt[i] + bias);
        }
#pragma unroll
        for (int i = 0; i < WIDE; i++) {
            const int row = (threadIdx.x + i * THREADS) / ROWS, column = threadIdx.x % ROWS;
            tile.b[row][column] = (float)b[i];
            tile.c[row][column] = (float)c[i];
        }
    }
};

template <class V> DEVICE float value_of(const V *array, int column, const Sizes &s) {
    return array && column < s.channels ? (float)array[column] : 0.0f;
}

DEVICE void slopes_of(float (&slopes)[EACH], const A *a_log, const Place &place) {
#pragma unroll
    for (int j = 0; j < EACH; j++)
        slopes[j] = j < place.states ? -expf((float)a_log[place.state + j]) : 0.0f;
}

KERNEL(THREADS, SHARE < 16 ? 6 : 4)
selective_scan(const T *__restrict__ x, const R *__restrict__ dt, const A *__restrict__ a_log,
               const T *__restrict__ b, const T *__restrict__ c, const O *__restrict__ d,
               const Q *__restrict__ dt_bias, const float *__restrict__ initial,
               const I *__restrict__ offsets, T *__restrict__ y, float *__restrict__ final,
               float *__restrict__ states, const __grid_constant__ Sizes s) {
    __shared__ Tile tile;
    __shared__ float out[BACKWARD ? 1 : CHUNK][CHANNELS];
    const Place place(offsets, s);
    const float skip = value_of(d, place.column, s), bias = value_of(dt_bias, place.column, s);
    float state[EACH], slopes[EACH];
    slopes_of(slopes, a_log, place);
    place.begin(state, initial ? initial + place.at(place.text, s) : nullptr);
    const int chunks = place.chunks();
    Ahead ahead;
    ahead.fetch(x, dt, b, c, place, 0, s);  // nothing, beyond the text
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int count = place.count(chunk);
        __syncthreads();
        ahead.put(tile, bias);
        __syncthreads();
        ahead.fetch(x, dt, b, c, place, chunk + 1, s);
        if constexpr (BACKWARD) place.write(states, place.slot + chunk, s, state);
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            const float rate = tile.rate[t][place.own], u = rate * tile.x[t][place.own];
            Four write, read;
            fetch(write, &tile.b[t][place.from]);
            fetch(read, &tile.c[t][place.from]);
            float sum = 0;
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                state[j] = fmaf(exp_below(rate * slopes[j]), state[j], u * write.at[j]);
                sum = fmaf(read.at[j], state[j], sum);
            }
            if constexpr (!BACKWARD) {
                sum = group_sum<SHARE>(sum);
                if (place.from == 0) out[t][place.own] = sum;
            }
        }
        if constexpr (BACKWARD) continue;
        __syncthreads();
        T *const to = y + (place.start + chunk * (long long)CHUNK) * s.channels + place.column;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int row = threadIdx.x / CHANNELS + i * SHARE, column = threadIdx.x % CHANNELS;
            if (row < count && place.column < s.channels)
                to[row * (long long)s.channels] =
                    (T)fmaf(skip, tile.x[row][column], out[BACKWARD ? 0 : row][column]);
        }
    }
    if constexpr (!BACKWARD) place.write(final, place.text, s, state);
}

// Sum products over the channels of a warp; of every two halves, a lane gives one away.
template <int COUNT, int DISTANCE = SHARE>
DEVICE void divide_up(float (&products)[2 * EACH]) {
    if constexpr (DISTANCE < 32) {
        const bool upper = threadIdx.x & DISTANCE;
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++) {
            const float given = upper ? products[i] : products[i + COUNT / 2];
            const float own = upper ? products[i + COUNT / 2] : products[i];
            products[i] = own + __shfl_xor_sync(0xffffffffu, given, DISTANCE);
        }
        divide_up<COUNT / 2, 2 * DISTANCE>(products);
    }
}

// The lane that `divide_up` gives product `number` of the threads with states from `from` on.
DEVICE int lane_of(int from, int number) {
    int lane = from / EACH;
#pragma unroll
    for (int distance = SHARE, half = EACH; distance < 32; distance *= 2, half /= 2)
        lane += number & half ? distance : 0;
    return lane;
}

KERNEL(THREADS, 2)
selective_scan_backward(const T *__restrict__ dy, const float *__restrict__ dfinal,
                        const T *__restrict__ x, const R *__restrict__ dt,
                        const A *__restrict__ a_log, const T *__restrict__ b,
                        const T *__restrict__ c, const O *__restrict__ d,
                        const Q *__restrict__ dt_bias, const I *__restrict__ offsets,
                        const float *__restrict__ states, T *__restrict__ dx,
                        R *__restrict__ ddt, float *__restrict__ dinitial,
                        float *__restrict__ vectors, float *__restrict__ of_slopes,
                        float *__restrict__ of_channels, const __grid_constant__ Sizes s) {
    __shared__ Tile tile;
    __shared__ float dys[CHUNK][CHANNELS], dus[CHUNK][CHANNELS], ddecays[CHUNK][CHANNELS];
    __shared__ Four history[CHUNK][THREADS];  // states; then sums of products
    const Place place(offsets, s);
    const float skip = value_of(d, place.column, s), bias = value_of(dt_bias, place.column, s);
    float slopes[EACH], dslopes[EACH] = {}, dstate[EACH], dskip = 0, dbias = 0;
    slopes_of(slopes, a_log, place);
    place.begin(dstate, dfinal ? dfinal + place.at(place.text, s) : nullptr);
    const int chunks = place.chunks(), column = threadIdx.x % CHANNELS;
    const bool real = place.column < s.channels;
    Ahead ahead;
    if (chunks) ahead.fetch(x, dt, b, c, place, chunks - 1, s);
    for (int chunk = chunks - 1; chunk >= 0; chunk--) {
        const int count = place.count(chunk);
        const long long first = place.start + chunk * (long long)CHUNK;
        __syncthreads();
        ahead.put(tile, bias);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int row = threadIdx.x / CHANNELS + i * SHARE;
            dys[row][column] = row < count && real
                                   ? (float)dy[(first + row) * s.channels + place.column]
                                   : 0.0f;
        }
        float start[EACH], state[EACH];
        place.read(start, states + place.at(place.slot + chunk, s));
#pragma unroll
        for (int j = 0; j < EACH; j++) state[j] = start[j];
        __syncthreads();
        if (chunk) ahead.fetch(x, dt, b, c, place, chunk - 1, s);
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            const float rate = tile.rate[t][place.own], u = rate * tile.x[t][place.own];
            Four write;
            fetch(write, &tile.b[t][place.from]);
#pragma unroll
            for (int j = 0; j < EACH; j++)
                state[j] = fmaf(exp_below(rate * slopes[j]), state[j], u * write.at[j]);
            store(history[t][threadIdx.x].at, state);
        }
#pragma unroll 2
        for (int t = count - 1; t >= 0; t--) {
            const float rate = tile.rate[t][place.own], u = rate * tile.x[t][place.own];
            const float out = dys[t][place.own];
            Four write, read;
            fetch(write, &tile.b[t][place.from]);
            fetch(read, &tile.c[t][place.from]);
            float before[EACH], products[2 * EACH], du = 0, ddecay = 0;
            if (t) load(before, history[t - 1][threadIdx.x].at);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                before[j] = t ? before[j] : start[j];
                dstate[j] = fmaf(out, read.at[j], dstate[j]);
                products[j] = dstate[j] * u;
                products[EACH + j] = state[j] * out;
                du = fmaf(dstate[j], write.at[j], du);
                dstate[j] *= exp_below(rate * slopes[j]);
                const float q = dstate[j] * before[j];
                dslopes[j] = fmaf(rate, q, dslopes[j]);
                ddecay = fmaf(slopes[j], q, ddecay);
                state[j] = before[j];
            }
            divide_up<2 * EACH>(products);
#pragma unroll
            for (int i = 0; i < KEPT; i++) history[t][threadIdx.x].at[i] = products[i];
            du = group_sum<SHARE>(du), ddecay = group_sum<SHARE>(ddecay);
            if (place.from == 0) dus[t][place.own] = du, ddecays[t][place.own] = ddecay;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int row = threadIdx.x / CHANNELS + i * SHARE;
            if (row >= count || !real) continue;
            const long long at = (first + row) * s.channels + place.column;
            const float own = tile.x[row][column], rate = tile.rate[row][column];
            const float out = dys[row][column], du = dus[row][column];
            // 1 - exp(-softplus) is the sigmoid, softplus' slope
            const float draw = fmaf(own, du, ddecays[row][column]) * -expm1f(-rate);
            dx[at] = (T)fmaf(skip, out, rate * du);
            ddt[at] = (R)draw;
            dskip = fmaf(out, own, dskip);
            dbias += draw;
        }
        for (int i = threadIdx.x; i < count * 2 * ROWS; i += THREADS) {
            const int t = i / (2 * ROWS), of_c = i / ROWS % 2, row = i % ROWS;
            if (row >= DIM) continue;
            const int number = of_c * EACH + row % EACH, lane = lane_of(row / EACH * EACH, number);
            float sum = 0;
#pragma unroll
            for (int warp = 0; warp < THREADS / 32; warp++)
                sum += history[t][warp * 32 + lane].at[number % KEPT];
            const long long tile_row = of_c * s.tiles + place.first / CHANNELS;
            vectors[(tile_row * s.tokens + first + t) * DIM + row] = sum;
        }
    }
    if (dinitial) place.write(dinitial, place.text, s, dstate);
#pragma unroll
    for (int j = 0; j < EACH; j++) dslopes[j] *= slopes[j];
    place.write(of_slopes, place.text, s, dslopes);
    __syncthreads();
    dys[threadIdx.x / CHANNELS][column] = dskip;
    dus[threadIdx.x / CHANNELS][column] = dbias;
    __syncthreads();
    if (threadIdx.x >= CHANNELS || !real) return;
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < SHARE; i++) sums[0] += dys[i][column], sums[1] += dus[i][column];
    of_channels[place.text * (long long)s.channels + place.column] = sums[0];
    of_channels[(s.texts + place.text) * (long long)s.channels + place.column] = sums[1];
}
