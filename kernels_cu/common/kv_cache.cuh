// The numbers of a call that appends tokens to a cache of keys and values.
#pragma once

struct Cache {
    long long start;          // position of the first new token, without an array of starts
    long long count, tokens;  // new tokens of all rows; of one row
    long long kv_heads;
    long long pages, slots;  // pages and their tokens; without pages the batch and its slots
    long long sinks;         // first tokens of a row, which stay
    long long row_pages;     // pages in a row of page_table
    // distances between neighbouring rows, and tokens of a row, of k and v, in values
    long long k_row, k_token, v_row, v_token;
};

// The slot of token `at` of the new ones of a row, of which `first` is the position of the first;
// -1 if a later one of them takes it, or there is none.
DEVICE long long slot_of(const Cache &call, long long first, long long at) {
    const long long position = first + at, ring = call.slots - call.sinks;
    if (position < call.sinks) return position < 0 ? -1 : position;
    if (position < first + call.tokens - ring) return -1;
    return call.sinks + (position - call.sinks) % ring;
}

// The slot of a position among those of all pages; -1 if the table of a row has no page for it.
template <class G>
DEVICE long long slot_in_pages(const Cache &call, const G *table, long long row, long long position) {
    const long long index = position / call.slots;
    if (position < 0 || index >= call.row_pages) return -1;
    const long long page = table[row * call.row_pages + index];
    return page < 0 || page >= call.pages ? -1 : page * call.slots + position % call.slots;
}
