// Texts: packed end to end, or the rows of a batch, which have equal lengths.
//
//   constants   PACKED    there are offsets: the first token of each text, then the number of all
//               I         dtype of offsets
#pragma once

// The first of all tokens of a text, or the end of the one before it; never outside of the arrays,
// whatever offsets hold.
DEVICE long long text_start(const I *offsets, int text, long long each, long long tokens) {
    if constexpr (!PACKED) return text * each;
    const long long start = offsets[text];
    return start < 0 ? 0 : start < tokens ? start : tokens;
}

// The last of `texts` texts for which `reached(text)`, which holds up to some text; at least 0.
template <class Reached> DEVICE int last_text(int texts, Reached reached) {
    int low = 0, high = texts - 1;
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (reached(middle)) low = middle;
        else high = middle - 1;
    }
    return low;
}
