// A step of the tensors of an optimizer whose states are float32 arrays, in one launch.
//
//   constants   those of common/many.cuh, with the fields PARAMETER, COPY, GRADIENT and those of the
//               states; parameter and gradient have the dtype of their kind, except for these flags:
//               COPIED    the parameter is float32, and a copy of it has the dtype of the kind
//               WIDE      the gradient is float32
#pragma once
#include <common/many.cuh>

// Call update(parameter, gradient * factor, states) for each value of a block's chunk; STATES are
// the fields of the states.
template <int K, int... STATES, class Update>
DEVICE void step_chunk(const long long *tensor, float factor, Update update) {
    constexpr int N = sizeof...(STATES);
    constexpr int fields[N] = {STATES...};
    using Copy = NumberOf<K>;
    using Parameter = NumberOf<K & COPIED ? FLOAT32 : K>;
    using Gradient = NumberOf<K & WIDE ? FLOAT32 : K>;
    const long long first = (blockIdx.x - tensor[FIRST]) * CHUNK, elements = tensor[ELEMENTS];
    const long long end = min(first + CHUNK, elements);
    for (long long at = first + threadIdx.x / 32 * SPAN; at < end; at += THREADS / 32 * SPAN) {
        const long long count = elements - at;
        Values p, g, s[N];
        load(p, address<Parameter>(tensor, PARAMETER) + at, count);
        load(g, address<Gradient>(tensor, GRADIENT) + at, count);
#pragma unroll
        for (int n = 0; n < N; n++) load(s[n], address<float>(tensor, fields[n]) + at, count);
        each([&](int i, int j) {
            if constexpr (N == 1) update(p.at[i][j], g.at[i][j] * factor, s[0].at[i][j]);
            else update(p.at[i][j], g.at[i][j] * factor, s[0].at[i][j], s[N - 1].at[i][j]);
        });
        store(address<Parameter>(tensor, PARAMETER), at, p, count);
        if constexpr (K & COPIED) store(address<Copy>(tensor, COPY), at, p, count);
#pragma unroll
        for (int n = 0; n < N; n++) store(address<float>(tensor, fields[n]), at, s[n], count);
    }
}
