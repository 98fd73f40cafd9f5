// Functions that kernels call: from the emulated ptx.cuh and hopper.cuh, and from translated PTX.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emu {
#define WHERE const char *file, int line
struct Where {
  const char *file;
  int line;
};
// collectives.cpp
void barrier(int id, int count, bool wait, WHERE);
int barrier_count(bool pred, WHERE);  // barrier 0, all threads
int barrier_count(int id, int count, bool pred, WHERE);
void syncwarp(unsigned mask, WHERE);
uint64_t shfl(unsigned mask, uint64_t v, int src, WHERE);
unsigned ballot(unsigned mask, bool pred, WHERE);
unsigned active_lanes();
[[noreturn]] void trap(const char *what, WHERE);
// memory.cpp
void atomic_enter(void *p, unsigned size, WHERE);
void threadfence(bool device);
uint32_t shared_address(const void *p, WHERE);
char *from_shared(uint32_t address, size_t n, Where at, int rank);
// hooks.cpp: called for every access of a checked build
enum Access { Read, Write, Atomic, Peek };  // Peek: a volatile read; it may meet atomics
void access(char *p, size_t n, Access a, Where at);
void access_volatile(char *p, size_t n, bool write, Where at);
void check_alignment(const void *p, size_t n, Where at, const char *type = nullptr);
// tensor_core.cpp, narrow.cpp
enum { BF16, F16, TF32, S8, E4M3, E5M2 };
void mma(int type, void *d, const uint32_t *a, const uint32_t *b, const void *c, WHERE);
void ldmatrix(int n, bool trans, uint32_t *r, const void *row, WHERE);
uint32_t pack_fp8(int type, float low, float high);
uint32_t unpack_fp8(int type, uint32_t pair);
void wgmma_fence(WHERE);
void wgmma_commit();
void wgmma_wait(int pending, WHERE);
void wgmma(int n, int type, float *d, const uint32_t *registers, uint64_t a, uint64_t b,
           int scale_d, bool transpose_a, bool transpose_b, WHERE);
// scheduler.cpp
void polled(WHERE);
// async_copy.cpp
void cp_async(void *dst, const void *src, int bytes, int src_bytes, WHERE);
void cp_async_commit();
void cp_async_wait(int pending, WHERE);
void mbarrier_init(void *bar, int count, WHERE);
void mbarrier_init_fence();
void mbarrier_arrive(void *bar, int expect_tx, WHERE);
void mbarrier_complete(void *bar, int bytes, WHERE);
void mbarrier_wait(void *bar, int parity, WHERE);
void tma_load(int rank, void *dst, const void *map, void *bar, const int *coord, WHERE);
void tma_load_multicast(int rank, void *dst, const void *map, void *bar, const int *coord,
                        unsigned ranks, WHERE);
void tma_store(int rank, const void *map, const void *src, const int *coord, bool add, WHERE);
void tma_store_commit();
void tma_store_wait(int pending, bool read);
void bulk_load(void *dst, const void *src, int bytes, void *bar, WHERE);
void bulk_store(void *dst, const void *src, int bytes, WHERE);
void bulk_add(float *dst, const void *src, int bytes, WHERE);
void store_async(void *dst, uint32_t value, void *bar, int rank, WHERE);
void fence_proxy_async();
// cluster.cpp
void cluster_arrive(bool relaxed, WHERE);
void cluster_wait(WHERE);
int cluster_rank();
int cluster_size();
void *cluster_map(const void *p, int rank, WHERE);
#undef WHERE
}  // namespace emu
