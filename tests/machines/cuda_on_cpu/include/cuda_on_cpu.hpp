// CUDA C in C++: g++ includes this header before a kernel's translation unit.
//
// It has only the language: keywords, vector types, intrinsics.  The machine behind it (fibers,
// barriers, memory checks) is in src/.  Nothing here is visible to nvcc or NVRTC.
#pragma once
#include "../src/calls.hpp"

#define __global__ inline  // so that g++ compiles only the kernel of the entry, not all of a file
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
// thread_local is the one C++ storage class that is legal both alone at block scope (where it
// implies static) and after `extern`.  Every block starts with the module's thread-local image
// poisoned.
#define __shared__ thread_local

// ---- vector types ------------------------------------------------------------------------------
#define EMU_VECTOR(T, N, A2, A3, A4)                                  \
  struct alignas(A2) N##2 { T x, y; };                                \
  struct alignas(A3) N##3 { T x, y, z; };                             \
  struct alignas(A4) N##4 { T x, y, z, w; };                          \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }                \
  inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }        \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(float, float, 8, 4, 16)
EMU_VECTOR(int, int, 8, 4, 16)
EMU_VECTOR(unsigned, uint, 8, 4, 16)
EMU_VECTOR(short, short, 4, 2, 8)
EMU_VECTOR(unsigned short, ushort, 4, 2, 8)
EMU_VECTOR(char, char, 2, 1, 4)
EMU_VECTOR(unsigned char, uchar, 2, 1, 4)
EMU_VECTOR(double, double, 16, 8, 16)
EMU_VECTOR(long long, longlong, 16, 8, 16)
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Constant for the fiber that reads them: the scheduler writes threadIdx at each switch, and a
// value that the compiler caches is in that fiber's own registers or stack.  `const` also keeps the
// sanitiser pass from instrumenting the reads.
extern const uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

// ---- the machine -------------------------------------------------------------------------------
// Default arguments record the location of the call, for messages.
#define EMU_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define EMU_HERE file, line

inline void __syncthreads(EMU_PLACE) { emu::barrier(0, 0, true, EMU_HERE); }
inline void __syncwarp(unsigned mask = ~0u, EMU_PLACE) { emu::syncwarp(mask, EMU_HERE); }
inline int __syncthreads_count(int p, EMU_PLACE) { return emu::barrier_count(p, EMU_HERE); }
inline int __syncthreads_or(int p, EMU_PLACE) { return emu::barrier_count(p, EMU_HERE) != 0; }
inline int __syncthreads_and(int p, EMU_PLACE) { return emu::barrier_count(!p, EMU_HERE) == 0; }
inline void __threadfence() { emu::threadfence(true); }
inline void __threadfence_block() { emu::threadfence(false); }
inline unsigned __activemask() { return emu::active_lanes(); }
inline void __trap(EMU_PLACE) { emu::trap("__trap()", EMU_HERE); }
inline void __nanosleep(unsigned) {}

// ---- warps -------------------------------------------------------------------------------------
namespace emu {
template <class T> inline T shfl_as(unsigned mask, T v, int src, const char *file, int line) {
  static_assert(sizeof(T) <= 8, "shuffle operand wider than 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &v, sizeof(T));
  bits = shfl(mask, bits, src, file, line);
  __builtin_memcpy(&v, &bits, sizeof(T));
  return v;
}
inline int lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31;
}
// Returns the lane that shfl.up, .down, .bfly or .idx reads; c has a segment mask and a bound.
inline int source(char mode, int by, unsigned c, bool *in = nullptr) {
  int own = lane(), seg = c >> 8 & 31, first = own & seg, last = first | (c & 31 & ~seg);
  by &= 31;
  int from = mode == 'u' ? own - by : mode == 'd' ? own + by : mode == 'b' ? own ^ by
                                                               : first | (by & ~seg);
  bool inside = mode == 'u' ? from >= last : from <= last;
  if (in) *in = inside;
  return inside ? from : own;
}
}  // namespace emu
template <class T> inline T __shfl_sync(unsigned m, T v, int src, int width = 32, EMU_PLACE) {
  return emu::shfl_as(m, v, emu::source('i', src, (32 - width) << 8 | 31), EMU_HERE);
}
template <class T> inline T __shfl_xor_sync(unsigned m, T v, int x, int width = 32, EMU_PLACE) {
  return emu::shfl_as(m, v, emu::source('b', x, (32 - width) << 8 | 31), EMU_HERE);
}
template <class T> inline T __shfl_down_sync(unsigned m, T v, unsigned d, int width = 32, EMU_PLACE) {
  return emu::shfl_as(m, v, emu::source('d', d, (32 - width) << 8 | 31), EMU_HERE);
}
template <class T> inline T __shfl_up_sync(unsigned m, T v, unsigned d, int width = 32, EMU_PLACE) {
  return emu::shfl_as(m, v, emu::source('u', d, (32 - width) << 8), EMU_HERE);
}
inline unsigned __ballot_sync(unsigned m, int p, EMU_PLACE) { return emu::ballot(m, p, EMU_HERE); }
inline int __any_sync(unsigned m, int p, EMU_PLACE) { return emu::ballot(m, p, EMU_HERE) != 0; }
inline int __all_sync(unsigned m, int p, EMU_PLACE) { return emu::ballot(m, !p, EMU_HERE) == 0; }

// ---- atomics: one CPU thread runs every fiber, so a plain read-modify-write is atomic -----------
template <class T> struct emu_same { using type = T; };
#define EMU_ATOMIC(NAME, EXPR)                                     \
  template <class T>                                               \
  __attribute__((no_sanitize("thread"), noinline)) T NAME(         \
      T *p, typename emu_same<T>::type v, EMU_PLACE) {             \
    emu::atomic_enter(p, sizeof(T), EMU_HERE);                     \
    T old = *p;                                                    \
    *p = EXPR;                                                     \
    return old;                                                    \
  }
EMU_ATOMIC(atomicAdd, old + v)
EMU_ATOMIC(atomicSub, old - v)
EMU_ATOMIC(atomicExch, v)
EMU_ATOMIC(atomicMax, old > v ? old : v)
EMU_ATOMIC(atomicMin, old < v ? old : v)
EMU_ATOMIC(atomicOr, old | v)
EMU_ATOMIC(atomicAnd, old & v)
EMU_ATOMIC(atomicXor, old ^ v)
EMU_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
template <class T>
__attribute__((no_sanitize("thread"), noinline)) T atomicCAS(
    T *p, typename emu_same<T>::type compare, typename emu_same<T>::type v, EMU_PLACE) {
  emu::atomic_enter(p, sizeof(T), EMU_HERE);
  T old = *p;
  if (old == compare) *p = v;
  return old;
}

// ---- loads, bits, maths ------------------------------------------------------------------------
template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline void __stcs(T *p, T v) { *p = v; }
template <class T> inline void __stcg(T *p, T v) { *p = v; }
// Declared here instead of by <math.h>, which NVRTC does not have (nor INFINITY) and which takes
// g++ longer to compile than a kernel.
#define EMU_UNARY(F)                                             \
  extern "C" float F##f(float) noexcept;                         \
  extern "C" double F(double) noexcept;                          \
  inline float F(float x) { return F##f(x); }
EMU_UNARY(sqrt) EMU_UNARY(exp) EMU_UNARY(exp2) EMU_UNARY(expm1) EMU_UNARY(log) EMU_UNARY(log2)
EMU_UNARY(log1p) EMU_UNARY(sin) EMU_UNARY(cos) EMU_UNARY(tanh) EMU_UNARY(erf) EMU_UNARY(erfc) EMU_UNARY(fabs)
EMU_UNARY(floor) EMU_UNARY(ceil) EMU_UNARY(trunc) EMU_UNARY(rint) EMU_UNARY(round)
extern "C" {
float powf(float, float) noexcept;
float fmodf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
double fma(double, double, double) noexcept;
float copysignf(float, float) noexcept;
float ldexpf(float, int) noexcept;
int abs(int) noexcept;
}
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline float abs(float x) { return fabsf(x); }
inline void sincosf(float x, float *s, float *c) {
  *s = sinf(x);
  *c = cosf(x);
}
inline void sincospif(float x, float *s, float *c) {  // of pi x
  *s = (float)sin(3.141592653589793 * x);
  *c = (float)cos(3.141592653589793 * x);
}
inline float __uint_as_float(unsigned u) { float f; __builtin_memcpy(&f, &u, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned u; __builtin_memcpy(&u, &f, 4); return u; }
inline float __int_as_float(int u) { return __uint_as_float((unsigned)u); }
inline int __float_as_int(float f) { return (int)__float_as_uint(f); }
inline int __popc(unsigned u) { return __builtin_popcount(u); }
inline int __popcll(unsigned long long u) { return __builtin_popcountll(u); }
inline int __clz(int u) { return u ? __builtin_clz(u) : 32; }
inline int __ffs(int u) { return __builtin_ffs(u); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (signed char)(a >> i) * (signed char)(b >> i);
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
  return c;
}
namespace emu {
inline unsigned prmt(unsigned x, unsigned y, unsigned s) {  // bit 3 of a digit: replicate the sign
  unsigned r = 0;
  for (int i = 0; i < 32; i += 8) {
    unsigned k = s >> i / 2, byte = ((uint64_t)y << 32 | x) >> 8 * (k & 7) & 255;
    r |= (k & 8 ? (byte >> 7) * 255 : byte) << i;
  }
  return r;
}
// The minimum of a NaN and a number is the number; -0 is less than 0.
template <class T> inline T least(T a, T b) {
  if (a != a || b != b) return a != a ? b : a;
  return a < b || (a == b && __builtin_signbit(a)) ? a : b;
}
template <class T> inline T most(T a, T b) { return -least(-a, -b); }
}  // namespace emu
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  return emu::prmt(x, y, s & 0x7777);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) {  // the reciprocal of a divisor beyond 2^126 is 0
  return fabsf(y) > 0x1p126f && !isinf(y) ? x * copysignf(0, y) : x / y;
}
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// rounded separately, never contracted to a fused multiply-add
inline float __fadd_rn(float a, float b) { a += b; asm("" : "+x"(a)); return a; }
inline float __fmul_rn(float a, float b) { a *= b; asm("" : "+x"(a)); return a; }
inline float __saturatef(float x) {  // compares bits, as float comparisons would flush denormals
  int bits = __float_as_int(x);
  return isnan(x) || bits < 0 ? 0 : bits < 0x3f800000 ? x : 1;
}
inline int __float2int_rn(float x) { return (int)rintf(x); }
#define EMU_MINMAX(T)                              \
  inline T min(T a, T b) { return b < a ? b : a; } \
  inline T max(T a, T b) { return a < b ? b : a; }
EMU_MINMAX(int) EMU_MINMAX(unsigned) EMU_MINMAX(long) EMU_MINMAX(unsigned long)
EMU_MINMAX(long long) EMU_MINMAX(unsigned long long)
inline float fminf(float a, float b) { return emu::least(a, b); }
inline float fmaxf(float a, float b) { return emu::most(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// ---- launch: unpack an array of pointers to arguments -------------------------------------------
namespace emu {
template <size_t... I> struct Sequence {};
template <size_t N, size_t... I> struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I> struct Count<0, I...> { using type = Sequence<I...>; };
template <class T> struct Bare { using type = T; };
template <class T> struct Bare<const T> { using type = T; };
template <class... A, size_t... I>
__attribute__((no_sanitize("thread"), noinline)) void call(void (*f)(A...), void **a, Sequence<I...>) {
  f(*static_cast<typename Bare<A>::type *>(a[I])...);
}
template <class... A> inline void call(void (*f)(A...), void **a) {
  call(f, a, typename Count<sizeof...(A)>::type());
}
template <class... A> constexpr int arity(void (*)(A...)) { return sizeof...(A); }
}  // namespace emu
#define EMU_ENTRY(...)                                                       \
  extern "C" {                                                               \
  void emu_entry(void **a) { emu::call(__VA_ARGS__, a); }                    \
  extern const int emu_arity = emu::arity(__VA_ARGS__);                      \
  }
