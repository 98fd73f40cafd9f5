// Each instruction alone: compared with plain arithmetic here and with hardware on a GPU.
#include <common/descriptor.cuh>
#include <common/philox.cuh>

KERNEL(32) ldmatrix_both(const unsigned *in, unsigned *out) {
  __shared__ uint4 tile[32];
  tile[threadIdx.x] = reinterpret_cast<const uint4 *>(in)[threadIdx.x];
  __syncwarp();
  uint32_t r[4], t[4];
  ldmatrix_x4(r, &tile[threadIdx.x]);
  ldmatrix_x4_trans(t, &tile[threadIdx.x]);
  for (int i = 0; i < 4; i++) {
    out[threadIdx.x * 8 + i] = r[i];
    out[threadIdx.x * 8 + 4 + i] = t[i];
  }
}

// Lane i copies row i, or zeros where i is a multiple of 3, in two groups.
KERNEL(32) async_copies(const int *in, int *out) {
  __shared__ int4 rows[32];
  const int lane = threadIdx.x;
  const int4 *const from = reinterpret_cast<const int4 *>(in);
  if (lane < 16) cp_async_16(&rows[lane], from + lane, lane % 3 > 0);
  cp_async_commit();
  if (lane >= 16) cp_async_16(&rows[lane], from + lane, lane % 3 > 0);
  cp_async_commit();
  cp_async_wait<1>();
  cp_async_wait<0>();
  __syncwarp();
  reinterpret_cast<int4 *>(out)[31 - lane] = rows[lane];
}

template <int RANK>
__device__ __forceinline__ void tma_dump(const TensorMap &m, unsigned char *out, int bytes, int c0,
                                         int c1, int c2, int c3) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&bar, bytes);
    if (RANK == 2) tma_load_2d(smem, &m, &bar, c0, c1);
    if (RANK == 3) tma_load_3d(smem, &m, &bar, c0, c1, c2);
    if (RANK == 4) tma_load_4d(smem, &m, &bar, c0, c1, c2, c3);
  }
  mbarrier_wait(&bar, 0);
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = smem[i];
}
KERNEL(64) tma2(const __grid_constant__ TensorMap m, unsigned char *out, int bytes, int c0,
                int c1) {
  tma_dump<2>(m, out, bytes, c0, c1, 0, 0);
}
KERNEL(64) tma3(const __grid_constant__ TensorMap m, unsigned char *out, int bytes, int c0, int c1,
                int c2) {
  tma_dump<3>(m, out, bytes, c0, c1, c2, 0);
}
KERNEL(64) tma4(const __grid_constant__ TensorMap m, unsigned char *out, int bytes, int c0, int c1,
                int c2, int c3) {
  tma_dump<4>(m, out, bytes, c0, c1, c2, c3);
}

// Warp 0 fills, warps 1 to 3 consume, through two named barriers.
KERNEL(128) named(const float *in, float *out, int rounds) {
  __shared__ float box[32];
  for (int r = 0; r < rounds; r++) {
    if (threadIdx.x < 32) {
      if (r) named_barrier_sync(2, 128);
      box[threadIdx.x] = in[r * 32 + threadIdx.x];
      named_barrier_arrive(1, 128);
    } else {
      named_barrier_sync(1, 128);
      if (threadIdx.x < 64) out[r * 32 + threadIdx.x - 32] = box[63 - threadIdx.x];
      if (r + 1 < rounds) named_barrier_arrive(2, 128);
    }
  }
}

KERNEL(32) warp_moves(const int *in, int *out) {
  int lane = threadIdx.x, v = in[lane];
  out[lane] = __shfl_sync(0xffffffffu, v, 5);
  out[32 + lane] = __shfl_xor_sync(0xffffffffu, v, 3);
  out[64 + lane] = __shfl_up_sync(0xffffffffu, v, 2);
  out[96 + lane] = __shfl_down_sync(0xffffffffu, v, 7, 16);
  out[128 + lane] = (int)__ballot_sync(0xffffffffu, v % 3 == 0);
  out[160 + lane] = __any_sync(0xffffffffu, v < 0) * 2 + __all_sync(0xffffffffu, v >= 0);
}

// Four words of each counter, under its key.
KERNEL(32) random_words(const unsigned *counters, const unsigned *keys, unsigned *out) {
  const unsigned *const c = counters + threadIdx.x * 4, *const k = keys + threadIdx.x * 2;
  const uint4 words = philox(c[0], c[1], c[2], c[3], k[0], k[1]);
  out[threadIdx.x * 4] = words.x;
  out[threadIdx.x * 4 + 1] = words.y;
  out[threadIdx.x * 4 + 2] = words.z;
  out[threadIdx.x * 4 + 3] = words.w;
}

KERNEL(64) atomics(int *cells, float *sum) {
  atomicAdd(&cells[0], 1);
  atomicMax(&cells[1], (int)threadIdx.x);
  atomicMin(&cells[2], -(int)threadIdx.x);
  atomicOr(&cells[3], 1 << threadIdx.x % 8);
  atomicAdd(&sum[0], 0.5f);
}

KERNEL(1024) broken(int *out, int mode) {
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
  if (mode == 11) {
    uint64_t *bar = reinterpret_cast<uint64_t *>(tile);
    mbarrier_wait(bar, 0);
  }
  if (mode == 13)
    for (volatile int i = 0;; i = i + 1) {}
  if (mode == 12) {
    cp_async_16(&tile[lane * 4 % 32], out + lane * 4 % 32);
    cp_async_commit();
    out[40 + lane] = tile[lane];
  }
}
