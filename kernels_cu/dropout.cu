// Dropout of rows: each element is kept, times a factor, or becomes 0.
//
//   y[r, c] = x[r, c] * factor if word c % 4 of Philox(0, 0, r, c / 4) >= threshold, else 0
//
//   traffic     2 * rows * columns * sizeof(T)
//   constants   T         dtype of x and y, which may be one array
//               K         dtype of the key: 64 bits, or 32 of an int
//               LANES     values of one access: 16 bytes of them, or fewer as columns and addresses
//                         allow
//               THREADS   threads of a block
//
//   The trick: the key of Philox is read from memory, if there is one, so that a captured graph
//   draws anew in each launch; else it is the two words that the host passes.
#include <common/philox.cuh>
#include <common/vector.cuh>

KERNEL(THREADS)
dropout(const T *x, T *y, const K *__restrict__ key, int columns, int tiles, unsigned low,
        unsigned high, long long threshold, float factor) {
    const long long row = blockIdx.x / tiles;
    const int column = (int)(blockIdx.x % tiles * THREADS + threadIdx.x) * LANES;
    if (column >= columns) return;
    if (key != nullptr) {
        const long long bits = *key;
        low = (unsigned)bits, high = (unsigned)(bits >> 32);
    }
    const long long at = row * columns + column;
    float v[LANES];
    load(v, x + at);
#pragma unroll
    for (int j = 0; j < LANES; j += 4) {
        const uint4 drawn = philox(0, 0, (unsigned)row, (unsigned)(column + j) / 4, low, high);
#pragma unroll
        for (int i = 0; i < 4 && j + i < LANES; i++) {
            const int number = LANES >= 4 ? i : (column + i) % 4;
            const unsigned word = number < 2 ? number ? drawn.y : drawn.x
                                             : number == 3 ? drawn.w : drawn.z;
            v[j + i] = word >= threshold ? v[j + i] * factor : 0.0f * v[j + i];
        }
    }
    store(y + at, v);
}
