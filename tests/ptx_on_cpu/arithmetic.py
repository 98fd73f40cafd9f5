"""Arithmetic, logic, comparisons and conversions."""

from typing import TYPE_CHECKING

from .instructions import BITS, ROUND, SIZE, WIDTH, instruction, only
from .parse import UnknownError

if TYPE_CHECKING:
    from .translate import Function

# Operands, then C++ of them.  t: the type of the instruction, w: twice as wide, u: 32 bits, p: a
# predicate.  A name may hold a word that tells forms of an instruction apart.
INTEGERS = {
    "add": ("tt", "{t}({x} + {y})"),
    "add.sat": ("tt", "clamped<{t}>(s64({x}) + {y})"),
    "sub": ("tt", "{t}({x} - {y})"),
    "sub.sat": ("tt", "clamped<{t}>(s64({x}) - {y})"),
    "add.cc": ("tt", "add_carry<{t}>({x}, {y}, false, &carry)"),
    "addc": ("tt", "add_carry<{t}>({x}, {y}, carry, nullptr)"),
    "addc.cc": ("tt", "add_carry<{t}>({x}, {y}, carry, &carry)"),
    "sub.cc": ("tt", "subtract_carry<{t}>({x}, {y}, false, &carry)"),
    "subc": ("tt", "subtract_carry<{t}>({x}, {y}, carry, nullptr)"),
    "subc.cc": ("tt", "subtract_carry<{t}>({x}, {y}, carry, &carry)"),
    "mul.lo": ("tt", "{t}({b}({x}) * 1ull * {b}({y}))"),
    "mul.hi": ("tt", "mul_hi({x}, {y})"),
    "mul.wide": ("tt", "{w}({x}) * {w}({y})"),
    "mad.lo": ("ttt", "{t}({b}({x}) * 1ull * {b}({y}) + {z})"),
    "mad.lo.cc": ("ttt", "add_carry<{t}>({t}({b}({x}) * 1ull * {b}({y})), {z}, false, &carry)"),
    "mad.hi.cc": ("ttt", "add_carry<{t}>(mul_hi({x}, {y}), {z}, false, &carry)"),
    "madc.lo": ("ttt", "add_carry<{t}>({t}({b}({x}) * 1ull * {b}({y})), {z}, carry, nullptr)"),
    "madc.lo.cc": ("ttt", "add_carry<{t}>({t}({b}({x}) * 1ull * {b}({y})), {z}, carry, &carry)"),
    "madc.hi": ("ttt", "add_carry<{t}>(mul_hi({x}, {y}), {z}, carry, nullptr)"),
    "madc.hi.cc": ("ttt", "add_carry<{t}>(mul_hi({x}, {y}), {z}, carry, &carry)"),
    "mad.hi": ("ttt", "{t}(mul_hi({x}, {y}) + {z})"),
    "mad.wide": ("ttw", "{w}({w}({x}) * {w}({y}) + {z})"),
    "div": ("tt", "divide<{t}>({x}, {y}, {at})"),
    "rem": ("tt", "remainder<{t}>({x}, {y}, {at})"),
    "min": ("tt", "({x} < {y} ? {x} : {y})"),
    "max": ("tt", "({x} > {y} ? {x} : {y})"),
    "neg": ("t", "{t}(0 - {x})"),
    "abs": ("t", "{t}({x} < 0 ? 0 - {x} : {x})"),
    "and": ("tt", "{t}({x} & {y})"),
    "or": ("tt", "{t}({x} | {y})"),
    "xor": ("tt", "{t}({x} ^ {y})"),
    "not": ("t", "{t}(~{x})"),
    "shl": ("tu", "shl<{t}>({x}, {y})"),
    "shr": ("tu", "shr<{t}>({x}, {y})"),
    "selp": ("ttp", "({z} ? {x} : {y})"),
    "bfe": ("tuu", "bfe<{t}>({x}, {y}, {z})"),
    "bfi": ("ttuu", "bfi<{t}>({x}, {y}, {z}, {v})"),
    "popc": ("t", "popc({x})"),
    "clz": ("t", "clz({x})"),
    "brev": ("t", "brev({x})"),
    "bfind": ("t", "bfind<{t}>({x}, false)"),
    "bfind.shiftamt": ("t", "bfind<{t}>({x}, true)"),
    "prmt": ("uuu", "prmt({x}, {y}, {z})"),
    "lop3": ("uuuu", "lop3({x}, {y}, {z}, {v})"),
    "shf.l.wrap": ("uuu", "funnel<true, false>({x}, {y}, {z})"),
    "shf.l.clamp": ("uuu", "funnel<true, true>({x}, {y}, {z})"),
    "shf.r.wrap": ("uuu", "funnel<false, false>({x}, {y}, {z})"),
    "shf.r.clamp": ("uuu", "funnel<false, true>({x}, {y}, {z})"),
    "dp4a.u32": ("uuu", "dp4a<u8, u8>({x}, {y}, {z})"),
    "dp4a.s32": ("uuu", "dp4a<s8, s8>({x}, {y}, {z})"),
}
PREDICATES = {"not": "!{x}", "and": "{x} & {y}", "or": "{x} | {y}", "xor": "{x} ^ {y}"}
# n: the number of operands; then C++ of them
FLOATS = {
    "add": (2, "{x} + {y}"),
    "sub": (2, "{x} - {y}"),
    "mul": (2, "{x} * {y}"),
    "fma": (3, "fused({x}, {y}, {z})"),
    "mad": (3, "fused({x}, {y}, {z})"),
    "div": (2, "{x} / {y}"),
    "div.approx": (2, "div_approx({x}, {y})"),
    "rcp": (1, "{c}(1) / {x}"),
    "sqrt": (1, "std::sqrt({x})"),
    "min": (2, "least({x}, {y})"),
    "max": (2, "most({x}, {y})"),
    "min.NaN": (2, "either_nan({x}, {y}, least({x}, {y}))"),
    "max.NaN": (2, "either_nan({x}, {y}, most({x}, {y}))"),
    "neg": (1, "-{x}"),
    "abs": (1, "std::fabs({x})"),
    "copysign": (2, "std::copysign({y}, {x})"),
    "ex2": (1, "std::exp2({x})"),
    "lg2": (1, "std::log2({x})"),
    "rsqrt": (1, "{c}(1) / std::sqrt({x})"),
    "sin": (1, "std::sin({x})"),
    "cos": (1, "std::cos({x})"),
    "tanh": (1, "std::tanh({x})"),
}
BARE = ("neg", "abs", "copysign")  # they move bits and round nothing
ROUNDED = ("add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt")  # by the CPU, which flushes
NARROW = {"f16": ("from_f16", "to_f16"), "bf16": ("from_bf16", "to_bf16")}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
COMPARE |= {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
WHOLE = {"rni": "std::rint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}
EIGHT = {"e4m3x2": "4", "e5m2x2": "5"}  # as the machine numbers them


def form(table: dict[str, object], word: str, words: list[str]) -> str:
    """Return the longest name in a table that an instruction's words make."""
    said = {word, *words}
    return max((n for n in table if n.split(".")[0] == word and {*n.split(".")} <= said), key=len)


def control(words: list[str], kind: str) -> str:
    """Return how the CPU should round, and whether denormals are zero."""
    mode = next((ROUND[word] for word in words if word in ROUND), "NEAREST")
    return f"{mode} | {'FLUSH' if 'ftz' in words and kind == 'f32' else 'DENORMALS'}"


def under(words: list[str], kind: str, code: str) -> str:
    """Return code that runs with the rounding that the words ask for; most runs as it stands."""
    how = control(words, kind)
    return code if how == "NEAREST | FLUSH" else f"under<{how}>([&] {{ return {code}; }})"


def arithmetic(f: "Function", words: list[str], ops: list[str]) -> str:
    """Translate what the tables hold."""
    kind = WIDTH[words[-1]]
    target, *rest = ops
    if kind == "bool":
        only(words, "pred")
        names = zip("xy", (f.value(o, "bool") for o in rest), strict=False)
        return f.to(target, f"bool({PREDICATES[f.word].format(**dict(names))})")
    if "f" in words[-1] and f.word != "selp":
        return floats(f, words, ops)
    name = form(INTEGERS, f.word, words)
    only(
        words, f"sync {name.replace('.', ' ')} {words[-1]} {'u32 s32' if f.word == 'dp4a' else ''}"
    )
    takes, code = INTEGERS[name]
    if f.word == "dp4a" and len({*words}) > 1:
        raise UnknownError("signs that differ")
    twice = f"{kind[0]}{SIZE[kind] * 16}" if kind[0] != "f" else ""
    kinds = {"t": kind, "w": twice, "u": "u32", "p": "bool"}
    if len(takes) != len(rest):
        raise UnknownError(f"{len(rest)} operands")
    given = {n: f.value(o, kinds[k]) for n, o, k in zip("xyzv", rest, takes, strict=False)}
    return f.to(target, code.format(t=kind, w=twice, b=BITS[kind], at=f.at(), **given))


def floats(f: "Function", words: list[str], ops: list[str]) -> str:
    """Translate arithmetic of floats: of 16 bits in float32 or wider, rounded once; pairs apart."""
    kind, name = words[-1], form(FLOATS, f.word, words)
    only(words, f"{' '.join(ROUND)} ftz sat approx full {name.replace('.', ' ')} {kind}")
    count, code = FLOATS[name]
    target, *rest = ops
    if len(rest) != count:
        raise UnknownError(f"{len(rest)} operands")
    one = kind.removesuffix("x2")
    narrow = NARROW.get(one)
    c = "f32" if narrow else WIDTH[one]

    def made(operands: list[str]) -> str:
        how = [] if narrow else words
        plain = f.word in BARE or control(how, c) == "NEAREST | FLUSH"
        flush = "ftz" in how and c == "f32" and f.word not in ROUNDED
        operands = [f"flushed({o})" for o in operands] if flush else operands
        given = operands if plain else [f"hidden({o})" for o in operands]
        done = code.format(c=c, **dict(zip("xyz", given, strict=False)))
        done = done.replace("fused(", "fused_odd(") if narrow else done
        done = done if plain else under(how, c, done)
        done = f"flushed({done})" if flush else done
        return f"sat({done})" if "sat" in words else done

    if one == kind:
        read = [f.value(o, WIDTH[one]) for o in rest]
        read = [f"{narrow[0]}({o})" for o in read] if narrow else read
        return f.to(target, f"{narrow[1]}({made(read)})" if narrow else f"{c}({made(read)})")
    bits = BITS[WIDTH[one]]
    get, put = narrow or (f"as<{c}>", "as<u32>")
    each = (
        f"[&](auto x, auto y, auto z) {{ return {put}({made([f'{get}({n})' for n in 'xyz'])}); }}"
    )
    whole = [f.value(o, WIDTH[kind]) for o in rest]
    return f.to(target, f"by_halves<{bits}, {WIDTH[kind]}>({each}, {', '.join(whole)})")


@instruction("mov")
def mov(f: "Function", words: list[str], ops: list[str]) -> str:
    kind, (target, source) = WIDTH[words[-1]], ops
    only(words, words[-1])
    whole = f"u{SIZE[kind] * 8}"
    parts = f.several(source if source.startswith("{") else target)
    each = SIZE[kind] * 8 // len(parts)
    if source.startswith("{"):
        shifted = (f"u64({f.value(p, f'u{each}')}) << {each * i}" for i, p in enumerate(parts))
        return f.to(target, f"{whole}({' | '.join(shifted)})")
    if target.startswith("{"):
        pieces = (f.to(p, f"u{each}(w >> {each * i})") for i, p in enumerate(parts))
        return f"u64 w = {f.value(source, whole)}; {' '.join(pieces)}"
    return f.to(target, f.value(source, kind))


@instruction("cvt")
def cvt(f: "Function", words: list[str], ops: list[str]) -> str:
    into, of = words[-2:]
    target, *rest = ops
    only(words[:-2], f"{' '.join(ROUND)} {' '.join(WHOLE)} rna ftz sat satfinite")
    if into in ("f16x2", "bf16x2") and of == "f32":
        only(words[:-2], "rn")
        high, low = (f"u32({NARROW[into[:-2]][1]}({f.value(o, 'f32')}))" for o in rest)
        return f.to(target, f"{high} << 16 | {low}")
    if into in EIGHT:
        if words[:-2] != ["rn", "satfinite"]:
            raise UnknownError("8 bits that do not end at the largest")
        high, low = (f.value(o, "f32") for o in rest)
        return f.to(target, f"pack_fp8({EIGHT[into]}, {low}, {high})")
    if of in EIGHT:
        return f.to(target, f"unpack_fp8({EIGHT[of]}, {f.value(rest[0], 'u16')})")
    if into == "tf32":
        only(words[:-2], "rna")
        return f.to(target, f"(as<u32>({f.value(rest[0], 'f32')}) + 0x1000) & ~0x1fffu")
    return f.to(target, converted(words, into, of, f.value(rest[0], WIDTH[of])))


def converted(words: list[str], into: str, of: str, x: str) -> str:
    """Return a number of one type as another."""
    wanted, given = WIDTH[into], WIDTH[of]
    if of in NARROW:
        x, given = f"{NARROW[of][0]}({x})", "f32"
    whole = next((WHOLE[word] for word in words if word in WHOLE), "")
    if given[0] == "f" and wanted[0] == "f" and into not in NARROW:
        if whole or given != wanted:
            x = under(words, "f32", f"{wanted}({whole}(hidden({x})))")
        x = f"flushed({x})" if "ftz" in words and wanted == "f32" else x
        return f"sat({x})" if "sat" in words else x
    if into in NARROW:
        only([w for w in words[:-2] if w in ROUND], "rn")
        if given in ("s64", "u64"):
            raise UnknownError("64 bits in 16")
        return f"{NARROW[into][1]}({x if given[0] == 'f' else f'f64({x})'})"
    if given[0] == "f":
        if not whole:
            raise UnknownError("rounding")
        plain = "ftz" in words and given == "f32"
        x = x if plain else f"under<NEAREST | DENORMALS>([&] {{ return {whole}(hidden({x})); }})"
        return f"integer<{wanted}>({f'{whole}({x})' if plain else x})"
    if wanted[0] == "f":
        return under([*words, "ftz"], "f32", f"{wanted}(hidden({x}))")
    if "sat" in words:
        return f"clamped<{wanted}>({x})"
    return f"{wanted}({x})"


@instruction("setp", "set")
def setp(f: "Function", words: list[str], ops: list[str]) -> str:
    if f.word == "set":
        raise UnknownError("set")
    compare, of = words[0], words[-1]
    kind = WIDTH[of]
    only(words[1:-1], "ftz and or xor")
    a, b = (f.value(o, kind) for o in ops[1:3])
    if of in NARROW:
        (a, b), kind = (f"{NARROW[of][0]}({x})" for x in (a, b)), "f32"
    if kind[0] == "f":
        code = compared(compare)
        code = code.format(a=f"hidden({a})", b=f"hidden({b})")
        code = under(["ftz"] if "ftz" in words else [], kind, code)
    else:
        code = f"({a} {COMPARE[compare]} {b})"
    (p, _, q) = ops[0].partition("|")
    more = next((w for w in words[1:-1] if w in ("and", "or", "xor")), None)
    if not more:
        return f"bool t = {code}; {f.to(p, 't')}{f.to(q, '!t') if q else ''}"
    sign = {"and": "&", "or": "|", "xor": "^"}[more]
    done = f"bool t = {code}, c = {f.value(ops[3], 'bool')}; {f.to(p, f'bool(t {sign} c)')}"
    return done + (f.to(q, f"bool(!t {sign} c)") if q else "")


def compared(compare: str) -> str:
    """Return a comparison of two floats; with u, also true where one is NaN."""
    if compare in ("num", "nan"):
        return f"{'!' if compare == 'num' else ''}std::isunordered({{a}}, {{b}})"
    ordered = compare in COMPARE
    sign = COMPARE[compare if ordered else compare[:-1]]
    if compare == "ne":
        return "std::islessgreater({a}, {b})"
    if compare == "equ":
        return "!std::islessgreater({a}, {b})"
    if ordered or compare == "neu":
        return f"({{a}} {sign} {{b}})"
    opposite = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}[sign]
    return f"!({{a}} {opposite} {{b}})"
