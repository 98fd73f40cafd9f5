// Products and conversions alone: compared with plain arithmetic here and with hardware on a GPU.
#include <common/descriptor.cuh>

// Operands of each lane lie together: a four, b two, c and d four words.
#define MMA(NAME, C)                                                          \
  KERNEL(32) NAME(const unsigned *a, const unsigned *b, const C *c, C *d) {   \
    uint32_t x[4], y[2];                                                      \
    C z[4], r[4];                                                             \
    for (int i = 0; i < 4; i++) x[i] = a[threadIdx.x * 4 + i];                \
    for (int i = 0; i < 2; i++) y[i] = b[threadIdx.x * 2 + i];                \
    for (int i = 0; i < 4; i++) z[i] = c[threadIdx.x * 4 + i];                \
    mma_##NAME(r, x, y, z);                                                   \
    for (int i = 0; i < 4; i++) d[threadIdx.x * 4 + i] = r[i];                \
  }
MMA(m16n8k16_f16, float)
MMA(m16n8k16_bf16, float)
MMA(m16n8k8_tf32, float)
MMA(m16n8k32_s8, int)

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
MMA(m16n8k32_e4m3, float)
MMA(m16n8k32_e5m2, float)
#endif

KERNEL(32) dot_bytes(const int *a, const int *b, const int *c, int *d) {
  int i = threadIdx.x;
  d[i] = __dp4a(a[i], b[i], c[i]);
}

KERNEL(32) tf32_rounding(const float *x, unsigned *out) {
  out[threadIdx.x] = round_tf32(x[threadIdx.x]);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
// Out: a pair as e4m3 and as e5m2.
KERNEL(64) fp8_pack(const float *x, unsigned *out) {
  int i = threadIdx.x;
  out[2 * i] = pack_e4m3(x[2 * i], x[2 * i + 1]);
  out[2 * i + 1] = pack_e5m2(x[2 * i], x[2 * i + 1]);
}

KERNEL(128) fp8_unpack(const unsigned short *pairs, unsigned *out) {
  int i = threadIdx.x;
  out[2 * i] = unpack_e4m3(pairs[i]);
  out[2 * i + 1] = unpack_e5m2(pairs[i]);
}
#endif

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int N> struct Wgmma;
#define WGMMA_TEST(N)                                                                             \
  template <> struct Wgmma<N> {                                                                   \
    template <int TA, int TB, class... A> __device__ static void shared(A &&...a) {               \
      wgmma_m64n##N##k16_bf16<TA, TB>(a...);                                                      \
    }                                                                                             \
    template <int TB, class... A> __device__ static void registers(A &&...a) {                    \
      wgmma_m64n##N##k16_f16_registers<TB>(a...);                                                 \
    }                                                                                             \
    template <int FP8, class... A> __device__ static void shared8(A &&...a) {                     \
      if constexpr (FP8 == 1) wgmma_m64n##N##k32_e4m3(a...);                                      \
      else wgmma_m64n##N##k32_e5m2(a...);                                                         \
    }                                                                                             \
    template <int FP8, class... A> __device__ static void registers8(A &&...a) {                  \
      if constexpr (FP8 == 1) wgmma_m64n##N##k32_e4m3_registers(a...);                            \
      else wgmma_m64n##N##k32_e5m2_registers(a...);                                               \
    }                                                                                             \
  };
WGMMA_TEST(32)
WGMMA_TEST(64)
WGMMA_TEST(96)
WGMMA_TEST(128)
WGMMA_TEST(160)
WGMMA_TEST(192)
WGMMA_TEST(224)
WGMMA_TEST(256)

// B tiles of 32 (one axis) by 64 (the other) after the A tile, under the 128-byte swizzle; inner
// is 64, or 128 values of 8 bits (FP8: 1 for e4m3, 2 for e5m2).  A's fragments are read from global
// memory where REGISTERS says so.  With TB, those of B begin at FIRST, a multiple of 8, in one tile.
template <int N, int TA, int TB, bool REGISTERS, int FP8 = 0, int FIRST = 0>
__global__ void __launch_bounds__(128)
    wgmma(const __grid_constant__ TensorMap ma, const __grid_constant__ TensorMap mb,
          const unsigned *fragments, float *d) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  unsigned char *const tile = smem + 8192;
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(&bar, 8192 + (TB ? (N + FIRST + 63) / 64 * 64 : N) * 128);
    tma_load_2d(smem, &ma, &bar, 0, 0);
    if (TB)  // 64 columns by 64 of the inner axis a tile
      for (int i = 0; i * 64 < N + FIRST; i++) tma_load_2d(tile + i * 8192, &mb, &bar, i * 64, 0);
    else
      for (int i = 0; i * 32 < N; i++) tma_load_2d(tile + i * 4096, &mb, &bar, 0, i * 32);
  }
  mbarrier_wait(&bar, 0);
  float acc[N / 2];
  uint32_t x[16];
  if (REGISTERS)
    for (int i = 0; i < 16; i++) x[i] = fragments[threadIdx.x * 16 + i];
  wgmma_fence(acc);
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const uint64_t b = wgmma_descriptor_128b(tile + k * (TB ? 2048 : 32) + FIRST * 2,
                                             TB ? 8192 : 16, 1024);
    if constexpr (REGISTERS) {
      const uint32_t part[4] = {x[k * 4], x[k * 4 + 1], x[k * 4 + 2], x[k * 4 + 3]};
      if constexpr (FP8) Wgmma<N>::template registers8<FP8>(acc, part, b, k > 0);
      else Wgmma<N>::template registers<TB>(acc, part, b, k > 0);
    } else {
      const uint64_t a = wgmma_descriptor_128b(smem + k * (TA ? 2048 : 32), 16, 1024);
      if constexpr (FP8) Wgmma<N>::template shared8<FP8>(acc, a, b, k > 0);
      else Wgmma<N>::template shared<TA, TB>(acc, a, b, k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>(acc);
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + (i >> 1 & 1) * 8;
    d[row * N + i / 4 * 8 + threadIdx.x % 4 * 2 + (i & 1)] = acc[i];
  }
}
#endif
