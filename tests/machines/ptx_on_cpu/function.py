"""Translate a PTX function to C++: blocks become blocks, registers variables, branches gotos.

An instruction is translated by the table line of its full name, or by a Python function:

    "sh[l|r].b32"     shl.b32 and shr.b32; [a|b|] is a, b or nothing
    "bfi.b32": "bfi<{t}>({x}, {y}, {z:u32}, {v:u32})"

C++ that ends in a semicolon is a statement; other C++ is a value, which is assigned to the first
operand.  Operands are x, y, z, v, w.  Each is read as the type after its name, or as t:

========  ===========================================================================
t wide    the type of the last word of the instruction's name; a type twice as wide
b to      the bits of t; the type of the word before the last
a8        a pointer to 8 bytes of shared memory; a: to one byte; g: to global memory
u32*4     {a, b, c, d}, as an initializer; D*4: they are assigned from an array D
# - _     a literal number; an ignored operand; a result that is not needed
r|p       two results, of which the second may be missing
label     the target of a branch
?         after another type: the operand may be missing, and is then 0
========  ===========================================================================

``at`` is the location for messages; ``line`` has no line of PTX, for collectives: the compiler may
copy a line of source.  ``words[1]`` is a word of the name; ``has[trans]`` says if it has that word.
"""

import collections
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ...code.programs.ptx import (
    SIZE,
    WIDTH,
    Body,
    Piece,
    UnknownError,
    instruction,
    operands,
    several,
)

Words, Ops = tuple[str, ...], tuple[str, ...]
# A register's own type: unsigned, or bool.
BITS = {kind: kind if kind == "bool" else f"u{kind[1:]}" for kind in SIZE}
VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)*\.(global|const|shared|local|param)\s+"
    r"(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?",
    re.S,
)
PLACES = {"tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}
SPECIAL = {f"%{name}.{axis}": f"{of}.{axis}" for axis in "xyz" for name, of in PLACES.items()} | {
    "%cluster_ctarank": "cluster_rank()",
    "%cluster_nctarank": "cluster_size()",
}
MOVES = ("mov", "selp", "wgmma")  # may use the registers of a wgmma that has not been waited for


class Function:
    """Translates one function; ``code`` has its lines of C++."""

    def __init__(self, body: Body, spaces: dict[str, str], places: dict[tuple[str, int], int]):
        self.spaces, self.places = dict(spaces), places  # of variables; numbers of locations
        self.name = "emu_entry" if body.entry else f"f_{body.name}"
        self.params = {name: number for number, name in enumerate(body.parameters)}
        self.labels = {(p.text, p.blocks[-1]) for p in body.pieces if p.kind == "label"}
        self.poison = in_flight(body.pieces)
        self.code = [f"{'' if body.entry else 'static '}void {self.name}(void **a) {{"]
        self.code.append("bool carry = false, none;" + " Products products;" * bool(self.poison))
        self.code += [*map(self.translated, body.pieces), "}"]

    def translated(self, piece: Piece) -> str:
        """Return the C++ of a piece."""
        self.piece = piece
        if piece.kind == "label":
            return f"{self.label(piece.text)}:;"
        if piece.kind == "declaration":
            return self.declared(piece.text)
        if piece.kind != "instruction":
            return piece.text
        text = " ".join(piece.text.split())
        try:
            guard, self.words, ops = instruction(piece.text)
            test = f"if ({self.value(guard, 'bool')}) " if guard else ""
            return f"{test}{{ {write(self, self.words, ops)} }}  // {piece.line}: {text}"
        except (UnknownError, KeyError, ValueError, IndexError, StopIteration) as error:
            raise UnknownError(f"PTX line {piece.line}: {text} ({error})") from error

    # ---- names ---------------------------------------------------------------------------------
    def declared(self, text: str) -> str:
        """Declare registers, .reg .b32 %r<5>; or a variable, .shared .align 4 .b8 name[40]."""
        if (match := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)) is None:
            space, name, code = variable(text)
            self.spaces[name] = space
            return code
        names = list[str]()
        for name in operands(match[2]):
            bare, _, count = name.rstrip(">").partition("<")
            names += [f"{bare}{i}" for i in range(int(count))] if count else [bare]
        return f"{BITS[WIDTH[match[1]]]} {', '.join(map(self.register, names))};"

    def register(self, name: str) -> str:
        """Return the C++ variable of a register; an undeclared one is an error of g++."""
        return f"v{name.replace('%', '_')}"

    def label(self, name: str) -> str:
        """Return the C++ label for this name in the innermost block that has it."""
        block = next(b for b in reversed(self.piece.blocks) if (name, b) in self.labels)
        return f"L_{name.replace('$', '_')}_{block}"

    def at(self, collective: bool = False) -> str:
        """Return the location of a statement: its line of source and, unless collective, of PTX."""
        file, line = self.piece.place
        key = (file if collective else f"PTX {self.piece.line}, {file}", line)
        return f"AT(W[{self.places.setdefault(key, len(self.places))}])"

    # ---- operands ------------------------------------------------------------------------------
    def value(self, text: str, kind: str) -> str:
        """Return an operand as a value of a C++ type; {a, b} as one number."""
        if text[0] == "{":
            names = several(text)
            each = SIZE[kind] * 8 // len(names)
            parts = (f"{kind}({self.value(n, f'u{each}')})" for n in names)
            return " | ".join(f"{part} << {each * i}" for i, part in enumerate(parts))
        if text[0] == "!":
            return f"!{self.value(text[1:], kind)}"
        if (number := constant(text, kind)) is not None:
            return number
        if text in self.params:
            code = f"(u64)a[{self.params[text]}]"
        elif text in self.spaces:
            is_shared = self.spaces[text] == "shared"
            code = f"shared_address(s_{text}, {self.at()})" if is_shared else f"(u64)s_{text}"
        elif text in self.poison and self.words[0] not in MOVES:
            code = f"arrived({self.register(text)}, {self.at()})"
        else:
            code = SPECIAL.get(text) or self.register(text)
        return f"AS({kind}, {code})" if kind[0] == "f" else f"{kind}({code})"

    def address(self, text: str, space: str, size: int = 1) -> str:
        """Return [register+offset], or the name of a parameter, as a pointer of the CPU."""
        base, _, offset = (part.strip() for part in text.strip("[] ").partition("+"))
        own = self.spaces.get(base, "")
        if base in self.params:
            code = f"(char *)a[{self.params[base]}]"
        elif space.startswith("shared") or own == "shared":
            return f"near({self.value(base, 'u64')} + ({offset or 0}), {size}, {self.at()})"
        else:
            code = f"(char *){f's_{base}' if own else self.value(base, 'u64')}"
        return f"({code} + ({offset}))" if offset else code

    def to(self, name: str, value: str, kind: str = "") -> str:
        """Return the assignment of a value to a register; kind is its type if it is a float."""
        if name == "_":
            return f"(void)({value});"
        if name[0] == "{":
            each = 8 * SIZE[WIDTH[self.words[-1]]] // len(several(name))
            parts = (self.to(n, f"w >> {each * i}") for i, n in enumerate(several(name)))
            return f"u64 w = {value}; {' '.join(parts)}"
        return f"{self.register(name)} = {bits(value, kind)};"

    def sums(self) -> str:
        """Return pointers to the registers that may hold accumulators of wgmma."""
        return ", ".join(f"&{self.register(name)}" for name in sorted(self.poison))


def bits(value: str, kind: str) -> str:
    """Return a value as the bits that a register holds."""
    return f"AS({BITS[kind]}, {kind}({value}))" if kind[:1] == "f" else value


def constant(text: str, kind: str) -> str | None:
    """Return a literal number of PTX in C++; None if the text is not one."""
    if match := re.fullmatch(r"0([fFdD])([0-9A-Fa-f]+)", text):
        own, number = ("f32", f"0x{match[2]}u") if match[1] in "fF" else ("f64", f"0x{match[2]}ull")
        return f"AS({own}, {number})" if kind == own else f"{kind}({number})"
    if not re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
        return None
    return f"{kind}({int(text.rstrip('U'), 0) & (1 << 64) - 1}ull)"


def variable(text: str) -> tuple[str, str, str]:
    """Return the space, name and C++ of a .global, .const, .shared, .local or .param variable."""
    if (match := VARIABLE.fullmatch(text)) is None:
        raise UnknownError(text)
    space, align, kind, name, sides, value = match.groups(default="")
    own = BITS[WIDTH[kind]]
    code = f"__attribute__((aligned({align or SIZE[own]}))) {own} s_{name}{sides or '[1]'}"
    if space == "shared" and (text.startswith(".extern") or sides == "[]"):
        return space, name, f"extern thread_local {own} s_{name}[];"
    if space in ("global", "const"):
        numbers = re.sub(r"\b0[fFdD]([0-9A-Fa-f]+)", r"0x\1u", value.strip("{} "))
        return space, name, f"static {code} = {{{numbers}}};"
    return space, name, f"{'static thread_local ' * (space == 'shared')}{code};"


def in_flight(pieces: list[Piece]) -> set[str]:
    """Return the registers that wgmma writes, and those that moves may copy them to.

    Until the wait they hold the name of an accumulator; a move copies it, any other use is an
    error.  The wait writes the accumulator to every register that has its name.
    """
    registers, edges = set[str](), list[tuple[str, str]]()
    for piece in pieces:
        if "wgmma.mma_async" in piece.text:
            registers |= {*operands(piece.text[piece.text.index("{") + 1 :].split("}")[0])}
        elif moved := re.match(r"(?:@\S+ )?(?:mov|selp)\.[bf]32\s+(.*)", piece.text):
            target, *sources = operands(moved[1])
            edges += [(target, source) for source in sources[:2]]
    reached = 0
    while registers and reached < len(registers):
        reached = len(registers)
        registers |= {target for target, source in edges if source in registers}
    return registers


# ---- the translation of an instruction -----------------------------------------------------------
Write = Callable[[Function, Words, Ops], str]
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
    """Return a table with every pattern replaced by the names that it stands for."""
    return {name: code for pattern, code in table.items() for name in forms(pattern)}


def writes(*names: str) -> Callable[[Write], Write]:
    """Return a decorator: the function translates instructions whose names start with these."""

    def keep(write: Write) -> Write:
        WRITERS.update(dict.fromkeys(names, write))
        return write

    return keep


def only(words: Iterable[str], known: str) -> None:
    """Raise UnknownError if a word is not among the known ones."""
    if unknown := {*words} - {*known.split()}:
        raise UnknownError(f"no .{' .'.join(sorted(unknown))}")


def write(f: Function, words: Words, ops: Ops) -> str:
    """Return the C++ of an instruction."""
    if code := RULES.get(".".join(words)):
        return by_rule(f, words, ops, code)
    for count in range(len(words), 0, -1):
        if own := WRITERS.get(".".join(words[:count])):
            return own(f, words, ops)
    raise UnknownError("no rule")


class Operand(NamedTuple):
    """An operand; a table line's format specification says how it is read."""

    f: Function
    text: str
    types: dict[str, str]

    def __format__(self, spec: str) -> str:  # noqa: PLR0911
        kind, _, count = (spec.rstrip("?") or "t").partition("*")
        if kind in ("#", "-"):
            return self.text * (kind == "#")
        if kind == "_":
            return self.f.to(self.text, "0") if self.text != "_" else ""
        if kind == "label":
            return self.f.label(self.text)
        if "|" in kind:
            both = zip(self.text.split("|"), kind.split("|"), strict=False)
            return " ".join(self.f.to(name, value) for name, value in both)
        if kind == "g" or kind[0] == "a":
            return self.f.address(self.text, "shared" * (kind != "g"), int(kind[1:] or 1))
        if not count:
            base = self.text.strip("[]").partition(",")[0] if self.text[0] == "[" else self.text
            return self.f.value(base, self.types.get(kind, kind))
        names = several(self.text[max(self.text.find("{"), 0) :].rstrip("]"))
        if len(names) != int(count):
            raise UnknownError(f"{len(names)} registers")
        if kind == "D":
            return " ".join(self.f.to(name, f"D[{i}]") for i, name in enumerate(names))
        return f"{{{', '.join(self.f.value(name, kind) for name in names)}}}"


def by_rule(f: Function, words: Words, ops: Ops, code: str) -> str:
    """Return the C++ of an instruction by its table line."""
    target, ops = ((), ops) if code.endswith(";") else (ops[:1], ops[1:])
    fields = dict(re.findall(r"\{([v-z])(?::(.*?))?\}", code))
    if len(ops) not in (len(fields), sum("?" not in spec for spec in fields.values())):
        raise UnknownError(f"{len(ops)} operands")
    into, of = words[-2:] if words[1:] else ("", words[0])
    kind = WIDTH.get(of, "")
    types = {"t": kind, "b": BITS.get(kind, ""), "to": WIDTH.get(into, ""), "of": of, "into": into}
    types["wide"] = kind and f"{kind[0]}{SIZE[kind] * 16}"
    named = {n: Operand(f, o, types) for n, o in zip("xyzvw", (*ops, "0"), strict=False)}
    has = collections.defaultdict(lambda: "false", dict.fromkeys(words, "true"))
    here = {name: f.at(name == "line") for name in ("at", "line") if f"{{{name}}}" in code}
    here |= {"sums": f.sums()} if "{sums}" in code else {}
    code = code.format(**here, **types, **named, has=has, words=words)
    return f.to(target[0], code) if target else code
