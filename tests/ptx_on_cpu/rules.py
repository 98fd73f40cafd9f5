"""How an instruction becomes C++: a line of a table by its whole name, or a function.

    "sh[l|r].b32"     shl.b32 and shr.b32; [a|b|] is a, b or nothing
    "bfi.b32": "bfi<{t}>({x}, {y}, {z:u32}, {v:u32})"

C++ that ends in a semicolon is a statement; other C++ is a value, which the first operand gets.
Operands are x, y, z, v.  Each is read as the type that stands behind its name, or as t:

========  ===========================================================================
t w b to  the type that the last word names; twice as wide; its bits; of the word before
a8        a pointer to so many bytes of shared memory; a: to one; g: to global memory
u32*4     {a, b, c, d}, as an initializer; D*4: they get what an array D holds
# - _     a number as it stands; what does not matter; no result
label ?   where to go; behind another: it may be missing, and is 0
========  ===========================================================================

``at`` is the place of a message, ``line`` that without the line of PTX, for lanes that must meet;
``words[1]`` is a word of the name, and ``has[trans]`` says whether it has one.
What needs more is written by a function, by how the name begins:

    @instruction("bra")
    def bra(f, words, ops): ...      f the Function, words between dots, operands; returns C++
"""

import collections
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from .parse import UnknownError

if TYPE_CHECKING:
    from .translate import Function

Words, Ops = tuple[str, ...], tuple[str, ...]
Write = Callable[["Function", Words, Ops], str]

# The C++ type as which an instruction reads a register; and the register's own.
WIDTH = {"pred": "bool", "f16": "u16", "bf16": "u16", "e4m3x2": "u16", "e5m2x2": "u16"}
WIDTH |= {
    "tf32": "u32",
    "f16x2": "u32",
    "bf16x2": "u32",
    "f32x2": "u64",
    "f32": "f32",
    "f64": "f64",
}
WIDTH |= {f"{k}{n}": f"{k}{n}".replace("b", "u") for k in "bus" for n in (8, 16, 32, 64)}
SIZE = {"bool": 1, **{f"{k}{n}": n // 8 for k in "usf" for n in (8, 16, 32, 64)}}
BITS = {kind: kind if kind == "bool" else f"u{kind[1:]}" for kind in SIZE}

RULES: dict[str, str] = {}
WRITERS: dict[str, Write] = {}


def forms(pattern: str) -> Iterator[str]:
    """Yield the names that a pattern stands for."""
    if (inner := re.search(r"\[([^][]*)\]", pattern)) is None:
        yield pattern
        return
    for each in inner[1].split("|"):
        yield from forms(pattern[: inner.start()] + each + pattern[inner.end() :])


def spelled(table: dict[str, str]) -> dict[str, str]:
    """Return a table by whole names."""
    return {name: code for pattern, code in table.items() for name in forms(pattern)}


def instruction(*names: str) -> Callable[[Write], Write]:
    """Keep a function as what writes the instructions that begin so."""

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


class Operand(NamedTuple):
    """An operand, which a line of a table reads as it says."""

    f: "Function"
    text: str
    types: dict[str, str]

    def __format__(self, how: str) -> str:  # noqa: PLR0911
        kind, _, count = (how.rstrip("?") or "t").partition("*")
        if kind in ("#", "-"):
            return self.text * (kind == "#")
        if kind == "_":
            return self.f.to(self.text, "0") if self.text != "_" else ""
        if kind == "label":
            return self.f.label(self.text)
        if kind == "g" or kind[0] == "a":
            return self.f.address(self.text, "shared" * (kind != "g"), int(kind[1:] or 1))
        if not count:
            base = self.text.strip("[]").partition(",")[0] if self.text[0] == "[" else self.text
            return self.f.value(base, self.types.get(kind, kind))
        names = self.f.several(self.text[max(self.text.find("{"), 0) :].rstrip("]"))
        if len(names) != int(count):
            raise UnknownError(f"{len(names)} registers")
        if kind == "D":
            return " ".join(self.f.to(name, f"D[{i}]") for i, name in enumerate(names))
        return f"{{{', '.join(self.f.value(name, kind) for name in names)}}}"


def write(f: "Function", words: Words, ops: Ops) -> str:
    """Return the C++ of an instruction."""
    if code := RULES.get(".".join(words)):
        return by_rule(f, words, ops, code)
    for count in range(len(words), 0, -1):
        if own := WRITERS.get(".".join(words[:count])):
            return own(f, words, ops)
    raise UnknownError("no rule")


def by_rule(f: "Function", words: Words, ops: Ops, code: str) -> str:
    """Write what a line of a table says."""
    target = () if code.endswith(";") else ops[:1]
    ops, fields = (
        ops[len(target) :],
        {m[1]: m[2] for m in re.finditer(r"\{([x-zv]):?(.*?)\}", code)},
    )
    if len(ops) not in (len(fields), sum("?" not in how for how in fields.values())):
        raise UnknownError(f"{len(ops)} operands")
    into, of = words[-2:] if words[1:] else ("", words[0])
    kind = WIDTH.get(of, "")
    types = {"t": kind, "b": BITS.get(kind, ""), "to": WIDTH.get(into, ""), "of": of, "into": into}
    types["w"] = kind and f"{kind[0]}{SIZE[kind] * 16}"
    given = {n: Operand(f, o, types) for n, o in zip("xyzv", (*ops, "0"), strict=False)}
    has = collections.defaultdict(lambda: "false", dict.fromkeys(words, "true"))
    places = {"at": f.at(), "line": f.at(collective=True)}
    code = code.format(**places, **types, **given, has=has, words=words)
    return f.to(target[0], code) if target else code
