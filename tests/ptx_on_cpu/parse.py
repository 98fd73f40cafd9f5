"""The text of a PTX module, as statements: what is declared, and the body of each function."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

# Directives that stand on a line of their own, without a semicolon.
LINE = re.compile(r"\.(version|target|address_size|file|loc|noreturn|pragma)\b")
HEAD = re.compile(r"(\.visible |\.weak |\.extern )*\.(entry|func)\b")
LOC = re.compile(r"\.loc\s+(\d+) (\d+) (\d+)(?:.*inlined_at (\d+) (\d+) (\d+))?")
Place = tuple[str, int]  # "ptx.cuh:61 in tile.cuh", 113: of inlined code the caller too


class UnknownError(Exception):
    """An instruction, or a form of one, that is not translated."""


class Piece(NamedTuple):
    """A statement, label, brace or directive, with its line of PTX and its place in the source."""

    kind: str  # statement, label, open, close, head
    text: str
    line: int
    place: Place = ("?", 0)


class Body(NamedTuple):
    """A function: its parameters in order, those that it returns first, and what it does."""

    name: str
    entry: bool
    parameters: tuple[str, ...]
    cluster: tuple[int, int, int]
    pieces: list[Piece]


def operands(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    found, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            found.append(text[last:i].strip())
            last = i + 1
    return [*found, text[last:].strip()] if text.strip() else []


def pieces(text: str) -> Iterator[Piece]:
    """Yield statements, labels and braces."""
    skip, buffer, start = False, "", 0
    named = re.findall(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"]*)"', text, re.M)
    files = dict(named)  # they stand at the end
    place: Place = ("?", 0)
    chains: dict[tuple[str | Any, ...], tuple[Any, ...]] = {}  # of calls, by place and column
    for number, whole_line in enumerate(text.splitlines(), 1):
        line = whole_line.partition("//")[0].strip()
        skip |= line.startswith(".section")
        if skip:
            skip = "}" not in line
            continue
        if not buffer and LINE.match(line):
            if m := LOC.match(line):
                own, by = m.group(1, 2, 3), m.group(4, 5, 6)
                calls = chains.get(by, (by[:2],)) if m[4] else ()
                chains[own] = own[:2], *calls
                names = [f"{files[file]}:{at}" for file, at in chains[own]]
                words = " in ".join(names).rpartition(":")
                place = (words[0], int(words[2]))
            continue
        for part in re.split(r"([;{}]|(?<!:):(?!:))", line + " "):
            start = start if buffer else number
            kind = ""
            if part == ";":
                kind = "statement"
            elif part == ":" and re.fullmatch(r"[$\w%]+", buffer.strip()):
                kind = "label"
            elif part == "{" and (not buffer or HEAD.match(buffer)):
                kind = "head" if buffer else "open"
            elif part == "}" and not buffer:
                kind = "close"
            if kind:
                yield Piece(kind, buffer.strip(), start, place)
                buffer = ""
            else:
                buffer = (buffer + part).lstrip()


def head(text: str) -> Body:
    """Read .entry name(parameters), or .func (results) name(parameters)."""
    found = re.match(r".*?\.(entry|func)\s*(?:\(([^)]*)\)\s*)?([\w$]+)\s*(?:\(([^)]*)\))?", text)
    if found is None:
        raise UnknownError(text)
    kind, results, name, given = found.groups(default="")
    names = [p.split()[-1].partition("[")[0] for p in operands(f"{results},{given}".strip(", "))]
    sides = re.search(r"\.reqnctapercluster\s+([\d, ]+)", text)
    several = [*map(int, sides[1].split(",") if sides else ()), 1, 1, 1]
    return Body(name, kind == "entry", tuple(names), (several[0], several[1], several[2]), [])


def functions(text: str) -> tuple[list[str], list[Body]]:
    """Return what a module declares outside of functions, and its functions."""
    declared: list[str] = []
    found: list[Body] = []
    depth = 0
    for piece in pieces(text):
        if piece.kind == "head":
            found.append(head(piece.text))
            depth = 1
        elif not depth:
            if not HEAD.match(piece.text):  # the prototype of a function
                declared.append(piece.text)
        else:
            depth += (piece.kind == "open") - (piece.kind == "close")
            if depth:
                found[-1].pieces.append(piece)
    return declared, found
