// A step of AdamW over all tensors of an optimizer, in place; adamw.cu has the formula.
//
//   Skipped, with every bit kept, where finite is false.  Gradients are multiplied by factor first.
//   States are float32, or codes of 8 bits with a float32 maximum for every 256 of them:
//   mean = signed_map[code] * mean_scale, square = unsigned_map[code] * square_scale.
//
//   traffic     elements * (2 * sizeof(parameter) + sizeof(gradient) + sizeof(copy) + 16), or with
//               codes + 4 + 16 / 256 in place of + 16; beside it 4 to 8 KiB a chunk of 8192 elements
//   constants   KINDS     a bit for every kind of tensor that the launch has
//                         kind = dtype (float16, bfloat16, float32)
//                                + 3 where that is the dtype of a copy, and the parameter float32
//                                + 6 where the gradient is float32 instead + 12 where codes are kept
//               LANES     values of one access: 4, or what all addresses are multiples of
//               THREADS   of a block
//
//   The trick: the step is counted on the device.  The last block to end leaves the bias corrections
//   of the next step, so the host need not know whether this one was skipped.  A span of a warp is a
//   block of codes: its maxima meet in shuffles.  Codes are computed, then put right by the two
//   midpoints beside them: 4 reads of a table where a binary search takes 16.
#include "common/adamw.cuh"
#include "common/many.cuh"
#include "common/reduce.cuh"

using Map = float[256];

// The code whose value is nearest to x; the lower one of two that are as near.  `map` holds the
// midpoint between each code and the next.  In decade i (0.1 .. 1 times 10^(i - 6)) there are
// 2^i positive values, and 2^(i + 1) where there are no negative ones, each in the middle of its
// share of the decade.
template <bool SIGNED> __device__ __forceinline__ int nearest(float x, const Map &middle) {
    const float size = fabsf(x);
    int decade = 0;
    float unit = 1e6f;
#pragma unroll
    for (int i = 1; i < 7; i++) {
        constexpr float LOW[] = {0, 1e-6f, 1e-5f, 1e-4f, 1e-3f, 1e-2f, 1e-1f};
        constexpr float UNIT[] = {1e6f, 1e5f, 1e4f, 1e3f, 1e2f, 1e1f, 1.0f};
        if (size >= LOW[i]) {
            decade = i;
            unit = UNIT[i];
        }
    }
    const int cells = (SIGNED ? 1 : 2) << decade;
    const float share = (size * unit - 0.1f) * __fdiv_rn(cells, 0.9f);
    const int position = cells - !SIGNED + (int)fminf(fmaxf(share, -1.0f), cells - 1.0f);
    int code = SIGNED ? 127 + (x < 0 ? -position : position) : position;
    if (code < 255 && x > middle[code]) code++;
    else if (code > 0 && x <= middle[code - 1]) code--;
    return code;
}

// Codes become values; what is not there becomes 0, so that no maximum sees it.
__device__ __forceinline__ void decode(Values &v, const Map &map, float scale, long long count) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
        for (int j = 0; j < LANES; j++)
            v.at[i][j] = place(i) + j < count ? map[(int)v.at[i][j]] * scale : 0.0f;
}

// Returns the largest size in the warp's span.
template <bool SIGNED> __device__ __forceinline__ float encode(Values &v, const Map &middle) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
        for (int j = 0; j < LANES; j++) largest = fmaxf(largest, fabsf(v.at[i][j]));
    largest = group_max<32>(largest);
    // below float32's normal numbers there is no reciprocal: such values are as good as 0; that of
    // numbers beyond 2^126 would be below them
    const float unit = largest > 0x1p126f ? 0.25f : 1.0f;
    const float inverse = largest < 1.17549435e-38f ? 0.0f : 1.0f / (largest * unit);
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
        for (int j = 0; j < LANES; j++)
            v.at[i][j] = (float)nearest<SIGNED>(v.at[i][j] * inverse * unit, middle);
    return largest;
}

template <int K>
__device__ __forceinline__ void chunk(const long long *tensor, float factor,
                                      const Rates &rates, const Map *maps) {
    constexpr bool COPY = K / 3 % 2, WIDE = K / 6 % 2, CODED = K / 12;
    using Copy = typename Number<K % 3>::type;
    using Parameter = typename Number<COPY ? 2 : K % 3>::type;
    using Gradient = typename Number<WIDE ? 2 : K % 3>::type;
    const long long first = (blockIdx.x - tensor[FIRST]) * CHUNK, elements = tensor[ELEMENTS];
    const long long end = min(first + CHUNK, elements);
    for (long long at = first + threadIdx.x / 32 * SPAN; at < end; at += THREADS / 32 * SPAN) {
        const long long count = elements - at, block = at / SPAN;
        Values p, g, m, s;
        load(p, address<Parameter>(tensor, 0) + at, count);
        load(g, address<Gradient>(tensor, 6) + at, count);
        if constexpr (CODED) {
            load(m, address<unsigned char>(tensor, 2) + at, count);
            load(s, address<unsigned char>(tensor, 3) + at, count);
            decode(m, maps[0], address<float>(tensor, 4)[block], count);
            decode(s, maps[2], address<float>(tensor, 5)[block], count);
        } else {
            load(m, address<float>(tensor, 2) + at, count);
            load(s, address<float>(tensor, 3) + at, count);
        }
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
            for (int j = 0; j < LANES; j++)
                update(p.at[i][j], g.at[i][j] * factor, m.at[i][j], s.at[i][j], rates);
        store(address<Parameter>(tensor, 0), at, p, count);
        if constexpr (COPY) store(address<Copy>(tensor, 1), at, p, count);
        if constexpr (CODED) {
            const float largest_mean = encode<true>(m, maps[1]);
            const float largest_square = encode<false>(s, maps[3]);
            store(address<unsigned char>(tensor, 2), at, m, count);
            store(address<unsigned char>(tensor, 3), at, s, count);
            __syncwarp();  // all lanes have read the scales of before
            if (threadIdx.x % 32 == 0) {
                address<float>(tensor, 4)[block] = largest_mean;
                address<float>(tensor, 5)[block] = largest_square;
            }
        } else {
            store(address<float>(tensor, 2), at, m, count);
            store(address<float>(tensor, 3), at, s, count);
        }
    }
}

template <int K>
__device__ __forceinline__ void choose(const long long *tensor, float factor,
                                       const Rates &rates, const Map *maps) {
    if constexpr (K < 24) {
        if constexpr (KINDS >> K & 1)
            if (tensor[KIND] == K) return chunk<K>(tensor, factor, rates, maps);
        choose<K + 1>(tensor, factor, rates, maps);
    }
}

// of an SM: a thread holds eight values of each array, 68 to 114 registers; 70 KiB are in flight
constexpr int BLOCKS = LANES < 4 || KINDS >> 12 ? 2 : 3;

// powers: beta1^step, beta2^step, beta1, beta2 of this step; corrections: what becomes of rate and
// eps by them; counts: steps that are done, blocks that have ended.
KERNEL(THREADS, BLOCKS)
adamw_step(const long long *tensors, const int *owners, const float *map, const float *factor,
           const bool *finite, double *powers, float *corrections, unsigned *counts, float beta1,
           float rest1, float beta2, float rest2, float lr, float eps, float kept) {
    if (finite && !*finite) return;
    const long long *tensor = tensors + (long long)owners[blockIdx.x] * FIELDS;
    __shared__ Map maps[KINDS >> 12 ? 4 : 1];
    if constexpr (KINDS >> 12) {
        for (int i = threadIdx.x; i < 4 * 256; i += THREADS) maps[i / 256][i % 256] = map[i];
        __syncthreads();
    }
    const Rates rates = {beta1, rest1, beta2, rest2, lr * corrections[0], eps * corrections[1], kept};
    choose<0>(tensor, factor ? *factor : 1.0f, rates, maps);
    __syncthreads();  // all of the block have read the corrections
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicInc(&counts[1], gridDim.x - 1) == gridDim.x - 1) {
            __threadfence();  // the other blocks have read their corrections
            const double power1 = powers[0] * powers[2], power2 = powers[1] * powers[3];
            powers[0] = power1;
            powers[1] = power2;
            corrections[0] = (float)(sqrt(1 - power2) / (1 - power1));
            corrections[1] = (float)sqrt(1 - power2);
            counts[0]++;
        }
    }
}
