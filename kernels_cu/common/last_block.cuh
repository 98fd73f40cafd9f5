// Which block ends last: it finishes what blocks have left in parts, always in one order.
#pragma once

// Say to all threads of a block whether it is the last of `several` to come here: it then sees what
// thread 0 of each of them has written, and what others have that met it at a barrier since.  `last`
// lies in shared memory.  The counter, which begins at 0, is 0 again.
__device__ __forceinline__ bool last_to_arrive(unsigned *counter, unsigned several, bool &last) {
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(counter, several - 1) == several - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}
