// Attention forward: out = softmax(score) @ v and lse = log(sum(exp(score))), row by row.
//
//   score = cap * tanh(scale * q @ k.T / cap) + bias - slope * abs(query position - key position)
//   -inf where mask, window, lengths or block_mask hide a key; dropout after the softmax
//
//   traffic     q and out once; k and v once a block of ROWS queries, and a group's query heads
//               read them from L2; 4 * queries * keys * DIM operations a head
//   constants   T                dtype of q, k, v and out; B, A, S of bias, alibi and sinks
//               L, P             dtypes of key_lengths and query_start
//               DIM, VALUE_DIM   columns of q and k, of v: multiples of 8
//               WARPS            of a block
//               WARP_TILES       tiles of 16 queries a warp
//               TILE_KEYS        keys of a stage of the ring
//               KEPT             a warp's queries stay in registers; else they are read again
//               LEFT, RIGHT      a query sees no key further than that from its own position
//               BLOCK_MASK       tiles of 128 x 128 are left out
//               LENGTHS, STARTS  each batch has a number of keys, a position of its first query
//               MASK, BIAS, ALIBI, SOFTCAP, DROPOUT
//               FOLD             nothing comes between the product and exp: scale is folded in
//
//   The trick: scores never leave registers.  A warp owns whole rows: 16-bit operands go through
//   the tensor cores, whose result has the layout that the next product wants; float32 goes
//   through FMAs in the same layout, with 16-byte reads that a quarter or an eighth of a warp
//   shares.  While a tile is worked on, cp.async brings the next.  Tiles that no row sees are
//   never loaded; only tiles at an edge pay for comparing positions.
#include <common/ptx.cuh>
#include "common/philox.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int CHUNK = 16 / sizeof(T);  // values of 16 bytes
constexpr int DIMS = (DIM + 15) / 16 * 16, VALUES = (VALUE_DIM + 15) / 16 * 16;  // with padding
constexpr int WARP_ROWS = 16 * WARP_TILES, ROWS = WARPS * WARP_ROWS;
constexpr int STEPS = DIMS / 16;
constexpr int BLOCK_MASK_TILE = 128;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#define NO_SCORE __int_as_float(0xff800000)  // -inf

// Of a result tile of 16 x 8, a lane holds [0], [1] of row lane / 4, and [2], [3] of 8 rows below.
using Scores = float[WARP_TILES][TILE_KEYS / 8][4];
using Output = float[WARP_TILES][VALUES / 8][4];
using Fragment = uint32_t[WARP_TILES][4];  // 16 columns of a warp's queries

// Rows in shared memory.  Eight neighbours at one chunk lie in eight groups of banks: by xor
// where a row fills all banks, by an odd number of chunks elsewhere.
template <int COLUMNS> struct Tile {
    static constexpr int CHUNKS = COLUMNS / CHUNK;
    static constexpr bool XOR = CHUNKS % 8 == 0;
    static constexpr int PITCH = (XOR ? CHUNKS : CHUNKS | 1) * CHUNK;
    T *start;

    __device__ __forceinline__ T *at(int row, int chunk) const {
        return start + row * PITCH + (XOR ? chunk ^ (row & 7) : chunk) * CHUNK;
    }
    // Where a lane reads: `rows` and `chunks` beyond a row and a chunk of its own.  They share no
    // bit with its own, so that they are a constant: of the address, or of one xor.  In bytes.
    struct Lane {
        const char *row;
        int chunk;

        __device__ __forceinline__ const char *at(int rows, int chunks) const {
            return row + (XOR ? chunk ^ chunks * 16 : chunk + chunks * 16) +
                   rows * (PITCH * (int)sizeof(T));
        }
    };
    __device__ __forceinline__ Lane lane(int row, int chunk) const {
        const T *first = start + row * PITCH;
        return {reinterpret_cast<const char *>(first), 16 * (XOR ? chunk ^ (row & 7) : chunk)};
    }
    // Begin to copy rows first .. first + COUNT; rows from `stop` on and padding become 0.
    template <int COUNT, int USED>
    __device__ __forceinline__ void copy(const T *from, int first, int stop, int stride) const {
        constexpr int TURNS = (COUNT * CHUNKS + THREADS - 1) / THREADS;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            const int i = turn * THREADS + threadIdx.x, row = i / CHUNKS, chunk = i % CHUNKS;
            if (COUNT * CHUNKS % THREADS != 0 && i >= COUNT * CHUNKS) break;
            const bool inside = COLUMNS == USED || chunk * CHUNK < USED;
            const T *real = from + (long long)min(first + row, stop - 1) * stride;
            cp_async_16(at(row, chunk), real + (inside ? chunk * CHUNK : 0),
                        inside && first + row < stop);
        }
    }
};
using KeyTile = Tile<DIMS>;  // also of queries
using ValueTile = Tile<VALUES>;
constexpr int STAGE = TILE_KEYS * (KeyTile::PITCH + ValueTile::PITCH);

// ---- products ----------------------------------------------------------------------------------
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2], __half) {
    mma_m16n8k16_f16(d, a, b, d);
}
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2], __nv_bfloat16) {
    mma_m16n8k16_bf16(d, a, b, d);
}
__device__ __forceinline__ uint32_t pair(float low, float high, __half) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&both);
}
__device__ __forceinline__ uint32_t pair(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&both);
}

__device__ __forceinline__ void fetch(Fragment &q, const KeyTile &tile, int row, int step) {
    const KeyTile::Lane from = tile.lane(row + threadIdx.x % 16, threadIdx.x / 16 % 2);
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++) ldmatrix_x4(q[m], from.at(m * 16, step * 2));
}

// s = q @ k.T for the rows of a warp, from `row` on.
template <class E>
__device__ __forceinline__ void query_by_key(Scores &s, Fragment (&kept)[KEPT ? STEPS : 1],
                                             const KeyTile &q, int row, const KeyTile &k, E) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[m][n][i] = 0;
    if constexpr (sizeof(E) == 2) {
        const KeyTile::Lane from = k.lane(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Fragment again;
            if constexpr (!KEPT) fetch(again, q, row, step);
            Fragment &a = KEPT ? kept[KEPT ? step : 0] : again;
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; n += 2) {
                uint32_t b[4];
                ldmatrix_x4(b, from.at(n * 8, step * 2));
                const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
                for (int m = 0; m < WARP_TILES; m++) {
                    multiply(s[m][n], a[m], b0, E());
                    multiply(s[m][n + 1], a[m], b1, E());
                }
            }
        }
    } else {
        const KeyTile::Lane left = q.lane(row + lane / 4, 0);
        const KeyTile::Lane right[2] = {k.lane(lane % 4 * 2, 0), k.lane(lane % 4 * 2 + 1, 0)};
#pragma unroll 2
        for (int chunk = 0; chunk < DIMS / 4; chunk++) {
            float4 a[WARP_TILES][2];
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    a[m][half] =
                        *reinterpret_cast<const float4 *>(left.at(m * 16 + half * 8, chunk));
#pragma unroll
            for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float4 b =
                        *reinterpret_cast<const float4 *>(right[e].at(n * 8, chunk));
#pragma unroll
                    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            // of a long row, sums of four first: fewer roundings in a row
                            float &sum = s[m][n][half * 2 + e];
                            float part = DIMS > 128 ? 0.0f : sum;
                            part = fmaf(a[m][half].x, b.x, part);
                            part = fmaf(a[m][half].y, b.y, part);
                            part = fmaf(a[m][half].z, b.z, part);
                            part = fmaf(a[m][half].w, b.w, part);
                            sum = DIMS > 128 ? sum + part : part;
                        }
                }
        }
    }
}

// The first column of o[..][n] that a lane holds.  Of float32 it holds runs of four, in two n.
__device__ __forceinline__ int column(int n) {
    const int quarter = threadIdx.x % 4;
    return sizeof(T) == 2 ? n * 8 + quarter * 2 : n / 2 * 16 + quarter * 4 + n % 2 * 2;
}

// o += p @ v
template <class E>
__device__ __forceinline__ void add_values(Output &o, const Scores &p, const ValueTile &v, E) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(E) == 2) {
        const ValueTile::Lane from = v.lane(lane % 16, lane / 16);
#pragma unroll
        for (int j = 0; j < TILE_KEYS / 8; j += 2) {
            Fragment a;
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[m][i] = pair(p[m][j + i / 2][i % 2 * 2], p[m][j + i / 2][i % 2 * 2 + 1], E());
#pragma unroll
            for (int n = 0; n < VALUES / 8; n += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b, from.at(j * 8, n));
                const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
#pragma unroll
                for (int m = 0; m < WARP_TILES; m++) {
                    multiply(o[m][n], a[m], b0, E());
                    multiply(o[m][n + 1], a[m], b1, E());
                }
            }
        }
    } else {
#pragma unroll
        for (int key = 0; key < TILE_KEYS; key++) {
            float share[WARP_TILES][2];
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    share[m][half] = __shfl_sync(0xffffffffu, p[m][key / 8][half * 2 + key % 2],
                                                 key % 8 / 2, 4);
            // lanes differ in the last two bits of the chunk, the others are the same in all
            const ValueTile::Lane from = v.lane(0, lane % 4 ^ (ValueTile::XOR ? key % 4 : 0));
#pragma unroll
            for (int n = 0; n < VALUES / 8; n += 2) {
                const int chunks = ValueTile::XOR ? n * 2 ^ (key & 4) : n * 2;
                const float4 b = *reinterpret_cast<const float4 *>(from.at(key, chunks));
#pragma unroll
                for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float *first = &o[m][n][half * 2], *second = &o[m][n + 1][half * 2];
                        first[0] = fmaf(share[m][half], b.x, first[0]);
                        first[1] = fmaf(share[m][half], b.y, first[1]);
                        second[0] = fmaf(share[m][half], b.z, second[0]);
                        second[1] = fmaf(share[m][half], b.w, second[1]);
                    }
            }
        }
    }
}

// ---- the kernel --------------------------------------------------------------------------------
__device__ __forceinline__ int clipped(long long offset) {  // queries and keys are below 2^29
    return (int)max(-(1ll << 29), min(1ll << 29, offset));
}

// factor     scale * log2(e), or scale / softcap; then cap is softcap * log2(e)
// left       keys seen before and (right) after a query's own position
// start      position of the first query, without STARTS and if started
// *_batch .. *_key   elements between neighbours on that axis, 0 where it is broadcast
// dropped    words below it drop a probability; the others grow by `grown`
KERNEL(32 * WARPS, WARP_TILES) attention_forward(
    const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v, T *__restrict__ out,
    float *__restrict__ lse, int heads, int kv_heads, int queries, int keys, float factor,
    float cap, long long left, long long right, const L *__restrict__ key_lengths,
    const P *__restrict__ starts, int starts_batch, bool started, long long start,
    const bool *__restrict__ mask, long long mask_batch, long long mask_head, long long mask_query,
    int mask_key, const B *__restrict__ bias, long long bias_batch, long long bias_head,
    long long bias_query, int bias_key, const A *__restrict__ alibi, int alibi_batch,
    const S *__restrict__ sinks, const bool *__restrict__ block_mask, long long block_mask_batch,
    long long block_mask_head, unsigned seed_low, unsigned seed_high, unsigned dropped,
    float grown) {
    DYNAMIC_SHARED(T, memory);
    const KeyTile query_tile{memory};
    T *const ring = memory + ROWS * KeyTile::PITCH;

    // the last rows first: with RIGHT they see most keys
    const int row_blocks = (queries + ROWS - 1) / ROWS;
    const int first_row = (row_blocks - 1 - blockIdx.x % row_blocks) * ROWS;
    const int head_of_all = blockIdx.x / row_blocks;
    const int head = head_of_all % heads, batch = head_of_all / heads;
    const int kv_head = head / (heads / kv_heads);
    const int query_stride = heads * DIM, key_stride = kv_heads * DIM;
    const int value_stride = kv_heads * VALUE_DIM, out_stride = heads * VALUE_DIM;
    q += (long long)batch * queries * query_stride + head * DIM;
    k += (long long)batch * keys * key_stride + kv_head * DIM;
    v += (long long)batch * keys * value_stride + kv_head * VALUE_DIM;

    // row r sees the keys r + low .. r + high, below length
    int length = keys;
    if constexpr (LENGTHS)
        length = (int)max(0ll, min((long long)keys, (long long)key_lengths[batch]));
    if constexpr (STARTS) start = starts[batch * starts_batch];
    else if (!started) start = length - queries;
    const int low = clipped(start - left), high = clipped(start + right);
    const int origin = clipped(start);
    const int last_row = min(first_row + ROWS, queries) - 1;
    const int stop_key = RIGHT ? min(length, last_row + high + 1) : length;
    int tile = LEFT ? max(0, first_row + low) / TILE_KEYS : 0;
    if constexpr (BLOCK_MASK)
        block_mask += batch * block_mask_batch + head * block_mask_head +
                      (long long)(first_row / BLOCK_MASK_TILE) *
                          ((keys + BLOCK_MASK_TILE - 1) / BLOCK_MASK_TILE);
    auto seen_from = [&](int tile) {  // the first tile from this one on that some row sees
        if constexpr (BLOCK_MASK)
            while (tile * TILE_KEYS < stop_key && !block_mask[tile * TILE_KEYS / BLOCK_MASK_TILE])
                tile++;
        return tile;
    };
    auto load = [&](int tile, int stage) {
        const KeyTile to{ring + stage * STAGE};
        const ValueTile values{to.start + TILE_KEYS * KeyTile::PITCH};
        to.copy<TILE_KEYS, DIM>(k, tile * TILE_KEYS, length, key_stride);
        values.copy<TILE_KEYS, VALUE_DIM>(v, tile * TILE_KEYS, length, value_stride);
    };

    tile = seen_from(tile);
    query_tile.copy<ROWS, DIM>(q, first_row, queries, query_stride);
    cp_async_commit();
    if (tile * TILE_KEYS < stop_key) load(tile, 0);
    cp_async_commit();

    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS;
    Fragment kept[KEPT ? STEPS : 1];
    if constexpr (KEPT) {
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int step = 0; step < STEPS; step++) fetch(kept[step], query_tile, warp_row, step);
    }
    float slope = 0;
    if constexpr (ALIBI) slope = (float)alibi[batch * alibi_batch + head] * LOG2E;
    if constexpr (MASK) mask += batch * mask_batch + head * mask_head;
    if constexpr (BIAS) bias += batch * bias_batch + head * bias_head;

    Output o = {};
    float top[WARP_TILES][2], sum[WARP_TILES][2];  // sum: of this lane's columns
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) top[m][half] = NO_SCORE, sum[m][half] = 0;

    for (int stage = 0; tile * TILE_KEYS < stop_key; stage ^= 1) {
        const int here = tile * TILE_KEYS;
        tile = seen_from(tile + 1);
        cp_async_wait<0>();
        __syncthreads();  // this tile is there, and everyone has left the one before
        if (tile * TILE_KEYS < stop_key) load(tile, stage ^ 1);
        cp_async_commit();

        // what this warp's rows see of the tile: nothing, all of it, or some pairs
        const int top_row = first_row + warp_row, bottom_row = top_row + WARP_ROWS - 1;
        bool edge = here + TILE_KEYS > length;
        if constexpr (LEFT) {
            if (here + TILE_KEYS - 1 < top_row + low) continue;
            edge |= here < bottom_row + low;
        }
        if constexpr (RIGHT) {
            if (here > bottom_row + high) continue;
            edge |= here + TILE_KEYS - 1 > top_row + high;
        }
        const KeyTile key_tile{ring + stage * STAGE};
        const ValueTile value_tile{key_tile.start + TILE_KEYS * KeyTile::PITCH};
        Scores s;
        query_by_key(s, kept, query_tile, warp_row, key_tile, T());

        const int key = here + lane % 4 * 2;
        bool moved = false;
        float rescale[WARP_TILES][2];
#pragma unroll
        for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = top_row + m * 16 + half * 8 + lane / 4;
                if constexpr (!FOLD) {
                    const bool real = row < queries;
#pragma unroll
                    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float &x = s[m][n][half * 2 + e];
                            const int at = key + n * 8 + e;
                            x *= factor;
                            if constexpr (SOFTCAP) x = cap * tanhf(x);
                            if constexpr (BIAS)
                                if (real && at < keys)
                                    x = fmaf((float)bias[row * bias_query + (long long)at * bias_key],
                                             LOG2E, x);
                            if constexpr (ALIBI) x -= slope * (float)abs(at - row - origin);
                        }
                }
                if constexpr (MASK) {
#pragma unroll
                    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int at = key + n * 8 + e;
                            if (row < queries && at < keys &&
                                !mask[row * mask_query + (long long)at * mask_key])
                                s[m][n][half * 2 + e] = NO_SCORE;
                        }
                }
                if (edge) {
                    int last = length - 1;
                    if constexpr (RIGHT) last = min(last, row + high);
#pragma unroll
                    for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int at = key + n * 8 + e;
                            bool hidden = at > last;
                            if constexpr (LEFT) hidden |= at < row + low;
                            if (hidden) s[m][n][half * 2 + e] = NO_SCORE;
                        }
                }

                float most = top[m][half];
#pragma unroll
                for (int n = 0; n < TILE_KEYS / 8; n++)
                    most = fmaxf(most, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
                const float unit = FOLD ? factor : 1.0f;
                const float shift = most == NO_SCORE ? 0.0f : __fmul_rn(most, unit);
                rescale[m][half] = exp2f(__fmul_rn(top[m][half], unit) - shift);
                moved |= top[m][half] != most;
                top[m][half] = most;
                float total = 0;
#pragma unroll
                for (int n = 0; n < TILE_KEYS / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float &x = s[m][n][half * 2 + e];
                        x = exp2f(FOLD ? fmaf(x, unit, -shift) : x - shift);
                        total += x;
                    }
                sum[m][half] = sum[m][half] * rescale[m][half] + total;
            }
        if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                for (int n = 0; n < VALUES / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) o[m][n][i] *= rescale[m][i / 2];
        }

        if constexpr (DROPOUT) {
            // Four keys of a row share a counter, and two lanes these keys: one lane draws for the
            // upper row, the other for the lower, and they swap the words that they do not need.
            const int odd = lane % 2;
#pragma unroll
            for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
                for (int n = 0; n < TILE_KEYS / 8; n++) {
                    const int row = top_row + m * 16 + odd * 8 + lane / 4;
                    const uint4 w = philox(batch, head, row, (key + n * 8) / 4, seed_low, seed_high);
                    const unsigned x = __shfl_xor_sync(0xffffffffu, odd ? w.x : w.z, 1);
                    const unsigned y = __shfl_xor_sync(0xffffffffu, odd ? w.y : w.w, 1);
                    const unsigned drawn[4] = {odd ? x : w.x, odd ? y : w.y, odd ? w.z : x,
                                               odd ? w.w : y};
#pragma unroll
                    for (int i = 0; i < 4; i++) s[m][n][i] = drawn[i] < dropped ? 0 : s[m][n][i];
                }
        }
        add_values(o, s, value_tile, T());
    }
    out += (long long)batch * queries * out_stride + head * VALUE_DIM;
    lse += (long long)head_of_all * queries;
#pragma unroll
    for (int m = 0; m < WARP_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + warp_row + m * 16 + half * 8 + lane / 4;
            float total = sum[m][half], most = __fmul_rn(top[m][half], FOLD ? factor : 1.0f), share = 1;
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            if (sinks != nullptr) {
                const float sink = (float)sinks[head] * LOG2E, both = fmaxf(most, sink);
                if (both != NO_SCORE) {
                    share = exp2f(most - both);
                    total = total * share + exp2f(sink - both);
                    most = both;
                }
            }
            if (row >= queries) continue;
            const bool empty = total == 0;
            if (lane % 4 == 0) lse[row] = empty ? NO_SCORE : (most + log2f(total)) * LN2;
            share = empty ? 0 : share / total;
            if constexpr (DROPOUT) share *= grown;
            T *const to = out + (long long)row * out_stride;
#pragma unroll
            for (int n = 0; n < VALUES / 8; n++) {
                if (VALUES != VALUE_DIM && column(n) >= VALUE_DIM) continue;
                const float first = o[m][n][half * 2] * share, second = o[m][n][half * 2 + 1] * share;
                if constexpr (sizeof(T) == 2) {
                    T both[2] = {(T)first, (T)second};
                    *reinterpret_cast<uint32_t *>(to + column(n)) =
                        *reinterpret_cast<const uint32_t *>(both);
                } else {
                    *reinterpret_cast<float2 *>(to + column(n)) = make_float2(first, second);
                }
            }
        }
}
