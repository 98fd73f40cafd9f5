// What translated PTX calls: addresses, accesses, arithmetic.  The machine is tests/cuda_on_cpu's.
//
// Registers are unsigned integers of their width, predicates bool; as<T>() reads one as a type of an
// instruction, put() writes it.  A shared address is one of the block's window, from 0 on, with the
// rank plus 1 of another block in its top byte; all other addresses are those of the CPU.
#pragma once
#include "machine.hpp"

#include <cmath>
#include <xmmintrin.h>

using namespace emu;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

namespace emu {  // what the files of the machine give, but for machine.hpp
#define WHERE const char *, int
void barrier(int, int, bool, WHERE);
int barrier_count(bool, WHERE);
void syncwarp(unsigned, WHERE);
uint64_t shfl(unsigned, uint64_t, int, WHERE);
unsigned ballot(unsigned, bool, WHERE);
void atomic_enter(void *, unsigned, WHERE);
void threadfence(bool);
unsigned active_lanes();
void mma(int, void *, const uint32_t *, const uint32_t *, const void *, WHERE);
uint32_t pack_fp8(int, float, float);
uint32_t unpack_fp8(int, uint32_t);
void ldmatrix(int, bool, uint32_t *, const void *, WHERE);
void cp_async(void *, const void *, int, int, WHERE);
void cp_async_commit();
void cp_async_wait(int, WHERE);
void mbarrier_init(void *, int, WHERE);
void mbarrier_init_fence();
void mbarrier_arrive(void *, int, WHERE);
void mbarrier_complete(void *, int, WHERE);
void mbarrier_wait(void *, int, WHERE);
void tma_load_multicast(int, void *, const void *, void *, const int *, unsigned, WHERE);
void tma_store(int, const void *, const void *, const int *, bool, WHERE);
void bulk_load(void *, const void *, int, void *, WHERE);
void bulk_store(void *, const void *, int, WHERE);
void store_async(void *, uint32_t, void *, int, WHERE);
void cluster_arrive(bool, WHERE);
void cluster_wait(WHERE);
void tma_store_commit();
void tma_store_wait(int);
void fence_proxy_async();
void wgmma_fence(WHERE);
void wgmma_commit();
void wgmma_wait(int, WHERE);
void wgmma(int, int, float *, const uint32_t *, uint64_t, uint64_t, int, bool, bool, WHERE);
}  // namespace emu
#define AT(w) (w).file, (w).line

// ---- registers ---------------------------------------------------------------------------------
template <class T, class U> inline T as(U x) {
  T v;
  static_assert(sizeof(T) <= sizeof(U), "operand narrower than its type");
  memcpy(&v, &x, sizeof v);
  return v;
}
template <class U> inline void put(U &d, f32 v) { d = as<u32>(v); }
template <class U> inline void put(U &d, f64 v) { d = as<u64>(v); }
template <class U, class T> inline void put(U &d, T v) { d = U(v); }

// ---- addresses and accesses --------------------------------------------------------------------
inline int rank_of(u32 a) { return a >> 24 ? int(a >> 24) - 1 : M.cur->rank; }
inline char *near(u64 a, size_t n, const Where &at) {  // shared::cta, shared::cluster
  return from_shared(u32(a) & 0xffffff, n, at, rank_of(u32(a)));
}
inline int at_most(int n, int copied, const Where &at) {
  if (n < 0 || n > copied) fail("cp.async reads more than it copies", at);
  return n;
}
inline char *access(char *p, size_t n, Access a, const Where &at) {
  if (uintptr_t(p) % n)
    fail("address not aligned to " + std::to_string(n) + " bytes (" + describe(p) + ")", at);
  if (!M.checks || size_t(p - M.cur->stack) < kStack) return p;
  if (M.patience && ++M.accesses > M.patience)
    fail("watchdog: " + std::to_string(M.patience) + " accesses since the block last met", at);
  if (a == Peek && M.accesses % 64 == 0) yield(at);
  touch(p, n, a, at);
  return p;
}
inline char *access_volatile(char *p, size_t n, bool write, const Where &at) {
  access(p, n, write ? Atomic : Peek, at);
  if (M.checks) heard(p);
  if (M.checks && write) publish(p, true);
  return p;
}
template <class T> inline T get(const char *p, int i = 0) {
  T v;
  memcpy(&v, p + i * sizeof(T), sizeof v);
  return v;
}
template <class T> inline void set(char *p, int i, T v) { memcpy(p + i * sizeof(T), &v, sizeof v); }
template <class T, class F> inline T atomic(char *p, const Where &at, F f) {
  if (uintptr_t(p) % sizeof(T)) fail("atomic: address not aligned", at);
  atomic_enter(p, sizeof(T), AT(at));
  T old = get<T>(p);
  set<T>(p, 0, f(old));
  return old;
}

// ---- integers ----------------------------------------------------------------------------------
template <class T> inline T shl(T a, u32 n) { return n >= sizeof(T) * 8 ? T(0) : T(a << n); }
template <class T> inline T shr(T a, u32 n) {
  return n < sizeof(T) * 8 ? T(a >> n) : a < 0 ? T(-1) : T(0);
}
template <class T> inline T divide(T a, T b, const Where &at) {
  if (!b) fail("integer division by zero", at);
  return T(-1) < 0 && b == T(-1) ? T(T(0) - a) : T(a / b);  // the CPU traps at the lowest / -1
}
template <class T> inline T remainder(T a, T b, const Where &at) {
  if (!b) fail("integer division by zero", at);
  return T(-1) < 0 && b == T(-1) ? T(0) : T(a % b);
}
template <class T> inline T mul_hi(T a, T b) { return T((__int128)a * b >> 8 * sizeof(T)); }
template <> inline u64 mul_hi(u64 a, u64 b) { return u64((unsigned __int128)a * b >> 64); }
template <class T> inline T add_carry(T a, T b, bool in, bool *out) {
  constexpr int n = sizeof(T) * 8;
  auto wide = (unsigned __int128)as<typename std::make_unsigned<T>::type>(a) +
              as<typename std::make_unsigned<T>::type>(b) + in;
  if (out) *out = wide >> n & 1;
  return T(wide);
}
template <class T> inline T subtract_carry(T a, T b, bool in, bool *out) {  // the carry is a borrow
  using U = typename std::make_unsigned<T>::type;
  if (out) *out = (unsigned __int128)U(a) < (unsigned __int128)U(b) + in;
  return T(U(a) - U(b) - in);
}
template <class D, class T> inline D clamped(T x) {
  constexpr bool is_signed = D(-1) < D(0);
  constexpr int bits = sizeof(D) * 8 - is_signed;
  __int128 high = ((__int128)1 << bits) - 1, low = is_signed ? -high - 1 : 0, v = x;
  return D(v < low ? low : v > high ? high : v);
}
template <class T> inline T bfi(T a, T b, u32 at, u32 n) {
  at &= 255, n &= 255;
  T mask = n >= sizeof(T) * 8 ? T(~T(0)) : T((T(1) << n) - 1);
  return T((b & ~shl(mask, at)) | shl(T(a & mask), at));
}
template <class T> inline T bfe(T a, u32 at, u32 n) {
  at &= 255, n &= 255;
  if (!n) return 0;
  u32 bits = sizeof(T) * 8, top = at + n - 1 < bits ? at + n - 1 : bits - 1;
  T v = shr(a, at);
  if (n < bits) v = T(v & T((T(1) << n) - 1));
  if (T(-1) < T(0) && (a >> top & 1) && n < bits) v = T(v | T(~T(0) << n));
  return v;
}
inline u32 prmt(u32 a, u32 b, u32 s) {
  u64 both = u64(b) << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    u32 k = s >> 4 * i & 15, byte = u32(both >> 8 * (k & 7)) & 255;
    r |= (k & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return r;
}
inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 r = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return r;
}
template <bool left, bool clamp> inline u32 funnel(u32 a, u32 b, u32 n) {
  n = clamp ? (n > 32 ? 32 : n) : n & 31;
  u64 both = u64(b) << 32 | a;
  return u32(left ? both >> (32 - n) : both >> n);
}
inline u32 popc(u64 a) { return __builtin_popcountll(a); }
inline u32 clz(u32 a) { return a ? __builtin_clz(a) : 32; }
inline u32 clz(u64 a) { return a ? __builtin_clzll(a) : 64; }
template <class T> inline T brev(T a) {
  T r = 0;
  for (u32 i = 0; i < sizeof(T) * 8; i++) r |= (a >> i & 1) << (sizeof(T) * 8 - 1 - i);
  return r;
}
template <class T> inline u32 bfind(T x, bool shift) {
  u64 a = x < 0 ? ~u64(s64(x)) : u64(x);
  if (!a) return ~0u;
  return shift ? sizeof(T) * 8 - 64 + __builtin_clzll(a) : 63 - __builtin_clzll(a);
}
template <class A, class B> inline u32 dp4a(u32 a, u32 b, u32 c) {
  for (int i = 0; i < 32; i += 8) c += u32(A(a >> i)) * u32(B(b >> i));
  return c;
}

// ---- floats: a launch sets the CPU to flush denormals and to round to nearest -------------------
enum : unsigned { NEAREST = 0x1f80, DOWN = 0x3f80, UP = 0x5f80, TO_ZERO = 0x7f80 };
enum : unsigned { DENORMALS = 0, FLUSH = 0x8040, INEXACT = 0x20 };
template <class T> inline T hidden(T x) {  // from the compiler, which would compute it elsewhere
  asm volatile("" : "+m"(x));
  return x;
}
template <unsigned control, class F> inline auto under(F f, bool *inexact = nullptr) {
  unsigned before = _mm_getcsr();
  _mm_setcsr(control);
  auto r = hidden(f());
  if (inexact) *inexact = _mm_getcsr() & INEXACT;
  _mm_setcsr(before);
  return r;
}
inline f32 sat(f32 x) {  // by its bits, of which a comparison sees no denormal
  s32 bits = as<s32>(x);
  return x != x || bits < 0 ? 0 : bits < 0x3f800000 ? x : 1;
}
inline f32 flushed(f32 x) {
  return as<u32>(x) & 0x7f800000 ? x : as<f32>(as<u32>(x) & 0x80000000);
}
inline f32 fused(f32 x, f32 y, f32 z) { return std::fma(x, y, z); }
inline f64 fused(f64 x, f64 y, f64 z) { return std::fma(x, y, z); }
// To odd where it is inexact, so that rounding it again to 16 bits is as rounding once.
inline f32 fused_odd(f32 x, f32 y, f32 z) {
  bool inexact;
  f32 r = under<TO_ZERO | DENORMALS>(
      [&] { return std::fma(hidden(x), hidden(y), hidden(z)); }, &inexact);
  return inexact ? as<f32>(as<u32>(r) | 1) : r;
}
inline f32 div_approx(f32 x, f32 y) {  // of a divisor beyond 2^126 the reciprocal is 0
  return std::fabs(y) > 0x1p126f && !std::isinf(y) ? x * std::copysign(0.f, y) : x / y;
}
template <class T> inline T least(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T> inline T most(T a, T b) {
  if (a != a) return b;
  if (b != b) return a;
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}
template <class T> inline T either_nan(T a, T b, T r) { return a != a || b != b ? T(NAN) : r; }
template <class D, class T> inline D integer(T x) {  // of a whole number; NaN is 0
  constexpr bool is_signed = D(-1) < D(0);
  constexpr int bits = sizeof(D) * 8 - is_signed;
  if (x != x) return 0;
  if (x >= (T)std::ldexp(1.0, bits)) return D(((unsigned __int128)1 << bits) - 1);
  if (x < (is_signed ? (T)-std::ldexp(1.0, bits) : T(0))) return D((unsigned __int128)is_signed << bits);
  return D(x);
}
inline f32 from_bf16(u16 h) { return as<f32>(u32(h) << 16); }
inline u16 to_bf16(f32 x) {
  u32 u = as<u32>(x);
  return x != x ? 0x7fff : u16((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline f32 from_f16(u16 h) { return (f32)as<_Float16>(h); }
template <class T> inline u16 to_f16(T x) { return x != x ? 0x7fff : as<u16>((_Float16)x); }
template <class H, class W, class F> inline W by_halves(F f, W a, W b = 0, W c = 0) {
  constexpr int n = sizeof(H) * 8;
  return f(H(a), H(b), H(c)) | W(f(H(a >> n), H(b >> n), H(c >> n))) << n;
}

// ---- warps -------------------------------------------------------------------------------------
inline int lane_id() { return M.cur->index & 31; }
inline u32 shuffle(char mode, u32 v, u32 b, u32 c, u32 mask, bool *found, const Where &at) {
  int lane = lane_id(), seg = c >> 8 & 31, clamp = c & 31, by = b & 31;
  int last = (lane & seg) | (clamp & ~seg), first = lane & seg;
  int from = mode == 'u' ? lane - by : mode == 'd' ? lane + by : mode == 'b' ? lane ^ by
                                                               : first | (by & ~seg);
  bool in = mode == 'u' ? from >= last : from <= last;
  if (found) *found = in;
  return u32(shfl(mask, v, in ? from : lane, AT(at)));
}
template <class T, class F> inline T reduced(T v, u32 mask, const Where &at, F f) {
  T sum = 0;
  for (int l = 0, first = 1; l < 32; l++)
    if (mask >> l & 1) {
      T other = T(shfl(mask, u32(v), l, AT(at)));
      sum = first ? other : f(sum, other);
      first = 0;
    }
  return sum;
}

// ---- accumulators of wgmma in flight: registers hold a name until the wait ------------------------
constexpr u32 kName = 0xffa00000;  // a NaN that no arithmetic gives; then 5 bits of sum, 7 of place
inline bool is_name(u32 v) { return (v & 0xfffff000) == kName; }
inline u32 arrived(u32 v, const Where &at) {
  if (is_name(v)) fail("accumulators of a wgmma before its wgmma.wait_group", at);
  return v;
}
struct Products {
  static constexpr int kSums = 32;
  f32 value[kSums][128];
  bool taken[kSums] = {};
  template <size_t N> f32 *open(u32 *const (&d)[N], const Where &at) {
    int s = 0;
    if (is_name(*d[0])) {
      s = *d[0] >> 7 & 31;
    } else {
      while (s < kSums && taken[s]) s++;
      if (s == kSums) fail("more wgmma in flight than the translator holds", at);
      taken[s] = true;
      for (size_t i = 0; i < N; i++) value[s][i] = as<f32>(*d[i]);
    }
    for (size_t i = 0; i < N; i++)
      if (is_name(*d[i]) != is_name(*d[0]) || (is_name(*d[0]) && *d[i] != (*d[0] | i)))
        fail("accumulators of a wgmma that is in flight, among others", at);
    return value[s];
  }
  template <size_t N> void leave(u32 *const (&d)[N], const f32 *sum) {
    for (size_t i = 0; i < N; i++) *d[i] = kName | u32(sum - value[0]) | u32(i);
  }
  template <size_t N> void land(u32 *const (&sums)[N]) {  // what is no longer poison has come
    for (auto *r : sums)
      if (is_name(*r) && as<u32>(value[*r >> 7 & 31][0]) != ~0u) *r = as<u32>(value[0][*r & 0xfff]);
    for (int s = 0; s < kSums; s++) taken[s] &= as<u32>(value[s][0]) == ~0u;
  }
};
