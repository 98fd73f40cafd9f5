"""Write the API pages: one per group of ``unsloth_cupy/__init__.py``, in its order.

An op's page shows the signature string that checks its calls, so a new op documents itself.
"""

import importlib
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import unsloth_cupy
from tests.hardware.fixtures import table
from unsloth_cupy._jit import source_root
from unsloth_cupy._op import OPS, Op

# Modules whose names are not repeated in the package itself.
MODULES = {"unsloth_cupy.models": "Models", "unsloth_cupy.errors": "Errors"}
PARTS = ("_forward", "_backward")


def groups() -> dict[str, list[str]]:
    """Return the public names by the comments that head them."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in Path(unsloth_cupy.__file__).read_text().splitlines():
        if line.startswith("# "):
            names = found.setdefault(line[2:], [])
        elif (hit := re.search(r" as (\w+)$", line)) and hit[1] != "__version__":
            names.append(hit[1])
    return found


def page(title: str, module: str, names: list[str]) -> str:
    """Return one page: every name with its docstring, parts of an op after the op."""
    lines = [f"# {title}", ""]
    space = importlib.import_module(module)
    for name in sorted(names, key=lambda name: (name.endswith(PARTS), names.index(name))):
        value = getattr(space, name)
        kind = "class" if isinstance(value, type) else "function"
        lines += ["```{eval-rst}", f".. auto{kind}:: {module}.{name}"]
        if kind == "class" and not issubclass(value, Exception):
            lines += ["   :members:"]
        lines += ["```", ""]
    return "\n".join(lines)


def kernels() -> str:
    """Return the page of the kernels: the comment that opens each file."""
    lines = [
        "# Kernels",
        "",
        "Collected from the files of `kernels_cu/`: maths, traffic, constants.",
    ]
    for path in sorted(source_root().glob("*.cu")):
        header = re.match(r"(?://.*\n)+", path.read_text())
        text = re.sub(r"^// ?", "", header[0], flags=re.M) if header else ""
        lines += ["", f"## {path.name}", "", "```text", text.rstrip(), "```"]
    lines += [
        "",
        "## Instructions",
        "",
        "Each instruction that kernels may use is tested alone, on the CPU, against arithmetic.",
        "`python -m tests.hardware` asks a GPU for the same bits and keeps the date.",
        "",
        table(),
    ]
    return "\n".join(lines)


def write_pages(app: Sphinx) -> None:
    """Write api/*.md and the index that lists them."""
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    pages = {title: page(title, "unsloth_cupy", names) for title, names in groups().items()}
    for module, title in MODULES.items():
        space = vars(importlib.import_module(module))
        own = [
            name
            for name, value in space.items()
            if isinstance(getattr(value, "__module__", None), str)
            and value.__module__.startswith(module)
        ]
        pages[title] = page(title, module, own)
    pages["Kernels"] = kernels()
    files = {title: re.sub(r"\W+", "-", title).lower() for title in pages}
    index = ["# API", "", "Everything is importable from `unsloth_cupy` unless a module is named."]
    index += ["", "```{toctree}", "", *files.values(), "```", ""]
    texts = {f"{files[title]}.md": text for title, text in pages.items()}
    for name, text in {**texts, "index.md": "\n".join(index)}.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:  # unchanged pages are not rebuilt
            path.write_text(text)
    for path in folder.glob("*.md"):
        if path.name not in {*texts, "index.md"}:
            path.unlink()


def add_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Put the signature string of an op under the first line of its docstring.

    ``(*rows, hidden)`` stands in docstrings as it does in signatures; for Sphinx a star opens
    emphasis, so those outside of quotes are escaped.
    """
    lines[:] = [line if "`" in line else re.sub(r"(?<!\*)\*(?=\w)", r"\*", line) for line in lines]
    last = name.rpartition(".")[2]
    op = value if isinstance(value, Op) else OPS.get(f"{last}_forward")
    if what != "function" or op is None or not lines:
        return
    inputs, _, outputs = op.signature.partition(" -> ")
    operands = re.sub(r"(\)|: \w+(?: < \w+)?), ", r"\1,\n", inputs).splitlines()
    shown = [f"   {text}" for text in [*operands, f"-> {outputs}"]]
    runs = "CUDA kernel: yes" if op.launch is not None else "CUDA kernel: no; runs its definition"
    first = lines.index("") if "" in lines else len(lines)
    lines[first:first] = ["", "::", "", *shown, "", runs, ""]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx; before numpydoc, which rewrites the docstring."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", add_signature, priority=400)
    return {"parallel_read_safe": True}
