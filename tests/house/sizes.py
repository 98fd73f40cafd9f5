"""Lines of code of each room of ``unsloth_cupy``, and what has come since a commit.

    python -m tests.house.sizes [REVISION]

A line counts if a body has code on it: docstrings, blank lines, comments, imports and the heads of
functions and classes do not count.  No room has a limit: ``test_sizes`` limits what grows unseen.
"""

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator

from ..harness.tracked import ROOT, tracked

PACKAGE = ROOT / "unsloth_cupy"
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


def modules(revision: str | None = None) -> dict[str, str]:
    """Return the source of each module, now or at a commit."""
    if revision is None:
        paths = tracked("unsloth_cupy/**/*.py")
        return {str(p.relative_to(PACKAGE)): p.read_text(encoding="utf-8") for p in paths}
    command = ["git", "-C", str(ROOT), "archive", revision, "unsloth_cupy"]
    data = io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)
    with tarfile.open(fileobj=data) as archive:
        members = [each for each in archive if each.name.endswith(".py")]
        read = {each.name: archive.extractfile(each) for each in members}
        return {
            name.removeprefix("unsloth_cupy/"): file.read().decode()
            for name, file in read.items()
            if file is not None
        }


def sizes(revision: str | None = None) -> Counter[str]:
    """Return the lines of code of each room."""
    counts = Counter[str]()
    for name, source in modules(revision).items():
        counts[name.partition("/")[0] if "/" in name else "modules"] += lines_of_code(source)
    return counts


def main() -> None:
    """Print the lines of code of each room, and the difference to a commit."""
    now = sizes()
    before = sizes(sys.argv[1]) if sys.argv[1:] else now
    for room in sorted(now | before):
        print(f"{room:10}{now[room]:7,}{now[room] - before[room]:+7,}")
    print(f"{'all':10}{now.total():7,}{now.total() - before.total():+7,}")


if __name__ == "__main__":
    main()
