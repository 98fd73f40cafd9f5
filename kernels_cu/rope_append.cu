// Rotary position embedding of queries and keys, and the keys and values into a cache, in one launch.
//
//   turned_q = rope(q)      keys[b, slot(starts[b] + i)] = rope(k)[b, i]      likewise v to values
//   with rope of rope.cu; slots and pages as in kv_append.cu
//
//   traffic     per token, (HEADS + 2 KV_HEADS) * DIM * sizeof(T) * 2 + HALF * sizeof(C) * 2
//   constants   T, C, I, P        dtypes of q, k and v, of the tables, of positions, of starts
//               G, PAGED          dtype of page_table; whether tokens are in its pages
//               HEADS, KV_HEADS   heads of q; of k and of v
//               DIM, HALF         columns of a head; pairs of them that are rotated
//               LANES             values of one access: 16 bytes, or fewer as DIM, HALF and the
//                                 addresses allow
//               COLUMNS           threads of a head
//               SLOTS             heads of a token that a block works on at a time
//               TOKENS            tokens of a block
//               INTERLEAVED
//
//   The trick: a step of generation has so few bytes that a launch takes longer than to move them.
//   Turned keys are never stored but in the cache.  A token without a slot is dropped.
#include <common/faults.cuh>
#include <common/heads.cuh>
#include <common/kv_cache.cuh>
#include <common/rotate.cuh>

KERNEL(TOKENS * SLOTS * COLUMNS, 4)
rope_append_(const T *q, const T *k, const T *v, const C *__restrict__ cos,
             const C *__restrict__ sin, const I *__restrict__ positions,
             const P *__restrict__ starts, const G *__restrict__ page_table, T *turned_q, T *keys,
             T *values, const __grid_constant__ Tokens tokens, const __grid_constant__ Cache call,
             long long *faults, long long who) {
    const int column = threadIdx.x % COLUMNS, slot = threadIdx.x / COLUMNS % SLOTS;
    const long long token = (long long)blockIdx.x * TOKENS + threadIdx.x / (SLOTS * COLUMNS);
    if (token >= tokens.count) return;
    const long long batch = token / call.tokens, at = token % call.tokens;
    const long long index = token % tokens.period;
    const long long row = positions == nullptr ? index : (long long)positions[index];
    long long to = -1;  // among the tokens of all rows or pages
    if constexpr (PAGED) {
        to = slot_in_pages(call, page_table, batch, starts[batch] + at);
    } else {
        to = slot_of(call, starts[batch], at);
        to = to < 0 ? -1 : batch * call.slots + to;
    }
    const long long new_keys = to * KV_HEADS * DIM;
    const int last = HEADS + (to < 0 ? 0 : KV_HEADS);
    const auto from = [&](int head) {
        return head < HEADS ? q + token * tokens.q.token + head * tokens.q.head
                            : k + token * tokens.k.token + (head - HEADS) * tokens.k.head;
    };
    const auto place = [&](int head) {
        return head < HEADS ? (token * HEADS + head) * DIM : new_keys + (head - HEADS) * DIM;
    };
    for (int pair = column * PAIRS; pair < HALF; pair += COLUMNS * PAIRS) {
        float c[PAIRS], s[PAIRS];
        if (row >= 0 && row < tokens.length) {
            load(c, cos + row * HALF + pair);
            load(s, sin + row * HALF + pair);
        } else {
            if (pair == 0 && slot == 0) report(faults, who, index, row, tokens.length);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) c[j] = s[j] = __int_as_float(0x7fffffff);
        }
#pragma unroll 4
        for (int head = slot; head < last; head += SLOTS)
            rotate(from(head), head < HEADS ? turned_q : keys, place(head), pair, c, s);
    }
    for (int head = slot; TURNED < DIM && head < last; head += SLOTS)
        for (int rest = TURNED + column * LANES; rest < DIM; rest += COLUMNS * LANES) {
            Vector<T, LANES> some;
            fetch(some, from(head) + rest);
            put(head < HEADS ? turned_q : keys, place(head) + rest, some);
        }
    const T *const own = v + batch * call.v_row + at * call.v_token;
    for (int head = slot; to >= 0 && head < KV_HEADS; head += SLOTS)
        for (int value = column * LANES; value < DIM; value += COLUMNS * LANES) {
            Vector<T, LANES> some;
            fetch(some, own + head * DIM + value);
            put(values, new_keys + head * DIM + value, some);
        }
}
