// Rotates pairs of columns of a head.
//
//   constants   T             dtype of the head
//               HALF          pairs that are rotated
//               LANES         values of one access
//               INTERLEAVED   pairs are neighbours
#pragma once
#include <common/vector.cuh>

constexpr int PAIRS = INTERLEAVED && LANES > 1 ? LANES / 2 : LANES;  // pairs of a thread at a time
constexpr int TURNED = 2 * HALF;

// Rotate the pairs from `pair` on of the head at x, and write them to the head at y + head.
DEVICE void rotate(const T *x, T *y, long long head, int pair, const float (&c)[PAIRS],
                   const float (&s)[PAIRS]) {
    float first[PAIRS], second[PAIRS];
    if constexpr (!INTERLEAVED || LANES == 1) {
        const int one = INTERLEAVED ? 2 * pair : pair, other = INTERLEAVED ? one + 1 : pair + HALF;
        load(first, x + one);
        load(second, x + other);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const float turned = first[j] * c[j] - second[j] * s[j];
            second[j] = second[j] * c[j] + first[j] * s[j];
            first[j] = turned;
        }
        store(y, head + one, first);
        store(y, head + other, second);
    } else {
        float both[2 * PAIRS];
        load(both, x + 2 * pair);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            const float turned = both[2 * j] * c[j] - both[2 * j + 1] * s[j];
            both[2 * j + 1] = both[2 * j + 1] * c[j] + both[2 * j] * s[j];
            both[2 * j] = turned;
        }
        store(y, head + 2 * pair, both);
    }
}
