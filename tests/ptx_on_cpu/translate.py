"""PTX to C++: a function for each of its functions, a typed local per register, a goto per branch.

    unit(text, "rms_norm_forward", dynamic=232448)       C++ that includes ptx.hpp

Registers are unsigned integers of their width, and predicates bool.  A guard is an if; a statement
is a block of C++, written by the function that ``instructions.py`` keeps for its first word.
"""

import re
from collections.abc import Iterator

from . import arithmetic, memory, warps  # noqa: F401  they register what they know
from .instructions import BITS, INSTRUCTIONS, SIZE, SPECIAL, WIDTH, Poison
from .parse import Body, Piece, UnknownError, functions, operands

VARIABLE = re.compile(
    r"(?:\.(?:visible|weak|extern)\s+)*\.(global|const|shared|local|param)\s+"
    r"(?:\.attribute\([^)]*\)\s*)?(?:\.align\s+(\d+)\s+)?"
    r"\.(\w+)\s+([\w$]+)((?:\[\d*\])*)\s*(?:=\s*(.*))?",
    re.S,
)
Symbols = dict[str, tuple[str, str]]  # by name: space, C++


class Function:
    """Translate one function; ``code`` holds its lines of C++."""

    def __init__(self, body: Body, symbols: Symbols, places: dict[tuple[str, int], int]) -> None:
        self.symbols, self.places = dict(symbols), places
        self.params = {name: number for number, name in enumerate(body.parameters)}
        self.scopes: list[dict[str, tuple[str, str]]] = [{}]  # register: (C++, type)
        self.inside = [0]  # the numbers of the blocks around a statement
        self.labels = set(_labels(body.pieces))
        self.locals: list[str] = []
        self.shared: list[str] = []
        self.poison = Poison(body.pieces)
        self.blocks, self.piece, self.word = 0, Piece("", "", 0), ""
        self.entry = body.entry
        self.code = [line for piece in body.pieces for line in self.translated(piece)]

    def translated(self, piece: Piece) -> Iterator[str]:
        """Yield the C++ of a statement or label; follow blocks."""
        self.piece = piece
        if piece.kind == "open":
            self.blocks += 1
            self.inside.append(self.blocks)
            self.scopes.append({})
        elif piece.kind == "close":
            self.inside.pop()
            self.scopes.pop()
        elif piece.kind == "label":
            yield f"{_label(piece.text, self.inside[-1])}:;"
        elif piece.text.startswith("."):
            self.declare(piece.text)
        else:
            yield self.instruction(piece.text)

    def instruction(self, text: str) -> str:
        """Return the C++ of an instruction with its guard."""
        found = re.match(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
        if found is None:
            raise UnknownError(f"PTX line {self.piece.line}: {text}")
        self.word, *words = found[3].split(".")
        try:
            guard = f"if ({found[1]}{self.value(found[2], 'bool')}) " if found[2] else ""
            write = INSTRUCTIONS.get(self.word, arithmetic.arithmetic)
            code = write(self, words, operands(found[4]))
        except (UnknownError, KeyError, ValueError, IndexError, StopIteration) as error:
            raise UnknownError(f"PTX line {self.piece.line}: {text} ({error})") from error
        return f"  {guard}{{ {code} }}  // {self.piece.line}: {' '.join(text.split())}"

    # ---- names ---------------------------------------------------------------------------------
    def declare(self, text: str) -> None:
        """Declare registers, .reg .b32 %r<5>; or a variable, .shared .align 4 .b8 name[40]."""
        if text.startswith(".pragma"):
            return
        if found := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S):
            bits, made = BITS[WIDTH[found[1]]], {}
            for name in operands(found[2]):
                bare, _, count = name.rstrip(">").partition("<")
                for each in [f"{bare}{i}" for i in range(int(count))] if count else [bare]:
                    made[each] = (f"v_{each.lstrip('%')}_{self.inside[-1]}", bits)
            self.scopes[-1] |= made
            self.locals.append(f"{bits} {', '.join(code for code, _ in made.values())};")
            return
        space, name, code = variable(text, f"_{self.blocks}")
        self.symbols[name] = (space, f"s_{name}_{self.blocks}")
        (self.shared if space == "shared" else self.locals).append(code)

    def register(self, name: str) -> tuple[str, str] | None:
        """Return the C++ and the type of a register, or None."""
        return next((s[name] for s in reversed(self.scopes) if name in s), None)

    def label(self, name: str) -> str:
        """Return the label of that name in the nearest block around."""
        known = (_label(name, n) for n in reversed(self.inside))
        return next(label for label in known if label in self.labels)

    def at(self, collective: bool = False) -> str:
        """Return where this is, the line of PTX and that of the source.

        Lanes may meet in copies that the compiler made of one line: there the line alone counts.
        """
        file, line = self.piece.place
        key = (file if collective else f"PTX {self.piece.line}, {file}", line)
        return f"W[{self.places.setdefault(key, len(self.places))}]"

    def call(self, name: str, *given: str, collective: bool = False) -> str:
        """Return a call of the machine, which takes file and line last."""
        return f"{name}({', '.join([*given, f'AT({self.at(collective)})'])})"

    # ---- operands ------------------------------------------------------------------------------
    def value(self, text: str, kind: str) -> str:
        """Return an operand, read as a C++ type."""
        if text[0] in "!-" and self.register(text[1:]):
            return f"{text[0]}{self.value(text[1:], kind)}"
        if found := self.register(text):
            code, bits = found
            if text in self.poison.registers and self.word not in Poison.MOVES:
                code = f"arrived({code}, {self.at()})"
            return code if bits == kind else f"as<{kind}>({code})"
        if (number := _constant(text, kind)) is not None:
            return number
        if text.startswith("%"):
            return f"{kind}({SPECIAL[text[1:]]})"
        if text in self.params:
            return f"{kind}((u64)a[{self.params[text]}])"
        space, code = self.symbols[text]
        own = f"shared_address({code}, {self.at()})" if space == "shared" else f"(u64){code}"
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

    def to(self, name: str, value: str) -> str:
        """Return what writes a register."""
        if name == "_":
            return f"(void)({value});"
        found = self.register(name)
        if found is None:
            raise UnknownError(f"result {name}")
        return f"put({found[0]}, {value});"

    def text(self, name: str, entry: bool) -> list[str]:
        """Return the whole function."""
        return [
            f"{'' if entry else 'static '}void {name}(void **a) {{",
            *("  bool carry = false;" for _ in range(any("carry" in line for line in self.code))),
            *self.locals,
            *self.poison.declared(self),
            *self.code,
            "}",
        ]


def _constant(text: str, kind: str) -> str | None:
    """Return a number of PTX as one of C++; None for what is none."""
    if found := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", text):
        return f"as<f32>(0x{found[1]}u)" if kind == "f32" else f"{kind}(0x{found[1]}u)"
    if found := re.fullmatch(r"0[dD]([0-9A-Fa-f]{16})", text):
        return f"as<f64>(u64(0x{found[1]}ull))"
    if not re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
        return None
    number = int(text.rstrip("U"), 0)
    return f"{kind}({number})" if kind[0] == "f" else f"{kind}({number & (1 << 64) - 1}ull)"


def _label(name: str, block: int) -> str:
    return f"L_{name.replace('$', '_')}_{block}"


def _labels(pieces: list[Piece]) -> Iterator[str]:
    """Yield the labels of a function, each with the number of its block."""
    inside, blocks = [0], 0
    for piece in pieces:
        if piece.kind == "open":
            blocks += 1
            inside.append(blocks)
        elif piece.kind == "close":
            inside.pop()
        elif piece.kind == "label":
            yield _label(piece.text, inside[-1])


def variable(text: str, suffix: str = "") -> tuple[str, str, str]:
    """Return space, name and C++ of .global, .const, .shared, .local or .param."""
    found = VARIABLE.fullmatch(text)
    if found is None:
        raise UnknownError(text)
    space, align, kind, name, sides, value = found.groups()
    bits = BITS[WIDTH[kind]]
    code = (
        f"__attribute__((aligned({align or SIZE[bits]}))) {bits} s_{name}{suffix}{sides or '[1]'}"
    )
    if space == "shared":
        if text.startswith(".extern") or sides == "[]":
            return space, name, f"#define s_{name}{suffix} emu_buffer"
        return space, name, f"static thread_local {code};"
    if space in ("local", "param"):
        return space, name, f"{code};"
    numbers = re.sub(r"\b0[fFdD]([0-9A-Fa-f]+)", r"0x\1u", (value or "").strip("{} "))
    return space, name, f"static {code} = {{{numbers}}};"


def unit(text: str, name: str, dynamic: int) -> str:
    """Return the C++ of an entry of a PTX module, and of the functions that it may call."""
    declared, bodies = functions(text)
    symbols: Symbols = {}
    outside, places, code = [], dict[tuple[str, int], int](), list[str]()
    for statement in declared:
        space, symbol, written = variable(statement)
        symbols[symbol] = (space, f"s_{symbol}")
        outside.append(written)
    wanted = [body for body in bodies if not body.entry or body.name == name]
    if not wanted or not wanted[-1].entry:
        raise UnknownError(f"no entry {name}")
    for body in wanted:
        made = Function(body, symbols, places)
        outside += made.shared
        code += made.text("emu_entry" if body.entry else f"f_{body.name}", body.entry)
    entry = wanted[-1]
    has_buffer = any(line.startswith("#") for line in outside)
    section = r".section .tbss, \"awT\", @nobits; .balign 1024"
    buffer = [section, ".globl emu_buffer; .type emu_buffer, @object; emu_buffer:"]
    assembly = "".join(f'"{line}\\n" ' for line in (*buffer, f".zero {dynamic}; .text"))
    lines = [
        "static thread_local volatile char emu_first;",
        f"extern thread_local __attribute__((aligned(1024))) unsigned char emu_buffer[{dynamic}];",
        f"asm({assembly});" if has_buffer else "",
        'extern "C" void *emu_dynamic() {',
        f"  emu_first = 0; return {'emu_buffer' if has_buffer else 'nullptr'}; }}",
        *outside,
        "static const Where W[] = {",
        *(f'  {{"{file}", {line}}},' for file, line in places or {("?", 0): 0}),
        "};",
        *(f"static void f_{body.name}(void **a);" for body in wanted if not body.entry),
        'extern "C" {',
        f"extern const int emu_arity = {len(entry.parameters)};",
        f"extern const unsigned emu_cluster[3] = {{{', '.join(map(str, entry.cluster))}}};",
        *code,
        "}",
    ]
    return "\n".join([*lines, ""])
