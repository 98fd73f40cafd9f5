// Writes new keys and values into a cache of 8-bit integers, in place; a scale per token and head.
//
//   absmax = max |k[b, i, h]|      codes = round(k * (127 / absmax))      scale = absmax / 127
//
//   keys[b, slot(start + i), h] = codes, scales[0, b, slot(start + i), h] = scale; likewise for
//   values, in scales[1]; slots and pages as in kv_append.cu
//
//   traffic     2 * batch * tokens * kv_heads * (DIM * (sizeof(T) + 1) + 4)
//   constants   T            dtype of k and v
//               P, G         dtypes of starts and of page_table
//               DIM          values of a head
//               LANES        values of one access: 16 bytes, or fewer as DIM and the addresses
//                            allow
//               ROW_THREADS  threads that share a head: a power of two up to 32
//               THREADS      threads of a block
//               PAGED        tokens are in pages of page_table
//
//   The trick: one launch for keys and values, which reads a head once and keeps it in its own
//   dtype.  A head with a NaN or an infinity has the scale NaN and codes of 0.
#include <common/kv_cache.cuh>
#include <common/math.cuh>
#include <common/reduce.cuh>
#include <common/vector.cuh>

constexpr int STEP = ROW_THREADS * LANES, DEPTH = (DIM + STEP - 1) / STEP;
constexpr float TINY = 1.504632769052528e-36f;  // 2^-119: 127 / TINY is finite
constexpr float LARGEST = 3.402823466e38f;

KERNEL(THREADS)
kv_append_int8_(const T *__restrict__ k, const T *__restrict__ v, signed char *__restrict__ keys,
                signed char *__restrict__ values, float *__restrict__ scales,
                const G *__restrict__ page_table, const P *__restrict__ starts,
                const __grid_constant__ Cache call) {
    constexpr int GROUPS = THREADS / ROW_THREADS;
    const long long each = call.count * call.kv_heads;
    const long long group = (long long)blockIdx.x * GROUPS + threadIdx.x / ROW_THREADS;
    const bool second = group >= each;  // a head of v
    const long long index_in_array = second ? group - each : group;
    const long long token = index_in_array / call.kv_heads, head = index_in_array % call.kv_heads;
    const long long row = token / call.tokens, at = token % call.tokens;
    const int first = threadIdx.x % ROW_THREADS * LANES;

    long long slot = -1;  // index among all tokens of the cache
    if (index_in_array < each) {
        const long long start = starts == nullptr ? call.start : (long long)starts[row];
        const long long position = start + at;
        if constexpr (PAGED) {
            slot = slot_in_pages(call, page_table, row, position);
        } else {
            const long long ring = call.slots - call.sinks;
            slot = position;
            if (position >= call.sinks)  // a later token may take its slot
                slot = position < start + call.tokens - ring
                           ? -1
                           : call.sinks + (position - call.sinks) % ring;
            slot = slot < 0 ? -1 : row * call.slots + slot;
        }
    }
    const T *const from = (second ? v + row * call.v_row + at * call.v_token
                                  : k + row * call.k_row + at * call.k_token) +
                          head * DIM + first;
    Vector<T, LANES> kept[DEPTH];
    float top = 0;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        if (slot < 0 || first + i * STEP >= DIM) continue;
        fetch(kept[i], from + i * STEP);
#pragma unroll
        for (int j = 0; j < LANES; j++) {
            const float size = fabsf((float)kept[i].at[j]);
            top = fmaxf(top, size <= LARGEST ? size : __uint_as_float(0x7f800000u));  // NaN too
        }
    }
    top = group_max<ROW_THREADS>(top);
    if (slot < 0) return;
    const bool broken = top > LARGEST;
    top = top < TINY ? 0.0f : top;
    const float factor = broken || top == 0 ? 0.0f : __fdiv_rn(127.0f, top);
    const long long at_scale = slot * call.kv_heads + head;
    signed char *const to = (second ? values : keys) + at_scale * DIM + first;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        if (first + i * STEP >= DIM) continue;
        Vector<signed char, LANES> code;
#pragma unroll
        for (int j = 0; j < LANES; j++)
            code.at[j] = broken ? 0 : (signed char)__float2int_rn((float)kept[i].at[j] * factor);
        put(to + i * STEP, code);
    }
    if (first == 0)
        scales[(second ? call.pages * call.slots * call.kv_heads : 0) + at_scale] =
            broken ? __uint_as_float(0x7fc00000u) : divided_by<127>(top);
}
