// Bulk copies, sums in memory, and what the blocks of a cluster do to each other, each alone.
#include <common/hopper.cuh>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
DEVICE void prepare(uint64_t *bar, int count) {
  if (threadIdx.x == 0) {
    mbarrier_init(bar, count);
    mbarrier_init_fence();
  }
}

// 256 words in, reversed, out again.
KERNEL(64) bulk(const unsigned *in, unsigned *out) {
  __shared__ __align__(16) unsigned tile[256], turned[256];
  __shared__ uint64_t bar;
  prepare(&bar, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&bar, sizeof tile);
    bulk_load(tile, in, sizeof tile, &bar);
  }
  mbarrier_wait(&bar, 0);
  for (int i = threadIdx.x; i < 256; i += 64) turned[i] = tile[255 - i];
#ifndef BUG_NO_PROXY_FENCE
  fence_proxy_async();
#endif
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_store(out, turned, sizeof turned);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

// Each round, a thread fills a box by a bulk copy, a warp reads it, and the next copy overwrites it.
KERNEL(64) refilled(const unsigned *in, unsigned *out, int rounds) {
  __shared__ __align__(16) unsigned box[32];
  __shared__ uint64_t full, empty;
  prepare(&full, 1);
  prepare(&empty, 1);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    for (int r = 0; r < rounds; r++) {
      mbarrier_wait(&full, r & 1);
      out[r * 32 + lane] = box[31 - lane];
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&empty);
    }
  } else if (lane == 0) {
    for (int r = 0; r < rounds; r++) {
      if (r) mbarrier_wait(&empty, (r - 1) & 1);
      mbarrier_arrive_expect_tx(&full, sizeof box);
      bulk_load(box, in + r * 32, sizeof box, &full);
    }
  }
}

// Every block adds its tile of 8 rows by 16 to the same place.
template <class T>
DEVICE void add_tile(const TensorMap &sum, const T *in) {
  __shared__ __align__(128) T tile[128];
  tile[threadIdx.x] = in[blockIdx.x * 128 + threadIdx.x];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_reduce_add_2d(&sum, tile, 16, 4);
    tma_store_commit();
    tma_store_wait<0>();
  }
}
KERNEL(128) reduce_float(const __grid_constant__ TensorMap sum, const float *in) {
  add_tile(sum, in);
}
KERNEL(128) reduce_int(const __grid_constant__ TensorMap sum, const int *in) { add_tile(sum, in); }
KERNEL(128) reduce_bfloat16(const __grid_constant__ TensorMap sum, const unsigned short *in) {
  add_tile(sum, in);
}

// The same with one sum of floats at a time: each block waits for its turn, which it draws.
KERNEL(128) in_turns(float *sum, const float *in, int *turns) {
  __shared__ __align__(128) float tile[128];
  tile[threadIdx.x] = in[blockIdx.x * 128 + threadIdx.x];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int turn = atomicAdd(turns, 1);
    while (load_acquire(turns + 1) != turn) {}
    fence_proxy_async_global();
    bulk_add(sum, tile, sizeof tile);
    tma_store_commit();
    tma_store_wait_read<0>();
    tile[0] = 0;
    tma_store_wait<0>();
    store_release(turns + 1, turn + 1);
  }
}

KERNEL(128) store_tile(const __grid_constant__ TensorMap to, const int *in) {
  __shared__ __align__(128) int tile[128];
  tile[threadIdx.x] = in[threadIdx.x];
  fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store_2d(&to, tile, 16, 4);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

// out[block, 0:32] is read from the next block's shared memory, the rest written there by it.
DEVICE void exchange(const int *in, int *out) {
  __shared__ int mine[32], theirs[32];
  const int size = cluster_size(), rank = cluster_rank(), next = (rank + 1) % size;
  mine[threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];
#ifdef BUG_NO_FIRST_BARRIER
  __syncthreads();
#else
  cluster_arrive();
  cluster_wait();
#endif
  const int *const neighbour = static_cast<int *>(cluster_map(mine, next));
  out[blockIdx.x * 64 + threadIdx.x] = neighbour[threadIdx.x];
  static_cast<int *>(cluster_map(theirs, next))[threadIdx.x] = 100 * rank + threadIdx.x;
#ifdef BUG_NO_LAST_BARRIER
  theirs[threadIdx.x] = 0;
#else
  cluster_arrive();
  cluster_wait();
#endif
  out[blockIdx.x * 64 + 32 + threadIdx.x] = theirs[threadIdx.x];
}
KERNEL(32) __cluster_dims__(2, 1, 1) exchange2(const int *in, int *out) { exchange(in, out); }
KERNEL(32) __cluster_dims__(4, 1, 1) exchange4(const int *in, int *out) { exchange(in, out); }

// Every thread leaves a note with rank 0, which waits for 128 arrivals; each block sends a word to
// every other, at its rank.
KERNEL(32) __cluster_dims__(4, 1, 1) signals(int *out, int *noted) {
  __shared__ uint64_t arrivals, words;
  __shared__ unsigned sent[4];
  __shared__ int notes[128];
  const int rank = cluster_rank();
  prepare(&arrivals, 128);
  prepare(&words, 1);
  if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&words, 16);
  cluster_arrive_relaxed();
  cluster_wait();
  const int note = rank * 32 + threadIdx.x;
  static_cast<int *>(cluster_map(notes, 0))[note] = 3 * note;
  mbarrier_arrive_cluster(&arrivals, 0);
  if (threadIdx.x < 4) store_async_b32(&sent[rank], 10 * rank + threadIdx.x, &words, threadIdx.x);
  if (rank == 0) {
    mbarrier_wait_cluster(&arrivals, 0);
    for (int i = 0; i < 4; i++)
      noted[blockIdx.x * 32 + i * 32 + threadIdx.x] = notes[i * 32 + threadIdx.x];
  }
#ifndef BUG_NO_WAIT
  mbarrier_wait_cluster(&words, 0);
#endif
  if (threadIdx.x < 4) out[blockIdx.x * 4 + threadIdx.x] = sent[threadIdx.x];
  cluster_arrive();  // one's own words are here; those to a neighbour may be on their way
  cluster_wait();
}

// Each of two blocks loads half a tile into both.  Later architectures advise against multicast
// where they are not asked for by their own name, as sm_100a.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1000
KERNEL(64) __cluster_dims__(2, 1, 1) multicast(const __grid_constant__ TensorMap m, int *out) {
  __shared__ __align__(128) int tile[2][128];
  __shared__ uint64_t bar;
  const int rank = cluster_rank();
  prepare(&bar, 1);
  if (threadIdx.x == 0) mbarrier_arrive_expect_tx(&bar, sizeof tile);
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) tma_load_multicast_2d(tile[rank], &m, &bar, 16, 8 * rank, 3);
  mbarrier_wait_cluster(&bar, 0);
  for (int i = threadIdx.x; i < 256; i += 64) out[blockIdx.x * 256 + i] = tile[i / 128][i % 128];
  cluster_arrive();
  cluster_wait();
}
#endif
#endif
