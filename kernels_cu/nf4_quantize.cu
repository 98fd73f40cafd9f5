// Quantizes values to 4-bit codes and the absmax of each block, in one pass.
//
//   absmax = max |w|          code = the level nearest to w * (1 / absmax), the lower of a tie
//
//   a last block that is short has an absmax of at least 1e-38, and divides w / absmax instead
//
//   traffic     size * (sizeof(T) + 1 / 2) + blocks * 4
//   constants   T          dtype of w
//               BLOCK      values that share an absmax: a power of two, 32 to 4096
//               LANES      values of one access
//               THREADS    threads of a block
//               KIND       whose levels: NF4, FP4 or MXFP4
//
//   The trick: a thread keeps 16 values, so all are read once.  The maximum is taken over bit
//   patterns, which have the order of absolute values, with infinity and NaN as the largest: these
//   show in absmax.  A binary search finds a code by four comparisons with 15 bounds.  The
//   remainder of a product with the rounded reciprocal corrects it to the rounded quotient.  A
//   block below 2^-126 has the codes of zeros; one above 2^126, where float32 has no normal
//   reciprocal, is scaled first.
#include <common/four_bits.cuh>
#include <common/vector.cuh>

constexpr int VALUES = 16;                    // values of a thread
constexpr int CHUNK = LANES < 2 ? 2 : LANES;  // contiguous ones: whole bytes of codes
constexpr int DEPTH = VALUES / CHUNK;
constexpr int GROUP = BLOCK / VALUES;         // threads that share a block
constexpr unsigned LEAST = 0x006ce3eeu;       // 1e-38

KERNEL(THREADS, 1536 / THREADS)
nf4_quantize(const T *__restrict__ w, unsigned char *__restrict__ packed,
             float *__restrict__ absmax, long long size) {
    __shared__ unsigned tops[THREADS / 32];
    const int member = threadIdx.x % GROUP;
    const long long block = (long long)blockIdx.x * (THREADS / GROUP) + threadIdx.x / GROUP;
    const long long first = block * BLOCK, start = first + member * CHUNK;
    const int left = (int)min(max(size - start, -1ll), 2ll * BLOCK);
    w += start;
    packed += start / 2;

    float v[DEPTH][CHUNK];
#pragma unroll
    for (int k = 0; k < DEPTH; k++)
#pragma unroll
        for (int j = 0; j < CHUNK; j += LANES) {
            const int at = k * GROUP * CHUNK + j;
            load(reinterpret_cast<float (&)[LANES]>(v[k][j]), w + at, left - at);
        }
    unsigned top = 0;
#pragma unroll
    for (int k = 0; k < DEPTH; k++)
#pragma unroll
        for (int j = 0; j < CHUNK; j++) top = max(top, __float_as_uint(v[k][j]) & 0x7fffffffu);
#pragma unroll
    for (int d = min(GROUP, 32) / 2; d > 0; d /= 2)
        top = max(top, __shfl_xor_sync(0xffffffffu, top, d));
    if constexpr (GROUP > 32) {
        if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < GROUP / 32; i++)
            top = max(top, tops[threadIdx.x / GROUP * (GROUP / 32) + i]);
    }
    if (first >= size) return;

    const bool divides = first + BLOCK > size;
    if (member == 0) absmax[block] = __uint_as_float(divides ? max(top, LEAST) : top);
    const float unit = top > LARGE ? 0.25f : 1.0f, most = __uint_as_float(top) * unit;
    float by = top < NORMAL ? 0.0f : __frcp_rn(most);
    if (divides || top > LARGE) {
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
#pragma unroll
            for (int j = 0; j < CHUNK; j++) {
                const float scaled = v[k][j] * unit, value = scaled * by;
                v[k][j] = divides ? fmaf(fmaf(-value, most, scaled), by, value) : scaled;
            }
        by = divides ? 1.0f : by;
    }
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        const int at = k * GROUP * CHUNK;
        Vector<unsigned char, CHUNK / 2> codes;
#pragma unroll
        for (int j = 0; j < CHUNK; j += 2)
            codes.at[j / 2] = nearest_code<KIND>(v[k][j] * by) << 4
                                | nearest_code<KIND>(v[k][j + 1] * by);
        if (at + CHUNK <= left) {
            put(packed + at / 2, codes);
        } else {
#pragma unroll
            for (int j = 0; j < CHUNK; j += 2)
                if (at + j < left) packed[at / 2 + j / 2] = codes.at[j / 2];
        }
    }
}
