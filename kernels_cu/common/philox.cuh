// Counter-based random bits: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, 2011.
#pragma once

// Four random words for a counter of four words, a .. d, and a key of two, first and second.
DEVICE uint4 philox(unsigned a, unsigned b, unsigned c, unsigned d, unsigned first,
                    unsigned second) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned high = __umulhi(0xD2511F53u, a), low = 0xD2511F53u * a;
        const unsigned other_high = __umulhi(0xCD9E8D57u, c), other_low = 0xCD9E8D57u * c;
        a = other_high ^ b ^ first;
        b = other_low;
        c = high ^ d ^ second;
        d = low;
        first += 0x9E3779B9u;
        second += 0xBB67AE85u;
    }
    return make_uint4(a, b, c, d);
}
