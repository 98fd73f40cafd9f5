// What a kernel met that no host could look at before: kept until the host asks for it.
//
//   faults[0]  who reports, 0 for nobody      faults[1]  the place      faults[2]  the number there
//   faults[3]  the end of 0 .. end, where it had to be
#pragma once

// The first report stays; later ones are let go.
__device__ __forceinline__ void report(long long *faults, long long who, long long place,
                                       long long number, long long end) {
    if (atomicCAS((unsigned long long *)faults, 0ull, (unsigned long long)who) != 0) return;
    faults[1] = place;
    faults[2] = number;
    faults[3] = end;
}
