"""What all instructions share: types, special registers, and the rules that most of them follow.

    RULES["mbarrier.init"] = Rule("a8 i", "mbarrier_init({x}, {y}, {at})", "shared::cta b64")

A rule says how operands are read, what C++ they make, and which words may stand beside its name;
the longest name wins whose words an instruction has.  What no rule holds has its own function:

    @instruction("bra")
    def bra(f, words, ops): ...      f the Function, words between dots, operands; returns C++

=======  =======================================================
d        the result, first, where the C++ is a value
t w r    of the type that the last word names; twice as wide; its bits
u i l p  32 bits, unsigned and signed; 64 bits; a predicate
a8       an address in shared memory, of so many bytes; a: of one
g        an address in global memory
# _      a number as it stands; no result
?        behind another: it may be missing, and is 0
=======  =======================================================

C++ names operands x, y, z, v, the types t, w and r, and the place of a message in three forms:
``at`` as two arguments, ``where`` as one, ``line`` without that of PTX, for lanes that must meet.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from .parse import UnknownError

if TYPE_CHECKING:
    from .translate import Function

Words, Ops = tuple[str, ...], tuple[str, ...]
Write = Callable[["Function", Words, Ops], str]

# The C++ type as which an instruction reads a register; and the register's own.
WIDTH = {"pred": "bool", "b8": "u8", "u8": "u8", "s8": "s8", "b16": "u16", "f16": "u16"}
WIDTH |= {"bf16": "u16", "f16x2": "u32", "bf16x2": "u32", "b32": "u32", "tf32": "u32", "b64": "u64"}
WIDTH |= {f"{k}{n}": f"{k}{n}" for k in "us" for n in (16, 32, 64)}
WIDTH |= {"f32": "f32", "f64": "f64", "f32x2": "u64", "e4m3x2": "u16", "e5m2x2": "u16"}
SIZE = {"bool": 1, **{f"{k}{n}": n // 8 for k in "usf" for n in (8, 16, 32, 64)}}
BITS = {kind: kind if kind == "bool" else f"u{kind[1:]}" for kind in SIZE}
PLACES = (("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"))
SPECIAL = {f"{name}.{axis}": f"{var}.{axis}" for axis in "xyz" for name, var in PLACES} | {
    "laneid": "lane_id()",
    "warpid": "(M.cur->index % M.stride / 32)",
    "cluster_ctarank": "M.cur->rank",
    "cluster_nctarank": "M.blocks",
    "lanemask_lt": "((1u << lane_id()) - 1)",
}


class Rule(NamedTuple):
    """How operands are read, the C++ that they make, and words that may stand beside the name."""

    operands: str
    code: str
    words: str = ""


RULES: dict[str, Rule] = {}
WRITERS: dict[str, Write] = {}


def instruction(*names: str) -> Callable[[Write], Write]:
    """Keep a function as what writes the instructions of these names."""

    def keep(write: Write) -> Write:
        WRITERS.update(dict.fromkeys(names, write))
        return write

    return keep


def only(words: Iterable[str], known: str) -> None:
    """Raise UnknownError for a word that is not known."""
    if strange := {*words} - {*known.split()}:
        raise UnknownError(f"no .{' .'.join(sorted(strange))}")


def flag(value: bool) -> str:
    """Return true or false of C++."""
    return str(value).lower()


def longest(table: Iterable[str], words: Words) -> str:
    """Return the longest name in a table that an instruction's words make; nothing if none does."""
    own = (n for n in table if n.partition(".")[0] == words[0] and {*n.split(".")} <= {*words})
    return max(own, key=lambda n: (n.count("."), len(n)), default="")


def write(f: "Function", words: Words, ops: Ops) -> str:
    """Return the C++ of an instruction."""
    own = longest(WRITERS, words)
    if own and own.count(".") >= longest(RULES, words).count("."):
        return WRITERS[own](f, words, ops)
    return by_rule(f, words, ops)


def by_rule(f: "Function", words: Words, ops: Ops) -> str:
    """Write what a rule says."""
    if not (name := longest(RULES, words)):
        raise UnknownError("no rule")
    rule, kind = RULES[name], WIDTH.get(words[-1], "")
    codes = rule.operands.split()
    typed = {"t", "w", "r"} & {*codes}
    only(words, f"{name.replace('.', ' ')} {rule.words} {words[-1] if typed else ''}")
    if len(ops) not in (len(codes), sum("?" not in code for code in codes)):
        raise UnknownError(f"{len(ops)} operands")
    ops = (*ops, "0")[: len(codes)]
    types = {"t": kind, "r": BITS.get(kind, ""), "w": kind and f"{kind[0]}{SIZE[kind] * 16}"}
    known = types | {"u": "u32", "i": "s32", "l": "u64", "p": "bool"}

    def read(code: str, op: str) -> str:
        if code[0] == "a":
            return f.address(op, "shared", int(code[1:] or 1))
        if code == "_" and op != "_":
            raise UnknownError(f"result {op}")
        if code in "#_":
            return op
        return f.address(op, "global") if code == "g" else f.value(op.strip("[]"), known[code[0]])

    has_result = codes[:1] == ["d"]
    pairs = [*zip(codes, ops, strict=True)][has_result:]
    given = dict(zip("xyzv", (read(*pair) for pair in pairs), strict=False))
    code = rule.code.format(**types, **given, **f.places_in(rule.code))
    return f.to(ops[0], code) if has_result else f"{code};"
