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

KERNEL(32) ldmatrix_two(const unsigned *in, unsigned *out) {
  __shared__ uint4 tile[16];
  if (threadIdx.x < 16) tile[threadIdx.x] = reinterpret_cast<const uint4 *>(in)[threadIdx.x];
  __syncwarp();
  uint32_t r[2];
  ldmatrix_x2(r, &tile[threadIdx.x % 16]);
  out[threadIdx.x * 2] = r[0];
  out[threadIdx.x * 2 + 1] = r[1];
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
DEVICE void tma_dump(const TensorMap &m, unsigned char *out, int bytes, int c0,
                                         int c1, int c2, int c3) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    tma_prefetch_descriptor(&m);
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

// Each round, warp 0 fills and warp 1 empties a box, through two mbarriers.
KERNEL(64) handed_over(const int *in, int *out, int rounds) {
  __shared__ uint64_t full, empty;
  __shared__ int box[32];
  if (threadIdx.x == 0) {
    mbarrier_init(&full, 32);
    mbarrier_init(&empty, 32);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int r = 0; r < rounds; r++) {
    if (threadIdx.x < 32) {
      if (r) mbarrier_wait(&empty, (r - 1) & 1);
      box[lane] = in[r * 32 + lane];
      mbarrier_arrive(&full);
    } else {
      mbarrier_wait(&full, r & 1);
      out[r * 32 + lane] = box[31 - lane];
      mbarrier_arrive(&empty);
    }
  }
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
  atomicAnd(&cells[4], ~(1 << threadIdx.x % 16));
  atomicXor(&cells[5], threadIdx.x);
  atomicSub(&cells[6], 2);
  atomicInc(reinterpret_cast<unsigned *>(&cells[7]), 9);
  atomicExch(&cells[8], 7);
  int seen = 0;
  for (int old; (old = atomicCAS(&cells[9], seen, seen + 1)) != seen;) seen = old;
  atomicAdd(&sum[0], 0.5f);
}

// A float as two 16-bit floats and back; then what integers can do.
KERNEL(64) roundings(const float *x, unsigned short *narrow, float *wide) {
  const int i = threadIdx.x;
  const __half half = __float2half_rn(x[i]);
  const __nv_bfloat16 brain = __float2bfloat16_rn(x[i]);
  narrow[2 * i] = __half_as_ushort(half);
  narrow[2 * i + 1] = __bfloat16_as_ushort(brain);
  wide[2 * i] = __half2float(half);
  wide[2 * i + 1] = __bfloat162float(brain);
}
KERNEL(32) integers(const unsigned *in, unsigned *out) {
  const unsigned a = in[2 * threadIdx.x], b = in[2 * threadIdx.x + 1];
  unsigned *const to = out + 8 * threadIdx.x;
  to[0] = __popc(a);
  to[1] = __clz((int)a);
  to[2] = __ffs((int)a);
  to[3] = __umulhi(a, b);
  to[4] = __dp4a(a, b, 5u);
  to[5] = __float2int_rn((float)(a >> 8) / 2);
  to[6] = min(a, b);
  to[7] = max((int)a, (int)b);
}
KERNEL(64) block_votes(const int *in, int *out) {
  const int i = threadIdx.x;
  out[i] = __syncthreads_count(in[i] > 3);
  out[64 + i] = __syncthreads_or(in[i] > 9);
  out[128 + i] = __syncthreads_and(in[i] >= 0);
}

// Every block leaves its words; the last to arrive adds those of all.
KERNEL(64) last_block(const int *in, int *left, unsigned *ticket, int *out) {
  __shared__ bool last;
  left[blockIdx.x * 64 + threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x] * 2;
#ifndef BUG_NO_BARRIER
  __syncthreads();
#endif
  if (threadIdx.x == 0) {
#ifndef BUG_NO_FENCE
    __threadfence();
#endif
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
#ifndef BUG_NO_FENCE_BEHIND
    __threadfence();
#endif
  }
  __syncthreads();
  if (!last) return;
  int total = 0;
  for (int b = 0; b < gridDim.x; b++) total += left[b * 64 + threadIdx.x];
  out[threadIdx.x] = total;
}
