// Rings of stages in shared memory, which some warps fill and others use.
#pragma once
#include <common/hopper.cuh>

// A position in a ring of stages, and the parity of the number of times that it has wrapped around.
template <int STAGES> struct Ring {
    int stage = 0, phase = 0;
    DEVICE void next() {
        stage++;
        if (stage == STAGES) stage = 0, phase ^= 1;
    }
};

// One barrier counts the bytes of a tile that arrive, the other the warps that no longer need it.
DEVICE void init_handover(uint64_t *full, uint64_t *empty, int warps) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, warps);
}
DEVICE void release(uint64_t *empty) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}
