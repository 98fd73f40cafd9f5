// Functions that translated PTX calls, besides the machine and the language of tests/machines/cuda_on_cpu.
//
// Registers are unsigned integers of their width, predicates bool; AS(T, x) reinterprets bits, for
// example of a register as a float.  A shared address is an offset in the block's shared memory,
// with the rank plus 1 of another block in its top byte; all other addresses are the CPU's.
#pragma once
#include "cuda_on_cpu.hpp"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

#include <limits>
#include <type_traits>

using namespace emu;
using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t;
using s8 = int8_t; using s16 = int16_t; using s32 = int32_t; using s64 = int64_t;
using f16 = __half; using bf16 = __nv_bfloat16; using f32 = float; using f64 = double;
using u128 = unsigned __int128;
#define AS(T, x) __builtin_bit_cast(T, x)  // a template would take g++ longer, thousands of times
#define AT(w) (w).file, (w).line
#define WHERE const char *file, int line
#define OWN static __attribute__((noinline))  // one copy in a unit, for all calls
template <class T> using Raw = typename std::make_unsigned<T>::type;
template <class T> constexpr u32 width = sizeof(T) * 8;

// ---- addresses and accesses --------------------------------------------------------------------
inline int rank_of(u32 a) { return a >> 24 ? int(a >> 24) - 1 : cluster_rank(); }
OWN char *near(u64 a, size_t n, WHERE) {  // shared::cta, shared::cluster
  return from_shared(u32(a) & 0xffffff, n, {file, line}, rank_of(u32(a)));
}
inline char *own(u32 a, WHERE) { return near(a & 0xffffff, 4, file, line); }
OWN u32 map_shared(u32 a, int rank, WHERE) {
  cluster_map(near(a, 1, file, line), rank, file, line);
  return u32(rank + 1) << 24 | a;
}
OWN int at_most(int n, int copied, WHERE) {
  if (n < 0 || n > copied) trap("cp.async reads more than it copies", file, line);
  return n;
}
OWN char *accessed(char *p, size_t n, bool write, bool strong, WHERE) {
  check_alignment(p, n, {file, line});
  strong ? access_volatile(p, n, write, {file, line})
         : access(p, n, write ? Write : Read, {file, line});
  return p;
}
template <class T> inline T get(const char *p, int i = 0) {
  T v;
  __builtin_memcpy(&v, p + i * sizeof(T), sizeof v);
  return v;
}
template <class T> inline void set(char *p, int i, T v) {
  __builtin_memcpy(p + i * sizeof(T), &v, sizeof v);
}
// ---- integers ----------------------------------------------------------------------------------
template <class T> inline T shl(T a, u32 n) { return n >= width<T> ? T(0) : T(a << n); }
template <class T> inline T shr(T a, u32 n) {
  return n < width<T> ? T(a >> n) : a < 0 ? T(-1) : T(0);
}
template <class T> inline T divide(T a, T b, WHERE) {
  if (!b) trap("integer division by zero", file, line);
  return T(-1) < 0 && b == T(-1) ? T(T(0) - a) : T(a / b);  // the CPU traps at the lowest / -1
}
template <class T> inline T low(T a, T b) { return T(Raw<T>(a) * 1ull * Raw<T>(b)); }
template <class T> inline T high(T a, T b) {
  return T((std::is_signed<T>::value ? u128((__int128)a * b) : u128(a) * b) >> width<T>);
}
template <int sign, class T> inline T carried(T a, T b, bool takes, bool in, bool &out) {
  u128 wide = u128(Raw<T>(a)) + sign * (u128(Raw<T>(b)) + (takes & in));  // -1: a borrow
  out = wide >> width<T> & 1;
  return T(wide);
}
template <class T> inline T bfi(T a, T b, u32 at, u32 n) {
  T mask = (n &= 255) >= width<T> ? T(~T(0)) : T((T(1) << n) - 1);
  return T((b & ~shl(mask, at & 255)) | shl(T(a & mask), at & 255));
}
template <class T> inline u32 leading_zeros(T a) {
  return a ? __builtin_clzll(a) - (64 - width<T>) : width<T>;
}
template <class T> inline T brev(T a) {
  T r = 0;
  for (u32 i = 0; i < width<T>; i++) r = r << 1 | (a >> i & 1);
  return r;
}
inline u32 dp2a(u32 a, u32 b, u32 c) { return c + u16(a) * u8(b) + (a >> 16) * u8(b >> 8); }
template <class D, class T> inline D clamped(T x) {  // x: a whole number of any type
  using Limits = std::numeric_limits<D>;
  const long double exact = x, least = Limits::min(), most = Limits::max();  // exact for 64 bits
  return x != x ? 0 : exact > most ? Limits::max() : exact < least ? Limits::min() : D(x);
}

// ---- floats: a launch sets the CPU to flush denormals and to round to nearest -------------------
enum : unsigned { NEAREST = 0x1f80, DOWN = 0x3f80, UP = 0x5f80, TO_ZERO = 0x7f80 };
enum : unsigned { DENORMALS = 0, FLUSH = 0x8040 };
constexpr int e4m3x2 = E4M3, e5m2x2 = E5M2;
template <class T> inline T hidden(T x) {  // the compiler must not move the computation past this
  asm volatile("" : "+m"(x));
  return x;
}
template <unsigned control, class F> inline auto under(F f) {
  unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(control);
  auto r = hidden(f());
  __builtin_ia32_ldmxcsr(before);
  return r;
}
template <class T> inline T flushed(T x) { return x; }
template <> inline f32 flushed(f32 x) {
  return AS(u32, x) & 0x7f800000 ? x : AS(f32, AS(u32, x) & 0x80000000);
}
// An approximation, with JITTER times the error that PTX documents, up or down by a hash of its bits;
// the values that are documented to be exact are 1, zeros and infinities.
inline f32 off(f32 r, [[maybe_unused]] double error) {
#ifdef JITTER
    if (r != 1) r = f32(r * (1 + (AS(u32, r) * 0x9e3779b1u >> 31 ? error : -error) * JITTER));
#endif
    return r;
}
template <class F> inline u64 by_halves(F f, u64 a, u64 b, u64 c = 0) {
  return f(a, b, c) | u64(f(a >> 32, b >> 32, c >> 32)) << 32;
}

// ---- accumulators of wgmma: registers hold a name until the wait --------------------------------
constexpr u32 kName = 0xffa00000;  // a NaN of no arithmetic; 5 bits of accumulator, 7 of element
inline bool is_name(u32 v) { return (v & 0xfffff000) == kName; }
OWN u32 arrived(u32 v, WHERE) {
  if (is_name(v)) trap("accumulators of a wgmma before its wgmma.wait_group", file, line);
  return v;
}
struct Products {
  f32 value[32][128];
  u32 taken = 0;  // a bit for each accumulator
  template <size_t N> f32 *open(u32 *const (&d)[N], WHERE) {
    bool more = is_name(*d[0]);
    if (!more && !~taken) trap("more wgmma in flight than the translator holds", file, line);
    u32 sum = more ? *d[0] >> 7 & 31 : __builtin_ctz(~taken);
    for (u32 i = 0; i < N; i++) {
      u32 name = kName | sum << 7 | i;
      if (more ? *d[i] != name : is_name(*d[i]))
        trap("accumulators of a wgmma that is in flight, among others", file, line);
      if (!more) value[sum][i] = AS(f32, *d[i]);
      *d[i] = name;
    }
    taken |= 1u << sum;
    return value[sum];
  }
  template <size_t N> void land(u32 *const (&sums)[N]) {  // accumulators that are not poison: done
    for (u32 *r : sums)
      if (is_name(*r) && AS(u32, value[*r >> 7 & 31][0]) != ~0u) *r = AS(u32, value[0][*r & 0xfff]);
    for (int s = 0; s < 32; s++)
      if (AS(u32, value[s][0]) != ~0u) taken &= ~(1u << s);
  }
};
