// Copies keys and values of sequences out of their pages, in order, for the attention kernels.
//
//   keys[b, i] = k_pages[page_table[b, i / PAGE], i % PAGE]        i < lengths[b]; values likewise
//   codes      times the scale of their token and head
//
//   traffic     tokens * (KEY + VALUE) * (sizeof(T) + sizeof(C)), for the tokens in reach of queries
//   constants   T, C         dtypes of keys and values; of pages: signed char for codes, else T
//               G, L, P      dtypes of page_table, lengths and starts
//               KEY, VALUE   values of a token: kv_heads times the columns of a head
//               DIM, VALUE_DIM   columns of a head
//               VECTORS      accesses of a token, of LANES values each
//               PAGE         tokens of a page
//               LANES        values of one access: 16 bytes of T, or fewer as the addresses allow
//               LEFT         queries see `call.left` keys before their own position
//               TILE         the most keys that an attention kernel reads at a time
//               THREADS      threads of a block
//
//   The trick: lengths and starts are read on the device.  Tokens that no tile of keys contains are
//   neither read nor written, so room after a sequence, and keys before a window, cost nothing.
//   Within TILE tokens after the last one, and where there is no such page, zeros are written.
#include <common/codes.cuh>

constexpr bool CODES = sizeof(C) == 1;

struct Call {
    long long row_pages, pages;  // pages in a row of page_table; of the cache
    long long left, start;       // keys before a query that it sees; position of the first query
    unsigned tokens, room;       // of all sequences; of one sequence
    int queries, kv_heads, has_start, starts_batch;
};

KERNEL(THREADS)
gather_pages(const C *__restrict__ k_pages, const C *__restrict__ v_pages,
             const float *__restrict__ scales, const G *__restrict__ page_table,
             const L *__restrict__ lengths, const P *__restrict__ starts, T *__restrict__ keys,
             T *__restrict__ values, const __grid_constant__ Call call) {
    const long long vector = (long long)blockIdx.x * THREADS + threadIdx.x;
    const long long of_all = vector / VECTORS;
    if (of_all >= call.tokens) return;
    const unsigned batch = (unsigned)of_all / call.room, token = (unsigned)of_all % call.room;
    const long long length = min((long long)call.room, (long long)lengths[batch]);
    if (token >= length + TILE) return;
    if constexpr (LEFT) {
        long long first = length - call.queries;
        if (starts != nullptr) first = starts[batch * call.starts_batch];
        else if (call.has_start) first = call.start;
        if (token + TILE <= first - call.left) return;
    }
    long long source = -1;  // the token among all tokens of the cache
    if (token < length) {
        const long long number = page_table[batch * call.row_pages + token / PAGE];
        if (number >= 0 && number < call.pages) source = number * PAGE + token % PAGE;
    }
    const int place = vector % VECTORS * LANES;
    const bool second = place >= KEY;  // a value
    const int row = second ? VALUE : KEY, column = second ? place - KEY : place;
    Vector<T, LANES> gathered = {};
    if (source >= 0) {
        const C *const from = (second ? v_pages : k_pages) + source * row + column;
        if constexpr (CODES) {
            const long long all = call.pages * PAGE * call.kv_heads;  // scales of keys
            const int head = second ? column / VALUE_DIM : column / DIM;
            const float scale = scales[(second ? all : 0) + source * call.kv_heads + head];
            Vector<signed char, LANES> codes;
            fetch(codes, reinterpret_cast<const signed char *>(from));
            float value[LANES];
            widen_codes(value, codes);
#pragma unroll
            for (int j = 0; j < LANES; j++) value[j] *= scale;
            narrow(gathered, value);
        } else {
            fetch(gathered, reinterpret_cast<const T *>(from));
        }
    }
    put((second ? values : keys) + of_all * row + column, gathered);
}
