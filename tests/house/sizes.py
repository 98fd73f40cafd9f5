"""Lines of code of each room of ``unsloth_cupy``, beside its limit.

    python -m tests.house.sizes

A line counts if a body has code on it: docstrings, blank lines, comments, imports and the heads of
functions and classes do not count.  A room that needs more gets a higher limit in the commit that
needs it.  That a module is long is advice, not a fault: split it by variant, never by layer.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator

from ..harness.tracked import ROOT, tracked

PACKAGE = ROOT / "unsloth_cupy"
LONG = 300  # lines of a module, everything counted
LIMITS = {
    "core": 920,
    "compiled": 80,
    "ops": 9600,
    "losses": 620,
    "training": 1120,
    "inference": 540,
    "interop": 2540,
    "parallel": 2080,
    "models": 12000,
    "memory": 1100,
    "finetune": 6560,
    "bench": 850,
    "profiling": 960,
    "cli": 1500,
    "modules": 480,
}
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def lines_of_code(source: str) -> int:
    """Return the number of lines on which the bodies of a module have code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    spans = [(t.start[0], t.end[0]) for t in tokens if t.type not in LAYOUT]
    lines = {line for first, last in spans for line in range(first, last + 1)}
    for node in ast.walk(ast.parse(source)):
        lines -= {line for first, last in not_counted(node) for line in range(first, last)}
    return len(lines)


def not_counted(node: ast.AST) -> Iterator[tuple[int, int]]:
    """Yield the first line of what does not count in a node, and the line after its last one."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            yield node.lineno, (node.end_lineno or 0) + 1
        case ast.FunctionDef() | ast.ClassDef():
            heads = [node, *node.decorator_list]
            yield min(head.lineno for head in heads), node.body[0].lineno


def sizes() -> dict[str, int]:
    """Return the lines of code of each room."""
    counts = dict.fromkeys(LIMITS, 0)
    for path in tracked("unsloth_cupy/**/*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        room = "modules" if room.endswith(".py") else room
        counts[room] = counts.get(room, 0) + lines_of_code(path.read_text(encoding="utf-8"))
    return counts


def too_large() -> list[str]:
    """Return the rooms that are beyond their limit, or have none."""
    return [
        f"{room}: {count} lines of code, limit {LIMITS.get(room, 0)}"
        for room, count in sizes().items()
        if count > LIMITS.get(room, 0)
    ]


def main() -> None:
    """Print the rooms and the long modules; fail if a room is beyond its limit."""
    counts = sizes()
    for room, count in counts.items():
        print(f"{room:10}{count:7,} of {LIMITS.get(room, 0):6,} lines of code")
    print(f"{'all':10}{sum(counts.values()):7,} of {sum(LIMITS.values()):6,} lines of code")
    for path in tracked("unsloth_cupy/**/*.py"):
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length > LONG:
            print(f"long: {path.relative_to(PACKAGE.parent)} has {length} lines")
    sys.exit("\n".join(too_large()) or None)


if __name__ == "__main__":
    main()
