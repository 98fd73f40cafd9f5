"""The tables of PTX's arithmetic, logic, comparisons and conversions: see function.py."""

import re

from ...code.programs.ptx import WIDTH
from .function import RULES, bits, spelled

INT, BIT = "[.u16|.s16|.u32|.s32|.u64|.s64]", "[.b16|.b32|.b64]"
ANY, WORD = f"[.u8|.s8|{INT}]", "[.u32|.s32|.u64|.s64]"
CC = "carry, {has[cc]} ? carry : none)"  # the carry that an addition takes, and the one it sets
INTEGERS = {
    f"add{INT}": "{t}({x} + {y})",
    f"sub{INT}": "{t}({x} - {y})",
    f"mul.lo{INT}": "low({x}, {y})",
    f"mul.hi{INT}": "high({x}, {y})",
    "mul.wide[.u16|.s16|.u32|.s32]": "{wide}({x}) * {wide}({y})",
    f"mad.lo{INT}": "{t}(low({x}, {y}) + {z})",
    f"mad.hi{INT}": "{t}(high({x}, {y}) + {z})",
    "mad.wide[.u16|.s16|.u32|.s32]": "{wide}({wide}({x}) * {wide}({y}) + {z:wide})",
    f"[add.cc|addc[.cc|]]{WORD}": "carried<1>({x}, {y}, {has[addc]}, " + CC,
    f"[sub.cc|subc[.cc|]]{WORD}": "carried<-1>({x}, {y}, {has[subc]}, " + CC,
    f"[mad.lo.cc|madc.lo[.cc|]]{WORD}": "carried<1>(low({x}, {y}), {z}, {has[madc]}, " + CC,
    f"[mad.hi.cc|madc.hi[.cc|]]{WORD}": "carried<1>(high({x}, {y}), {z}, {has[madc]}, " + CC,
    f"div{INT}": "divide<{t}>({x}, {y}, {at})",
    f"rem{INT}": "{t}({x} - divide<{t}>({x}, {y}, {at}) * {y})",
    f"min{INT}": "({x} < {y} ? {x} : {y})",
    f"max{INT}": "({x} > {y} ? {x} : {y})",
    "min.relu.s32": "max(0, min({x}, {y}))",
    "max.relu.s32": "max(0, max({x}, {y}))",
    "neg[.s16|.s32|.s64]": "{t}(0 - {x})",
    "abs[.s16|.s32|.s64]": "{t}({x} < 0 ? 0 - {x} : {x})",
    f"and[{BIT}|.pred]": "{t}({x} & {y})",
    f"or[{BIT}|.pred]": "{t}({x} | {y})",
    f"xor[{BIT}|.pred]": "{t}({x} ^ {y})",
    f"not{BIT}": "{t}(~{x})",
    "not.pred": "!{x}",
    f"shl{BIT}": "shl<{t}>({x}, {y:u32})",
    f"shr[{BIT}|{INT}]": "shr<{t}>({x}, {y:u32})",
    f"mov[{BIT}|{INT}|.f32|.f64|.pred]": "{x:b}",
    f"selp[{BIT}|{INT}|.f32|.f64]": "({z:bool} ? {x:b} : {y:b})",
    "bfi[.b32|.b64]": "bfi<{t}>({x}, {y}, {z:u32}, {v:u32})",
    "popc[.b32|.b64]": "__builtin_popcountll({x})",
    "clz[.b32|.b64]": "leading_zeros({x})",
    "brev[.b32|.b64]": "brev({x})",
    "bfind[.u32|.u64]": "({x} ? width<{t}> - 1 - leading_zeros({x}) : ~0u)",
    "bfind.shiftamt.u32": "({x} ? leading_zeros({x}) : ~0u)",
    "prmt.b32": "prmt({x}, {y}, {z})",
    "shf.l.wrap.b32": "u32(((u64({y}) << 32 | {x}) << ({z} & 31)) >> 32)",
    "shf.r.wrap.b32": "u32((u64({y}) << 32 | {x}) >> ({z} & 31))",
    "dp4a.u32.u32": "__dp4a({x}, {y}, {z})",
    "dp4a.s32.s32": "__dp4a({x}, {y}, {z})",
    "dp2a.lo.u32.u32": "dp2a({x}, {y}, {z})",
    "dp2a.hi.u32.u32": "dp2a({x}, {y} >> 16, {z})",
    # conversions
    f"cvt{ANY}{ANY}": "{to}({x})",
    f"cvt.sat{ANY}{ANY}": "clamped<{to}>({x})",
    "cvt.f32.[f16|bf16]": "AS(u32, f32(AS({of}, {x})))",
    "cvt.rn.[f16|bf16].f32": "AS(u16, {into}({x}))",
    "cvt.rn.f16x2.f32": "u32(AS(u16, f16({x}))) << 16 | AS(u16, f16({y}))",
    "cvt.rn.bf16x2.f32": "u32(AS(u16, bf16({x}))) << 16 | AS(u16, bf16({y}))",
    "cvt.rn.satfinite.[e4m3|e5m2]x2.f32": "pack_fp8({into}, {y}, {x})",
    "cvt.rn.f16x2.[e4m3|e5m2]x2": "unpack_fp8({of}, {x})",
    "cvt.rna.tf32.f32": "(AS(u32, {x}) + 0x1000) & ~0x1fffu",
}
R, F = "[.rn|.rz|.rm|.rp]", "[.ftz|]"
BOTH = f"[{F}.f32|.f64]"
SUM = f"[{R}|][{F}[.sat|].f32|.f64|{F}.f32x2]"
APPROX = f".approx{F}.f32"
WHOLE = "[.rni|.rzi|.rmi|.rpi]"
FLOATS = {
    f"add{SUM}": "{x} + {y}",
    f"sub{SUM}": "{x} - {y}",
    f"mul{SUM}": "{x} * {y}",
    f"fma{R}[{F}[.sat|].f32|.f64|{F}.f32x2]": "__builtin_fma{s}({x}, {y}, {z})",
    f"div{R}{BOTH}": "{x} / {y}",
    f"div.full{F}.f32": "off({x} / {y}, 0x1p-22)",
    f"div{APPROX}": "off(__fdividef({x}, {y}), 0x1p-22)",
    f"rcp{R}{BOTH}": "{t}(1) / {x}",
    f"rcp{APPROX}": "off({t}(1) / {x}, 0x1p-23)",
    f"sqrt[{R}{BOTH}|{APPROX}]": "sqrt({x})",
    f"min{BOTH}": "least({x}, {y})",
    f"max{BOTH}": "most({x}, {y})",
    f"neg{BOTH}": "-{x}",
    f"abs{BOTH}": "fabs({x})",
    "copysign[.f32|.f64]": "__builtin_copysign{s}({y}, {x})",
    f"ex2{APPROX}": "off(exp2({x}), 0x1p-22)",
    f"rsqrt{APPROX}": "off({t}(1) / sqrt({x}), 1.28e-7)",  # 2^-22.9
    f"cvt[{WHOLE}|]{F}[.sat|].f32.f32": "{whole}({x})",
    f"cvt{WHOLE}.f64.f64": "{whole}({x})",
    f"cvt{WHOLE}{F}{ANY}.f32": "clamped<{to}>({whole}({x}))",
    f"cvt{WHOLE}{ANY}.f64": "clamped<{to}>({whole}({x}))",
    f"cvt{R}[.f32|.f64]{ANY}": "{to}({x})",
    f"cvt{R}{F}.f32.f64": "{to}({x})",
    f"cvt{F}.f64.f32": "{to}({x})",
    f"setp.ne{BOTH}": "__builtin_islessgreater({x}, {y})",
    f"setp.equ{BOTH}": "!__builtin_islessgreater({x}, {y})",
    f"setp.num{BOTH}": "!__builtin_isunordered({x}, {y})",
    f"setp.nan{BOTH}": "__builtin_isunordered({x}, {y})",
}
INTEGERS |= {"setp.eq[.b16|.b32|.b64]": "{x} == {y}", "setp.ne[.b16|.b32|.b64]": "{x} != {y}"}
OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", "<=": ">", ">": "<="}
for _word, _sign in zip(("eq", "ne", "lt", "ge", "le", "gt"), OPPOSITE, strict=True):
    INTEGERS[f"setp.{_word}{INT}"] = f"{{x}} {_sign} {{y}}"
    FLOATS.setdefault(f"setp.{_word}{BOTH}", f"{{x}} {_sign} {{y}}")
    FLOATS.setdefault(f"setp.{_word}u{BOTH}", f"!({{x}} {OPPOSITE[_sign]} {{y}})")  # or NaN
INTEGERS, FLOATS = spelled(INTEGERS), spelled(FLOATS)
EXACT = ("neg", "abs", "copysign")  # they change bits and do not round
ROUNDED = ("add", "sub", "mul", "fma", "div", "rcp", "sqrt", "setp")  # by the CPU, which flushes
ROUND = {"rz": "TO_ZERO", "rm": "DOWN", "rp": "UP"}
TO_WHOLE = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def with_modifiers(name: str, code: str) -> str:
    """Return a line of FLOATS with the rounding, flushing and pairs that the name asks for."""
    words = name.split(".")
    of, into = WIDTH[words[-1].removesuffix("x2")], WIDTH[words[-2]] if words[0] == "cvt" else ""
    code = code.replace("{t}", of).replace("{s}", "f" * (of == "f32"))
    code = code.replace("{whole}", next((TO_WHOLE[w] for w in words if w in TO_WHOLE), ""))
    names = [operand for operand in ("{x}", "{y}", "{z}") if operand in code]
    if is_pair := words[-1] == "f32x2":
        code = re.sub(r"\{(.)\}", r"AS(f32, \1)", code)
    mode = next((ROUND[word] for word in words if word in ROUND), "NEAREST")
    control = f"{mode} | {'FLUSH' if 'ftz' in words or of[0] != 'f' else 'DENORMALS'}"
    operand = r"(\{.\}|AS\(f32, .\))"
    if flush := "ftz" in words and words[0] not in ROUNDED:
        code = re.sub(operand, r"flushed(\1)", code)
    if words[0] not in EXACT and control != "NEAREST | FLUSH":  # which is how a launch sets the CPU
        code = re.sub(rf"flushed\({operand}\)|{operand}", r"hidden(\g<0>)", code)
        code = f"under<{control}>([&] {{{{ return {code}; }}}})"
    code = f"flushed({code})" if flush else code
    code = bits(
        f"__saturatef({code})" if "sat" in words else code,
        {"cvt": into, "setp": ""}.get(words[0], of),
    )
    if is_pair:
        code = f"by_halves([&](u32 x, u32 y, u32 z) {{{{ return {code}; }}}}, {', '.join(names)})"
    return code


RULES.update(INTEGERS | {name: with_modifiers(name, code) for name, code in FLOATS.items()})
