// Emulates common/hopper.cuh: the same functions, without inline assembly.
#pragma once
#include <common/ptx.cuh>
struct alignas(64) TensorMap { uint64_t opaque[16]; };

inline void mbarrier_init(uint64_t *bar, int count, EMU_PLACE) {
  emu::mbarrier_init(bar, count, EMU_HERE);
}
inline void mbarrier_init_fence() { emu::mbarrier_init_fence(); }
inline void mbarrier_arrive(uint64_t *bar, EMU_PLACE) { emu::mbarrier_arrive(bar, 0, EMU_HERE); }
inline void mbarrier_arrive_expect_tx(uint64_t *bar, int bytes, EMU_PLACE) {
  emu::mbarrier_arrive(bar, bytes, EMU_HERE);
}
inline void mbarrier_wait(uint64_t *bar, int parity, EMU_PLACE) {
  emu::mbarrier_wait(bar, parity, EMU_HERE);
}
inline void tma_prefetch_descriptor(const TensorMap *) {}
inline void tma_load_2d(void *dst, const TensorMap *m, uint64_t *bar, int c0, int c1, EMU_PLACE) {
  int c[] = {c0, c1};
  emu::tma_load(2, dst, m, bar, c, EMU_HERE);
}
inline void tma_load_3d(void *dst, const TensorMap *m, uint64_t *bar, int c0, int c1, int c2,
                        EMU_PLACE) {
  int c[] = {c0, c1, c2};
  emu::tma_load(3, dst, m, bar, c, EMU_HERE);
}
inline void tma_load_4d(void *dst, const TensorMap *m, uint64_t *bar, int c0, int c1, int c2,
                        int c3, EMU_PLACE) {
  int c[] = {c0, c1, c2, c3};
  emu::tma_load(4, dst, m, bar, c, EMU_HERE);
}
inline void tma_store_2d(const TensorMap *m, const void *src, int c0, int c1, EMU_PLACE) {
  int c[] = {c0, c1};
  emu::tma_store(2, m, src, c, false, EMU_HERE);
}
inline void tma_reduce_add_2d(const TensorMap *m, const void *src, int c0, int c1, EMU_PLACE) {
  int c[] = {c0, c1};
  emu::tma_store(2, m, src, c, true, EMU_HERE);
}
inline void bulk_load(void *dst, const void *src, int bytes, uint64_t *bar, EMU_PLACE) {
  emu::bulk_load(dst, src, bytes, bar, EMU_HERE);
}
inline void bulk_store(void *dst, const void *src, int bytes, EMU_PLACE) {
  emu::bulk_store(dst, src, bytes, EMU_HERE);
}
inline void bulk_add(float *dst, const void *src, int bytes, EMU_PLACE) {
  emu::bulk_add(dst, src, bytes, EMU_HERE);
}
inline void tma_store_commit() { emu::tma_store_commit(); }
template <int N> inline void tma_store_wait() { emu::tma_store_wait(N, false); }
template <int N> inline void tma_store_wait_read() { emu::tma_store_wait(N, true); }
inline void fence_proxy_async() { emu::fence_proxy_async(); }
inline void fence_proxy_async_global() { emu::fence_proxy_async(); }

inline uint32_t cluster_rank() { return emu::cluster_rank(); }
inline uint32_t cluster_size() { return emu::cluster_size(); }
inline void cluster_arrive(EMU_PLACE) { emu::cluster_arrive(false, EMU_HERE); }
inline void cluster_arrive_relaxed(EMU_PLACE) { emu::cluster_arrive(true, EMU_HERE); }
inline void cluster_wait(EMU_PLACE) { emu::cluster_wait(EMU_HERE); }
inline void *cluster_map(const void *p, int rank, EMU_PLACE) {
  return emu::cluster_map(p, rank, EMU_HERE);
}
// Kernels do not use the address itself, which differs from a GPU's for other blocks.
inline uint32_t cluster_smem_u32(const void *p, int rank, EMU_PLACE) {
  emu::cluster_map(p, rank, EMU_HERE);
  return uint32_t(rank + 1) << 24 | smem_u32(p, EMU_HERE);
}
inline void mbarrier_arrive_cluster(uint64_t *bar, int rank, EMU_PLACE) {
  emu::mbarrier_arrive(emu::cluster_map(bar, rank, EMU_HERE), 0, EMU_HERE);
}
inline void mbarrier_wait_cluster(uint64_t *bar, int parity, EMU_PLACE) {
  emu::mbarrier_wait(bar, parity, EMU_HERE);
}
inline void store_async_b32(void *dst, uint32_t value, uint64_t *bar, int rank, EMU_PLACE) {
  emu::store_async(dst, value, bar, rank, EMU_HERE);
}
inline void tma_load_multicast_2d(void *dst, const TensorMap *m, uint64_t *bar, int c0, int c1,
                                  int ranks, EMU_PLACE) {
  int c[] = {c0, c1};
  emu::tma_load_multicast(2, dst, m, bar, c, ranks, EMU_HERE);
}

template <int R> inline void setmaxnreg_inc() {}
template <int R> inline void setmaxnreg_dec() {}
template <int R> inline void wgmma_name(float (&)[R]) {}
template <int R> inline void wgmma_name(uint32_t (&)[R][4]) {}
template <int R> inline void wgmma_fence(float (&d)[R], EMU_PLACE) {
  emu::wgmma_fence(EMU_HERE);
}
inline void wgmma_commit() { emu::wgmma_commit(); }
template <int N, int R> inline void wgmma_wait(float (&d)[R], EMU_PLACE) {
  emu::wgmma_wait(N, EMU_HERE);
}
#define WGMMA_OF(TYPE, CODE, N)                                                                   \
  template <int TA, int TB>                                                                       \
  inline void wgmma_m64n##N##k16_##TYPE(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d,   \
                                        EMU_PLACE) {                                              \
    emu::wgmma(N, emu::CODE, d, nullptr, a, b, scale_d, TA, TB, EMU_HERE);                        \
  }                                                                                               \
  template <int TB>                                                                               \
  inline void wgmma_m64n##N##k16_##TYPE##_registers(float (&d)[N / 2], const uint32_t (&a)[4],    \
                                                    uint64_t b, int scale_d, EMU_PLACE) {         \
    emu::wgmma(N, emu::CODE, d, a, 0, b, scale_d, false, TB, EMU_HERE);                           \
  }
#define WGMMA8_OF(TYPE, CODE, N)                                                                  \
  inline void wgmma_m64n##N##k32_##TYPE(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d,   \
                                        EMU_PLACE) {                                              \
    emu::wgmma(N, emu::CODE, d, nullptr, a, b, scale_d, false, false, EMU_HERE);                  \
  }                                                                                               \
  inline void wgmma_m64n##N##k32_##TYPE##_registers(float (&d)[N / 2], const uint32_t (&a)[4],    \
                                                    uint64_t b, int scale_d, EMU_PLACE) {         \
    emu::wgmma(N, emu::CODE, d, a, 0, b, scale_d, false, false, EMU_HERE);                        \
  }
#define WGMMA(N)                                  \
  WGMMA_OF(bf16, BF16, N) WGMMA_OF(f16, F16, N)   \
  WGMMA8_OF(e4m3, E4M3, N) WGMMA8_OF(e5m2, E5M2, N)
WGMMA(32) WGMMA(64) WGMMA(96) WGMMA(128) WGMMA(160) WGMMA(192) WGMMA(224) WGMMA(256)
