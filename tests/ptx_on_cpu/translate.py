"""PTX to C++: a function for each of its functions, a typed local per register, a goto per branch.

    unit(text, "rms_norm_forward")       C++ that includes ptx.hpp

Registers are unsigned integers of their width, and predicates bool.  A guard is an if; a statement
is a block of C++, written by a line or a function of ``arithmetic.py`` or ``machine.py``.
"""

import re
from collections.abc import Iterator

from ..cuda_on_cpu import build
from . import arithmetic, machine  # noqa: F401  they say what they know
from .parse import Body, Piece, UnknownError, functions, instruction, operands
from .rules import BITS, SIZE, WIDTH, write

VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)*\.(global|const|shared|local|param)\s+"
    r"(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?",
    re.S,
)
PLACES = {"tid": "threadIdx", "ntid": "blockDim", "ctaid": "blockIdx", "nctaid": "gridDim"}
SPECIAL = {f"{name}.{axis}": f"{of}.{axis}" for axis in "xyz" for name, of in PLACES.items()} | {
    "laneid": "lane_id()",
    "warpid": "(M.cur->index % M.stride / 32)",
    "cluster_ctarank": "M.cur->rank",
    "cluster_nctarank": "M.blocks",
    "lanemask_lt": "((1u << lane_id()) - 1)",
}
MOVES = ("mov", "selp", "wgmma")  # what may touch a sum in flight
Symbols = dict[str, tuple[str, str]]  # by name: space, C++


class Function:
    """Translate one function; ``code`` holds its lines of C++."""

    def __init__(self, body: Body, symbols: Symbols, places: dict[tuple[str, int], int]) -> None:
        self.symbols, self.places, self.entry = dict(symbols), places, body.entry
        self.name = "emu_entry" if body.entry else f"f_{body.name}"
        self.params = {name: number for number, name in enumerate(body.parameters)}
        self.registers: dict[tuple[str, int], tuple[str, str]] = {}  # with block: C++, its type
        self.labels = {(p.text, p.blocks[-1]) for p in body.pieces if p.kind == "label"}
        self.locals, self.shared = list[str](), list[str]()
        self.poison = in_flight(body.pieces)
        self.code = [line for self.piece in body.pieces for line in self.translated()]

    def translated(self) -> Iterator[str]:
        """Yield the C++ of a piece; a declaration goes to ``locals`` or ``shared``."""
        piece = self.piece
        if piece.kind == "label":
            yield f"{self.label(piece.text)}:;"
        elif piece.kind == "declaration":
            self.declare(piece.text)
        else:
            words = " ".join(piece.text.split())
            try:
                guard, names, ops = instruction(piece.text)
                self.word = names[0]
                test = f"if ({self.value(guard, 'bool')}) " if guard else ""
                code = write(self, names, ops)
            except (UnknownError, KeyError, ValueError, IndexError, StopIteration) as error:
                raise UnknownError(f"PTX line {piece.line}: {words} ({error})") from error
            yield f"{test}{{ {code} }}  // {piece.line}: {words}"

    # ---- names ---------------------------------------------------------------------------------
    def declare(self, text: str) -> None:
        """Declare registers, .reg .b32 %r<5>; or a variable, .shared .align 4 .b8 name[40]."""
        block = self.piece.blocks[-1]
        if found := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S):
            bits, made = BITS[WIDTH[found[1]]], {}
            for name in operands(found[2]):
                bare, _, count = name.rstrip(">").partition("<")
                for each in [f"{bare}{i}" for i in range(int(count))] if count else [bare]:
                    made[each, block] = (f"{each.lstrip('%')}_{block}", bits)
            self.registers |= made
            self.locals.append(f"{bits} {', '.join(code for code, _ in made.values())};")
            return
        space, name, code = variable(text, f"_{block}")
        self.symbols[name] = (space, f"s_{name}_{block}")
        (self.shared if space == "shared" else self.locals).append(code)

    def register(self, name: str) -> tuple[str, str] | None:
        """Return the C++ and the type of a register of the nearest block, or None."""
        found = (self.registers.get((name, block)) for block in reversed(self.piece.blocks))
        return next(filter(None, found), None)

    def label(self, name: str) -> str:
        """Return the label of that name in the nearest block."""
        block = next(b for b in reversed(self.piece.blocks) if (name, b) in self.labels)
        return f"L_{name.replace('$', '_')}_{block}"

    def at(self, collective: bool = False) -> str:
        """Return where this is, the line of PTX and that of the source.

        Lanes may meet in copies that the compiler made of one line: there the line alone counts.
        """
        file, line = self.piece.place
        key = (file if collective else f"PTX {self.piece.line}, {file}", line)
        return f"AT(W[{self.places.setdefault(key, len(self.places))}])"

    # ---- operands ------------------------------------------------------------------------------
    def value(self, text: str, kind: str) -> str:  # noqa: PLR0911
        """Return an operand, read as a C++ type; {a, b} as one number."""
        if text.startswith("{"):
            parts = [*enumerate(self.several(text))]
            each = SIZE[kind] * 8 // len(parts)
            return " | ".join(
                f"{kind}({self.value(p, f'u{each}')}) << {each * i}" for i, p in parts
            )
        if text[0] in "!-" and self.register(text[1:]):
            return f"{text[0]}{self.value(text[1:], kind)}"
        if found := self.register(text):
            code, bits = found
            if text in self.poison and self.word not in MOVES:
                code = f"arrived({code}, {self.at()})"
            if SIZE[kind] > SIZE[bits] or (kind[0] == "f" and SIZE[kind] < SIZE[bits]):
                raise UnknownError(f"{text} has another width than .{kind}")
            read = f"AS({kind}, " if kind[0] == "f" else f"{kind}("
            return code if bits == kind else f"{read}{code})"
        if (number := _constant(text, kind)) is not None:
            return number
        if text.startswith("%"):
            return f"{kind}({SPECIAL[text[1:]]})"
        if text in self.params:
            return f"{kind}((u64)a[{self.params[text]}])"
        space, code = self.symbols[text]
        own = f"shared_address({code}, {{{self.at()}}})" if space == "shared" else f"(u64){code}"
        return f"{kind}({own})"

    def address(self, text: str, space: str, size: int = 1) -> str:
        """Return [register+offset] as a pointer of the CPU; a parameter by its name."""
        base, _, offset = text.strip("[] ").partition("+")
        offset, base = f" + ({offset})" if offset else "", base.strip()
        if base in self.params:
            return f"((char *)a[{self.params[base]}]{offset})"
        if self.symbols.get(base, ("shared",))[0] != "shared":
            return f"((char *){self.symbols[base][1]}{offset})"
        found = self.register(base)  # of 32 or 64 bits
        far = f"({found[0] if found else self.value(base, 'u64')}{offset})"
        is_shared = space.startswith("shared") or base in self.symbols
        return f"near({far}, {size}, {self.at()})" if is_shared else f"(char *)(u64){far}"

    def several(self, text: str) -> list[str]:
        """Return the parts of {a, b}, or what stands alone."""
        return operands(text.strip()[1:-1]) if text.startswith("{") else [text]

    def to(self, name: str, value: str, kind: str = "") -> str:
        """Return what writes a register; kind is the type of a value that is a float."""
        if name == "_":
            return f"(void)({value});"
        if name.startswith("{"):
            parts = [*enumerate(self.several(name))]
            each = max(SIZE[found[1]] * 8 for _, p in parts if (found := self.register(p)))
            return f"u64 w = {value}; {' '.join(self.to(p, f'w >> {each * i}') for i, p in parts)}"
        if (found := self.register(name)) is None:
            raise UnknownError(f"result {name}")
        return f"{found[0]} = {f'AS({BITS[kind]}, {kind}({value}))' if kind[:1] == 'f' else value};"

    def text(self) -> Iterator[str]:
        """Yield the whole function."""
        yield f"{'' if self.entry else 'static '}void {self.name}(void **a) {{"
        yield "bool carry = false, none;"
        yield from self.locals
        if self.poison:
            sums = [code for (name, _), (code, _) in self.registers.items() if name in self.poison]
            yield f"Products products; u32 *const sums[] = {{&{', &'.join(sums)}}};"
        yield from [*self.code, "}"]


def in_flight(pieces: list[Piece]) -> set[str]:
    """Return the registers that wgmma writes, and those that copies of them may reach.

    Until the wait such a register holds the name of its sum, which a move carries along; whatever
    computes with one fails.  The wait puts sums where their names have come to.
    """
    found, edges = set[str](), list[tuple[str, str]]()
    for piece in pieces:
        if "wgmma.mma_async" in piece.text:
            found |= {*operands(piece.text[piece.text.index("{") + 1 :].split("}")[0])}
        elif moved := re.match(r"(?:@\S+ )?(?:mov|selp)\.[bf]32\s+(.*)", piece.text):
            target, *sources = operands(moved[1])
            edges += [(target, source) for source in sources[:2]]
    reached = 0
    while found and reached < len(found):
        reached = len(found)
        found |= {target for target, source in edges if source in found}
    return found


def _constant(text: str, kind: str) -> str | None:
    """Return a number of PTX as one of C++; None for what is none."""
    if found := re.fullmatch(r"0([fFdD])([0-9A-Fa-f]+)", text):
        own, bits = ("f32", f"0x{found[2]}u") if found[1] in "fF" else ("f64", f"0x{found[2]}ull")
        return f"AS({own}, {bits})" if kind == own else f"{kind}({bits})"
    if not re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
        return None
    return f"{kind}({int(text.rstrip('U'), 0) & (1 << 64) - 1}ull)"


def variable(text: str, suffix: str = "") -> tuple[str, str, str]:
    """Return space, name and C++ of .global, .const, .shared, .local or .param."""
    found = VARIABLE.fullmatch(text)
    if found is None:
        raise UnknownError(text)
    space, align, kind, name, sides, value = found.groups()
    bits = BITS[WIDTH[kind]]
    own = f"{bits} s_{name}{suffix}{sides or '[1]'}"
    code = f"__attribute__((aligned({align or SIZE[bits]}))) {own}"
    if space == "shared":
        if text.startswith(".extern") or sides == "[]":
            return space, name, f"#define s_{name}{suffix} emu_buffer"
        return space, name, f"static thread_local {code};"
    if space in ("local", "param"):
        return space, name, f"{code};"
    numbers = re.sub(r"\b0[fFdD]([0-9A-Fa-f]+)", r"0x\1u", (value or "").strip("{} "))
    return space, name, f"static {code} = {{{numbers}}};"


def unit(text: str, name: str) -> str:
    """Return the C++ of an entry of a PTX module, and of the functions that it may call."""
    declared, bodies = functions(text)
    variables = [variable(statement) for statement in declared]
    symbols = {symbol: (space, f"s_{symbol}") for space, symbol, _ in variables}
    places: dict[tuple[str, int], int] = {}
    wanted = [body for body in bodies if not body.entry or body.name == name]
    if not wanted or not wanted[-1].entry:
        raise UnknownError(f"no entry {name}")
    made, entry = [Function(body, symbols, places) for body in wanted], wanted[-1]
    outside = [*(code for *_, code in variables), *(line for f in made for line in f.shared)]
    has_buffer = any(line.startswith("#") for line in outside)
    lines = [
        f"BUFFER({build.DYNAMIC_SHARED})" if has_buffer else "NO_BUFFER",
        *outside,
        "static const Where W[] = {",
        *(f'  {{"{file}", {line}}},' for file, line in places or {("?", 0): 0}),
        "};",
        *(f"static void {f.name}(void **a);" for f in made if not f.entry),
        'extern "C" {',
        f"extern const int emu_arity = {len(entry.parameters)};",
        f"extern const unsigned emu_cluster[3] = {{{', '.join(map(str, entry.cluster))}}};",
        *(line for f in made for line in f.text()),
        "}",
    ]
    return "\n".join([*lines, ""])
