"""Arithmetic, logic, comparisons and conversions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .parse import UnknownError
from .rules import BITS, RULES, SIZE, WIDTH, Ops, Rule, Words, instruction, longest, only

if TYPE_CHECKING:
    from .translate import Function

INTEGERS = {
    "add": ("t t", "{t}({x} + {y})"),
    "sub": ("t t", "{t}({x} - {y})"),
    "mul.lo": ("t t", "low({x}, {y})"),
    "mul.hi": ("t t", "high({x}, {y})"),
    "mul.wide": ("t t", "{w}({x}) * {w}({y})"),
    "mad.lo": ("t t t", "{t}(low({x}, {y}) + {z})"),
    "mad.hi": ("t t t", "{t}(high({x}, {y}) + {z})"),
    "mad.wide": ("t t w", "{w}({w}({x}) * {w}({y}) + {z})"),
    "div": ("t t", "divide<{t}>({x}, {y}, {where})"),
    "rem": ("t t", "remainder<{t}>({x}, {y}, {where})"),
    "min": ("t t", "({x} < {y} ? {x} : {y})"),
    "max": ("t t", "({x} > {y} ? {x} : {y})"),
    "min.relu": ("t t", "std::max({t}(0), std::min({x}, {y}))"),
    "max.relu": ("t t", "std::max({t}(0), std::max({x}, {y}))"),
    "neg": ("t", "{t}(0 - {x})"),
    "abs": ("t", "{t}({x} < 0 ? 0 - {x} : {x})"),
    "and": ("t t", "{t}({x} & {y})"),
    "or": ("t t", "{t}({x} | {y})"),
    "xor": ("t t", "{t}({x} ^ {y})"),
    "not": ("t", "{t}(~{x})"),
    "not.pred": ("p", "!{x}"),
    "shl": ("t u", "shl<{t}>({x}, {y})"),
    "shr": ("t u", "shr<{t}>({x}, {y})"),
    "selp": ("r r p", "({z} ? {x} : {y})"),
    "bfi": ("t t u u", "bfi<{t}>({x}, {y}, {z}, {v})"),
    "popc": ("t", "__builtin_popcountll({x})"),
    "clz": ("t", "leading_zeros({x})"),
    "brev": ("t", "brev({x})"),
    "bfind": ("t", "bfind<{t}>({x}, false)"),
    "bfind.shiftamt": ("t", "bfind<{t}>({x}, true)"),
    "prmt.b32": ("u u u", "prmt({x}, {y}, {z})"),
    "shf.l.wrap.b32": ("u u u", "u32(((u64({y}) << 32 | {x}) << ({z} & 31)) >> 32)"),
    "shf.r.wrap.b32": ("u u u", "u32((u64({y}) << 32 | {x}) >> ({z} & 31))"),
    "dp4a.u32": ("u u u", "dot<u8, u8>({x}, {y}, {z})"),
    "dp4a.s32": ("u u u", "dot<s8, s8>({x}, {y}, {z})"),
    "dp2a.lo.u32": ("u u u", "dot<u16, u8>({x}, {y}, {z})"),
    "dp2a.hi.u32": ("u u u", "dot<u16, u8>({x}, {y} >> 16, {z})"),
}
# A sum with a carry: c behind the name takes it, .cc leaves it.
for _name, _sum in {
    "add": "{x}, {y}",
    "sub": "{x}, {y}",
    "mad.lo": "low({x}, {y}), {z}",
    "mad.hi": "high({x}, {y}), {z}",
}.items():
    for _takes, _leaves in ((False, True), (True, False), (True, True)):
        _word, _, _half = _name.partition(".")
        _whole = ".".join([_word + "c" * _takes, *filter(None, [_half]), *["cc"] * _leaves])
        _call = f"{'subtract' if _name == 'sub' else 'add'}_carry<{{t}}>"
        _carries = f"{'carry' if _takes else 'false'}, {'&carry' if _leaves else 'nullptr'}"
        INTEGERS[_whole] = ("t t t" if _half else "t t", f"{_call}({_sum}, {_carries})")
RULES.update({name: Rule(f"d {takes}", code) for name, (takes, code) in INTEGERS.items()})

FLOATS = {
    "add": "{x} + {y}",
    "sub": "{x} - {y}",
    "mul": "{x} * {y}",
    "fma": "__builtin_fma{s}({x}, {y}, {z})",
    "div": "{x} / {y}",
    "div.approx": "div_approx({x}, {y})",
    "rcp": "{c}(1) / {x}",
    "sqrt": "std::sqrt({x})",
    "min": "least({x}, {y})",
    "max": "most({x}, {y})",
    "min.NaN": "either_nan({x}, {y}, least({x}, {y}))",
    "max.NaN": "either_nan({x}, {y}, most({x}, {y}))",
    "neg": "-{x}",
    "abs": "std::fabs({x})",
    "copysign": "std::copysign({y}, {x})",
    "ex2": "std::exp2({x})",
    "lg2": "std::log2({x})",
    "rsqrt": "{c}(1) / std::sqrt({x})",
    "sin": "std::sin({x})",
    "cos": "std::cos({x})",
    "tanh": "std::tanh({x})",
}
BARE = ("neg", "abs", "copysign")  # they move bits and round nothing
ROUNDED = ("add", "sub", "mul", "fma", "div", "rcp", "sqrt")  # by the CPU, which flushes
ROUND = {"rn": "NEAREST", "rz": "TO_ZERO", "rm": "DOWN", "rp": "UP"}
WHOLE = {"rni": "std::rint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}
PLAIN = "NEAREST | FLUSH"  # as a launch sets the CPU
NARROW = {"f16": ("from_f16", "to_f16"), "bf16": ("from_bf16", "to_bf16")}
EIGHT = {"e4m3x2": "4", "e5m2x2": "5"}  # as the machine numbers them
SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


def under(words: Iterable[str], kind: str, code: str) -> str:
    """Return code that runs with the rounding that the words ask for; most runs as it stands."""
    mode = next((ROUND[word] for word in words if word in ROUND), "NEAREST")
    how = f"{mode} | {'FLUSH' if 'ftz' in words and kind == 'f32' else 'DENORMALS'}"
    return code if how == PLAIN else f"under<{how}>([&] {{ return {code}; }})"


@instruction(*(f"{n.partition('.')[0]}.{kind}" for n in FLOATS for kind in ("f32", "f64", "f32x2")))
def floats(f: "Function", words: Words, ops: Ops) -> str:
    """Write arithmetic of floats, and of pairs of them."""
    kind, name, (target, *rest) = words[-1], longest(FLOATS, words), ops
    only(words, f"{' '.join(ROUND)} ftz sat approx full {name.replace('.', ' ')} {kind}")
    real, code = kind.removesuffix("x2"), FLOATS[name]
    names = [n for n in "xyz" if f"{{{n}}}" in code]
    if len(rest) != len(names):
        raise UnknownError(f"{len(rest)} operands")
    plain = words[0] in BARE or not under(words, real, "")
    flush = "ftz" in words and words[0] not in ROUNDED

    def made(given: list[str]) -> str:
        given = [f"flushed({o})" if flush else o for o in given]
        given = given if plain else [f"hidden({o})" for o in given]
        done = code.format(c=real, s="f" * (real == "f32"), **dict(zip(names, given, strict=True)))
        done = done if plain else under(words, real, done)
        done = f"flushed({done})" if flush else done
        return f"sat({done})" if "sat" in words else done

    whole = [f.value(o, WIDTH[kind]) for o in rest]
    if kind == real:
        return f.to(target, made(whole), real)
    half = f"AS(u32, {made([f'AS(f32, {n})' for n in names])})"
    given = f"[&](u32 x, u32 y, u32 z) {{ return {half}; }}, {', '.join(whole)}"
    return f.to(target, f"by_halves({given})")


@instruction("mov")
def mov(f: "Function", words: Words, ops: Ops) -> str:
    kind, (target, source) = BITS[WIDTH[words[-1]]], ops
    only(words, f"mov {words[-1]}")
    packs = source.startswith("{")
    parts = f.several(source if packs else target)
    each = SIZE[kind] * 8 // len(parts)
    if packs:
        shifted = (f"u64({f.value(p, f'u{each}')}) << {each * i}" for i, p in enumerate(parts))
        return f.to(target, f"{kind}({' | '.join(shifted)})")
    if target.startswith("{"):
        pieces = (f.to(p, f"u{each}(w >> {each * i})") for i, p in enumerate(parts))
        return f"u64 w = {f.value(source, kind)}; {' '.join(pieces)}"
    return f.to(target, f.value(source, kind))


@instruction("cvt")
def cvt(f: "Function", words: Words, ops: Ops) -> str:
    _, *how, into, of = words
    target, *rest = ops
    only(how, f"{' '.join(ROUND)} {' '.join(WHOLE)} rna ftz sat satfinite")
    given = [f.value(o, WIDTH[of]) for o in rest]
    if into in ("f16x2", "bf16x2") and of == "f32":
        only(how, "rn")
        high, low = (f"u32({NARROW[into[:-2]][1]}({x}))" for x in given)
        return f.to(target, f"{high} << 16 | {low}")
    if into in EIGHT:
        if how != ["rn", "satfinite"]:
            raise UnknownError("8 bits that do not end at the largest")
        high, low = given
        return f.to(target, f"pack_fp8({EIGHT[into]}, {low}, {high})")
    if of in EIGHT:
        return f.to(target, f"unpack_fp8({EIGHT[of]}, {given[0]})")
    if into == "tf32":
        only(how, "rna")
        return f.to(target, f"(AS(u32, {given[0]}) + 0x1000) & ~0x1fffu")
    return f.to(target, converted(words, into, of, given[0]), WIDTH[into])


def converted(words: Words, into: str, of: str, x: str) -> str:
    """Return a number of one type as another."""
    wanted, given = WIDTH[into], WIDTH[of]
    if of in NARROW:
        x, given = f"{NARROW[of][0]}({x})", "f32"
    whole = next((WHOLE[word] for word in words if word in WHOLE), "")
    if into in NARROW:
        only([w for w in words if w in ROUND], "rn")
        only([given], "f32")
        return f"{NARROW[into][1]}({x})"
    if given[0] == wanted[0] == "f":
        if whole or given != wanted:
            x = under(words, "f32", f"{wanted}({whole}(hidden({x})))")
        x = f"flushed({x})" if "ftz" in words and wanted == "f32" else x
        return f"sat({x})" if "sat" in words else x
    if given[0] == "f":
        if not whole:
            raise UnknownError("rounding")
        how = ("ftz",) if "ftz" in words and given == "f32" else ()
        return f"clamped<{wanted}>({under(how, given, f'{whole}(hidden({x}))')})"
    if wanted[0] == "f":
        return under((*words, "ftz"), "f32", f"{wanted}(hidden({x}))")
    return f"clamped<{wanted}>({x})" if "sat" in words else f"{wanted}({x})"


@instruction("setp")
def setp(f: "Function", words: Words, ops: Ops) -> str:
    _, compare, *more, of = words
    kind = WIDTH[of]
    only(more, "ftz")
    a, b = (f.value(o, kind) for o in ops[1:])
    if kind[0] != "f":
        return f.to(ops[0], f"{a} {SIGNS[compare]} {b}")
    return f.to(ops[0], under((*more,), kind, compared(compare, f"hidden({a})", f"hidden({b})")))


def compared(word: str, a: str, b: str) -> str:
    """Return a comparison of two floats; with u, also true where one is NaN."""
    if word in ("num", "nan"):
        return f"{'!' * (word == 'num')}std::isunordered({a}, {b})"
    if word not in SIGNS:
        return f"!({compared(OPPOSITE[word[:-1]], a, b)})"
    return f"std::islessgreater({a}, {b})" if word == "ne" else f"{a} {SIGNS[word]} {b}"
