"""Every instruction of the tables against plain arithmetic, for every type, on edge values.

A module of PTX is written for each type: a thread reads three operands, and each instruction writes
a cell of 8 bytes.  What the tables know and no line here asks for is an error.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

from ...machines.cuda_on_cpu import Module, build
from ...machines.ptx_on_cpu import arithmetic, library
from ..programs.ptx import Compiled
from .plain import (
    FORMATS,
    INFINITY,
    NAN,
    clipped,
    computed,
    decoded,
    encoded,
    infinite,
    signed,
    whole,
)

Plain = Callable[..., int | None]
EDGES = {  # bits, in hexadecimal
    "f32": """
        0 80000000 1 7fffff 80000001 800000 3f800000 bf800000 3f800001 7f7fffff ff7fffff
        7f800000 ff800000 7fc00000 3f000000 40200000 3fc00000 4b000001 4f000000 cf000000
        5f000000 3dcccccd c00000 7e800001 33800000 477ff000 3f808000
    """,
    "f64": """
        0 8000000000000000 1 8000000000000001 10000000000000 3ff0000000000000
        bff0000000000000 7fefffffffffffff 7ff0000000000000 fff0000000000000
        7ff8000000000000 3fe0000000000000 4004000000000000 3fb999999999999a
        3ff0000010000000 36a0000000000000 47effffff0000000 41e0000000000000
    """,
    "narrow": """
        0 80000000 1 3f880000 3f980000 3f900000 3fb00000 bf8c0000 43e00000 43e80000 43f00000
        47600000 47680000 7f800000 ff800000 7fc00000 3b000000 3a800000 3ac00000 37800000
        37000000 37400000 3f801000 3f803000 3f800fff 7f7fffff ff7fffff c2c80000
    """,
    "f16": """
        0 8000 1 3ff 400 3c00 bc00 3c01 7bff fbff 7c00 fc00 7e00 3800 4100 1400 c01 2e66
    """,
    "bf16": """
        0 8000 1 7f 80 3f80 bf80 3f81 7f7f ff7f 7f80 ff80 7fc0 3f00 4020 3b80 81 3dcd
    """,
}
FLOATS = {k: [int(word, 16) for word in text.split()] for k, text in EDGES.items()}
SHIFTS = (0, 1, 2, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 255, 256, 1 << 31)


class Case(NamedTuple):
    """An instruction on %d, %x, %y, %z, and what plain arithmetic makes of the bits."""

    text: str
    plain: Plain
    loose: int = 0  # units in the last place that an approximation may be off


def integers(width: int) -> list[int]:
    top = 1 << (width - 1)
    numbers = {0, 1, 2, 3, 7, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 0x55 % top, *SHIFTS}
    return sorted(n & (2 * top - 1) for n in numbers | {12345 % (2 * top), top // 2 + 1})


def integer_cases(kind: str) -> Iterator[Case]:
    """Yield what integers of a type do; operands come as bits."""
    n, s = int(kind[1:]), kind[0] == "s"
    number = (lambda v: signed(v, n)) if s else (lambda v: v & ((1 << n) - 1))
    mask = (1 << n) - 1

    def case(text: str, f: Callable[..., int], count: int = 2) -> Case:
        return Case(text, lambda *v: f(*map(number, v[:count])) & mask)

    for to, mode in itertools.product(("f32", "f64"), "nzmp"):
        yield Case(f"cvt.r{mode}.{to}.{kind} %w, %x", functools.partial(real, number, to, mode))
    for to in WHOLE:
        yield Case(f"cvt.{to}.{kind} %w, %x", functools.partial(extended, number, to))
        yield Case(f"cvt.sat.{to}.{kind} %w, %x", functools.partial(saturated, number, to))
    if n == 8:  # no other instruction reads so few bits
        return
    for name, f in (("add", int.__add__), ("sub", int.__sub__)):
        yield case(f"{name}.{kind} %d, %x, %y", f)
    yield case(f"mul.lo.{kind} %d, %x, %y", int.__mul__)
    yield case(f"mul.hi.{kind} %d, %x, %y", lambda x, y: x * y >> n)
    yield case(f"mad.lo.{kind} %d, %x, %y, %z", lambda x, y, z: x * y + z, 3)
    yield case(f"mad.hi.{kind} %d, %x, %y, %z", lambda x, y, z: (x * y >> n) + z, 3)
    if n < 64:
        wide = (1 << 64) - 1
        big = f"{kind[0]}{2 * n}"
        yield Case(f"mul.wide.{kind} %w, %x, %y", lambda x, y, z: number(x) * number(y) & wide)
        add = f"cvt.{big}.{kind} %w, %z; mad.wide.{kind} %w, %x, %y, %w"
        yield Case(add, lambda *v: number(v[0]) * number(v[1]) + number(v[2]) & wide)
    safe = f"setp.eq.{kind} %p, %y, 0; selp.b{n} %t, 1, %y, %p;"
    whole = lambda x, y: abs(x) // abs(y or 1) * (-1 if (x < 0) != ((y or 1) < 0) else 1)  # noqa: E731
    yield case(f"{safe} div.{kind} %d, %x, %t", whole)
    yield case(f"{safe} rem.{kind} %d, %x, %t", lambda x, y: x - whole(x, y) * (y or 1))
    yield case(f"min.{kind} %d, %x, %y", min)
    yield case(f"max.{kind} %d, %x, %y", max)
    shift = lambda y, n=n: min(y & 0xFFFFFFFF, n)  # noqa: E731
    yield Case(f"shl.b{n} %d, %x, %u", lambda x, y, z: x << shift(y) & mask)
    yield Case(f"shr.{kind} %d, %x, %u", lambda x, y, z: number(x) >> shift(y) & mask)
    yield Case(f"selp.{kind} %d, %x, %y, %p0", lambda x, y, z: x if y & 1 else y)
    yield Case(f"mov.{kind} %d, %x", lambda x, y, z: x)
    for word, f in COMPARED.items():
        yield select(f"setp.{word}.{kind} %p, %x, %y", lambda x, y, f=f: f(number(x), number(y)))
    if s:
        yield case(f"neg.{kind} %d, %x", int.__neg__, 1)
        yield case(f"abs.{kind} %d, %x", abs, 1)
    else:
        yield from logic(n)
    if n >= 32:
        yield from carries(kind, n)
        yield from fields(n) if not s else ()
    if kind == "s32":
        for name, f in (("min", min), ("max", max)):
            yield case(f"{name}.relu.s32 %d, %x, %y", lambda x, y, f=f: max(0, f(x, y)))


COMPARED = {"eq": int.__eq__, "ne": int.__ne__, "lt": int.__lt__, "le": int.__le__} | {
    "gt": int.__gt__,
    "ge": int.__ge__,
}


def select(text: str, plain: Callable[[int, int], bool]) -> Case:
    return Case(f"{text}; selp.u32 %e, 1, 0, %p", lambda x, y, z: int(plain(x, y)))


def extended(number: Any, to: str, x: int, *_: int) -> int:
    kept = number(x) & ((1 << int(to[1:])) - 1)
    value = signed(kept, int(to[1:])) if to[0] == "s" else kept
    return value & ((1 << 64) - 1)


def saturated(number: Any, to: str, x: int, *_: int) -> int:
    width = int(to[1:])
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if to[0] == "s" else (0, (1 << width) - 1)
    return min(max(number(x), low), high) & ((1 << 64) - 1)


def real(number: Any, to: str, mode: str, x: int, *_: int) -> int | None:
    return encoded(Fraction(number(x)), to, mode)


def logic(n: int) -> Iterator[Case]:
    mask, u32 = (1 << n) - 1, 0xFFFFFFFF
    for name, f in (("and", int.__and__), ("or", int.__or__), ("xor", int.__xor__)):
        yield Case(f"{name}.b{n} %d, %x, %y", lambda x, y, z, f=f: f(x, y))
        text = f"setp.gt.u{n} %q, %y, %x; {name}.pred %p, %p0, %q; selp.u32 %e, 1, 0, %p"
        yield Case(text, lambda x, y, z, f=f: f(y & 1, int(y > x)))
    yield Case(f"not.b{n} %d, %x", lambda x, y, z: ~x & mask)
    yield Case(f"mov.b{n} %d, %x", lambda x, y, z: x)
    yield Case(f"shr.b{n} %d, %x, %u", lambda x, y, z: x >> min(y & u32, n))
    yield select(f"setp.eq.b{n} %p, %x, %y", int.__eq__)
    yield select(f"setp.ne.b{n} %p, %x, %y", int.__ne__)
    yield Case("mov.pred %p, %p0; selp.u32 %e, 1, 0, %p", lambda x, y, z: y & 1)
    yield Case("not.pred %p, %p0; selp.u32 %e, 1, 0, %p", lambda x, y, z: ~y & 1)
    if n < 32:
        return
    yield Case(f"popc.b{n} %e, %x", lambda x, y, z: x.bit_count())
    yield Case(f"clz.b{n} %e, %x", lambda x, y, z: n - x.bit_length())
    yield Case(f"brev.b{n} %d, %x", lambda x, y, z: int(f"{x:0{n}b}"[::-1], 2))
    if n == 64:
        return
    yield Case("prmt.b32 %d, %x, %y, %z", permuted)
    for left in (True, False):
        text = f"shf.{'l' if left else 'r'}.wrap.b32 %d, %x, %y, %z"
        yield Case(text, functools.partial(funnelled, left))
    for kind in "us":
        text = f"dp4a.{kind}32.{kind}32 %d, %x, %y, %z"
        yield Case(text, lambda x, y, z, k=kind: z + sum(dots(x, y, k)) & u32)
    for half, at in (("lo", 0), ("hi", 16)):
        text = f"dp2a.{half}.u32.u32 %d, %x, %y, %z"
        yield Case(text, lambda x, y, z, at=at: z + halves(x, y >> at) & u32)


def carries(kind: str, n: int) -> Iterator[Case]:
    """Yield sums of three words of which each takes what the last one leaves."""
    add = f"add.cc.{kind} %d, %x, %y; addc.cc.{kind} %d, %d, %z; addc.{kind} %d, %d, 0"
    yield Case(add, lambda x, y, z: carried(x, y, z, n))
    take = f"sub.cc.{kind} %d, %x, %y; subc.cc.{kind} %d, %d, %z; subc.{kind} %d, %d, 0"
    yield Case(take, lambda x, y, z: borrowed(x, y, z, n))
    number = (lambda v: signed(v, n)) if kind[0] == "s" else (lambda v: v)
    for part, at in (("lo", 0), ("hi", n)):
        text = f"mad.{part}.cc.{kind} %d, %x, %y, %z; madc.{part}.cc.{kind} %d, %y, %y, %d;"
        text += f" madc.{part}.{kind} %d, %x, %z, %d"
        yield Case(text, lambda x, y, z, at=at: multiplied(number, x, y, z, n, at))


def carried(x: int, y: int, z: int, n: int) -> int:
    mask = (1 << n) - 1
    second = (x + y & mask) + z + (x + y >> n)
    return (second & mask) + (second >> n) & mask


def borrowed(x: int, y: int, z: int, n: int) -> int:
    mask = (1 << n) - 1
    second = (x - y & mask) - z - (x < y)
    return (second & mask) - (second < 0) & mask


def multiplied(number: Any, x: int, y: int, z: int, n: int, at: int) -> int:
    mask = (1 << n) - 1
    a, b, c = map(number, (x, y, z))
    first = (a * b >> at & mask) + z
    second = (b * b >> at & mask) + (first & mask) + (first >> n)
    return (a * c >> at) + second + (second >> n) & mask


def permuted(x: int, y: int, z: int) -> int:
    source = (y << 32 | x).to_bytes(8, "little")
    picked = [(z >> 4 * i & 15) for i in range(4)]
    chosen = [255 * (source[k & 7] >> 7) if k & 8 else source[k & 7] for k in picked]
    return int.from_bytes(bytes(chosen), "little")


def funnelled(left: bool, x: int, y: int, z: int) -> int:
    by, both_words = z & 31, y << 32 | x
    return (both_words << by >> 32 if left else both_words >> by) & 0xFFFFFFFF


def dots(x: int, y: int, kind: str) -> Iterator[int]:
    for a, b in zip(x.to_bytes(4, "little"), y.to_bytes(4, "little"), strict=True):
        yield signed(a, 8) * signed(b, 8) if kind == "s" else a * b


def halves(x: int, y: int) -> int:
    return (x & 0xFFFF) * (y & 0xFF) + (x >> 16) * (y >> 8 & 0xFF)


def fields(n: int) -> Iterator[Case]:
    mask = (1 << n) - 1

    def insert(x: int, y: int, z: int) -> int:
        at, count = z & 255, 7
        field = ((1 << count) - 1) << at
        return ((y & ~field) | (x << at & field)) & mask

    yield Case(f"bfi.b{n} %d, %x, %y, %v, 7", insert)
    yield Case(f"bfind.u{n} %e, %x", lambda x, y, z: x.bit_length() - 1 & 0xFFFFFFFF)
    if n == 32:
        leading = lambda x, y, z: 32 - x.bit_length() if x else 0xFFFFFFFF  # noqa: E731
        yield Case("bfind.shiftamt.u32 %e, %x", leading)


SUMS = {"add": 2, "sub": 2, "mul": 2, "fma": 3}  # and how many operands they have
WHOLE = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def float_cases(kind: str) -> Iterator[Case]:
    """Yield what floats of a type do."""
    if kind in ("f16", "bf16"):
        yield Case(f"cvt.f32.{kind} %w, %x", functools.partial(again, kind, "f32", "n", False))
        return
    for flush in (False, True) if kind == "f32" else (False,):
        word = ".ftz" if flush else ""
        for (op, count), mode in itertools.product(SUMS.items(), ("", *"nzmp")):
            if mode or op != "fma":
                yield rounded(op, count, mode, kind, word)
                if kind == "f32":
                    yield rounded(op, count, mode, kind, f"{word}.sat")
        for op, count in (("div", 2), ("rcp", 1), ("sqrt", 1)):
            for mode in "nzmp":
                yield rounded(op, count, mode, kind, word)
        yield from sides(kind, flush, word)
    if kind == "f32":
        yield from (*approximations(False), *approximations(True), *conversions())
    if kind == "f64":
        yield from doubles()


def doubles() -> Iterator[Case]:
    """Yield the conversions of float64."""
    for mode in "nzmp":
        for flush in (False, True):
            text = f"cvt.r{mode}{'.ftz' * flush}.f32.f64 %w, %x"
            yield Case(text, functools.partial(again, "f64", "f32", mode, flush))
    for mode in "nzmp":
        yield Case(f"cvt.r{mode}i.f64.f64 %d, %x", functools.partial(integral, "f64", mode, ""))
    for mode, to in itertools.product("nzmp", WHOLE):
        text = f"cvt.r{mode}i.{to}.f64 %w, %x"
        yield Case(text, functools.partial(cut, "f64", to, mode, False))


def pick(flush: bool, kind: str) -> Callable[[int], Any]:
    return lambda bits: decoded(bits, kind, flush)


@functools.cache
def result(op: str, kind: str, mode: str, flush: bool, *args: int) -> int | None:
    """Return the bits of an exact result, rounded: several forms ask for it."""
    exact = computed(op, [decoded(b, kind, flush) for b in args], mode)
    return encoded(exact, kind, mode, flush)


def rounded(op: str, count: int, mode: str, kind: str, word: str) -> Case:
    flush, sat = ".ftz" in word, ".sat" in word

    def plain(*v: int) -> int | None:
        bits = result(op, kind, mode or "n", flush, *v[:count])
        if not sat:
            return bits
        return 0 if bits is None or bits >> 31 else min(bits, 0x3F800000)  # 1

    names = ", ".join(("%x", "%y", "%z")[:count])
    return Case(f"{op}{f'.r{mode}' * bool(mode)}{word}.{kind} %d, {names}", plain)


def sides(kind: str, flush: bool, word: str) -> Iterator[Case]:
    """Yield what moves or compares floats, and rounds none."""
    get, top = pick(flush, kind), 1 << (FORMATS[kind].bits - 1)

    def ordered(f: Callable[..., bool], else_: bool) -> Callable[[int, int], bool]:
        return lambda x, y: else_ if NAN in (get(x), get(y)) else f(get(x), get(y))

    def least(sign: int, x: int, y: int, z: int) -> int | None:
        numbers = [encoded(get(v), kind) for v in (x, y) if get(v) != NAN]
        key = lambda b: (sign * float(get(b)), -sign if b & top else sign)  # noqa: E731
        return min(numbers, key=key) if numbers else None

    for name, sign in (("min", 1), ("max", -1)):
        yield Case(f"{name}{word}.{kind} %d, %x, %y", functools.partial(least, sign))
    turn = lambda x: None if get(x) == NAN else (encoded(get(x), kind) or 0) ^ top  # noqa: E731
    yield Case(f"neg{word}.{kind} %d, %x", lambda x, y, z: turn(x))
    size = lambda x: None if get(x) == NAN else (encoded(get(x), kind) or 0) & ~top  # noqa: E731
    yield Case(f"abs{word}.{kind} %d, %x", lambda x, y, z: size(x))
    if not flush:
        yield Case(f"mov.{kind} %d, %x", lambda x, y, z: x)
        yield Case(f"selp.{kind} %d, %x, %y, %p0", lambda x, y, z: x if y & 1 else y)
        yield Case(f"copysign.{kind} %d, %x, %y", lambda x, y, z: (x & top) | (y & (top - 1)))
    import operator as o

    tests = {"eq": o.eq, "ne": o.ne, "lt": o.lt, "le": o.le, "gt": o.gt, "ge": o.ge}
    for name, f in tests.items():
        for u in (False, True):
            text = f"setp.{name}{'u' * u}{word}.{kind} %p, %x, %y"
            yield select(text, ordered(f, u))
    yield select(f"setp.num{word}.{kind} %p, %x, %y", ordered(lambda x, y: True, False))
    yield select(f"setp.nan{word}.{kind} %p, %x, %y", ordered(lambda x, y: False, True))


def approximations(flush: bool) -> Iterator[Case]:
    """Yield what is not exact on a GPU: near the value, and the limits that PTX states."""
    word = ".ftz" * flush

    def near(f: Callable[[np.float64], Any]) -> Plain:
        def plain(x: int, y: int, z: int) -> int | None:
            value = np.array([x], np.uint32).view(np.float32).astype(np.float64)
            if flush:
                value = np.where(np.abs(value) < 2.0**-126, np.copysign(0.0, value), value)
            with np.errstate(all="ignore"):
                result = np.float32(f(value)[0])
            if np.isnan(result):
                return None
            zero = flush and abs(result) < 2.0**-126
            rounded = np.copysign(np.float32(0), result) if zero else result
            return int(np.array([rounded], np.float32).view(np.uint32)[0])

        return plain

    names: dict[str, Any] = {"ex2": np.exp2, "sqrt": np.sqrt}
    names |= {"rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x}
    for name, f in names.items():
        yield Case(f"{name}.approx{word}.f32 %d, %x", near(f), 2)

    def divided(x: int, y: int, z: int) -> int | None:
        a, b = decoded(x, "f32", flush), decoded(y, "f32", flush)
        if NAN not in (a, b) and 2**126 < abs(b) < INFINITY:
            a, b = computed("mul", [a, -0.0 if b < 0 else 0], "n"), 1
        return encoded(computed("div", [a, b], "n"), "f32", "n", flush)

    yield Case(f"div.approx{word}.f32 %d, %x, %y", divided, 2)
    exact = rounded("div", 2, "n", "f32", word).plain
    yield Case(f"div.full{word}.f32 %d, %x, %y", exact, 2)


def again(of: str, to: str, mode: str, flush: bool, x: int, *_: int) -> int | None:
    number = decoded(x, of, flush and of == "f32")
    return encoded(number, to, mode, flush and to == "f32")


def cut(of: str, to: str, mode: str, flush: bool, x: int, *_: int) -> int:
    width = int(to[1:])
    result = clipped(decoded(x, of, flush), width, to[0] == "s", mode)
    return (signed(result, width) if to[0] == "s" else result) & ((1 << 64) - 1)


def conversions() -> Iterator[Case]:
    for mode, to in itertools.product("nzmp", WHOLE):
        for flush in (False, True):
            text = f"cvt.r{mode}i{'.ftz' * flush}.{to}.f32 %w, %x"
            yield Case(text, functools.partial(cut, "f32", to, mode, flush))
    yield Case("cvt.f64.f32 %w, %x", functools.partial(again, "f32", "f64", "n", False))
    yield Case("cvt.ftz.f64.f32 %w, %x", functools.partial(again, "f32", "f64", "n", True))
    for to in ("f16", "bf16"):
        yield Case(f"cvt.rn.{to}.f32 %t2, %x; cvt.u64.u16 %w, %t2", functools.partial(half, to))
        text = f"cvt.rn.{to}x2.f32 %e, %x, %y"
        yield Case(text, lambda x, y, z, to=to: joined(half(to, y), half(to, x), 16))
    for mode, ftz, sat in itertools.product(("", *"nzmp"), ("", ".ftz"), ("", ".sat")):
        text = f"cvt{f'.r{mode}i' * bool(mode)}{ftz}{sat}.f32.f32 %d, %x"
        yield Case(text, functools.partial(integral, "f32", mode, ftz + sat))


def narrow_cases() -> Iterator[Case]:
    """Yield what makes 8 bits, or tf32, of float32."""
    for kind in EIGHT:
        text = f"cvt.rn.satfinite.{kind}x2.f32 %t2, %x, %y; cvt.u64.u16 %w, %t2"
        yield Case(text, lambda x, y, z, k=kind: eighth(k, x) << 8 | eighth(k, y))
    yield Case("cvt.rna.tf32.f32 %d, %x", lambda x, y, z: x + 0x1000 & 0xFFFFE000)


EIGHT = {"e4m3": (7, 3, 0x7E), "e5m2": (15, 2, 0x7B)}  # bias, bits behind the point, the largest


def small(kind: str, code: int) -> Any:
    """Return the number that 8 bits hold."""
    bias, n, largest = EIGHT[kind]
    size, sign = code & 127, -1 if code >> 7 else 1
    if size > largest:
        return sign * INFINITY if kind == "e5m2" and size == 0x7C else NAN
    if not size:
        return -0.0 if sign < 0 else Fraction(0)
    fraction = size & (1 << n) - 1 | (1 << n if size >> n else 0)
    return sign * fraction * Fraction(2) ** (max(size >> n, 1) - bias - n)


@functools.cache
def eighth(kind: str, x: int) -> int:
    """Return the 8 bits nearest to a float32, ties to even ones; beyond the largest, that."""
    value, sign = decoded(x, "f32"), 128 * (x >> 31)
    if value == NAN:
        return 0x7F
    if abs(value) == INFINITY:
        return sign | EIGHT[kind][2]
    codes = range(EIGHT[kind][2] + 1)
    return sign | min(
        codes, key=lambda c: (abs(Fraction(small(kind, c)) - abs(Fraction(value))), c & 1)
    )


def small_cases() -> Iterator[Case]:
    """Yield what makes float16 of pairs of 8 bits."""
    for kind in EIGHT:
        pair = lambda x, k: [encoded(small(k, code), "f16") for code in (x & 255, x >> 8)]  # noqa: E731
        text = f"cvt.rn.f16x2.{kind}x2 %e, %x"
        yield Case(text, lambda x, y, z, k=kind, p=pair: joined(*p(x, k), 16))


def half(to: str, x: int, *_: int) -> int | None:
    bits = encoded(decoded(x, "f32"), to)
    return 0x7FFF if bits is None else bits


def joined(low: int | None, high: int | None, width: int) -> int | None:
    return None if low is None or high is None else high << width | low


def integral(kind: str, mode: str, words: str, x: int, *_: int) -> int | None:
    """Return a float as a whole one, where a mode says how; flushed and bounded as words say."""
    value = decoded(x, kind, "ftz" in words)
    if value != NAN and not infinite(value) and value and mode:
        value = Fraction(whole(Fraction(value), mode)) or (-0.0 if value < 0 else Fraction(0))
    if "sat" in words and (value == NAN or value <= 0):
        return 0
    return encoded(Fraction(1) if "sat" in words and value > 1 else value, kind)


def wide_pairs() -> Iterator[Case]:
    for op, mode, word in itertools.product(SUMS, ("", *"nzmp"), ("", ".ftz")):
        if not mode and op == "fma":
            continue
        one = rounded(op, SUMS[op], mode, "f32", word).plain
        words = "mov.b64 %w, {%x, %y}; mov.b64 %w1, {%y, %z}; mov.b64 %w2, {%z, %x};"
        names = ", ".join(("%w", "%w1", "%w2")[: SUMS[op]])
        text = f"{words} {op}{f'.r{mode}' * bool(mode)}{word}.f32x2 %w, {names}"
        yield Case(text, lambda x, y, z, f=one: joined(f(x, y, z), f(y, z, x), 32))


BITS = {"f32x2": 32, "narrow": 32, "small": 16}
CASES = {"f32x2": wide_pairs, "narrow": narrow_cases, "small": small_cases}


def cases(kind: str) -> list[Case]:
    if kind in CASES:
        return [*CASES[kind]()]
    return [*(float_cases(kind) if kind in FORMATS else integer_cases(kind))]


NAME = re.compile(r"\b([a-z][\w.:]*) ")
TYPES = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "f16", "bf16", "f32", "f64", *CASES)
THREADS = 128


def bits_of(kind: str) -> int:
    return FORMATS[kind].bits if kind in FORMATS else BITS.get(kind) or int(kind[1:])


def values(kind: str) -> np.ndarray:
    """Return rows of three operands: all pairs, with a third in turn."""
    if kind == "small":  # every code, beside another
        return np.array([(code | (255 - code) << 8, 0, 0) for code in range(256)], np.uint64)
    several = FLOATS.get("f32" if kind == "f32x2" else kind) or integers(bits_of(kind))
    rows = [
        (x, y, several[(i * 7 + j) % len(several)])
        for (i, x), (j, y) in itertools.product(enumerate(several), repeat=2)
    ]
    return np.array(rows, np.uint64)


def written(kind: str) -> str:
    """Return the module of a type: a cell of out for each case and row."""
    n = bits_of(kind)
    lines = [
        ".visible .entry all(.param .u64 in, .param .u64 out, .param .u32 rows) {",
        f".reg .b{n} %x, %y, %z, %d, %t; .reg .b64 %i, %o, %w, %w1, %w2, %at; .reg .b16 %t2;",
        ".reg .b32 %e, %u, %v, %n, %r, %t4, %t5, %a, %b, %c; .reg .pred %p, %p0, %q;",
        "ld.param.u64 %i, [in]; ld.param.u64 %o, [out]; ld.param.u32 %n, [rows];",
        "mov.u32 %r, %ctaid.x; mov.u32 %e, %tid.x;",
        f"mad.lo.u32 %r, %r, {THREADS}, %e; setp.ge.u32 %p, %r, %n; @%p bra $end;",
        "mul.wide.u32 %at, %r, 24; add.u64 %i, %i, %at;",
        *(f"ld.global.b{n} %{name}, [%i+{8 * at}];" for at, name in enumerate("xyz")),
        "ld.global.b32 %u, [%i+8]; ld.global.b32 %v, [%i+16];",
        "and.b32 %e, %u, 1; setp.eq.u32 %p0, %e, 1; mul.wide.u32 %at, %r, 8; add.u64 %o, %o, %at;",
        "mul.wide.u32 %at, %n, 8;",
    ]
    for case in cases(kind):
        last = result_of(case.text)
        width = {"d": n, "w": 64, "e": 32}[last]
        clear = "mov.b64 %w, 0; " if last == "w" and "%w" not in case.text[:-30] else ""
        lines.append(f"{clear}{case.text};")
        lines.append(f"st.global.b{width} [%o], %{last}; add.u64 %o, %o, %at;")
    return "\n".join([*lines, "$end: ret; }", ""])


@functools.cache
def result_of(text: str) -> str:
    """Return the register that the last instruction of a text writes."""
    return str(re.findall(r"%(\w+)", text.rpartition(";")[2])[0])


def units_apart(actual: int, expected: int, kind: str) -> int:
    n = bits_of(kind)
    order = [
        b & (1 << n - 1) - 1 if not b >> n - 1 else -(b & (1 << n - 1) - 1)
        for b in (actual, expected)
    ]
    return abs(order[0] - order[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_as_plain_arithmetic(kind: str) -> None:
    operand_values, several = values(kind), cases(kind)
    path = library(Compiled(written(kind), "all"))
    module = Module("all", path, build.runtime(), True, "")
    out = np.zeros((len(several), len(operand_values)), np.uint64)
    grid = -(-len(operand_values) // THREADS)
    module.launch(
        (0, 0, 1),
        1 << 16,
        (grid,),
        (THREADS,),
        (operand_values, out, np.uint32(len(operand_values))),
    )
    wrong = []
    for case, row in zip(several, out, strict=True):
        for operands, actual in zip(operand_values.tolist(), row.tolist(), strict=True):
            expected = case.plain(*operands)
            if same(case, kind, actual, expected):
                continue
            text = "NaN" if expected is None else hex(expected)
            wrong.append(f"{case.text} of {[*map(hex, operands)]}: {actual:#x}, not {text}")
            break
    assert not wrong, "\n".join(wrong)


def same(case: Case, kind: str, actual: int, expected: int | None) -> bool:
    if expected is None:
        target = re.findall(r"\.(f16|bf16|f32|f64|f16x2|bf16x2|f32x2)\b", case.text)[-1:]
        into = re.findall(r"cvt[\w.]*?\.(f16|bf16|f32|f64)\.", case.text) or target
        return into[0].endswith("x2") or decoded(actual, into[0]) == NAN
    if kind in ("s16", "s32", "s64") or not case.loose:
        width = {"d": bits_of(kind), "e": 32}.get(result_of(case.text), 64)
        if ".ftz" in case.text and expected & 0x7FFFFFFF == 0x800000 and actual & 0x7FFFFFFF == 0:
            return True  # PTX does not say whether it flushes before or after it rounds
        return (actual ^ expected) & ((1 << width) - 1) == 0
    return units_apart(actual, expected, kind) <= case.loose


def test_every_form_of_the_tables_is_asked_for() -> None:
    """By its whole name: none is forgotten, in whatever type."""
    said = {word for kind in TYPES for case in cases(kind) for word in NAME.findall(case.text)}
    assert {*arithmetic.INTEGERS, *arithmetic.FLOATS} - said == set()
