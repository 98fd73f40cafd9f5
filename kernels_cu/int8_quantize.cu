// Quantizes rows to 8-bit integers, with one scale per row.
//
//   absmax = max |x|      codes = round(x * (127 / absmax))      scale = absmax / 127
//
//   absmax is at least `least`; a row whose absmax is below TINY counts as 0; a row with a NaN or
//   an infinity has codes of 0 and the scale NaN
//
//   traffic     rows * COLUMNS * (sizeof(T) * (KEEP ? 1 : 2) + 1)
//   constants   T             dtype of x
//               COLUMNS       length of a row
//               LANES         values of one access: 16 bytes of x, or fewer as COLUMNS and the
//                             addresses allow
//               ROW_THREADS   threads of a block that share a row: a power of two up to 32, or all
//               THREADS       threads of a block
//               CLUSTER       blocks that share a row: 1, or up to 8 from sm_90 on
//               RESIDENT      blocks that an SM must hold
//               KEEP          a row stays in registers
//               OUTLIERS      a value beyond the threshold counts as 0, and so does each code of a
//                             column that holds such a value
//
//   The trick: a row that fits is read once, and is kept in its own dtype, so that a register holds
//   two values of 16 bits.  Both roundings, of 127 / absmax and of the product, are those of
//   float32 on any machine: codes have equal bits.
#include <common/math.cuh>
#include <common/row_threads.cuh>
#include <common/rows.cuh>
#include <common/vector.cuh>

constexpr float TINY = 1.504632769052528e-36f;  // 2^-119: 127 / TINY is finite
constexpr float LARGEST = 3.402823466e38f;

CLUSTER_KERNEL(CLUSTER, THREADS, RESIDENT)
int8_quantize(const T *x, signed char *codes, float *scales, float *absmax, const bool *outliers,
              long long rows, long long inner, long long outer, long long step, float threshold,
              float least) {
    __shared__ Exchange<WARPS, CLUSTER> exchange;
    const long long row = (long long)(blockIdx.x / CLUSTER) * ROWS + threadIdx.x / ROW_THREADS;
    const int first = column_of(0);
    const T *x_row = x + start(row, {inner, outer, step}) + first;
    signed char *codes_row = codes + row * COLUMNS + first;
    cluster_start<CLUSTER>(exchange);

    Vector<T, LANES> kept[KEEP ? DEPTH : 1];
    float top = 0;
#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        if (row >= rows || !inside(first + k * STEP, k)) continue;
        fetch(kept[KEEP ? k : 0], x_row + k * STEP);
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            const float size = fabsf((float)kept[KEEP ? k : 0].at[j]);
            if (OUTLIERS && size >= threshold) continue;
            top = fmaxf(top, size <= LARGEST ? size : __uint_as_float(0x7f800000u));  // NaN too
        }
    }
    top = row_greatest<ROW_THREADS, CLUSTER>(top, exchange);
    if (row >= rows) return;
    const bool broken = top > LARGEST;
    top = fmaxf(top < TINY ? 0.0f : top, least);
    const float factor = broken || top == 0 ? 0.0f : __fdiv_rn(127.0f, top);

#pragma unroll(KEEP ? DEPTH : 2)
    for (int k = 0; k < DEPTH; k++) {
        if (!inside(first + k * STEP, k)) continue;
        if constexpr (!KEEP) fetch(kept[0], x_row + k * STEP);
        Vector<signed char, LANES> code;
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            const float value = (float)kept[KEEP ? k : 0].at[j];
            const bool coded = !broken && !(OUTLIERS && outliers[first + k * STEP + j]);
            code.at[j] = coded ? (signed char)__float2int_rn(value * factor) : 0;
        }
        put(codes_row + k * STEP, code);
    }
    if (column_of(0) != 0) return;
    scales[row] = broken ? __uint_as_float(0x7fc00000u) : divided_by<127>(top);
    absmax[row] = broken ? __uint_as_float(0x7fc00000u) : top;
}
