// Adds an adapter's change to a weight, each value in one order of sums.
//
//   w[o, i] = (((s b[o, 0]) a[0, i] + (s b[o, 1]) a[1, i]) + ...) + w[o, i]
//
//   traffic     outputs * inputs * 2 * sizeof(T), and rank * (inputs + outputs / tiles) factors
//   constants   T          dtype of w, a and b
//               LANES      values of one access of w, which divide a row
//               ROWS       rows of a thread
//               THREADS    threads of a block
//
//   The trick: products and sums are rounded one by one and never fused, as NumPy rounds them, so
//   a file that the host writes is quantized from the bits that a product here was computed with.
//   A thread keeps ROWS x LANES sums, so a row of a is read once for ROWS rows of w; the factors of
//   b are the same for all threads of a block.
#include <common/vector.cuh>

KERNEL(THREADS)
lora_add_(T *__restrict__ w, const T *__restrict__ a, const T *__restrict__ b, int outputs,
          int width, int rank, int tiles, float scale) {
    const int unit = blockIdx.x % tiles * THREADS + threadIdx.x;  // of LANES columns
    const int first = blockIdx.x / tiles * ROWS;
    if (unit >= width) return;
    float sums[ROWS][LANES] = {};
    for (int r = 0; r < rank; r++) {
        float part[LANES];
        load(part, a + ((long long)r * width + unit) * LANES);
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const int output = min(first + row, outputs - 1);
            const float factor = __fmul_rn((float)b[(long long)output * rank + r], scale);
#pragma unroll
            for (int j = 0; j < LANES; j++)
                sums[row][j] = __fadd_rn(sums[row][j], __fmul_rn(factor, part[j]));
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        if (first + row >= outputs) return;
        T *to = w + ((long long)(first + row) * width + unit) * LANES;
        float v[LANES];
        load(v, to);
#pragma unroll
        for (int j = 0; j < LANES; j++) v[j] = __fadd_rn(sums[row][j], v[j]);
        store(to, v);
    }
}
