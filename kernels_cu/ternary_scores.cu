// Products of ternary rows, by counting bits.
//
//   s[i, j] = q_scale[i] * k_scale[j] * (ones(both) - 2 ones(both & differ))
//
//   ones      number of set bits
//   both      bits of columns where neither code is 0       differ    bits where the signs differ
//
//   traffic     tiles of k * q + tiles of q * k bytes of planes; q_rows * k_rows * sizeof(T)
//   constants   T      dtype of scales and scores
//               OWN    rows of q of a thread: 1, or 4
//
//   The trick: two counts per word instead of four, because codes that are not 0 and do not differ
//   agree.  16 by 16 threads share tiles of 16 OWN rows of q and 64 of k; the rows of a thread are
//   16 apart, so that neighbouring threads read neighbouring words.
#include <common/vector.cuh>

constexpr int SIDE = 16, THREADS = SIDE * SIDE, STEP = 8;  // STEP: words of a row at a time
constexpr int Q = SIDE * OWN, K = SIDE * 4;

// Bit masks of ROWS rows, [word][row]: `used` where codes are not 0, `plus` where they are 1.
template <int ROWS> struct Side {
    unsigned used[STEP][ROWS + 1], plus[STEP][ROWS + 1];

    DEVICE void load(const unsigned *planes, long long first, long long rows, int word, int words) {
        for (int i = threadIdx.x; i < ROWS * STEP; i += THREADS) {
            const int row = i / STEP, at = word + i % STEP;
            const bool in_range = first + row < rows && at < words;
            const unsigned *from = planes + (first + row) * 2 * words + at;
            const unsigned ones = in_range ? from[0] : 0, minus = in_range ? from[words] : 0;
            used[i % STEP][row] = ones | minus;
            plus[i % STEP][row] = ones;
        }
    }
};

KERNEL(THREADS)
ternary_scores(const unsigned char *q, const unsigned char *k, const T *q_scale, const T *k_scale,
               T *scores, long long q_rows, long long k_rows, int words, int tiles, int q_step,
               int k_step) {
    __shared__ Side<Q> of_q;
    __shared__ Side<K> of_k;
    const long long first_q = (long long)(blockIdx.x % tiles) * Q;
    const long long first_k = (long long)(blockIdx.x / tiles) * K;
    const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;

    int sums[OWN][4] = {};
    for (int word = 0; word < words; word += STEP) {
        __syncthreads();
        of_q.load(reinterpret_cast<const unsigned *>(q), first_q, q_rows, word, words);
        of_k.load(reinterpret_cast<const unsigned *>(k), first_k, k_rows, word, words);
        __syncthreads();
#pragma unroll
        for (int w = 0; w < STEP; w++)
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                const unsigned used = of_q.used[w][y + SIDE * i], plus = of_q.plus[w][y + SIDE * i];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const unsigned both = used & of_k.used[w][x + SIDE * j];
                    const unsigned differ = both & (plus ^ of_k.plus[w][x + SIDE * j]);
                    sums[i][j] += __popc(both) - 2 * __popc(differ);
                }
            }
    }
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const long long row = first_q + y + SIDE * i, column = first_k + x + SIDE * j;
            if (row >= q_rows || column >= k_rows) continue;
            const float scale = (float)q_scale[row * q_step] * (float)k_scale[column * k_step];
            scores[row * k_rows + column] = (T)((float)sums[i][j] * scale);
        }
}
