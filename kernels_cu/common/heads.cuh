// Layout of the heads of q and k, for kernels that rotate them by the positions of their tokens.
#pragma once

// Distances from one token, and from one head, to the next, in values: q and k may be slices of a
// wider array.
struct Steps { long long token, head; };

// The tokens of a call.  Token t of `count` uses row positions[t % period] of tables of `length`
// rows; without positions, row t % period.
struct Tokens {
    long long count, period, length;
    Steps q, k;
};
