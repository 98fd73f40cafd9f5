// Writes new keys and values into a cache, in place, both in one launch.
//
//   keys[b, slot(start + i)] = k[b, i]        likewise for values; each b has its own start
//
//   slot(p) = p                                         for p < sinks: these tokens stay
//             sinks + (p - sinks) % (slots - sinks)     else, in a ring that keeps the last tokens
//   paged:    page_table[b, p / page] * page + p % page
//
//   traffic     4 * batch * tokens * ROW * sizeof(T)
//   constants   T        dtype of keys and values
//               P, G     dtypes of starts and of page_table
//               ROW      values of a token: kv_heads * dim
//               LANES    values of one access: 16 bytes, or fewer as ROW and the addresses allow
//               THREADS  threads of a block
//
//   New tokens are read without a copy: they may be columns of a longer row.
//
//   The trick: positions are read on the device, so a captured launch can be replayed for every
//   token.  Of several tokens with the same slot only the last is written; a token that has no slot
//   is dropped.
#include <common/kv_cache.cuh>
#include <common/vector.cuh>

constexpr int VECTORS = ROW / LANES;  // vectors of a token

// Copy one vector of a new token to its slot.
DEVICE void copy(const T *k, const T *v, T *keys, T *values, long long slot, int column) {
    const long long to = slot * ROW + column;
    Vector<T, LANES> key, value;
    fetch(key, k + column);
    fetch(value, v + column);
    put(keys + to, key);
    put(values + to, value);
}

KERNEL(THREADS)
kv_append_(const T *__restrict__ k, const T *__restrict__ v, T *__restrict__ keys,
           T *__restrict__ values, const P *__restrict__ starts,
           const __grid_constant__ Cache call) {
    const long long vector = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long token = vector / VECTORS, row = token / call.tokens;
    const long long at = token % call.tokens;
    if (token >= call.count) return;
    const long long slot = slot_of(call, starts == nullptr ? call.start : (long long)starts[row], at);
    if (slot < 0) return;
    copy(k + row * call.k_row + at * call.k_token, v + row * call.v_row + at * call.v_token, keys,
         values, row * call.slots + slot, vector % VECTORS * LANES);
}

KERNEL(THREADS)
kv_append_paged_(const T *__restrict__ k, const T *__restrict__ v, T *__restrict__ k_pages,
                 T *__restrict__ v_pages, const G *__restrict__ page_table,
                 const P *__restrict__ starts, const __grid_constant__ Cache call) {
    const long long vector = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long token = vector / VECTORS, row = token / call.tokens, at = token % call.tokens;
    if (token >= call.count) return;
    const long long slot = slot_in_pages(call, page_table, row, starts[row] + at);
    if (slot < 0) return;
    copy(k + row * call.k_row + at * call.k_token, v + row * call.v_row + at * call.v_token,
         k_pages, v_pages, slot, vector % VECTORS * LANES);
}
