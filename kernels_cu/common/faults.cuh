// Invalid values that only the kernel can see, such as an index out of range: the report stays in
// device memory until the host reads it.
//
//   faults[0]  number of the reporting kernel, 0 without a report     faults[1]  index of the value
//   faults[2]  the value      faults[3]  the end of its legal range 0 .. end - 1
#pragma once

// The first report is kept; later ones are dropped.
DEVICE void report(long long *faults, long long who, long long position, long long number,
                   long long end) {
    if (atomicCAS((unsigned long long *)faults, 0ull, (unsigned long long)who) != 0) return;
    faults[1] = position;
    faults[2] = number;
    faults[3] = end;
}
