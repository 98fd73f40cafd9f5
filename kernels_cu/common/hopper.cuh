// PTX instructions that need sm_90: mbarrier, TMA, clusters, and the warpgroup products of sm_90a;
// see ptx.cuh.
#pragma once
#include <common/ptx.cuh>
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// ---- sm_90: mbarrier, TMA ---------------------------------------------------------------------
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
DEVICE void mbarrier_init(uint64_t *bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               ::"r"(smem_u32(bar)), "r"(count)
               : "memory");
}
DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
DEVICE void mbarrier_arrive(uint64_t *bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_u32(bar)) : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(uint64_t *bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               ::"r"(smem_u32(bar)), "r"(bytes)
               : "memory");
}
DEVICE void mbarrier_wait(uint64_t *bar, int parity) {
  asm volatile("{.reg .pred p;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
               "@!p bra again;}"
               ::"r"(smem_u32(bar)), "r"(parity)
               : "memory");
}
DEVICE void tma_prefetch_descriptor(const TensorMap *m) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory");
}
DEVICE void tma_load_2d(void *dst, const TensorMap *m, uint64_t *bar, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4}], [%2];"
               ::"r"(smem_u32(dst)), "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1)
               : "memory");
}
DEVICE void tma_load_3d(void *dst, const TensorMap *m, uint64_t *bar, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(smem_u32(dst)), "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
DEVICE void tma_load_4d(void *dst, const TensorMap *m, uint64_t *bar, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5, %6}], [%2];"
               ::"r"(smem_u32(dst)), "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
DEVICE void tma_store_2d(const TensorMap *m, const void *src, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
               ::"l"(m), "r"(smem_u32(src)), "r"(c0), "r"(c1)
               : "memory");
}
DEVICE void tma_reduce_add_2d(const TensorMap *m, const void *src, int c0, int c1) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group "
               "[%0, {%2, %3}], [%1];"
               ::"l"(m), "r"(smem_u32(src)), "r"(c0), "r"(c1)
               : "memory");
}
// Copy contiguous bytes without a tensor map; both addresses and the size are multiples of 16.
DEVICE void bulk_load(void *dst, const void *src, int bytes, uint64_t *bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1], %2, [%3];"
               ::"r"(smem_u32(dst)), "l"(src), "r"(bytes), "r"(smem_u32(bar))
               : "memory");
}
DEVICE void bulk_store(void *dst, const void *src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               ::"l"(dst), "r"(smem_u32(src)), "r"(bytes)
               : "memory");
}
// Add contiguous floats to those in global memory; their number is a multiple of four.
DEVICE void bulk_add(float *dst, const void *src, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(dst), "r"(smem_u32(src)), "r"(bytes)
               : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEVICE void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Wait until the sources of the stores have been read and may be overwritten; the data may not have
// arrived at the destination yet.
template <int N> DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Order an acquire of global memory before asynchronous copies to it.
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- sm_90: clusters --------------------------------------------------------------------------
DEVICE uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE uint32_t cluster_size() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
// The same without making earlier writes visible to those who wait: it waits for no store and
// flushes no cache.  What fence.mbarrier_init has published is visible all the same.
DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// The address in the block of `rank` that corresponds to a pointer to this block's shared memory.
DEVICE void *cluster_map(const void *p, int rank) {
  void *r;
  asm("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"(p), "r"(rank));
  return r;
}
DEVICE uint32_t cluster_smem_u32(const void *p, int rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem_u32(p)), "r"(rank));
  return r;
}
DEVICE void mbarrier_arrive_cluster(uint64_t *bar, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
               ::"r"(cluster_smem_u32(bar, rank))
               : "memory");
}
DEVICE void mbarrier_wait_cluster(uint64_t *bar, int parity) {
  asm volatile("{.reg .pred p;\n"
               "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
               "@!p bra again;}"
               ::"r"(smem_u32(bar)), "r"(parity)
               : "memory");
}
// Store four bytes in the block of `rank`; its mbarrier counts them when they arrive.  The compiler
// of CUDA 12.0 lacks st.async: there a plain store, a fence and a complete_tx take its place.
DEVICE void store_async_b32(void *dst, uint32_t value, uint64_t *bar, int rank) {
#if __CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ == 0
  asm volatile("st.shared::cluster.u32 [%0], %1;\n"
               "fence.acq_rel.cluster;\n"
               "mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%2], 4;"
               ::"r"(cluster_smem_u32(dst, rank)), "r"(value), "r"(cluster_smem_u32(bar, rank))
               : "memory");
#else
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(cluster_smem_u32(dst, rank)), "r"(value), "r"(cluster_smem_u32(bar, rank))
               : "memory");
#endif
}
// Load the same tile into every block whose bit in `ranks` is set; each has its own mbarrier.
DEVICE void tma_load_multicast_2d(void *dst, const TensorMap *m, uint64_t *bar, int c0, int c1,
                               int ranks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;"
               ::"r"(smem_u32(dst)), "l"(m), "r"(smem_u32(bar)), "r"(c0), "r"(c1),
                 "h"((unsigned short)ranks)
               : "memory");
}
#endif

// ---- sm_90a: warpgroup products, register budgets ---------------------------------------------
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int R> DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
}
template <int R> DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
}
// wgmma_fence and wgmma_wait both name the accumulators, which only the products themselves may
// touch between the two.  To the compiler an accumulator is ready as soon as its product has been
// issued, so instructions that compute or use it could move past an asm that does not name it.
#define WGMMA_NAME(d, count) \
  _Pragma("unroll") for (int i = 0; i < count; i++) asm volatile("" : "+f"(d[i])::"memory")
// Values named here are computed before what follows, such as the wait for other products.
template <int R> DEVICE void wgmma_name(float (&d)[R]) { WGMMA_NAME(d, R); }
template <int R> DEVICE void wgmma_name(uint32_t (&a)[R][4]) {
  _Pragma("unroll") for (int i = 0; i < R; i++) asm volatile(
      "" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}
template <int R> DEVICE void wgmma_fence(float (&d)[R]) {
  WGMMA_NAME(d, R);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N, int R> DEVICE void wgmma_wait(float (&d)[R]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  WGMMA_NAME(d, R);
}

// d += A * B, 64 rows by N columns.  A is in shared memory or, with `_registers`, in four registers
// of each lane in the layout of mma_m16n8, 16 rows for each warp; TA, TB: the operand is MN-major.
#define WGMMA_OUT8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_OUT16(i) WGMMA_OUT8(i), WGMMA_OUT8(i + 8)
#define WGMMA_OUT_16 WGMMA_OUT16(0)
#define WGMMA_OUT_32 WGMMA_OUT16(0), WGMMA_OUT16(16)
#define WGMMA_OUT_48 WGMMA_OUT_32, WGMMA_OUT16(32)
#define WGMMA_OUT_64 WGMMA_OUT_48, WGMMA_OUT16(48)
#define WGMMA_OUT_80 WGMMA_OUT_64, WGMMA_OUT16(64)
#define WGMMA_OUT_96 WGMMA_OUT_80, WGMMA_OUT16(80)
#define WGMMA_OUT_112 WGMMA_OUT_96, WGMMA_OUT16(96)
#define WGMMA_OUT_128 WGMMA_OUT_112, WGMMA_OUT16(112)
#define WGMMA_D_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D_32 WGMMA_D_16 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D_48 WGMMA_D_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D_64 WGMMA_D_48 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D_80 WGMMA_D_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_D_96 WGMMA_D_80 \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D_112 WGMMA_D_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_D_128 WGMMA_D_112 \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// I0 to I6 are the numbers of the operands that follow the R results.
#define WGMMA_OF(TYPE, N, R, I0, I1, I2, I3, I4, I5, I6)                                           \
  template <int TA, int TB>                                                                        \
  DEVICE void wgmma_m64n##N##k16_##TYPE(float (&d)[R], uint64_t a, uint64_t b, int scale_d) {         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0;\n"                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE                 \
                 " {" WGMMA_D_##R "}, %" #I0 ", %" #I1 ", p, 1, 1, %" #I3 ", %" #I4 ";}"           \
                 : WGMMA_OUT_##R                                                                   \
                 : "l"(a), "l"(b), "r"(scale_d), "n"(TA), "n"(TB));                                \
  }                                                                                                \
  template <int TB>                                                                                \
  DEVICE void wgmma_m64n##N##k16_##TYPE##_registers(float (&d)[R], const uint32_t (&a)[4],            \
                                                 uint64_t b, int scale_d) {                        \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I5 ", 0;\n"                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE                 \
                 " {" WGMMA_D_##R "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4             \
                 ", p, 1, 1, %" #I6 ";}"                                                           \
                 : WGMMA_OUT_##R                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(TB));     \
  }
// Operands of 8-bit floats cannot be MN-major.
#define WGMMA8_OF(TYPE, N, R, I0, I1, I2, I3, I4, I5, I6)                                          \
  DEVICE void wgmma_m64n##N##k32_##TYPE(float (&d)[R], uint64_t a, uint64_t b, int scale_d) {         \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0;\n"                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." #TYPE "." #TYPE                 \
                 " {" WGMMA_D_##R "}, %" #I0 ", %" #I1 ", p, 1, 1;}"                               \
                 : WGMMA_OUT_##R                                                                   \
                 : "l"(a), "l"(b), "r"(scale_d));                                                  \
  }                                                                                                \
  DEVICE void wgmma_m64n##N##k32_##TYPE##_registers(float (&d)[R], const uint32_t (&a)[4],            \
                                                 uint64_t b, int scale_d) {                        \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I5 ", 0;\n"                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." #TYPE "." #TYPE                 \
                 " {" WGMMA_D_##R "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4             \
                 ", p, 1, 1;}"                                                                     \
                 : WGMMA_OUT_##R                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d));              \
  }
#define WGMMA(...)                                            \
  WGMMA_OF(bf16, __VA_ARGS__) WGMMA_OF(f16, __VA_ARGS__)      \
  WGMMA8_OF(e4m3, __VA_ARGS__) WGMMA8_OF(e5m2, __VA_ARGS__)
WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)
#endif
