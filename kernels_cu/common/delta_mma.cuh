// The gated delta rule on tensor cores: what passes from kernel to kernel, and how warps divide a
// state and the triangles of a chunk.
//
//   constants   BACKWARD    for the gradients
//               EXACT       parts of what states depend on: 3, as exact as float32, or 2
//               and those of common/chunk_mma.cuh
#pragma once
#include <common/chunk_mma.cuh>
#include <common/vector.cuh>

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int HALVES = DIM / 64;           // warps with the same columns of values
constexpr int WIDE = 16 * WARPS / HALVES;  // columns of values of a block
constexpr int OWN = STRIPES / HALVES;      // stripes of a product of tokens that a warp computes
using Values = Tile<T, WIDE>;              // v, then out; dout, then dv
static_assert(sizeof(T) == 2 && WARPS == STRIPES);

// What delta_chunks_mma computes of a chunk and a value head; triangles are operands of lanes.
constexpr int TURNED = BACKWARD ? EXACT * PLANE : 0;  // of scores, where T^T begins
struct Pieces {
    uint4 solve[EXACT * PLANE];                                // T
    float into[CHUNK], onward[CHUNK], beta[CHUNK];
    uint4 scores[(BACKWARD ? 2 * EXACT : SHORT) * PLANE];      // P; with BACKWARD, P^T and T^T
};

DEVICE float4 four_of(const float (&d)[4]) { return make_float4(d[0], d[1], d[2], d[3]); }
DEVICE void add_four(float (&d)[4], const float4 x) {
    d[0] += x.x, d[1] += x.y, d[2] += x.z, d[3] += x.w;
}

// The stripes of a warp; both halves have five blocks of a triangle.
DEVICE int stripe_of(int half, int m) { return HALVES == 1 ? m : m == 0 ? half : 3 - half; }

// d += left @ the rows 16 * step .. of triangle^T or, with TURNED, of triangle: stripes of a warp.
// The triangle is in PLANES parts.
template <bool TURNED, int PLANES, int PARTS>
DEVICE void add_blocks(float (&d)[OWN * 2][4], const uint32_t (&left)[PARTS][4],
                       const uint4 *triangle, int step, int half) {
    const auto there = [&](int m) {
        return TURNED ? stripe_of(half, m) <= step : step <= stripe_of(half, m);
    };
#pragma unroll
    for (int plane = PLANES - 1; plane >= 0; plane--) {
        uint32_t right[OWN][4];
#pragma unroll
        for (int m = 0; m < OWN; m++) {
            if (!there(m)) continue;
            const int i = stripe_of(half, m), block = TURNED ? block_of(step, i) : block_of(i, step);
            const uint4 own = triangle[plane * PLANE + block * 32 + threadIdx.x % 32];
            right[m][0] = own.x, right[m][1] = own.y;
            right[m][2] = own.z, right[m][3] = own.w;
        }
#pragma unroll
        for (int part = min(PARTS, PLANES - plane) - 1; part >= 0; part--)
#pragma unroll
            for (int m = 0; m < OWN; m++)
                if (there(m)) add_two(d, m * 2, left[part], right[m]);
    }
}

// d += x @ triangle^T or, with TURNED, x @ triangle, where results x have 64 columns.
template <int PARTS, bool TURNED = false>
DEVICE void add_triangle(float (&d)[OWN * 2][4], const float (&x)[STRIPES * 2][4],
                         const uint4 *triangle, int half) {
#pragma unroll
    for (int step = 0; step < STRIPES; step++) {
        uint32_t left[PARTS][4];
        split(left, x[step * 2], x[step * 2 + 1]);
        add_blocks<TURNED, PARTS>(d, left, triangle, step, half);
    }
}

// Result n of 16 x 64 of which each half of two warps has computed what stripe_of says, and all
// have exchanged it as `sums`, (warp, number).
template <class Sums>
DEVICE void gather(float (&x)[STRIPES * 2][4], const float (&own)[OWN * 2][4], int half, Sums sums) {
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
        const int m = n / 4, owner = (n + 2) / 4 % 2;  // stripes 1 and 2 are of the second half
#pragma unroll
        for (int i = 0; i < 4; i++) x[n][i] = HALVES == 1 ? own[n % (OWN * 2)][i] : 0.0f;
        if constexpr (HALVES == 2) add_four(x[n], sums(owner, m * 2 + n % 2));
    }
}

// Write the stripes of a warp, 16 columns from `right` on of a tile, turned: by way of the tile.
DEVICE void put_stripes(T *to, long long at, const Values &tile, const float (&x)[OWN * 2][4],
                        int right, int half, int first, int stop, int stride) {
    const int lane = threadIdx.x % 32;
    auto line_of = tile.lane(lane % 4 * 2, right / 8);
    line_of.offset += lane / 4 * sizeof(T);
#pragma unroll
    for (int m = 0; m < OWN; m++) {
        const int stripe = stripe_of(half, m), row = stripe * 16 + lane / 2;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                *reinterpret_cast<T *>(line_of.at(n * 8 + i % 2, i / 2) +
                                       stripe * 16 * Values::PITCH_BYTES) = (T)x[m * 2 + n][i];
        __syncwarp();
        Vector<T, 8> line;  // half of a warp's columns
        fetch(line, tile.at(row, right / 8 + lane % 2));
        if (first + row < stop) put(to, at + (long long)(first + row) * stride + lane % 2 * 8, line);
    }
}

// ---- from kernel to kernel ----------------------------------------------------------------------
// 16 columns of values by WIDTH tokens, or rows of a state, in SHORT parts: 8 x 8 matrices side by
// side, of which a row is a column of values.
template <int WIDTH> struct Slab {
    static constexpr int MATRICES = WIDTH / 8, WORDS = SHORT * 2 * MATRICES * 32;
    uint32_t *start;

    DEVICE uint32_t *matrix(int part, int below, int n) const {
        return start + ((part * 2 + below) * MATRICES + n) * 32;
    }
    // Write the result n of a product that has such columns as rows.
    DEVICE void put(int n, const float (&d)[4]) const {
        uint32_t parts[SHORT][4];
#pragma unroll
        for (int below = 0; below < 2; below++) {
            split(parts, below, d[below * 2], d[below * 2 + 1]);
#pragma unroll
            for (int part = 0; part < SHORT; part++)
                matrix(part, below, n)[threadIdx.x % 32] = parts[part][below];
        }
    }
    // The operand a of 16 tokens, or b of 16 tokens or rows of a state, from matrix n on.
    template <bool FIRST> DEVICE void fetch(uint32_t (&to)[SHORT][4], int n) const {
        const int lane = threadIdx.x % 32, low = lane / 8 % 2, high = lane / 16;
#pragma unroll
        for (int part = 0; part < SHORT; part++)
            ldmatrix_x4_trans(to[part], matrix(part, FIRST ? high : low, n + (FIRST ? low : high)) +
                                            lane % 8 * 4);
    }
};
