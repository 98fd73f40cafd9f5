// Dropout of rows: each element is kept, times a factor, or becomes 0.  And uniform noise.
//
//   w = word c % 4 of Philox(0, 0, n, c / 4)      n = numbers[r], or r without numbers
//   dropout   y[r, c] = x[r, c] * factor if w >= threshold, else 0
//   noise     y[r, c] = (w / 2^31 - 1) * size of row r
//
//   traffic     dropout 2 * rows * columns * sizeof(T); noise half of that
//   constants   T         dtype of x and y, which may be one array
//               K         dtype of the key: 64 bits, or 32 of an int
//               I         dtype of the numbers of rows, of which 32 bits count
//               LANES     values of one access: 16 bytes of them, or fewer as columns and addresses
//                         allow
//               THREADS   threads of a block
//
//   The trick: the key of Philox is read from memory, if there is one, so that a captured graph
//   draws anew in each launch; else it is the two words that the host passes.
#include <common/philox.cuh>
#include <common/vector.cuh>

// The number by which a row draws: one of numbers, or its index.
DEVICE unsigned number_of(const I *__restrict__ numbers, long long row) {
    return numbers == nullptr ? (unsigned)row : (unsigned)numbers[row];
}

// The word of a column.
DEVICE unsigned word(const uint4 &drawn, int column) {
    const int number = column % 4;
    return number < 2 ? number ? drawn.y : drawn.x : number == 3 ? drawn.w : drawn.z;
}

KERNEL(THREADS)
dropout(const T *x, T *y, const K *__restrict__ key, const I *__restrict__ numbers, int columns,
        int tiles, unsigned low, unsigned high, long long threshold, float factor) {
    const long long row = blockIdx.x / tiles;
    const int column = (int)(blockIdx.x % tiles * THREADS + threadIdx.x) * LANES;
    if (column >= columns) return;
    if (key != nullptr) {
        const long long bits = *key;
        low = (unsigned)bits, high = (unsigned)(bits >> 32);
    }
    const unsigned number = number_of(numbers, row);
    const long long at = row * columns + column;
    float v[LANES];
    load(v, x + at);
#pragma unroll
    for (int j = 0; j < LANES; j += 4) {
        const uint4 drawn = philox(0, 0, number, (unsigned)(column + j) / 4, low, high);
#pragma unroll
        for (int i = 0; i < 4 && j + i < LANES; i++) {
            const bool kept = word(drawn, LANES >= 4 ? i : column + i) >= threshold;
            v[j + i] = kept ? v[j + i] * factor : 0.0f * v[j + i];
        }
    }
    store(y + at, v);
}

// sizes   those of `tokens` rows, after which they repeat; without them every row has this `size`
KERNEL(THREADS)
noise(T *y, const K *__restrict__ key, const I *__restrict__ numbers,
      const float *__restrict__ sizes, int columns, int tiles, int tokens, float size) {
    const unsigned row = blockIdx.x / tiles, number = number_of(numbers, row);
    const int column = (int)(blockIdx.x % tiles * THREADS + threadIdx.x) * LANES;
    if (column >= columns) return;
    const long long bits = *key;
    if (sizes != nullptr) size = sizes[row % tokens];
    float v[LANES];
#pragma unroll
    for (int j = 0; j < LANES; j += 4) {
        const uint4 drawn =
            philox(0, 0, number, (unsigned)(column + j) / 4, (unsigned)bits, (unsigned)(bits >> 32));
#pragma unroll
        for (int i = 0; i < 4 && j + i < LANES; i++)
            v[j + i] = ((float)word(drawn, LANES >= 4 ? i : column + i) * 0x1p-31f - 1.0f) * size;
    }
    store(y, (long long)row * columns + column, v);
}
