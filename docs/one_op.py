"""Draw the parts of an op, with the code of ``relu2``: one-op.svg, and one for narrow pages.

    python docs/one_op.py

The picture takes its colours from the page that contains it.
"""

import inspect
import re
import sys
import textwrap
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from unsloth_cupy.core.op import OPS  # noqa: E402
from unsloth_cupy.core.source import source_root  # noqa: E402

OP = "relu2"
LINE, PAD, GAP = 17, 16, 28  # heights: of a line; inside a box; between boxes
LETTER, LETTERS = 7.3, 50  # width of a letter of code; the most letters in a line
FILES = {2: "one-op.svg", 1: "one-op-narrow.svg"}  # by number of columns
STYLE = """<style>
.one-op text { font: 13px sans-serif; fill: var(--pst-color-text-base, #22272e); }
.one-op .head { font-weight: 600; font-size: 15px; }
.one-op .code { font: 12px monospace; white-space: pre; }
.one-op .soft { fill: var(--pst-color-text-muted, #5c6570); }
.one-op rect { fill: var(--pst-color-surface, #f4f6f8); stroke: var(--pst-color-border, #8b95a1); }
.one-op path { fill: none; stroke: var(--pst-color-text-muted, #5c6570); stroke-width: 1.5; }
.one-op polygon { fill: var(--pst-color-text-muted, #5c6570); }
</style>"""
Box = tuple[str, list[str], list[str]]  # title, code, notes


def body(function: object) -> list[str]:
    """Return the lines of a function without its decorator and docstring."""
    text = re.sub(r'\n    """.*?"""', "", inspect.getsource(function), flags=re.S)  # type: ignore[arg-type]
    return text[text.index("def ") :].rstrip().splitlines()


def kernel() -> list[str]:
    """Return the lines of the kernel."""
    text = (source_root() / f"{OP}.cu").read_text()
    match = re.search(rf"^KERNEL\(.*?\) {OP}\(.*?^}}", text, re.M | re.S)
    assert match is not None, OP
    return [part for line in match[0].splitlines() for part in wrapped(line)]


def wrapped(line: str) -> list[str]:
    """Split a line of code into lines of at most LETTERS letters."""
    indent = re.match(" *", line)[0]  # type: ignore[index]
    return textwrap.wrap(line, LETTERS, subsequent_indent=indent + "    ", drop_whitespace=True)


def boxes() -> list[Box]:
    """Return the boxes of the parts of the op."""
    op = OPS[OP]
    assert op.backward is not None
    definition = ["runs on a CPU, on any NumPy arrays", "defines the correct result"]
    launched = ["runs on a GPU, compiled at the first call", "tests compare it, run on a CPU"]
    gradient = ["used by the tape, torch and JAX", "tests compare it with finite differences"]
    return [
        ("the definition, in NumPy", body(op.definition), definition),
        ("the kernel, in CUDA", kernel(), launched),
        ("the gradient, written the same way", body(op.backward.definition), gradient),
    ]


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Return a line of text as SVG."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def arrow(x: float, y: float, down: float) -> list[str]:
    """Return an arrow that points down, of length ``down``."""
    tip = y + down
    head = f"{x - 5:g},{tip - 8:g} {x + 5:g},{tip - 8:g} {x:g},{tip:g}"
    return [f'<path d="M{x:g} {y:g}V{tip - 8:g}"/>', f'<polygon points="{head}"/>']


def box(x: float, y: float, wide: float, high: float, content: Box) -> list[str]:
    """Return a box: the title and the code at its top, the notes at its bottom."""
    title, code, notes = content
    first, foot = y + PAD + 14 + LINE, y + high - PAD - (len(notes) - 1) * LINE
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="6"/>',
        text(x + PAD, y + PAD + 10, title, "head"),
        *(text(x + PAD, first + n * LINE, line, "code") for n, line in enumerate(code)),
        *(text(x + PAD, foot + n * LINE, line, "soft") for n, line in enumerate(notes)),
    ]


def drawn(columns: int) -> str:
    """Return the picture as SVG: one column of boxes, or the kernel in a second column."""
    definition, kernel, gradient = every = boxes()
    wide = max(len(line) for _, code, _ in every for line in code) * LETTER + 2 * PAD
    width, top = columns * wide + (columns - 1) * GAP + 2, 2 * LINE + 2 * PAD + 6
    parts = [f'<rect x="1" y="1" width="{width - 2:g}" height="{top:g}" rx="6"/>']
    parts.append(text(1 + PAD, PAD + 14, f"{OP}(x)", "code head"))
    parts.append(text(1 + PAD + 80, PAD + 14, "of NumPy, CuPy, torch or JAX", "soft"))
    parts.append(text(1 + PAD, PAD + 16 + LINE + 4, OPS[OP].signature, "code"))
    if columns > 1:
        checks = "the signature: calls, error messages, gradients and tests are derived from it"
        parts.append(text(1 + PAD + 190, PAD + 16 + LINE + 4, checks, "soft"))
    heights = {c[0]: (len(c[1]) + len(c[2]) + 1) * LINE + 2 * PAD + 14 for c in every}
    high, y = 0.0, 1.0 + top
    for content in (definition, gradient) if columns > 1 else every:
        high = heights[content[0]]
        parts += arrow(1 + wide / 2, y, GAP - 2)
        parts += box(1, y + GAP, wide, high, content)
        y += GAP + high
    if columns > 1:
        parts += arrow(1 + wide * 1.5 + GAP, 1 + top, GAP - 2)
        parts += box(1 + wide + GAP, 1 + top + GAP, wide, y - 1 - top - GAP, kernel)
    title = f"The op {OP}: a signature, a definition, a kernel and a gradient"
    size = f"{width:g} {y + 2:g}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img" class="one-op">'
    )
    return "\n".join([head, f"<title>{title}</title>", STYLE, *parts, "</svg>", ""])


if __name__ == "__main__":
    for columns, name in FILES.items():
        Path(__file__).with_name(name).write_text(drawn(columns))
