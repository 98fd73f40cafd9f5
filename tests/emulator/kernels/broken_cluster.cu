#include <common/ptx.cuh>

// What a cluster must not do.
KERNEL(32) __cluster_dims__(2, 1, 1) broken_cluster(int *out, int mode) {
  __shared__ int cell[32];
  const int rank = cluster_rank();
  cell[threadIdx.x] = 1;
  if (mode == 0 && rank == 0) cluster_wait();
  cluster_arrive();
  if (mode == 1) cluster_arrive();
  if (mode == 2) return;
  cluster_wait();
  if (mode == 3) static_cast<int *>(cluster_map(cell, 1))[0] = rank;
  if (mode == 4 && rank) out[threadIdx.x] = static_cast<int *>(cluster_map(cell, 0))[threadIdx.x];
  if (mode == 5 && rank) out[threadIdx.x] = *static_cast<int *>(cluster_map(cell, 2));
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
