// Rows of a table, selected by token, and the gradient of the table.
//
//   x[t] = weight[tokens[t]]        dweight[v] = sum of dx[t] over the t with tokens[t] == v
//
//   traffic     forward   tokens * HIDDEN * sizeof(T) * 2
//               backward  (tokens + vocab) * HIDDEN * sizeof(T)
//   constants   T, I      dtypes of the table, of tokens
//               HIDDEN    length of a row
//               LANES     values of one access: 16 bytes, or fewer as HIDDEN and the addresses
//                         allow
//               THREADS   threads of a block
//               CHUNK     sorted tokens that are summed in advance, if they are all the same
//               ROWS      of dweight, of a block
//
//   The trick: backward takes sorted tokens, so the t of a row are neighbours, between two
//   `starts`.  A thread owns one vector of a row of dweight and adds its dx in their order: no
//   atomics, equal bits, one rounding; a row without a token gets its 0 in the same launch.  Most
//   rows have none: a block with one row would end before the next one has started, so it has a
//   few, and reads where the next row ends while it stores this one.  A frequent token would make
//   its thread slow: whole chunks of it are summed in advance, in parallel.  Forward, a token
//   outside the table gives NaN and a report; backward skips it.
#include <common/faults.cuh>
#include <common/vector.cuh>

constexpr int VECTORS = HIDDEN / LANES;                   // vectors of a row
constexpr int TILES = (VECTORS + THREADS - 1) / THREADS;  // blocks of a row

KERNEL(THREADS)
embedding(const I *__restrict__ tokens, const T *__restrict__ weight, T *__restrict__ x,
          long long *__restrict__ faults, long long who, long long count, long long vocab) {
    const long long vector = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long token = vector / VECTORS, column = vector % VECTORS * LANES;
    if (token >= count) return;
    const long long row = tokens[token];
    Vector<T, LANES> v;
    if (row >= 0 && row < vocab) {
        fetch(v, weight + row * HIDDEN + column);
    } else {
        if (column == 0) report(faults, who, token, row, vocab);
#pragma unroll
        for (int j = 0; j < LANES; j++) v.at[j] = (T)__int_as_float(0x7fffffff);
    }
    put(x + token * HIDDEN + column, v);
}

// starts[v] is the index of the first sorted token that is v or more, for v = 0 .. vocab.
KERNEL(THREADS)
embedding_starts(const I *__restrict__ sorted, long long *__restrict__ starts, long long count,
                 long long vocab) {
    const long long v = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (v > vocab) return;
    long long low = 0, high = count;
    while (low < high) {
        const long long middle = (low + high) / 2;
        if (sorted[middle] < v) low = middle + 1;
        else high = middle;
    }
    starts[v] = low;
}

// Add the rows of dx of the sorted tokens from .. end - 1, in one vector of columns.
DEVICE void add(float (&sum)[LANES], const T *dx, const long long *order, long long from,
                long long end) {
#pragma unroll 4
    for (long long i = from; i < end; i++) {
        float d[LANES];
        load(d, dx + order[i] * HIDDEN);
#pragma unroll
        for (int j = 0; j < LANES; j++) sum[j] += d[j];
    }
}

// partial[c] is the sum of chunk c of the sorted tokens, if they are all the same.
KERNEL(THREADS)
embedding_partial(const T *__restrict__ dx, const I *__restrict__ sorted,
                  const long long *__restrict__ order, float *__restrict__ partial) {
    const long long chunk = blockIdx.x / TILES, from = chunk * CHUNK;
    const int column = (blockIdx.x % TILES * THREADS + threadIdx.x) * LANES;
    if (column >= HIDDEN || sorted[from] != sorted[from + CHUNK - 1]) return;
    float sum[LANES] = {};
    add(sum, dx + column, order, from, from + CHUNK);
    store(partial + chunk * HIDDEN + column, sum);
}

// order[i] is the t of the i-th sorted token.  With 48 registers nothing spills.
KERNEL(THREADS, 1280 / THREADS)
embedding_backward(const T *__restrict__ dx, const long long *__restrict__ order,
                   const long long *__restrict__ starts, const float *__restrict__ partial,
                   T *__restrict__ dweight, long long vocab) {
    const int column = (blockIdx.x % TILES * THREADS + threadIdx.x) * LANES;
    if (column >= HIDDEN) return;
    long long row = blockIdx.x / TILES * (long long)ROWS;
    const long long stop = min(row + ROWS, vocab);
    long long start = starts[row], end = starts[row + 1];
    for (; row < stop; row++) {
        const long long next = starts[min(row + 2, vocab)];
        const long long first = (start + CHUNK - 1) / CHUNK, last = end / CHUNK;  // whole chunks
        const bool whole = first < last;
        float sum[LANES] = {};
        add(sum, dx + column, order, start, whole ? first * CHUNK : end);
        if (whole) {
#pragma unroll 2
            for (long long chunk = first; chunk < last; chunk++) {
                float d[LANES];
                load(d, partial + chunk * HIDDEN + column);
#pragma unroll
                for (int j = 0; j < LANES; j++) sum[j] += d[j];
            }
            add(sum, dx + column, order, last * CHUNK, end);
        }
        store(dweight + row * HIDDEN + column, sum);
        start = end;
        end = next;
    }
}
