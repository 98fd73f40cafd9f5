// Attention of few queries over latent rows, whose first RANK values are also the values of a key.
//
//   s = scale q row^T          out = softmax(s) row[: RANK]          lse = log(sum(exp(s)))
//
//   traffic     a row of DIM values once for every ROWS queries and heads; q, out and, for every
//               chunk of keys but the only one, rows * (RANK + 4) floats
//   constants   T                    dtype of q, latents and out
//               L, G                 dtypes of lengths and of page_table
//               DIM, RANK            values of a row, and of those the values of a key: multiples
//                                    of 8
//               ROWS, TILE_KEYS      rows of q, and keys that a block works on at a time
//               STAGES               tiles of keys in shared memory
//               WARPS, RESIDENT      warps of a block; blocks that an SM must hold
//               ROW_WARPS, KEY_WARPS warps along the rows and the keys of scores; the others take
//                                    turns along the depth
//               FAN                  partial results that are merged into one
//               MERGERS              threads of a block of latent_merge
//               PAGED, MASK, CAUSAL
//
//   The trick: all heads read the same row, so heads and queries are rows of one product, and a
//   tile in shared memory serves scores and values: nothing is read twice.  Warps divide scores
//   by rows and keys, and values by columns; probabilities pass through shared memory.  Chunks
//   begin at fixed keys and their parts are merged in their order, FAN at a time: the result of a
//   sequence does not depend on the batch, on unused room after its keys, or on pages.  Launches of
//   latent_merge divide the rows and columns of parts among many blocks: a part of 64 rows has 132
//   KB, and one block would read 32 of them longer than it takes to compute one.
#include <common/parts.cuh>
#include <common/tile.cuh>

constexpr int THREADS = 32 * WARPS;
constexpr int DEPTH_WARPS = sizeof(T) == 4 ? 1 : WARPS / (ROW_WARPS * KEY_WARPS);
using LatentTile = Tile<T, padded(DIM)>;  // also of queries
constexpr int STAGE = TILE_KEYS * LatentTile::PITCH;
constexpr int STEPS = padded(DIM) / 16;  // of 16 values, along the depth of scores
// scores of a warp: M times 16 rows, N times 8 keys
constexpr int M = ROWS / 16 / ROW_WARPS, N = TILE_KEYS / 8 / KEY_WARPS;
using ChanceTile = Tile<T, TILE_KEYS>;                    // probabilities
constexpr int SCORES = TILE_KEYS % 16 == 0 ? TILE_KEYS + 8 : 2 * TILE_KEYS;  // pitch, no conflicts
constexpr int PER_ROW = THREADS / ROWS, OWN = TILE_KEYS / PER_ROW;  // threads of a row, their keys
constexpr int WIDE = OWN < 4 ? OWN : 4;                             // neighbouring keys of these
// values of a warp: a power of two of column pairs, so that offsets are constants
constexpr int even_share(int pairs) {
    int share = 1;
    while (share * WARPS < pairs) share *= 2;
    return share;
}
constexpr int PAIRS = padded(RANK) / 16, SHARE = even_share(PAIRS), ALL = ROWS / 16;
using Part = Parts<RANK>;
constexpr unsigned NOWHERE = 0xffffffffu;  // the token of a page that is missing
static_assert(sizeof(T) == 4 || N % 2 == 0, "ldmatrix loads 16 keys");
static_assert(TILE_KEYS <= 32, "a lane has the token of a row");
static_assert(PER_ROW <= 32 && OWN >= 1, "a row lies in one warp");

// Write this warp's part of the scores of a tile: products of ROWS queries with TILE_KEYS rows, for
// 16-bit values DEPTH_WARPS terms of them.
template <class E, int COLUMNS>
DEVICE void put_scores(float *scores, const Tile<E, COLUMNS> &queries,
                       const Tile<E, COLUMNS> &keys) {
    const int lane = threadIdx.x % 32, warp = own_warp();
    if constexpr (sizeof(E) == 2) {
        const int row = warp % ROW_WARPS * 16 * M, key = warp / ROW_WARPS % KEY_WARPS * 8 * N;
        const int depth = warp / (ROW_WARPS * KEY_WARPS);
        const auto left = queries.lane(row + lane % 16, lane / 16 + depth * 2);
        const auto right = keys.lane(key + lane % 8 + lane / 16 * 8, lane / 8 % 2 + depth * 2);
        float s[M][N][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step += DEPTH_WARPS) {
            if (STEPS % DEPTH_WARPS != 0 && step + depth >= STEPS) break;
            Fragment<M> a;
#pragma unroll
            for (int m = 0; m < M; m++) ldmatrix_x4(a[m], left.at(m * 16, step * 2));
#pragma unroll
            for (int n = 0; n < N; n += 2) {
                uint32_t b[4];
                ldmatrix_x4(b, right.at(n * 8, step * 2));
                multiply_two<E>(s, n, a, b);
            }
        }
        float *const to = scores + (depth * ROWS + row + lane / 4) * SCORES + key + lane % 4 * 2;
        each_row<M>([&](int m, int half) {
#pragma unroll
            for (int n = 0; n < N; n++)
                *reinterpret_cast<float2 *>(to + (m * 16 + half * 8) * SCORES + n * 8) =
                    make_float2(s[m][n][half * 2], s[m][n][half * 2 + 1]);
        });
    } else {
        for (int i = threadIdx.x; i < ROWS * TILE_KEYS; i += THREADS) {
            const int row = i / TILE_KEYS, key = i % TILE_KEYS;
            float4 parts[2] = {};  // eight sums: shorter chains of roundings
#pragma unroll 4
            for (int at = 0; at < COLUMNS / 4; at++) {
                const float4 x = *reinterpret_cast<const float4 *>(queries.at(row, at));
                const float4 y = *reinterpret_cast<const float4 *>(keys.at(key, at));
                float4 &part = parts[at % 2];
                part.x = fmaf(x.x, y.x, part.x), part.y = fmaf(x.y, y.y, part.y);
                part.z = fmaf(x.z, y.z, part.z), part.w = fmaf(x.w, y.w, part.w);
            }
            const auto sum = [](const float4 &v) { return (v.x + v.y) + (v.z + v.w); };
            scores[row * SCORES + key] = sum(parts[0]) + sum(parts[1]);
        }
    }
}

// o += p @ values, for this warp's columns.
template <class E, int KEYS, int COLUMNS>
DEVICE void add_values(float (&o)[ALL][SHARE * 2][4], const Tile<E, KEYS> &p,
                       const Tile<E, COLUMNS> &values) {
    const int lane = threadIdx.x % 32, first_pair = own_warp() * SHARE;
    if constexpr (sizeof(E) == 2) {
        const auto from = values.lane(lane % 16, lane / 16 + first_pair * 2);
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            Fragment<ALL> a;
            fetch(a, p, 0, step);
#pragma unroll
            for (int n = 0; n < SHARE * 2; n += 2) {
                if (PAIRS % SHARE != 0 && first_pair + n / 2 >= PAIRS) break;
                uint32_t b[4];
                ldmatrix_x4_trans(b, from.at(step * 16, n));
                multiply_two<E>(o, n, a, b);
            }
        }
    } else {
#pragma unroll 1
        for (int first = 0; first < KEYS; first += 8) {
            float factor[2][8];
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int i = 0; i < 8; i++)
                    factor[half][i] = p.at(half * 8 + lane / 4, (first + i) / 4)[i % 4];
#pragma unroll
            for (int n = 0; n < SHARE * 2; n += 2) {
                if (PAIRS % SHARE != 0 && first_pair + n / 2 >= PAIRS) break;
                float part[2][4] = {};  // sums of eight first: shorter chains of roundings
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float4 y = *reinterpret_cast<const float4 *>(
                        values.at(first + i, (first_pair + n / 2) * 4 + lane % 4));
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float(&to)[4] = part[half];
                        const float by = factor[half][i];
                        to[0] = fmaf(by, y.x, to[0]), to[1] = fmaf(by, y.y, to[1]);
                        to[2] = fmaf(by, y.z, to[2]), to[3] = fmaf(by, y.w, to[3]);
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        o[0][n + i / 2][half * 2 + i % 2] += part[half][i];
            }
        }
    }
}

struct Call {
    int heads, queries, keys;  // keys: room for them in a sequence
    int chunk;                 // keys of a block: a multiple of TILE_KEYS
    int chunks, slots;         // chunks of the grid and slots for parts, of a sequence
    int page, row_pages, pages;  // if not PAGED: tokens from a sequence to the next; of all
    float unit;  // scale * log2(e)
    long long mask_batch, mask_head, mask_query;
    int mask_key;
};

// What a block works on: rows of a batch element, and how many of its chunks hold keys for them.
struct Work {
    int first_row, rows, batch;  // a row is query * heads + head
    int length, last_key, stop;  // last_key: the last that the first query sees, if CAUSAL
    int seen;                    // chunks; at least one block always goes on

    // `number` counts the blocks of rows of all batch elements.
    DEVICE Work(int number, const L *lengths, const Call &call) {
        const int all_rows = call.heads * call.queries, row_blocks = (all_rows + ROWS - 1) / ROWS;
        batch = number / row_blocks, first_row = number % row_blocks * ROWS;
        rows = min(ROWS, all_rows - first_row);
        length = (int)max(0ll, min((long long)call.keys, (long long)lengths[batch]));
        last_key = length - call.queries;
        const int bottom = (first_row + rows - 1) / call.heads;
        stop = CAUSAL ? min(length, last_key + bottom + 1) : length;
        seen = max(1, (stop + call.chunk - 1) / call.chunk);
    }
    DEVICE T *row_of_out(T *out, int row, const Call &call) const {
        return out + ((long long)batch * call.heads * call.queries + first_row + row) * RANK;
    }
    DEVICE void put_lse(float *lse, int row, float top, float sum, const Call &call) const {
        const int query = (first_row + row) / call.heads, head = (first_row + row) % call.heads;
        lse[((long long)batch * call.heads + head) * call.queries + query] =
            log_sum_exp(top, call.unit, sum);
    }
};
DEVICE int floats_of_part(const Call &call) {
    return min(ROWS, call.heads * call.queries) * Part::PITCH;
}

// parts      (blocks of rows, slots, rows, Part::PITCH), with two chunks or more: a slot for each
//            chunk, then for each FAN of these, and so on
KERNEL(32 * WARPS, RESIDENT)
latent_attention(const T *__restrict__ q, const T *__restrict__ latents,
                 const L *__restrict__ lengths, const G *__restrict__ page_table,
                 const bool *__restrict__ mask, T *__restrict__ out, float *__restrict__ lse,
                 float *__restrict__ parts, const __grid_constant__ Call call) {
    DYNAMIC_SHARED(T, memory);
    const LatentTile query_tile{memory};
    T *const ring = memory + ROWS * LatentTile::PITCH;
    const ChanceTile chances{ring + STAGES * STAGE};
    float *const scores = reinterpret_cast<float *>(chances.start + ROWS * ChanceTile::PITCH);
    float *const rescales = scores + DEPTH_WARPS * ROWS * SCORES;  // later the largest scores
    float *const sums = rescales + ROWS;

    const int lane = threadIdx.x % 32, warp = own_warp();
    const int heads = call.heads, chunks = call.chunks, all_rows = heads * call.queries;
    const int row_blocks = (all_rows + ROWS - 1) / ROWS;
    const int chunk = blockIdx.x / row_blocks % chunks;
    const int number = blockIdx.x / row_blocks / chunks * row_blocks + blockIdx.x % row_blocks;
    const Work work(number, lengths, call);
    const int first_row = work.first_row, rows = work.rows, batch = work.batch, seen = work.seen;
    const int length = work.length, last_key = work.last_key, stop = work.stop;
    if (chunk >= seen) return;
    const int begin = chunk * call.chunk, end = min(stop, begin + call.chunk);

    q += ((long long)batch * all_rows + first_row) * DIM;
    query_tile.copy<ROWS, DIM, THREADS, 4>(q, 0, rows, DIM);
    // the token of row `lane` of the tile that begins at `first`
    auto find = [&](int first) {
        const int key = first + lane;
        if (lane >= TILE_KEYS || key >= end) return NOWHERE;
        if constexpr (!PAGED) return (unsigned)batch * call.page + key;
        const long long number = page_table[(long long)batch * call.row_pages + key / call.page];
        return number < 0 || number >= call.pages ? NOWHERE
                                                  : (unsigned)number * call.page + key % call.page;
    };
    auto load = [&](int first, int stage, unsigned token) {
        const LatentTile to{ring + stage * STAGE};
#pragma unroll 4
        for (int i = threadIdx.x; i < TILE_KEYS * LatentTile::CHUNKS; i += THREADS) {
            const int row = i / LatentTile::CHUNKS, at = i % LatentTile::CHUNKS;
            const unsigned source = __shfl_sync(0xffffffffu, token, row);
            const bool real = source != NOWHERE && at * LatentTile::CHUNK < DIM;
            cp_async_16(to.at(row, at),
                        latents + (real ? (unsigned long long)source * DIM + at * LatentTile::CHUNK
                                        : 0),
                        real);
        }
    };
#pragma unroll
    for (int stage = 0; stage < STAGES; stage++) {
        const int first = begin + stage * TILE_KEYS;
        if (first < end) load(first, stage, find(first));
        cp_async_commit();
    }

    // softmax: PER_ROW neighbouring threads have a row; in turns, each takes WIDE keys of it
    const int own_row = threadIdx.x / PER_ROW, turn = threadIdx.x % PER_ROW * WIDE;
    const int own_of_all = min(first_row + own_row, all_rows - 1);
    const int query = own_of_all / heads, head = own_of_all % heads;
    const int own_stop = CAUSAL ? min(length, last_key + query + 1) : length;
    if constexpr (MASK)
        mask += batch * call.mask_batch + head * call.mask_head + query * call.mask_query;
    float top = NO_SCORE, sum = 0;  // sum: of this thread's keys
    float o[ALL][SHARE * 2][4] = {};

    int stage = 0;
    for (int here = begin; here < end; here += TILE_KEYS) {
        const unsigned later = find(here + STAGES * TILE_KEYS);  // early: it may be read from memory
        cp_async_wait<STAGES - 1>();
        __syncthreads();  // this tile has arrived, for all threads
        const LatentTile tile{ring + stage * STAGE};
        put_scores(scores, query_tile, tile);
        __syncthreads();  // all scores are there

        float s[OWN];
        const float before = top;
#pragma unroll
        for (int i = 0; i < OWN; i += WIDE) {
            const int at = i * PER_ROW + turn;
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                float x = 0;
#pragma unroll
                for (int depth = 0; depth < DEPTH_WARPS; depth++)
                    x += scores[(depth * ROWS + own_row) * SCORES + at + j];
                const int key = here + at + j;
                bool hidden = key >= own_stop;
                if constexpr (MASK) hidden = hidden || !mask[(long long)key * call.mask_key];
                s[i + j] = hidden ? NO_SCORE : x;
                top = fmaxf(top, s[i + j]);
            }
        }
#pragma unroll
        for (int away = 1; away < PER_ROW; away *= 2)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, away));
        const float shift = shift_of(top, call.unit), rescale = rescale_of(before, call.unit, shift);
        float total = 0;
#pragma unroll
        for (int i = 0; i < OWN; i += WIDE) {
            const int at = i * PER_ROW + turn;
            float p[WIDE];
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                p[j] = exp_of(s[i + j], call.unit, shift);
                total += p[j];
            }
            store(chances.at(own_row, at / ChanceTile::CHUNK) + at % ChanceTile::CHUNK, p);
        }
        sum = fmaf(sum, rescale, total);
        if (turn == 0) rescales[own_row] = rescale;
        // whether any row of the block must be rescaled; all probabilities are there
        if (__syncthreads_or(before != top))
            each_row<ALL>([&](int m, int half) {
                scale_row(o[m], half, rescales[m * 16 + half * 8 + lane / 4]);
            });

        if (warp * SHARE < PAIRS) add_values(o, chances, tile);
        __syncthreads();  // all warps are done with this tile
        if (here + STAGES * TILE_KEYS < end) load(here + STAGES * TILE_KEYS, stage, later);
        cp_async_commit();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    cp_async_wait<0>();  // queries of a block without keys

#pragma unroll
    for (int away = 1; away < PER_ROW; away *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, away);
    if (turn == 0) {
        rescales[own_row] = top == NO_SCORE ? NO_SCORE : level_of(top, call.unit);
        sums[own_row] = sum;
    }
    __syncthreads();
    float *const own_part =
        parts + ((long long)number * call.slots + chunk) * floats_of_part(call);
    each_row<ALL>([&](int m, int half) {
        const int row = m * 16 + half * 8 + lane / 4;
        if (row >= rows) return;
        float *const to = own_part + row * Part::PITCH;
        const float factor = sums[row] == 0 ? 0.0f : 1 / sums[row];
#pragma unroll
        for (int n = 0; n < SHARE * 2; n++) {
            const int at = warp * SHARE * 16 + column<T>(n);
            if (at >= RANK) continue;
            const float first = o[m][n][half * 2], second = o[m][n][half * 2 + 1];
            if (seen > 1) {
                *reinterpret_cast<float2 *>(to + at) = make_float2(first, second);
            } else {
                const float both[2] = {first * factor, second * factor};
                store(work.row_of_out(out, row, call) + at, both);
            }
        }
        if (warp == 0 && lane % 4 == 0) {
            if (seen > 1) {
                to[Part::TOP] = rescales[row];
                to[Part::SUM] = sums[row];
            } else {
                work.put_lse(lse, row, rescales[row], sums[row], call);
            }
        }
    });
}

// Merge the parts of a level, FAN chunks or results of the level before, four columns a thread.
KERNEL(MERGERS)
latent_merge(const L *__restrict__ lengths, float *parts, T *__restrict__ out,
             float *__restrict__ lse, const __grid_constant__ Call call, int level) {
    const int part = floats_of_part(call);
    const int slices = (part / Part::PITCH * Part::QUADS + MERGERS - 1) / MERGERS;
    int most = call.chunks;  // results of this level
    for (int i = 0; i <= level; i++) most = (most + FAN - 1) / FAN;
    const int node = blockIdx.x / slices % most, number = blockIdx.x / slices / most;
    const Work work(number, lengths, call);
    long long slot = (long long)number * call.slots;  // of the first part to merge
    int nodes = work.seen;
    for (int i = 0; i < level; i++) slot += nodes, nodes = (nodes + FAN - 1) / FAN;
    const int results = (nodes + FAN - 1) / FAN;
    const int i = blockIdx.x % slices * MERGERS + threadIdx.x;
    const int row = i / Part::QUADS, column = i % Part::QUADS * 4;
    if (nodes == 1 || node >= results || row >= work.rows) return;
    Merged m = Part::merged<8>(parts + (slot + node * FAN) * part + row * Part::PITCH, column,
                               min(FAN, nodes - node * FAN), part, call.unit);
    if (results > 1)
        return Part::put(parts + (slot + nodes + node) * part + row * Part::PITCH, column, m);
#pragma unroll
    for (int j = 0; j < 4; j++) m.value[j] = m.sum == 0 ? 0.0f : m.value[j] / m.sum;
    store(work.row_of_out(out, row, call) + column, m.value);
    if (column == 0) work.put_lse(lse, row, m.top, m.sum, call);
}
