// What a GPU would not forgive, by mode.
#include <common/descriptor.cuh>

KERNEL(1024) broken(int *out, int mode) {
  DYNAMIC_SHARED(int, more);
  __shared__ __align__(16) int tile[32];
  int lane = threadIdx.x % 32;
  if (mode == 0 && threadIdx.x < 64) __syncthreads();
  if (mode == 1) {
    if (threadIdx.x < 64) __syncthreads();
    else __syncthreads();
  }
  if (mode == 2 && lane < 16) __shfl_xor_sync(0xffffffffu, 1, 1);
  if (mode == 3) {
    if (lane < 16) __shfl_xor_sync(0xffffffffu, 1, 1);
    else __syncwarp();
  }
  if (mode == 4) reinterpret_cast<int4 *>(out + 1)[threadIdx.x % 4] = make_int4(0, 0, 0, 0);
  if (mode == 5) tile[threadIdx.x + (threadIdx.x == 31)] = 1;
  if (mode == 6) out[threadIdx.x] = tile[lane];
  if (mode == 7) tile[0] = threadIdx.x;
  if (mode == 8) out[threadIdx.x * 1000] = 1;
  if (mode == 9) out[0] = blockIdx.x;
  if (mode == 10)
    while (*(volatile int *)out == 0) {}
  if (mode == 13)
    for (volatile int i = 0;; i = i + 1) {}
  if (mode == 12) {
    cp_async_16(&tile[lane * 4 % 32], out + lane * 4 % 32);
    cp_async_commit();
    out[40 + lane] = tile[lane];
  }
  if (mode == 14) cp_async_16(tile + 1, out);
  if (mode == 29 || mode == 30) cp_async_16(&tile[lane * 4 % 32], out + lane * 4 % 32);
  if (mode == 29) cp_async_commit();
  if (mode == 15 && lane < 16) __shfl_sync(0xffffu, 1, 20);
  if (mode == 16) __shfl_sync(0xffff0000u, 1, 20);
  if (mode == 17 && lane == 5) return;
  if (mode == 17) __syncwarp();
  if (mode == 18) named_barrier_sync(1, threadIdx.x < 32 ? 64 : 96);
  if (mode == 19) named_barrier_sync(1, 33);
  if (mode == 33) named_barrier_sync(16, 32);
  if (mode == 31) named_barrier_arrive(1, 64);
  if (mode == 32) {  // what follows an arrival is not behind the barrier
    if (threadIdx.x < 32) {
      named_barrier_arrive(1, 64);
      tile[lane] = 1;
    } else {
      named_barrier_sync(1, 64);
      out[lane] = tile[lane];
    }
  }
  if (mode == 20) __trap();
  if (mode == 21) out[0] = 1 << (threadIdx.x + 32);
  if (mode == 22) out[0] = smem_u32(out);
  if (mode == 23) {
    uint32_t r[4];
    tile[lane] = lane;
    __syncwarp();
    ldmatrix_x4(r, tile + lane % 4);
  }
  if (mode == 24) {
    tile[lane] = 0;
    __syncwarp();
    out[threadIdx.x] = tile[(lane + 1) % 32];
    __syncwarp();
    tile[lane] = 1;
    out[32 + lane] = tile[(lane + 1) % 32];
  }
  if (mode == 25) {
    if (lane == 0) atomicAdd(out, 1);
    else if (lane == 1) out[2] = out[0];
  }
  if (mode == 26) more[threadIdx.x] = 1;
  if (mode == 27) {  // a flag without fences
    if (threadIdx.x == 32) {
      out[1] = 5;
      *(volatile int *)out = 1;
    }
    if (threadIdx.x == 0) {
      while (*(volatile int *)out == 0) {}
      out[2] = out[1];
    }
  }
  if (mode == 28 && lane == 0) atomicAdd(&tile[0], 1);
  if (mode == 28 && lane == 1) tile[0] = 1;
}

// What copies must not do: of one thread, between shared memory and 64 words.
KERNEL(1) broken_copy(const __grid_constant__ TensorMap m, const __grid_constant__ TensorMap wide,
                      int *out, int mode) {
  __shared__ __align__(1024) int tile[64];
  __shared__ __align__(16) uint64_t bar, twice[2];
  if (mode == 0) mbarrier_wait(&bar, 0);
  twice[0] = twice[1] = 0;
  if (mode == 1) mbarrier_wait(twice, 0);
  if (mode == 2) mbarrier_init(reinterpret_cast<uint64_t *>(reinterpret_cast<int *>(twice) + 1), 1);
  mbarrier_init(&bar, 1);
  if (mode != 3) mbarrier_init_fence();
  if (mode == 4) mbarrier_arrive(&bar);
  if (mode == 15) out[7] = 1;
  if (mode == 16) {
    for (int i = 0; i < 4; i++) tile[i] = 1;
    bulk_store(out, tile, 16);
  }
  if (mode == 21) tile[3] = 1;
  mbarrier_arrive_expect_tx(&bar, mode == 4 ? 4096 : 32);
  if (mode == 4) mbarrier_arrive(&bar);
  if (mode == 5) bulk_load(tile, out + 1, 32, &bar);
  if (mode == 6) bulk_load(tile, out, 1 << 20, &bar);
  if (mode == 7) bulk_load(tile, out, 1 << 18, &bar);
  if (mode == 8) tma_load_2d(tile, reinterpret_cast<const TensorMap *>(out), &bar, 0, 0);
  if (mode == 9) tma_load_3d(tile, &m, &bar, 0, 0, 0);
  if (mode == 10) tma_load_2d(tile + 4, &m, &bar, 0, 0);
  if (mode == 11) tma_load_2d(tile, &wide, &bar, 0, 0);
  if (mode == 12) tma_load_multicast_2d(tile, &m, &bar, 0, 0, 2);
  bulk_load(tile, out, 32, &bar);
  if (mode == 13) return;
  if (mode == 14) out[40] = tile[0];
  mbarrier_wait(&bar, 0);
  tile[0] = 7;
  fence_proxy_async();
  if (mode == 22) {
    store_release(out + 60, 1);
    load_acquire(out + 60);
  }
  while (mode == 23 && load_acquire(out + 60) != 5) {}
  if (mode == 17) tma_reduce_add_2d(&m, tile, 0, 0);
  if (mode == 24) bulk_add(reinterpret_cast<float *>(out) + 16, tile, 16);
  else bulk_store(out + 16, tile, 16);
  if (mode == 18) return;
  if (mode == 19) {
    tma_store_wait<0>();
    return;
  }
  tma_store_commit();
  if (mode == 20) tile[0] = 8;
  if (mode == 25) {
    tma_store_wait_read<0>();
    out[40] = out[16];
  }
  tma_store_wait<0>();
}

// What a warpgroup must not do with its products.
KERNEL(128) broken_product(int *out, int mode) {
  DYNAMIC_SHARED(uint4, smem);
  for (int i = threadIdx.x; i < 1024; i += 128) smem[i] = make_uint4(0, 0, 0, 0);
  if (mode != 0) fence_proxy_async();
  __syncthreads();
  float d[32];
  uint64_t a = wgmma_descriptor_128b(smem, 16, 1024);
  const uint64_t b = wgmma_descriptor_128b(smem + 512, 16, 1024);
  if (mode == 1 && threadIdx.x == 77) a += 2;
  if (mode == 2) a |= 1ull << 49;
  if (mode != 3) wgmma_fence(d);
  auto multiply = [&] { wgmma_m64n64k16_bf16<0, 0>(d, a, b, 0); };
  if (mode == 9 && threadIdx.x >= 64)
    multiply();
  else
    multiply();
  wgmma_commit();
  if (mode == 4) return;
  if (mode == 5) out[threadIdx.x] = d[3];
  if (mode == 6) d[31] = 0;
  if (mode == 7) smem[threadIdx.x] = make_uint4(1, 1, 1, 1);
  wgmma_wait<0>(d);
  if (mode == 8) {
    float again[32];
    wgmma_fence(again);
    wgmma_m64n64k16_bf16<0, 0>(again, a, b, 0);
    wgmma_commit();
    wgmma_fence(d);
    wgmma_m64n64k16_bf16<0, 0>(d, a, b, 1);
    wgmma_commit();
    wgmma_wait<1>(again);
    out[threadIdx.x] = again[0];
    out[threadIdx.x] = d[0];
  }
  out[threadIdx.x] = d[3];
}

// What a cluster must not do.
KERNEL(32) __cluster_dims__(2, 1, 1) broken_cluster(int *out, int mode) {
  __shared__ int cell[32];
  const int rank = cluster_rank();
  cell[threadIdx.x] = 1;
  if (mode == 0 && rank == 0) cluster_wait();
  if (mode == 8) cluster_arrive_relaxed();
  else cluster_arrive();
  if (mode == 1) cluster_arrive();
  if (mode == 2) return;
  cluster_wait();
  if (mode == 3) static_cast<int *>(cluster_map(cell, 1))[0] = rank;
  if (mode == 4 && rank) out[threadIdx.x] = static_cast<int *>(cluster_map(cell, 0))[threadIdx.x];
  if (mode == 8) out[threadIdx.x] = static_cast<int *>(cluster_map(cell, 1 - rank))[threadIdx.x];
  if (mode == 5 && rank) out[threadIdx.x] = *static_cast<int *>(cluster_map(cell, 2));
  if (mode == 7)
    store_async_b32(reinterpret_cast<char *>(cell) + 2, 1, reinterpret_cast<uint64_t *>(cell), 0);
  if (mode == 9 && rank)
    for (volatile int i = 0;; i = i + 1) {}
  if (mode == 6 && rank == 0) {
    cluster_arrive();
    cluster_wait();
  }
  if (mode == 6 && rank) {
    __shared__ uint64_t bar;
    if (threadIdx.x == 0) mbarrier_init(&bar, 2);
    __syncwarp();
    mbarrier_wait(&bar, 0);
  }
}
