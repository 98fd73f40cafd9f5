// Attention over chunks of keys: each block has a part, and parts are merged in a fixed order.
//
// A row of a part is COLUMNS values, the largest score times log2(e), the sum of exp, two unused.
#pragma once
#include <common/last_block.cuh>
#include <common/softmax.cuh>
#include <common/vector.cuh>

// The merged parts of a row: four columns, the largest score times log2(e), and the sum of exp.
struct Merged { float value[4], top, sum; };

template <int COLUMNS> struct Parts {
    static constexpr int TOP = COLUMNS, SUM = COLUMNS + 1, PITCH = COLUMNS + 4;
    static constexpr int QUADS = COLUMNS / 4;

    // Merge four columns of a row of several parts, which are `stride` floats apart.
    static DEVICE Merged merged(const float *row, int column, int parts, int stride) {
        Merged m = {{}, NO_SCORE, 0};
#pragma unroll 8
        for (int i = 0; i < parts; i++) m.top = fmaxf(m.top, row[i * stride + TOP]);
        const float shift = m.top == NO_SCORE ? 0.0f : m.top;
#pragma unroll 8
        for (int i = 0; i < parts; i++) {
            const float *const from = row + i * stride;
            const float weight = exp2f(from[TOP] - shift);
            float value[4];
            load(value, from + column);
#pragma unroll
            for (int j = 0; j < 4; j++) m.value[j] = fmaf(weight, value[j], m.value[j]);
            m.sum = fmaf(weight, from[SUM], m.sum);
        }
        return m;
    }
    static DEVICE void put(float *row, int column, const Merged &m) {
        store(row + column, m.value);
        if (column == 0) {
            row[TOP] = m.top;
            row[SUM] = m.sum;
        }
    }
};
