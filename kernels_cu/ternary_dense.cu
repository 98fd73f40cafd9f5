// Converts a ternary weight, or a part of it, to a dense matrix, or to codes of a byte each.
//
//   dense   w[r, c] = codes[row + r, column + c] * scale of its group
//   codes   -1, 0 or 1, as bytes
//
//   traffic     dense   rows * columns * (sizeof(T) + 1 / 4)
//               codes   rows * columns * (1 + 1 / 4)
//   constants   T, S      dtypes of w and of the scales
//               LANES     values of w that are stored together: 8, from a byte of each plane, or 1
//               GROUPED   a row has several scales
//
//   The trick: a thread has 8 columns, so it reads one byte of each plane; neighbouring threads
//   store neighbouring 16 bytes of 16-bit values.  As bytes, they are 16 columns: a product puts
//   four bits into four bytes, and as no code is 1 and -1, 255 times the bits of the second plane
//   are added without a carry.
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

// Four codes, from the lowest bits of both planes.
DEVICE unsigned bytes_of(unsigned plus, unsigned minus) {
    constexpr unsigned APART = 1 | 1 << 7 | 1 << 14 | 1 << 21, ONES = 0x01010101;
    return ((plus & 15) * APART & ONES) + ((minus & 15) * APART & ONES) * 255;
}

// A row has `chunks` of 16 columns, which take `blocks` blocks, and planes of `bytes`.
KERNEL(THREADS)
ternary_codes(const unsigned char *__restrict__ planes, signed char *__restrict__ codes,
              unsigned chunks, unsigned blocks, unsigned bytes) {
    const unsigned row = blockIdx.x / blocks;
    const unsigned chunk = blockIdx.x % blocks * THREADS + threadIdx.x;
    if (chunk >= chunks) return;
    const unsigned char *from = planes + row * 2ll * bytes + chunk * 2;
    const unsigned plus = *reinterpret_cast<const unsigned short *>(from);
    const unsigned minus = *reinterpret_cast<const unsigned short *>(from + bytes);
    Vector<unsigned, 4> four;
#pragma unroll
    for (int j = 0; j < 4; j++) four.at[j] = bytes_of(plus >> 4 * j, minus >> 4 * j);
    put(reinterpret_cast<unsigned *>(codes) + ((long long)row * chunks + chunk) * 4, four);
}
