// Conversions to and from 8-bit floats, and the additions of TMA's reductions in every dtype.
#include "machine.hpp"

#include <cmath>

namespace emu {
// e4m3 has no infinity and ends at 448; e5m2 is the upper half of a float16.
struct Format {
  int mantissa, bias;
  double largest;
};
static Format format(int type) {
  return type == E4M3 ? Format{3, 7, 448} : Format{2, 15, 57344};
}

static uint32_t encode(int type, double x) {
  auto [mantissa, bias, largest] = format(type);
  if (std::isnan(x)) return 0x7f;
  uint32_t sign = std::signbit(x) ? 0x80 : 0;
  double size = std::fabs(x);
  if (size >= largest) size = largest;
  int exponent = size ? std::max(std::ilogb(size), 1 - bias) : 1 - bias;
  // in units of the last place: nearbyint rounds ties to even; a carry increments the exponent
  auto steps = uint32_t(std::nearbyint(std::ldexp(size, mantissa - exponent)));
  return sign | ((uint32_t(exponent + bias - 1) << mantissa) + steps);
}

float decode_fp8(int type, uint32_t bits) {
  auto [mantissa, bias, largest] = format(type);
  int exponent = bits >> mantissa & (0x7f >> mantissa), fraction = bits & ((1 << mantissa) - 1);
  double size = exponent ? std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
                         : std::ldexp(fraction, 1 - bias - mantissa);
  if (type == E4M3 && (bits & 0x7f) == 0x7f) size = NAN;
  if (type == E5M2 && exponent == 31) size = fraction ? NAN : INFINITY;
  return float(bits & 0x80 ? -size : size);
}

uint32_t pack_fp8(int type, float low, float high) {
  return encode(type, low) | encode(type, high) << 8;
}

uint32_t unpack_fp8(int type, uint32_t pair) {
  _Float16 halves[2] = {_Float16(decode_fp8(type, pair & 255)),
                        _Float16(decode_fp8(type, pair >> 8 & 255))};
  uint32_t r;
  memcpy(&r, halves, 4);
  return r;
}

template <class T> static void add(char *to, const char *from) {
  T a, b;
  memcpy(&a, to, sizeof a);
  memcpy(&b, from, sizeof b);
  a = T(a + b);
  memcpy(to, &a, sizeof a);
}

void add_in_place(Number type, char *to, const char *from) {
  if (type == Float32) return add<float>(to, from);
  if (type == Float16) return add<_Float16>(to, from);
  if (type == Int32) return add<uint32_t>(to, from);
  uint32_t a = 0, b = 0;  // bfloat16: the upper halves of floats
  memcpy((char *)&a + 2, to, 2);
  memcpy((char *)&b + 2, from, 2);
  add<float>((char *)&a, (const char *)&b);
  a += 0x7fff + (a >> 16 & 1);
  memcpy(to, (char *)&a + 2, 2);
}
}  // namespace emu
