// A step of AdamW over all tensors of an optimizer, in place; adamw.cu has the formula.
//
//   Where `finite` is false the step is skipped and no bit changes.  Gradients are multiplied by
//   `factor` first.  States are float32, or 8-bit codes with a float32 maximum for every 256 of
//   them: mean = signed_map[code] * mean_scale, square = unsigned_map[code] * square_scale.  Only a
//   square of 0 has code 0: a step divides by its root.
//
//   traffic     elements * (2 * sizeof(parameter) + sizeof(gradient) + sizeof(copy) + 16), or with
//               codes + 4 + 16 / 256 in place of + 16; also 4 to 8 KiB per chunk of 8192 elements
//   constants   those of common/many.cuh, with the fields PARAMETER, COPY, MEAN, SQUARE,
//               MEAN_SCALE, SQUARE_SCALE and GRADIENT; parameter and gradient have the dtype of
//               their kind, except for these flags of a kind:
//               COPIED    the parameter is float32, and a copy of it has the dtype of the kind
//               WIDE      the gradient is float32
//               CODED     states are codes
//
//   The trick: steps are counted on the device.  The last block to end writes the bias corrections
//   of the next step, so the host need not know whether this one was skipped.  The span of a warp
//   is a block of codes, whose maximum is found by shuffles.  A code is computed, then corrected by
//   the bounds on either side: 4 reads of a table where a binary search takes 16.
#include <common/adamw.cuh>
#include <common/many.cuh>
#include <common/reduce.cuh>

constexpr bool ANY_CODED = KINDS >> CODED;  // the highest flag

using Map = float[256];
enum Maps { MEAN_VALUES, MEAN_BOUNDS, SQUARE_VALUES, SQUARE_BOUNDS, MAPS };

// The first code whose bound is not below x: its value is the nearest, or the next of a small square.
// Decade i (0.1 .. 1 times 10^(i - 6)) has 2^i positive values, or 2^(i + 1) in the map without
// negative ones, each in the middle of an equal part of the decade.
template <bool SIGNED> DEVICE int code_of(float x, const Map &bound) {
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
    const float fraction = (size * unit - 0.1f) * __fdiv_rn(cells, 0.9f);
    const int position = cells - !SIGNED + (int)fminf(fmaxf(fraction, -1.0f), cells - 1.0f);
    int code = SIGNED ? 127 + (x < 0 ? -position : position) : position;
    if (code < 255 && x > bound[code]) code++;
    else if (code > 0 && x <= bound[code - 1]) code--;
    return code;
}

// Turn codes into values.  Values past the end become 0, so that they do not affect a maximum.
DEVICE void decode(Values &v, const Map &map, float scale, long long count) {
    each([&](int i, int j) {
        v.at[i][j] = offset(i) + j < count ? map[(int)v.at[i][j]] * scale : 0.0f;
    });
}

// Turn values into codes; return the largest absolute value of the warp's span.
template <bool SIGNED> DEVICE float encode(Values &v, const Map &bound) {
    float largest = 0;
    each([&](int i, int j) { largest = fmaxf(largest, fabsf(v.at[i][j])); });
    largest = group_max<32>(largest);
    // a maximum below float32's normal numbers counts as 0, as its reciprocal may be infinite;
    // the reciprocal of one above 2^126 would itself be below the normal numbers
    const float unit = largest > 0x1p126f ? 0.25f : 1.0f;
    const bool tiny = largest < 1.17549435e-38f;
    const float inverse = tiny ? 0.0f : 1.0f / (largest * unit);
    each([&](int i, int j) {
        int code = code_of<SIGNED>(v.at[i][j] * inverse * unit, bound);
        if (!SIGNED && v.at[i][j] > 0) code = max(code, tiny ? 255 : 1);
        v.at[i][j] = (float)code;
    });
    return largest;
}

template <int K>
DEVICE void chunk(const long long *tensor, float factor, const Rates &rates, const Map *maps) {
    using Copy = NumberOf<K>;
    using Parameter = NumberOf<K & COPIED ? FLOAT32 : K>;
    using Gradient = NumberOf<K & WIDE ? FLOAT32 : K>;
    const long long first = (blockIdx.x - tensor[FIRST]) * CHUNK, elements = tensor[ELEMENTS];
    const long long end = min(first + CHUNK, elements);
    for (long long at = first + threadIdx.x / 32 * SPAN; at < end; at += THREADS / 32 * SPAN) {
        const long long count = elements - at, block = at / SPAN;
        Values p, g, m, s;
        load(p, address<Parameter>(tensor, PARAMETER) + at, count);
        load(g, address<Gradient>(tensor, GRADIENT) + at, count);
        if constexpr (K & CODED) {
            load(m, address<unsigned char>(tensor, MEAN) + at, count);
            load(s, address<unsigned char>(tensor, SQUARE) + at, count);
            decode(m, maps[MEAN_VALUES], address<float>(tensor, MEAN_SCALE)[block], count);
            decode(s, maps[SQUARE_VALUES], address<float>(tensor, SQUARE_SCALE)[block], count);
        } else {
            load(m, address<float>(tensor, MEAN) + at, count);
            load(s, address<float>(tensor, SQUARE) + at, count);
        }
        each([&](int i, int j) {
            update(p.at[i][j], g.at[i][j] * factor, m.at[i][j], s.at[i][j], rates);
        });
        store(address<Parameter>(tensor, PARAMETER), at, p, count);
        if constexpr (K & COPIED) store(address<Copy>(tensor, COPY), at, p, count);
        if constexpr (K & CODED) {
            const float largest_mean = encode<true>(m, maps[MEAN_BOUNDS]);
            const float largest_square = encode<false>(s, maps[SQUARE_BOUNDS]);
            store(address<unsigned char>(tensor, MEAN), at, m, count);
            store(address<unsigned char>(tensor, SQUARE), at, s, count);
            __syncwarp();  // all lanes have read the previous scales
            if (threadIdx.x % 32 == 0) {
                address<float>(tensor, MEAN_SCALE)[block] = largest_mean;
                address<float>(tensor, SQUARE_SCALE)[block] = largest_square;
            }
        } else {
            store(address<float>(tensor, MEAN), at, m, count);
            store(address<float>(tensor, SQUARE), at, s, count);
        }
    }
}

// blocks on an SM: a thread holds eight values of each array, 68 to 114 registers, which keeps
// 70 KiB in flight
constexpr int BLOCKS = LANES < 4 || ANY_CODED ? 2 : 3;

// powers: beta1^step, beta2^step, beta1, beta2 of this step; corrections: the factors of rate and
// eps that follow from them; counts: steps done, blocks that have ended.
KERNEL(THREADS, BLOCKS)
adamw_step(const long long *tensors, const int *owners, const float *map, const float *factor,
           const bool *finite, double *powers, float *corrections, unsigned *counts, float beta1,
           float rest1, float beta2, float rest2, float lr, float eps, float decay_factor) {
    if (finite && !*finite) return;
    const long long *tensor = tensors + (long long)owners[blockIdx.x] * FIELDS;
    __shared__ Map maps[ANY_CODED ? MAPS : 1];
    if constexpr (ANY_CODED) {
        for (int i = threadIdx.x; i < MAPS * 256; i += THREADS) maps[i / 256][i % 256] = map[i];
        __syncthreads();
    }
    const Rates rates = {
        beta1, rest1, beta2, rest2, lr * corrections[0], eps * corrections[1], decay_factor};
    with_kind(tensor[KIND], [&](auto kind) {
        chunk<decltype(kind)::value>(tensor, factor ? *factor : 1.0f, rates, maps);
    });
    __syncthreads();  // all threads of the block have read the corrections
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
