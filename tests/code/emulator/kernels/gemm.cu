// C = A B, one 64 x 128 tile a block, for the emulator's own tests.  B is (N, K) for gemm_tn,
// (K, N) for gemm_nn.  A producer warpgroup issues TMA loads into a ring of STAGES tiles, a
// consumer warpgroup runs wgmma on them and stores C by TMA.
#include <common/descriptor.cuh>

constexpr int TM = 64, TN = 128, TK = 64, STAGES = 3;
constexpr int A_BYTES = TM * TK * 2, B_BYTES = TN * TK * 2, STAGE = A_BYTES + B_BYTES;

template <bool N_MAJOR>
DEVICE void gemm_tile(const TensorMap &ma, const TensorMap &mb,
                                          const TensorMap &mc, int k) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ uint64_t full[STAGES], empty[STAGES];
  int steps = (k + TK - 1) / TK, m0 = blockIdx.y * TM, n0 = blockIdx.x * TN;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      mbarrier_init(&full[s], 1);
      mbarrier_init(&empty[s], 1);
    }
    mbarrier_init_fence();
  }
#ifndef BUG_MISSING_SYNC
  __syncthreads();
#endif
  if (threadIdx.x < 128) {  // producer
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0)
      for (int i = 0; i < steps; i++) {
        int s = i % STAGES, round = i / STAGES;
#ifndef BUG_NO_EMPTY_WAIT
        mbarrier_wait(&empty[s], (round & 1) ^ 1);
#endif
        unsigned char *a = smem + s * STAGE, *b = a + A_BYTES;
#ifdef BUG_WRONG_TX
        mbarrier_arrive_expect_tx(&full[s], STAGE + 16);
#else
        mbarrier_arrive_expect_tx(&full[s], STAGE);
#endif
        tma_load_2d(a, &ma, &full[s], i * TK, m0);
        if (N_MAJOR) {
          tma_load_2d(b, &mb, &full[s], n0, i * TK);
          tma_load_2d(b + B_BYTES / 2, &mb, &full[s], n0 + 64, i * TK);
        } else {
          tma_load_2d(b, &mb, &full[s], i * TK, n0);
        }
      }
  } else {  // consumer
    setmaxnreg_inc<232>();
    int t = threadIdx.x - 128;
    float acc[64];
    for (int i = 0; i < steps; i++) {
      int s = i % STAGES;
      mbarrier_wait(&full[s], i / STAGES & 1);
      unsigned char *a = smem + s * STAGE, *b = a + A_BYTES;
      wgmma_fence(acc);
#pragma unroll
      for (int kk = 0; kk < TK / 16; kk++) {
        uint64_t da = wgmma_descriptor_128b(a + kk * 32, 16, 1024);
        if (N_MAJOR)
          wgmma_m64n128k16_bf16<0, 1>(
              acc, da, wgmma_descriptor_128b(b + kk * 2048, B_BYTES / 2, 1024), i + kk > 0);
        else
          wgmma_m64n128k16_bf16<0, 0>(acc, da, wgmma_descriptor_128b(b + kk * 32, 16, 1024),
                                      i + kk > 0);
      }
      wgmma_commit();
#ifndef BUG_NO_WGMMA_WAIT
      wgmma_wait<0>(acc);
#endif
      if (t == 0) mbarrier_arrive(&empty[s]);
    }
#ifdef BUG_NO_WGMMA_WAIT
    wgmma_wait<0>(acc);
#endif
    // C as two 64 x 64 halves under the 128-byte swizzle, past the ring
    unsigned char *c = smem + STAGES * STAGE;
    int row = t / 32 * 16 + t % 32 / 4;
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        int r = row + h * 8, byte = (j % 8) * 16 + (t & 3) * 4;
        __nv_bfloat162 p = __floats2bfloat162_rn(acc[j * 4 + h * 2], acc[j * 4 + h * 2 + 1]);
        *reinterpret_cast<__nv_bfloat162 *>(c + j / 8 * 8192 + r * 128 + (byte ^ ((r & 7) << 4))) =
            p;
      }
#ifndef BUG_NO_PROXY_FENCE
    fence_proxy_async();
#endif
    named_barrier_sync(1, 128);
    if (t == 0) {
      tma_store_2d(&mc, c, n0, m0);
      tma_store_2d(&mc, c + 8192, n0 + 64, m0);
      tma_store_commit();
      tma_store_wait<0>();
    }
  }
}
KERNEL(256, 1) gemm_tn(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                       const __grid_constant__ TensorMap c, int k) {
  gemm_tile<false>(a, b, c, k);
}
KERNEL(256, 1) gemm_nn(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                       const __grid_constant__ TensorMap c, int k) {
  gemm_tile<true>(a, b, c, k);
}
