"""PTX: what NVRTC makes of a translation unit, and its text as statements with their places.

``tests/ptx_on_cpu`` executes it; ``tests/compiled`` reads what no run shows.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from unsloth_cupy.core.gpu import compiler_options

TOKEN = re.compile(
    r"""\s*(?: (?P<loc> \.loc\b[^\n]*)
    | (?P<skip> \.(?:version|target|address_size|file|noreturn|pragma)\b[^\n]* | \.section[^}]*\})
    | (?P<head> (?:\.(?:visible|weak|extern)\ )*\.(?:entry|func)\b[^{;]*) (?P<prototype>;?)
    | (?P<label> [$\w%]+):(?!:)
    | (?P<open> \{) | (?P<close> \}) | (?P<instruction> [^;]+); | \Z)""",
    re.X,
)
# The C++ type as which an instruction reads a register; and its bytes.
WIDTH = {f"{k}{n}": f"{k}{n}".replace("b", "u") for k in "bus" for n in (8, 16, 32, 64)} | {
    **{"pred": "bool", "f32": "f32", "f64": "f64", "f32x2": "u64"},
    **dict.fromkeys(("f16", "bf16", "e4m3x2", "e5m2x2"), "u16"),
    **dict.fromkeys(("tf32", "f16x2", "bf16x2"), "u32"),
}
SIZE = {"bool": 1, **{f"{k}{n}": n // 8 for k in "usf" for n in (8, 16, 32, 64)}}
Place = tuple[str, int]  # "ptx.cuh:61 in tile.cuh", 113: of inlined code the caller too


class UnknownError(Exception):
    """An instruction, or a form of one, that is not translated."""


class Piece(NamedTuple):
    """A bracket, label, declaration or instruction, and where it stands."""

    kind: str
    text: str
    line: int
    place: Place
    blocks: tuple[int, ...]  # by number, from the outermost


class Body(NamedTuple):
    """A function: its parameters in order, those that it returns first, and what it does."""

    name: str
    entry: bool
    parameters: tuple[str, ...]
    cluster: tuple[int, ...]
    pieces: list[Piece]


class Compiled(NamedTuple):
    """A module of PTX, and the name of the kernel in it."""

    text: str
    entry: str


def ptx(
    source: str, name: str, arch: str, folders: tuple[Path, ...] = (), fuse: bool = True
) -> Compiled:
    """Compile as cupy.RawModule does, to PTX; arch is 80, 90a, 100, ..."""
    template = name if "<" in name else None
    text, entry = _unit(source, arch, folders, fuse, template)
    return Compiled(text, entry or name)


@functools.lru_cache(maxsize=1024)
def _unit(
    source: str, arch: str, folders: tuple[Path, ...], fuse: bool, template: str | None
) -> tuple[str, str]:
    """Return the PTX of a unit with all of its kernels, and the name of a template there."""
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda import compiler

    # CuPy's own: -ftz and the execution space of RawModule, and the architecture
    own = ("-ftz=true", "-default-device", f"--gpu-architecture=compute_{arch}", "-lineinfo")
    fused = () if fuse else ("-fmad=false",)
    given = (*(f"-I{folder}" for folder in folders), *compiler_options(), *own, *fused)
    asked = (template,) if template else None
    program = compiler._NVRTCProgram(source, "unit.cu", name_expressions=asked, method="ptx")
    text, names = program.compile(assemble_cupy_compiler_options(given))
    text = text.decode() if isinstance(text, bytes) else text
    return text.rstrip("\0"), names[template] if template else ""


def operands(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    found, depth = [""], 0
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            found.append("")
        else:
            found[-1] += c
    return [each.strip() for each in found] if text.strip() else []


def several(text: str) -> list[str]:
    """Return the parts of {a, b}, or what stands alone."""
    return operands(text.strip()[1:-1]) if text.startswith("{") else [text]


def places(text: str) -> Callable[[str], Place]:
    """Return what reads a .loc, one after the other: of inlined code with the places of callers."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"]*)"', text, re.M))
    chains: dict[tuple[str | Any, ...], tuple[Any, ...]] = {}  # of calls, by place and column

    def place(loc: str) -> Place:
        here, _, caller = loc.partition("inlined_at")
        own, by = (*re.findall(r"\d+", here)[:3],), (*re.findall(r"\d+", caller),)
        chains[own] = own[:2], *(chains.get(by, (by[:2],)) if by else ())
        *inner, last = (f"{files[file]}:{line}" for file, line in chains[own])
        name, _, line = last.rpartition(":")
        return " in ".join([*inner, name]), int(line)

    return place


def instruction(text: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the guard, with its !, the words between dots, and the operands."""
    found = re.match(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
    if found is None:
        raise UnknownError(text)
    return found[1] or "", (*found[2].split("."),), (*operands(found[3]),)


def head(text: str) -> Body:
    """Read .entry name(parameters), or .func (results) name(parameters)."""
    found = re.match(r".*?\.(entry|func)\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?", text)
    if found is None:
        raise UnknownError(text)
    kind, results, name, given = found.groups(default="")
    names = [p.split()[-1].partition("[")[0] for p in operands(f"{results},{given}".strip(", "))]
    sides = re.search(r"\.reqnctapercluster\s+([\d, ]+)", text)
    several = [*map(int, sides[1].split(",") if sides else ()), 1, 1, 1]
    return Body(name, kind == "entry", (*names,), (*several[:3],), [])


def functions(text: str) -> tuple[list[str], list[Body]]:
    """Return what a module declares outside of functions, and its functions."""
    declared, found, blocks = list[str](), list[Body](), list[int]()
    read, place, count, line, last = places(text), ("?", 0), 0, 1, 0
    text = re.sub(r"//[^\n]*", "", text)
    for token in TOKEN.finditer(text):
        kind = token.lastgroup if token.lastgroup != "prototype" else "head"
        if kind is None or kind == "skip":
            continue
        start = token.start(kind)
        line, last = line + text.count("\n", last, start), start
        said = token[kind].strip()
        if kind == "loc":
            place = read(said)
        elif kind == "head":
            if not token["prototype"]:
                found.append(head(said))
                count = -1
        elif not blocks and kind != "open":
            declared.append(said)
        else:
            if kind == "open":
                count += 1
                blocks.append(count)
            kind = "declaration" if said.startswith(".") else kind
            found[-1].pieces.append(Piece(kind, said, line, place, (*blocks,)))
            if kind == "close":
                blocks.pop()
    return declared, found
