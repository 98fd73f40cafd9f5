// The CPU's common/ptx.cuh: the same functions, emulated.  It comes first on the include path.
#pragma once
struct alignas(64) TensorMap { uint64_t opaque[16]; };

namespace emu {
enum { BF16, F16 };
#define EMU_WHERE const char *file, int line
uint32_t shared_address(const void *p);
void mma16816(int type, float *d, const uint32_t *a, const uint32_t *b, const float *c, EMU_WHERE);
void ldmatrix(int n, bool trans, uint32_t *r, const void *row, EMU_WHERE);
void cp_async(void *dst, const void *src, int bytes, int src_bytes, EMU_WHERE);
void cp_async_commit();
void cp_async_wait(int pending, EMU_WHERE);
void mbarrier_init(void *bar, int count, EMU_WHERE);
void mbarrier_init_fence();
void mbarrier_arrive(void *bar, int expect_tx, EMU_WHERE);
void mbarrier_wait(void *bar, int parity, EMU_WHERE);
void tma_load(int rank, void *dst, const void *map, void *bar, const int *coord, EMU_WHERE);
void tma_store(int rank, const void *map, const void *src, const int *coord, EMU_WHERE);
void tma_store_commit();
void tma_store_wait(int pending);
void fence_proxy_async();
void wgmma_fence(EMU_WHERE);
void wgmma_commit();
void wgmma_wait(int pending, EMU_WHERE);
void wgmma(int n, int type, float *d, uint64_t a, uint64_t b, int scale_d, bool transpose_a,
           bool transpose_b, EMU_WHERE);
}  // namespace emu

inline uint32_t smem_u32(const void *p) { return emu::shared_address(p); }
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const float (&c)[4], EMU_PLACE) {
  emu::mma16816(emu::BF16, d, a, b, c, EMU_HERE);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             const float (&c)[4], EMU_PLACE) {
  emu::mma16816(emu::F16, d, a, b, c, EMU_HERE);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void *row, EMU_PLACE) {
  emu::ldmatrix(4, false, r, row, EMU_HERE);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row, EMU_PLACE) {
  emu::ldmatrix(4, true, r, row, EMU_HERE);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void *row, EMU_PLACE) {
  emu::ldmatrix(2, false, r, row, EMU_HERE);
}
inline void cp_async_16(void *dst, const void *src, bool valid = true, EMU_PLACE) {
  emu::cp_async(dst, src, 16, valid ? 16 : 0, EMU_HERE);
}
inline void cp_async_commit() { emu::cp_async_commit(); }
template <int N> inline void cp_async_wait(EMU_PLACE) { emu::cp_async_wait(N, EMU_HERE); }
inline void named_barrier_sync(int id, int threads, EMU_PLACE) {
  emu::barrier(id, threads, true, EMU_HERE);
}
inline void named_barrier_arrive(int id, int threads, EMU_PLACE) {
  emu::barrier(id, threads, false, EMU_HERE);
}

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
  emu::tma_store(2, m, src, c, EMU_HERE);
}
inline void tma_store_commit() { emu::tma_store_commit(); }
template <int N> inline void tma_store_wait() { emu::tma_store_wait(N); }
inline void fence_proxy_async() { emu::fence_proxy_async(); }

template <int R> inline void setmaxnreg_inc() {}
template <int R> inline void setmaxnreg_dec() {}
inline void wgmma_fence(EMU_PLACE) { emu::wgmma_fence(EMU_HERE); }
inline void wgmma_commit() { emu::wgmma_commit(); }
template <int N> inline void wgmma_wait(EMU_PLACE) { emu::wgmma_wait(N, EMU_HERE); }
template <int TA, int TB>
inline void wgmma_m64n64k16_bf16(float (&d)[32], uint64_t a, uint64_t b, int scale_d, EMU_PLACE) {
  emu::wgmma(64, emu::BF16, d, a, b, scale_d, TA, TB, EMU_HERE);
}
template <int TA, int TB>
inline void wgmma_m64n128k16_bf16(float (&d)[64], uint64_t a, uint64_t b, int scale_d, EMU_PLACE) {
  emu::wgmma(128, emu::BF16, d, a, b, scale_d, TA, TB, EMU_HERE);
}
