"""Compile a translation unit to PTX with NVRTC, and parse the text into statements.

``machines/ptx_on_cpu`` executes PTX; ``compiled`` checks in its text what no run shows.
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
# The C++ type with which an instruction of each PTX type reads a register, and the type's bytes.
WIDTH = {f"{k}{n}": f"{k}{n}".replace("b", "u") for k in "bus" for n in (8, 16, 32, 64)} | {
    **{"pred": "bool", "f32": "f32", "f64": "f64", "f32x2": "u64"},
    **dict.fromkeys(("f16", "bf16", "e4m3x2", "e5m2x2"), "u16"),
    **dict.fromkeys(("tf32", "f16x2", "bf16x2"), "u32"),
}
SIZE = {"bool": 1, **{f"{k}{n}": n // 8 for k in "usf" for n in (8, 16, 32, 64)}}
# A source location: file and line.  Inlined code names the caller too:
# ("ptx.cuh:61 in tile.cuh", 113).
Place = tuple[str, int]


class UnknownError(Exception):
    """An instruction, or a form of one, that is not supported."""


class Piece(NamedTuple):
    """A bracket, label, declaration or instruction, with its location."""

    kind: str
    text: str
    line: int  # of the PTX
    place: Place  # of the CUDA source
    blocks: tuple[int, ...]  # numbers of the { } around it, from the outermost


class Body(NamedTuple):
    """A function: its parameters in order, results first, and its statements."""

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
    return several_ptx(source, (name,), arch, folders, fuse)[0]


def several_ptx(
    source: str, names: tuple[str, ...], arch: str, folders: tuple[Path, ...], fuse: bool = True
) -> list[Compiled]:
    """Compile several kernels of a unit at once."""
    templates = tuple(name for name in names if "<" in name)
    text, entries = _unit(source, arch, folders, fuse, templates)
    return [Compiled(text, entries.get(name, name)) for name in names]


@functools.lru_cache(maxsize=1024)
def _unit(
    source: str, arch: str, folders: tuple[Path, ...], fuse: bool, templates: tuple[str, ...]
) -> tuple[str, dict[str, str]]:
    """Return the PTX of a unit with all of its kernels, and the names of templates there."""
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda import compiler

    # as CuPy passes them: -ftz and the execution space of RawModule, and the architecture
    own = ("-ftz=true", "-default-device", f"--gpu-architecture=compute_{arch}", "-lineinfo")
    fused = () if fuse else ("-fmad=false",)
    options = (*(f"-I{folder}" for folder in folders), *compiler_options(), *own, *fused)
    names = templates or None
    program = compiler._NVRTCProgram(source, "unit.cu", name_expressions=names, method="ptx")
    text, entries = program.compile(assemble_cupy_compiler_options(options))
    text = text.decode() if isinstance(text, bytes) else text
    return text.rstrip("\0"), entries or {}


def operands(text: str) -> list[str]:
    """Split a text at the commas outside of brackets."""
    split, depth = [""], 0
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            split.append("")
        else:
            split[-1] += c
    return [each.strip() for each in split] if text.strip() else []


def several(text: str) -> list[str]:
    """Return the elements of a vector operand {a, b}, or a single operand as a list."""
    return operands(text.strip()[1:-1]) if text.startswith("{") else [text]


def places(text: str) -> Callable[[str], Place]:
    """Return a function that reads a .loc; call it in order, as inlined code refers to callers."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"]*)"', text, re.M))
    chains: dict[tuple[str | Any, ...], tuple[Any, ...]] = {}  # callers, by location and column

    def place(loc: str) -> Place:
        here, _, caller = loc.partition("inlined_at")
        own, by = (*re.findall(r"\d+", here)[:3],), (*re.findall(r"\d+", caller),)
        chains[own] = own[:2], *(chains.get(by, (by[:2],)) if by else ())
        *inner, last = (f"{files[file]}:{line}" for file, line in chains[own])
        name, _, line = last.rpartition(":")
        return " in ".join([*inner, name]), int(line)

    return place


def instruction(text: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return an instruction's guard with its !, the parts of its name, and its operands."""
    match = re.match(r"(?:@(!?%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
    if match is None:
        raise UnknownError(text)
    return match[1] or "", (*match[2].split("."),), (*operands(match[3]),)


def head(text: str) -> Body:
    """Parse .entry name(parameters), or .func (results) name(parameters)."""
    match = re.match(r".*?\.(entry|func)\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?", text)
    if match is None:
        raise UnknownError(text)
    kind, results, name, inputs = match.groups(default="")
    names = [p.split()[-1].partition("[")[0] for p in operands(f"{results},{inputs}".strip(", "))]
    sides = re.search(r"\.reqnctapercluster\s+([\d, ]+)", text)
    cluster = [*map(int, sides[1].split(",") if sides else ()), 1, 1, 1]
    return Body(name, kind == "entry", (*names,), (*cluster[:3],), [])


def functions(text: str) -> tuple[list[str], list[Body]]:
    """Return a module's declarations outside of functions, and its functions."""
    declared, bodies, blocks = list[str](), list[Body](), list[int]()
    read, place, count, line, last = places(text), ("?", 0), 0, 1, 0
    text = re.sub(r"//[^\n]*", "", text)
    for token in TOKEN.finditer(text):
        kind = token.lastgroup if token.lastgroup != "prototype" else "head"
        if kind is None or kind == "skip":
            continue
        start = token.start(kind)
        line, last = line + text.count("\n", last, start), start
        statement = token[kind].strip()
        if kind == "loc":
            place = read(statement)
        elif kind == "head":
            if not token["prototype"]:
                bodies.append(head(statement))
                count = -1
        elif not blocks and kind != "open":
            declared.append(statement)
        else:
            if kind == "open":
                count += 1
                blocks.append(count)
            kind = "declaration" if statement.startswith(".") else kind
            bodies[-1].pieces.append(Piece(kind, statement, line, place, (*blocks,)))
            if kind == "close":
                blocks.pop()
    return declared, bodies
