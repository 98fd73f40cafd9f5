// Converts a part of a ternary weight to a dense matrix.
//
//   w[r, c] = codes[row + r, column + c] * scale of its group
//
//   traffic     rows * columns * (sizeof(T) + 1 / 4)
//   constants   T, S      dtypes of w and of the scales
//               LANES     values that are stored together: 8, from a byte of each plane, or 1
//               GROUPED   a row has several scales
//
//   The trick: a thread has 8 columns, so it reads one byte of each plane; neighbouring threads
//   store neighbouring 16 bytes of 16-bit values.
#include <common/vector.cuh>

constexpr int THREADS = 256;

KERNEL(THREADS)
ternary_dense_(T *w, const unsigned char *planes, const S *scale, long long eighths, int columns,
               int row, int column, int bytes, int group, int groups, int scale_step) {
    const long long at = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (at >= eighths) return;
    const int wide = (columns + 7) / 8, left = (int)(at % wide) * 8;
    const long long r = at / wide, output = row + r;
    const unsigned char *from = planes + output * 2 * bytes + (column + left) / 8;
    const unsigned plus = from[0], minus = from[bytes];
    const int part = GROUPED ? (column + left) / group : 0;  // 8 columns are of one group
    const float factor = (float)scale[output * scale_step * groups + part];
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = plus >> j & 1 ? factor : minus >> j & 1 ? -factor : 0.0f;
    T *to = w + r * columns + left;
    if constexpr (LANES == 8) {
        store(to, v);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (left + j < columns) to[j] = (T)v[j];
    }
}
