// Loops from which a compiler would move an access if an instruction did not order it.
#include <common/hopper.cuh>

// A thread copies four floats and reads them itself: this needs the wait, but no barrier.
KERNEL(32) own_copy(const float *x, float *out, int rounds) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  float sum = 0;
  cp_async_16(s + 4 * t, x + 4 * t);
  cp_async_commit();
  for (int i = 0; i < rounds; i++) {
    cp_async_wait<0>();
    sum += s[4 * t];
  }
  out[t] = sum;
}

// A thread writes global memory and copies it to shared memory, over the previous values.
KERNEL(32) copy_own(float *x, float *out, int rounds) {
  __shared__ __align__(16) float s[128];
  int t = threadIdx.x;
  float sum = 0;
  for (int i = 0; i < rounds; i++) {
    x[4 * t] = i + t;
    cp_async_16(s + 4 * t, x + 4 * t);
    cp_async_commit();
    cp_async_wait<0>();
    sum += s[4 * t];
  }
  out[t] = sum;
}

// One warp writes and another reads; neither reads its own writes.
KERNEL(64) by_named_barriers(const float *x, float *out, int rounds) {
  __shared__ float s[32];
  int lane = threadIdx.x % 32;
  float sum = 0;
  if (threadIdx.x < 32) {
    for (int i = 0; i < rounds; i++) {
      if (i) named_barrier_sync(2, 64);
      s[lane] = x[lane] + i;
      named_barrier_arrive(1, 64);
    }
  } else {
    for (int i = 0; i < rounds; i++) {
      named_barrier_sync(1, 64);
      sum += s[31 - lane];
      if (i + 1 < rounds) named_barrier_arrive(2, 64);
    }
    out[lane] = sum;
  }
}

// A warp reads with ldmatrix what it has just written, in every round.
KERNEL(32) rows_that_change(const float *x, float *out, int rounds) {
  __shared__ __align__(16) uint32_t s[128];
  int t = threadIdx.x;
  uint32_t sum = 0;
  for (int i = 0; i < rounds; i++) {
    for (int j = 0; j < 4; j++) s[4 * t + j] = i * 128 + 4 * t + j;
    __syncwarp();
    uint32_t r[4], q[4], p[2];
    ldmatrix_x4(r, s + 4 * t);
    ldmatrix_x4_trans(q, s + 4 * t);
    ldmatrix_x2(p, s + 4 * t);
    __syncwarp();
    sum += r[0] + 2 * r[3] + 3 * q[1] + 4 * q[2] + 5 * p[0] + 6 * p[1];
  }
  out[t] = __uint_as_float(sum & 0x3fffffff);
}

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
KERNEL(64) by_mbarriers(const float *x, float *out, int rounds) {
  __shared__ float s[32];
  __shared__ uint64_t full, empty;
  int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 32);
    mbarrier_init(&empty, 32);
    mbarrier_init_fence();
  }
  __syncthreads();
  float sum = 0;
  if (threadIdx.x < 32) {
    for (int i = 0; i < rounds; i++) {
      if (i) mbarrier_wait(&empty, (i - 1) & 1);
      s[lane] = x[lane] + i;
      mbarrier_arrive(&full);
    }
  } else {
    for (int i = 0; i < rounds; i++) {
      mbarrier_wait(&full, i & 1);
      sum += s[31 - lane];
      mbarrier_arrive(&empty);
    }
    out[lane] = sum;
  }
}

// Two blocks of a cluster: one writes into the other's shared memory, and the other reads it.
KERNEL(32) __cluster_dims__(2, 1, 1) by_clusters(const float *x, float *out, int rounds) {
  __shared__ float s[32];
  int lane = threadIdx.x, rank = cluster_rank();
  float sum = 0;
  float *there = (float *)cluster_map(s, 1);
  cluster_arrive();
  cluster_wait();
  for (int i = 0; i < rounds; i++) {
    if (rank == 0) there[lane] = x[lane] + i;
    cluster_arrive();
    cluster_wait();
    if (rank == 1) sum += s[31 - lane];
    cluster_arrive();
    cluster_wait();
  }
  if (rank == 1) out[lane] = sum;
}

// Bulk copies of values that threads wrote, to global memory and back.
KERNEL(32) by_bulk(float *x, float *out, int rounds) {
  __shared__ __align__(128) float s[32], back[32];
  __shared__ uint64_t full;
  int lane = threadIdx.x;
  if (lane == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init_fence();
  }
  __syncwarp();
  float sum = 0;
  for (int i = 0; i < rounds; i++) {
    s[lane] = lane + i;
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      bulk_store(x, s, 128);
      tma_store_commit();
      tma_store_wait<0>();
      mbarrier_arrive_expect_tx(&full, 128);
      bulk_load(back, x, 128, &full);
    }
    mbarrier_wait(&full, i & 1);
    sum += back[31 - lane];
    __syncwarp();
  }
  out[lane] = sum;
}
#endif
