"""Exact arithmetic: the correct result of an instruction, from the bits of its operands.

Floats are computed as fractions and rounded once by the rules of IEEE 754; denormals are kept, or
flushed in operands and result for instructions with .ftz.  No code is shared with the translator.
"""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np


class Format(NamedTuple):
    """A float format: the bits of its exponent and of its fraction."""

    exponent: int
    mantissa: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent) - 1) << self.mantissa


FORMATS = {"f16": Format(5, 10), "bf16": Format(8, 7), "f32": Format(8, 23), "f64": Format(11, 52)}
NAN, INFINITY = "nan", math.inf
Number = Any  # a Fraction, an infinity, NAN, or minus zero as -0.0


def signed(bits: int, width: int) -> int:
    """Return the value of an integer of this width in two's complement."""
    bits &= (1 << width) - 1
    return bits - (1 << width) if bits >> (width - 1) else bits


@functools.cache
def decoded(bits: int, kind: str, flush: bool = False) -> Number:
    """Return the value of a float from its bits."""
    f = FORMATS[kind]
    sign = -1 if bits >> (f.bits - 1) & 1 else 1
    size = bits & ((1 << (f.bits - 1)) - 1)
    if size >= f.infinity:
        return NAN if size > f.infinity else sign * INFINITY
    exponent, fraction = size >> f.mantissa, size & ((1 << f.mantissa) - 1)
    if not size or (flush and not exponent):
        return -0.0 if sign < 0 else Fraction(0)
    whole = fraction | (1 << f.mantissa if exponent else 0)
    return sign * whole * Fraction(2) ** (max(exponent, 1) - f.bias - f.mantissa)


def whole(value: Fraction, mode: str) -> int:
    """Round a fraction to a whole number: n to nearest even, z to zero, m down, p up."""
    if mode == "n":
        return round(value)
    return {"z": math.trunc, "m": math.floor, "p": math.ceil}[mode](value)


def encoded(value: Number, kind: str, mode: str = "n", flush: bool = False) -> int | None:
    """Return the bits of a rounded number; None for NaN, whose bits are not specified."""
    f = FORMATS[kind]
    if isinstance(value, str):
        return None
    sign = 1 << (f.bits - 1) if _minus(value) else 0
    if infinite(value):
        return sign | f.infinity
    size = abs(Fraction(value))
    if not size:
        return sign
    mode = {"m": "p" if sign else "z", "p": "z" if sign else "p"}.get(mode, mode)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= shifted(size, -exponent) < 1
    exponent = max(exponent, 1 - f.bias)
    steps = whole(shifted(size, f.mantissa - exponent), mode)
    bits = ((exponent + f.bias - 1) << f.mantissa) + steps  # a carry runs into the exponent
    if bits >= f.infinity:
        bits = f.infinity - (mode == "z")
    if flush and bits < 1 << f.mantissa:
        bits = 0
    return sign | bits


def shifted(value: Fraction, by: int) -> Fraction:
    """Return a fraction times 2**by."""
    top, bottom = value.numerator, value.denominator
    return Fraction(top << by, bottom) if by >= 0 else Fraction(top, bottom << -by)


def infinite(value: Number) -> bool:
    return isinstance(value, float) and math.isinf(value)


def computed(op: str, operands: list[Number], mode: str) -> Number:  # noqa: PLR0911
    """Return the exact result of +, -, *, /, sqrt or fma."""
    if any(isinstance(value, str) for value in operands):
        return NAN
    x, y, *rest = [*operands, 1][: max(2, len(operands))]
    if op == "sub":
        return computed("add", [x, -y if y else (Fraction(0) if _minus(y) else -0.0)], mode)
    if op in ("rcp", "sqrt"):
        return computed("div", [Fraction(1), x], mode) if op == "rcp" else _root(x)
    if op == "fma":
        product = computed("mul", [x, y], mode)
        return computed("add", [product, rest[0]], mode)
    if infinite(x) or infinite(y) or not x or not y:
        special = _special(op, x, y)
        if infinite(x) or infinite(y) or (op == "div" and not y):
            return NAN if np.isnan(special) else float(special) or (-0.0 if _minus(special) else 0)
        if (op != "add" and not x) or (op == "mul" and not y):
            return -0.0 if _minus(special) else Fraction(0)
    x, y = Fraction(x), Fraction(y)
    exact = {"add": x + y, "mul": x * y, "div": x / (y or 1)}[op]
    if exact:
        return exact
    both = _minus(operands[0]) and _minus(operands[1])  # a sum that is zero
    other = _minus(operands[0]) != _minus(operands[1]) and mode == "m"
    return -0.0 if both or other else Fraction(0)


def _special(op: str, x: Number, y: Number) -> np.float64:
    """Return a result of zeros and infinities, with 1 for other numbers."""
    far = [np.float64(INFINITY if infinite(v) else 1 if v else 0) for v in (x, y)]
    far = [np.copysign(f, -1 if _minus(v) else 1) for f, v in zip(far, (x, y), strict=True)]
    with np.errstate(all="ignore"):
        return {"add": far[0] + far[1], "mul": far[0] * far[1], "div": far[0] / far[1]}[op]


def _minus(value: Number) -> bool:
    return math.copysign(1, value) < 0 if isinstance(value, float) else bool(value < 0)


def _root(x: Number) -> Number:
    if infinite(x) or not x:
        return x if x != -INFINITY else NAN
    if x < 0:
        return NAN
    shift = 2 * (120 + x.denominator.bit_length())
    scaled = x.numerator * (1 << shift) // x.denominator
    root = math.isqrt(scaled)
    exact = root * root == scaled and x.numerator * (1 << shift) % x.denominator == 0
    return (Fraction(root) + (0 if exact else Fraction(1, 2))) / (1 << (shift // 2))


def clipped(value: Number, width: int, is_signed: bool, mode: str) -> int:
    """Convert a float to an integer of this width; it saturates at the limits, and NaN is 0."""
    low = -(1 << (width - 1)) if is_signed else 0
    high = (1 << (width - is_signed)) - 1
    if value == NAN:
        return 0
    if infinite(value):
        return (high if value > 0 else low) & ((1 << width) - 1)
    return min(max(whole(Fraction(value), mode), low), high) & ((1 << width) - 1)
