// Descriptors of the shared-memory operands of wgmma.
#pragma once
#include <common/hopper.cuh>

// A tile with the 128-byte swizzle; leading and stride are distances in bytes.
DEVICE uint64_t wgmma_descriptor_128b(const void *tile, int leading, int stride) {
    return (uint64_t)((smem_u32(tile) & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 |
           (uint64_t)(stride >> 4) << 32 | 1ull << 62;
}
