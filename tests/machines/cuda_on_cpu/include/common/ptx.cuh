// Emulates common/ptx.cuh: the same functions, without inline assembly.  This folder comes before
// kernels_cu on the include path.
#pragma once

inline uint32_t smem_u32(const void *p, EMU_PLACE) { return emu::shared_address(p, EMU_HERE); }
inline uint32_t opaque(uint32_t x) { return x; }
inline void mma_m16n8k16_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const float (&c)[4], EMU_PLACE) {
  emu::mma(emu::BF16, d, a, b, c, EMU_HERE);
}
inline void mma_m16n8k16_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             const float (&c)[4], EMU_PLACE) {
  emu::mma(emu::F16, d, a, b, c, EMU_HERE);
}
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             const float (&c)[4], EMU_PLACE) {
  emu::mma(emu::TF32, d, a, b, c, EMU_HERE);
}
inline void mma_m16n8k32_s8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                            const int (&c)[4], EMU_PLACE) {
  emu::mma(emu::S8, d, a, b, c, EMU_HERE);
}
inline uint32_t round_tf32(float x) { return (__float_as_uint(x) + 0x1000) & ~0x1fffu; }
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
inline int load_acquire(const int *p, EMU_PLACE) {
  emu::polled(EMU_HERE);
  const int value = *(const volatile int *)p;
  __threadfence();
  return value;
}
inline void store_release(int *p, int value) {
  __threadfence();
  *(volatile int *)p = value;
}

inline void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const float (&c)[4], EMU_PLACE) {
  emu::mma(emu::E4M3, d, a, b, c, EMU_HERE);
}
inline void mma_m16n8k32_e5m2(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              const float (&c)[4], EMU_PLACE) {
  emu::mma(emu::E5M2, d, a, b, c, EMU_HERE);
}
inline uint32_t pack_e4m3(float low, float high) { return emu::pack_fp8(emu::E4M3, low, high); }
inline uint32_t pack_e5m2(float low, float high) { return emu::pack_fp8(emu::E5M2, low, high); }
inline uint32_t unpack_e4m3(uint32_t pair) { return emu::unpack_fp8(emu::E4M3, pair); }
inline uint32_t unpack_e5m2(uint32_t pair) { return emu::unpack_fp8(emu::E5M2, pair); }
