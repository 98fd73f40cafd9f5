// Emulates cuda_fp16.h: half as g++'s _Float16, computed in float and rounded once; a single NaN.
#pragma once
struct alignas(2) __half {
  _Float16 v;
  __half() = default;
  __half(float f) : v((_Float16)(__builtin_isnan(f) ? __int_as_float(0x7fffffff) : f)) {}
  operator float() const { return (float)v; }
};
struct alignas(4) __half2 { __half x, y; };
using half = __half;
using half2 = __half2;
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline float __half2float(__half h) { return (float)h.v; }
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline __half2 __float22half2_rn(float2 f) { return {__half(f.x), __half(f.y)}; }
inline float2 __half22float2(__half2 h) { return {(float)h.x, (float)h.y}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half __hadd(__half a, __half b) { return __half((float)a + (float)b); }
inline __half __hmul(__half a, __half b) { return __half((float)a * (float)b); }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half __ushort_as_half(unsigned short u) {
  __half h;
  __builtin_memcpy(&h, &u, 2);
  return h;
}
inline unsigned short __half_as_ushort(__half h) {
  unsigned short u;
  __builtin_memcpy(&u, &h, 2);
  return u;
}
