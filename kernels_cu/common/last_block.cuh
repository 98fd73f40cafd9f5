// Finds the block that ends last; it combines the partial results of all blocks in a fixed order.
#pragma once

// Return, to all threads of a block, whether it is the last of `several` blocks to arrive here.
// The last one sees what thread 0 of every block has written, and what other threads had written
// before a barrier with that thread 0.  `last` is in shared memory.  The counter starts at 0 and is
// 0 again afterwards.
DEVICE bool last_to_arrive(unsigned *counter, unsigned several, bool &last) {
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(counter, several - 1) == several - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}
