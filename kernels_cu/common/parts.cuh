// Attention over chunks of keys: each block has a part, and parts are merged in a fixed order.
//
// A row of a part is COLUMNS values, the level of the largest score, the sum of exp, two unused.
#pragma once
#include <common/last_block.cuh>
#include <common/softmax.cuh>
#include <common/vector.cuh>

// The merged parts of a row: four columns, the level of the largest score, and the sum of exp.
struct Merged { float value[4], top, sum; };

template <int COLUMNS> struct Parts {
    static constexpr int TOP = COLUMNS, SUM = COLUMNS + 1, PITCH = COLUMNS + 4;
    static constexpr int QUADS = COLUMNS / 4;

    // Merge four columns of a row of several parts, which are `stride` floats apart.  AT_ONCE of
    // them are read together; the first group lacks `missing`.
    template <int AT_ONCE>
    static DEVICE Merged merged(const float *row, int column, int parts, int stride, float unit,
                                int missing = 0) {
        Merged m = {{}, NO_SCORE, 0};
        for (int first = -missing; first < parts; first += AT_ONCE) {
            float value[AT_ONCE][4] = {};
            float2 of[AT_ONCE];  // top and sum
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                of[i] = make_float2(NO_SCORE, 0);
                if ((unsigned)(first + i) >= (unsigned)parts) continue;
                const float *const from = row + (first + i) * stride;
                load(value[i], from + column);
                of[i] = *reinterpret_cast<const float2 *>(from + TOP);
            }
            const float before = m.top;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) m.top = fmaxf(m.top, of[i].x);
            const float shift = m.top == NO_SCORE ? 0.0f : m.top;
            const float rescale = exp_between(before - shift, unit);
#pragma unroll
            for (int j = 0; j < 4; j++) m.value[j] *= rescale;
            m.sum *= rescale;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                const float weight = exp_between(of[i].x - shift, unit);
#pragma unroll
                for (int j = 0; j < 4; j++) m.value[j] = fmaf(weight, value[i][j], m.value[j]);
                m.sum = fmaf(weight, of[i].y, m.sum);
            }
        }
        return m;
    }
    static DEVICE void put(float *row, int column, const Merged &m) {
        store(row + column, m.value);
        if (column == 0) *reinterpret_cast<float2 *>(row + TOP) = make_float2(m.top, m.sum);
    }
};
