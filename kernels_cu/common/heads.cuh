// Heads of queries and keys, for kernels that turn them by their tokens' positions.
#pragma once

// Values from one token, and from one head, to the next: q and k may be slices of a wider array.
struct Steps { long long token, head; };

// The tokens of a call: token t, of `count`, takes row positions[t % period] of tables of `length`
// rows, or row t % period without positions.
struct Tokens {
    long long count, period, length;
    Steps q, k;
};
