// Products of a warpgroup, 64 rows that four warps share, with tiles that TMA has loaded into
// shared memory.
//
// A tile is stored in panels of 64 16-bit columns, rows of 128 bytes with the 128-byte swizzle; a
// panel starts at a multiple of 1024 bytes.  A lane holds float[N / 2] of a result of 64 x N: the
// float[1][N / 8][4] of tile.cuh for its warp's 16 rows.
#pragma once
#include <common/descriptor.cuh>

constexpr int PANEL = 64, PANEL_ROW = 128;  // columns; bytes
constexpr int panels(int columns) { return (columns + PANEL - 1) / PANEL; }
constexpr int product_columns(int columns) {  // rounded up to a size that products are defined for
    return columns <= 64 ? 64 : (columns + 31) / 32 * 32;
}

template <int PARTS> using Parts = float[1][PARTS][4];
template <int R> DEVICE Parts<R / 4> &parts_of(float (&d)[R]) {
    return reinterpret_cast<Parts<R / 4> &>(d);
}

// The wgmma descriptor of a tile.  The upper half holds the distance between groups of eight rows;
// an offset in bytes is added to the lower half, which does not overflow.  The lower half passes
// through a shuffle, so that the compiler knows it to be the same in all lanes: sums with it take
// uniform registers.
struct Operand {
    uint32_t low;
    static constexpr uint32_t HIGH = 1u << 30 | 1024 >> 4;

    DEVICE Operand(const void *tile, int leading)
        : low(__shfl_sync(0xffffffffu, (uint32_t)wgmma_descriptor_128b(tile, leading, 1024), 0)) {}
    DEVICE uint64_t at(int bytes) const { return (uint64_t)HIGH << 32 | (low + (bytes >> 4)); }
};

// d = a @ b.T, or with `add` d += a @ b.T, for 16 columns of 64 rows of a and N rows of b.  An operand
// that is ACROSS has these 16 as rows, and its 64 or N as columns.
#define WARPGROUP_TILES(E, TYPE)                                                             \
    template <int N, int A_ACROSS = 0, int B_ACROSS = 0>                                     \
    DEVICE void multiply_tiles(float (&d)[N / 2], uint64_t a, uint64_t b, int add, E) {      \
        if constexpr (N == 32) wgmma_m64n32k16_##TYPE<A_ACROSS, B_ACROSS>(d, a, b, add);     \
        if constexpr (N == 64) wgmma_m64n64k16_##TYPE<A_ACROSS, B_ACROSS>(d, a, b, add);     \
        if constexpr (N == 96) wgmma_m64n96k16_##TYPE<A_ACROSS, B_ACROSS>(d, a, b, add);     \
        if constexpr (N == 128) wgmma_m64n128k16_##TYPE<A_ACROSS, B_ACROSS>(d, a, b, add);   \
        if constexpr (N == 256) wgmma_m64n256k16_##TYPE<A_ACROSS, B_ACROSS>(d, a, b, add);   \
    }
WARPGROUP_TILES(__nv_bfloat16, bf16)
WARPGROUP_TILES(__half, f16)
#undef WARPGROUP_TILES

// d += a @ b for 16 columns of a, in registers in the layout of mma, and N columns of b.
#define WARPGROUP_REGISTERS(E, TYPE)                                                           \
    template <int N>                                                                           \
    DEVICE void multiply_registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, E) { \
        if constexpr (N == 64) wgmma_m64n64k16_##TYPE##_registers<1>(d, a, b, 1);              \
        if constexpr (N == 96) wgmma_m64n96k16_##TYPE##_registers<1>(d, a, b, 1);              \
        if constexpr (N == 128) wgmma_m64n128k16_##TYPE##_registers<1>(d, a, b, 1);            \
        if constexpr (N == 160) wgmma_m64n160k16_##TYPE##_registers<1>(d, a, b, 1);            \
        if constexpr (N == 192) wgmma_m64n192k16_##TYPE##_registers<1>(d, a, b, 1);            \
        if constexpr (N == 224) wgmma_m64n224k16_##TYPE##_registers<1>(d, a, b, 1);            \
        if constexpr (N == 256) wgmma_m64n256k16_##TYPE##_registers<1>(d, a, b, 1);            \
    }
WARPGROUP_REGISTERS(__nv_bfloat16, bf16)
WARPGROUP_REGISTERS(__half, f16)
#undef WARPGROUP_REGISTERS

// s = a @ b.T, or with `add` s += a @ b.T, over DEPTH columns; a panel of a has A_ROWS rows, one of
// b has 2 * N.
template <class E, int DEPTH, int A_ROWS, int N>
DEVICE void begin_scores(float (&s)[N], Operand a, Operand b, bool add = false) {
    constexpr int B_ROWS = N * 2;
#pragma unroll
    for (int step = 0; step < DEPTH / 16; step++) {
        const int panel = step / 4, inside = step % 4 * 32;
        multiply_tiles<B_ROWS>(s, a.at(panel * A_ROWS * PANEL_ROW + inside),
                               b.at(panel * B_ROWS * PANEL_ROW + inside), step > 0 || add, E());
    }
    wgmma_commit();
}

// o += p @ b with 16 * STEPS rows of b.
template <class E, int STEPS, int N>
DEVICE void begin_values(float (&o)[N], const uint32_t (&p)[STEPS][4], Operand b) {
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        multiply_registers<N * 2>(o, p[step], b.at(step * 16 * PANEL_ROW), E());
    wgmma_commit();
}

// o = p.T @ b with 16 * STEPS rows of p and b, both in shared memory.
template <class E, int STEPS, int N>
DEVICE void begin_transposed(float (&o)[N], Operand p, Operand b) {
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        multiply_tiles<N * 2, 1, 1>(o, p.at(step * 16 * PANEL_ROW), b.at(step * 16 * PANEL_ROW),
                                    step > 0, E());
    wgmma_commit();
}

// Store a warp's 16 of 64 rows, of up to 64 columns, in a panel, in the layout that products read.
template <int STEPS>
DEVICE void put_operand(unsigned char *panel, const uint32_t (&p)[STEPS][4]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < STEPS * 4; i++) {  // rows 8 apart have the same swizzle
        const int chunk = i / 4 * 2 + i % 4 / 2, at = (row + i % 2 * 8) * PANEL_ROW;
        *reinterpret_cast<uint32_t *>(panel + at + (chunk ^ lane / 4) * 16 + lane % 4 * 4) =
            p[i / 4][i % 4];
    }
}

// Round a lane's part of 64 rows to 16 bits, in the layout of a product's operand.
template <class E, int STEPS, int R>
DEVICE void narrow(uint32_t (&to)[STEPS][4], const float (&from)[R]) {
    static_assert(R == STEPS * 8);
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[step][i] = pair(from[step * 8 + i * 2], from[step * 8 + i * 2 + 1], E());
    wgmma_name(to);
}

// Write the first `used` columns of one row in 16 bits, 16 bytes per lane, if the row is
// `in_range`.
// Four lanes hold two of every eight columns each: they exchange them until each lane has a whole
// group of eight.
template <class E, int R>
DEVICE void put_row_of_lanes(E *to, const float (&o)[R], int half, float factor, bool in_range,
                             int used) {
    static_assert(R % 16 == 0 && sizeof(E) == 2);
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int first = 0; first < R / 4; first += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *const two = o + (first + i) * 4 + half * 2;
            words[i] = pair(two[0] * factor, two[1] * factor, E());
        }
#pragma unroll
        for (int away = 1; away < 4; away *= 2)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i / away % 2 == 0) {
                    uint32_t &low = words[i], &high = words[i + away];
                    const bool upper = lane & away;
                    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, upper ? low : high, away);
                    (upper ? low : high) = theirs;
                }
        const int column = (first + lane) * 8;
        if (in_range && column < used)
            *reinterpret_cast<uint4 *>(to + column) = {words[0], words[1], words[2], words[3]};
    }
}

// Wait for products whose operand is in registers; afterwards the compiler may reuse these.
template <int N, int R, int STEPS>
DEVICE void wgmma_free(float (&sum)[R], uint32_t (&p)[STEPS][4]) {
    wgmma_wait<N>(sum);
    wgmma_name(p);
}
