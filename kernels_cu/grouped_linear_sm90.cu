// Products of sorted rows with the matrices of their groups on Hopper, by warpgroup products
// (wgmma): what grouped_linear.cu computes.
//
//   FORM 0, 1 and 2: y = x weight[e]^T + bias[e], dx = dy weight[e], dweight[e] = dy^T x, where e
//   is the group of a row: see common/groups.cuh
//
//   traffic     that of grouped_linear.cu
//   constants   those of common/groups.cuh, and
//               T, B          dtypes of a, b and c, of 16 bits; of bias
//               BIAS          whether there is a bias
//               CONSUMERS     warpgroups that multiply, 64 rows of c each; ROWS is 64 * CONSUMERS
//               STAGES        of the ring, of 64 values of a sum each
//               REGISTERS     registers of a thread that multiplies; PRODUCER, of one that loads
//   Rows of a, b and c begin at multiples of 16 bytes.
//
//   The trick: a warpgroup of its own loads, so that the others do nothing but products.  Rows are
//   read where they are, which the tensor memory accelerator cannot do, by 16-byte copies into the
//   layout that it would write.  A copy is seen by products only after a fence by the thread that
//   made it; so a stage is handed over when the copies of the next AHEAD stages are under way.
//   Blocks are persistent: stages of the next tile arrive while sums of this one are stored.
#include <common/tile.cuh>
#include <common/warpgroup.cuh>
#include <common/groups.cuh>
#include <common/ring.cuh>

constexpr int DEPTH = PANEL, WARPGROUP = 128, AHEAD = STAGES / 2;
static_assert(ROWS == 64 * CONSUMERS && AHEAD < STAGES);
// Along the depth of a product an operand has one panel of all its rows; across it, panels of DEPTH
// rows.
constexpr bool A_ACROSS = FORM == 2, B_ACROSS = FORM != 0;
constexpr int A_BYTES = ROWS * PANEL_ROW, STAGE = A_BYTES + COLUMNS * PANEL_ROW;
constexpr int TURNS = WARPGROUP / (PANEL / 8);  // rows that a warpgroup copies at the same time

struct Barriers {
    uint64_t full[STAGES], empty[STAGES];
};

// The rows that a thread copies of those that come p-th, from `first` on; -1 from `stop` on.
template <int TOP, int COUNT>
DEVICE void find_rows(int (&rows)[COUNT], const int *order, int first, int stop) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int p = first + i * TURNS + threadIdx.x % WARPGROUP / 8;
        rows[i] = p < stop ? row_of<TOP>(order, p) : -1;
    }
}

// Start copying COUNT rows of a tile in panels from its first column on, of which `left` exist;
// row_of(turn, down) is the number of a row, or -1 for a row of zeros.
template <int COUNT, int PANELS, class Row>
DEVICE void copy(unsigned char *to, const T *from, int pitch, int left, Row row_of) {
    const int chunk = threadIdx.x % 8, first = threadIdx.x % WARPGROUP / 8;
    const Tile<T, PANEL> tile{reinterpret_cast<T *>(to)};
    const auto own = tile.lane(first, chunk);
#pragma unroll
    for (int turn = 0; turn < COUNT / TURNS; turn++) {
        const int row = row_of(turn, turn * TURNS + first);
        const T *const real = from + (row < 0 ? 0 : (long long)row * pitch + chunk * 8);
#pragma unroll
        for (int panel = 0; panel < PANELS; panel++)
            cp_async_16(own.at(panel * COUNT + turn * TURNS, 0), real + panel * PANEL,
                        row >= 0 && panel * PANEL + chunk * 8 < left);
    }
}

KERNEL(128 * CONSUMERS + 128, 1)
grouped_linear_sm90(const T *__restrict__ a, const T *__restrict__ b, const B *__restrict__ bias,
                    const int *__restrict__ order, const int *__restrict__ tiles,
                    const I *__restrict__ offsets, T *__restrict__ c,
                    const __grid_constant__ Sizes s, int jobs) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Barriers &barriers = *reinterpret_cast<Barriers *>(memory + STAGES * STAGE);
    const int warp = own_warp(), lane = threadIdx.x % 32, group = warp / 4;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            mbarrier_init(&barriers.full[stage], 4);
            mbarrier_init(&barriers.empty[stage], 4 * CONSUMERS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    auto depth_of = [&](const Part &part) {
        if (FORM == 2) return max(part.stop - part.first, 0);
        return part.group == s.experts ? 0 : s.k;  // rows of no group have no sum
    };

    Ring<STAGES> at;
    if (group == CONSUMERS) {  // one warpgroup loads
        setmaxnreg_dec<PRODUCER>();
        Ring<STAGES> landing;  // the stage that is handed over next
        int under_way = 0;
        auto hand_over = [&] {
            fence_proxy_async();
            __syncwarp();
            release(&barriers.full[landing.stage]);
            landing.next();
        };
        for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
            const Part part = part_of(tiles, offsets, s, job);
            if (part.group < 0) break;
            const T *const matrix = FORM == 2 ? b : b + (part.group == s.experts ? 0 : part.at);
            const int depth = depth_of(part);
            int own[ROWS / TURNS];  // rows of a, in FORM 0 and 1
            if constexpr (FORM != 2) find_rows<A_TOP>(own, order, part.first, part.stop);
            int of_a[DEPTH / TURNS], of_b[DEPTH / TURNS];  // in FORM 2, of the next stage
            auto find = [&](int k) {
                if constexpr (FORM == 2) {
                    find_rows<A_TOP>(of_a, order, part.first + k, part.stop);
                    find_rows<B_TOP>(of_b, order, part.first + k, part.stop);
                }
            };
            find(0);
            for (int k = 0; k < depth; k += DEPTH) {
                unsigned char *const left = memory + at.stage * STAGE;
                unsigned char *const right = left + A_BYTES;
                mbarrier_wait(&barriers.empty[at.stage], at.phase ^ 1);
                if constexpr (FORM == 2) {
                    copy<DEPTH, ROWS / PANEL>(left, a + part.row, s.m, s.m - part.row,
                                              [&](int turn, int) { return of_a[turn]; });
                    copy<DEPTH, COLUMNS / PANEL>(right, matrix + part.column, s.n,
                                                 s.n - part.column,
                                                 [&](int turn, int) { return of_b[turn]; });
                } else {
                    copy<ROWS, 1>(left, a + k, s.k, s.k - k,
                                  [&](int turn, int) { return own[turn]; });
                    if constexpr (FORM == 0)
                        copy<COLUMNS, 1>(right, matrix + k, s.k, s.k - k, [&](int, int i) {
                            return part.column + i < s.n ? part.column + i : -1;
                        });
                    else
                        copy<DEPTH, COLUMNS / PANEL>(
                            right, matrix + part.column, s.n, s.n - part.column,
                            [&](int, int i) { return k + i < s.k ? k + i : -1; });
                }
                cp_async_commit();
                find(k + DEPTH);  // they arrive while this thread waits for an empty stage
                at.next();
                if (under_way == AHEAD) {
                    cp_async_wait<AHEAD>();
                    hand_over();
                } else {
                    under_way++;
                }
            }
        }
        cp_async_wait<0>();
        for (; under_way > 0; under_way--) hand_over();
        return;
    }

    setmaxnreg_inc<REGISTERS>();
    const int top = group * 64;  // the first row of the tile that this warpgroup has
    for (int job = blockIdx.x; job < jobs; job += gridDim.x) {
        const Part part = part_of(tiles, offsets, s, job);
        if (part.group < 0) break;
        const int rows = (FORM == 2 ? s.m - part.row : part.stop - part.first) - top;
        float sum[COLUMNS / 2];
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int column = part.column + n * 8 + lane % 4 * 2 + e;
                float value = 0;
                if constexpr (BIAS)
                    if (part.group < s.experts && column < s.n)
                        value = (float)bias[(long long)part.group * s.n + column];
                sum[n * 4 + e] = sum[n * 4 + 2 + e] = value;
            }
        const int steps = (depth_of(part) + DEPTH - 1) / DEPTH;
        if (rows <= 0) {  // no row of the tile is this warpgroup's
            for (int step = 0; step < steps; step++) {
                mbarrier_wait(&barriers.full[at.stage], at.phase);
                release(&barriers.empty[at.stage]);
                at.next();
            }
            continue;
        }
        uint64_t *done = nullptr;  // of the stage whose products are under way
        for (int step = 0; step < steps; step++) {
            mbarrier_wait(&barriers.full[at.stage], at.phase);
            const unsigned char *const left = memory + at.stage * STAGE;
            const Operand of_a(left + group * DEPTH * PANEL_ROW, 16);
            const Operand of_b(left + A_BYTES, B_ACROSS ? DEPTH * PANEL_ROW : 16);
            wgmma_fence(sum);
#pragma unroll
            for (int part = 0; part < DEPTH / 16; part++)
                multiply_tiles<COLUMNS, A_ACROSS, B_ACROSS>(
                    sum, of_a.at(part * (A_ACROSS ? 16 * PANEL_ROW : 32)),
                    of_b.at(part * (B_ACROSS ? 16 * PANEL_ROW : 32)), true, T());
            wgmma_commit();
            wgmma_wait<1>(sum);
            if (done != nullptr) release(done);
            done = &barriers.empty[at.stage];
            at.next();
        }
        wgmma_wait<0>(sum);
        if (done != nullptr) release(done);

        const int first = top + warp % 4 * 16 + lane / 4;
        const long long to = (FORM == 2 ? part.at + (long long)(part.row + first) * s.n
                                        : (long long)(part.first + first) * s.n) + part.column;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 *const words = reinterpret_cast<uint4 *>(c) + ((to + half * 8LL * s.n) >> 3);
            put_row_of_lanes(reinterpret_cast<T *>(words), sum, half, 1.0f,
                             first - top + half * 8 < rows, s.n - part.column);
        }
    }
}
