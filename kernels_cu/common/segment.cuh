// Concatenated sequences: which sequence a block works on, and which tile of it.
#pragma once

// The tokens first .. first + count - 1 of a sequence, clipped to the array of `tokens` tokens, so
// that invalid offsets do no harm.
struct Run { int first, count; };
template <class O>
DEVICE Run run_of(const O *offsets, int sequence, int tokens) {
    const long long first = max(0ll, min((long long)tokens, (long long)offsets[sequence]));
    const long long stop = max(first, min((long long)tokens, (long long)offsets[sequence + 1]));
    return {(int)first, (int)(stop - first)};
}

// The first row of the stats of a sequence.  They are padded: no two sequences share a tile of
// PADDING rows.
constexpr int PADDING = 128;
template <class O>
DEVICE int stats_of(const O *offsets, int sequence, int tokens) {
    return (run_of(offsets, sequence, tokens).first / PADDING + sequence) * PADDING;
}

// The last sequence whose stats begin at `row` or before.
template <class O>
DEVICE int sequence_of(const O *offsets, int sequences, int tokens, int row) {
    int low = 0, high = sequences;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (stats_of(offsets, middle, tokens) <= row) low = middle;
        else high = middle;
    }
    return low;
}

struct Segment {
    int sequence, tile;  // sequence is -1 past the last tile
};

// The index-th of the tiles of all sequences.  Tiles have ROWS tokens, the last of a sequence may
// have fewer.  All lanes of a warp call it together: they search 32 sequences at a time.
template <int ROWS, class O>
DEVICE Segment segment(const O *offsets, int sequences, int tokens, int index) {
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < sequences; first += 32) {
        int count = 0;
        if (first + lane < sequences)
            count = (run_of(offsets, first + lane, tokens).count + ROWS - 1) / ROWS;
        int stop = count;  // tiles up to and including this lane's sequence
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, stop, d);
            if (lane >= d) stop += other;
        }
        const unsigned beyond = __ballot_sync(0xffffffffu, stop > index);
        if (beyond != 0) {
            const int found = __ffs(beyond) - 1;
            return {first + found, index - __shfl_sync(0xffffffffu, stop - count, found)};
        }
        index -= __shfl_sync(0xffffffffu, stop, 31);
    }
    return {-1, 0};
}
