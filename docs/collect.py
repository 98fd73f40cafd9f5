"""Write the pages of the API, one per group of ``unsloth_cupy/__init__.py``, and of the kernels.

An op's page shows the signature string that checks its calls, so a new op documents itself.
"""

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import unsloth_cupy
from tests import budget
from tests.hardware import fixtures
from tests.variants import ARCHITECTURES
from unsloth_cupy.core.op import OPS, Op
from unsloth_cupy.core.source import source_root

# Modules whose names are not repeated in the package itself.
MODULES = {
    "unsloth_cupy.models": "Models",
    "unsloth_cupy.parallel": "Many devices",
    "unsloth_cupy.errors": "Errors",
}
# Modules that import torch or transformers, which the documentation does without: their names are
# read from their text, and autodoc imports them with mocks.
ELSEWHERE = {"unsloth_cupy.interop.huggingface": "Hugging Face"}
PARTS = ("_forward", "_backward")
EXAMPLES = Path(__file__).with_name("examples") / "api.md"


def groups() -> dict[str, list[str]]:
    """Return the public names by the comments that head them."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in Path(unsloth_cupy.__file__).read_text().splitlines():
        if line.startswith("# "):
            names = found.setdefault(line[2:], [])
        elif (hit := re.search(r" as (\w+),?$", line)) and hit[1] != "__version__":
            names.append(hit[1])
    return found


def exported(module: str) -> list[str]:
    """Return the functions and classes that the text of a module hands on."""
    text = (Path(unsloth_cupy.__file__).parents[1] / module.replace(".", "/")).with_suffix("")
    names = re.findall(r"^from .* as (\w+)$", (text / "__init__.py").read_text(), re.M)
    return [name for name in names if not name.isupper()]


def examples() -> dict[tuple[str, ...], str]:
    """Return the examples by the full names that they are for: of docstrings, then of api.md."""
    text = EXAMPLES.read_text(encoding="utf-8")
    found = re.findall(r"^## (.+)\n\n```python\n((?:.*\n)*?)```$", text, re.M)
    return of_docstrings() | {
        tuple(f"unsloth_cupy.{name}" for name in heading.split(", ")): block
        for heading, block in found
    }


def of_docstrings() -> dict[tuple[str, ...], str]:
    """Return the examples of docstrings: each also for what else it calls of its group."""
    found = {}
    for group in groups().values():
        own = {name: shown for name in group if (shown := in_docstring(name))}
        left = [name for name in group if name not in own]
        for name, shown in own.items():
            also = [other for other in left if re.search(rf"\b{other}\b", called(shown))]
            left = [other for other in left if other not in also]
            found[tuple(f"unsloth_cupy.{each}" for each in (name, *also))] = shown
    return found


def in_docstring(name: str) -> str:
    """Return the example that ends the docstring of a name of the package, or nothing."""
    text = inspect.getdoc(getattr(unsloth_cupy, name)) or ""
    return text.partition("\nExamples\n--------\n")[2]


def called(block: str) -> str:
    """Return an example without its imports and comments."""
    return re.sub(r"^(>>> )?(from|import) .*|#.*", "", block, flags=re.M)


def public() -> list[str]:
    """Return the full names of the public functions, and of the classes of the package itself."""
    names = [f"unsloth_cupy.{name}" for group in groups().values() for name in group]
    for module in MODULES:
        space = vars(importlib.import_module(module))
        own = [name for name, value in space.items() if inspect.isfunction(value)]
        names += [f"{module}.{name}" for name in own if name[0] != "_"]
    return names + [f"{module}.{name}" for module in ELSEWHERE for name in exported(module)]


def example(name: str) -> list[str]:
    """Return what a page says behind the docstring of a name."""
    for names, block in examples().items():
        if name == names[0] and block.startswith(">>>"):
            return []  # it is there
        if name == names[0]:
            return ["Example:", "", "```python", block.rstrip(), "```", ""]
        if name in names:
            return ["```{eval-rst}", f"Example: with :obj:`{names[0]}`.", "```", ""]
    return []


def page(title: str, module: str, names: list[str]) -> str:
    """Return one page: every name with its docstring, parts of an op after the op."""
    lines = [f"# {title}", ""]
    space = importlib.import_module(module)
    for name in sorted(names, key=lambda name: (name.endswith(PARTS), names.index(name))):
        value = getattr(space, name)
        home = value.__module__
        if home in MODULES and home != module:  # its source leads back to one place alone
            kind = "class" if isinstance(value, type) else "function"
            lines += ["```{eval-rst}", f".. py:{kind}:: {module}.{name}", ""]
            lines += [f"   :py:obj:`{home}.{name}`, by a shorter name.", "```", ""]
            lines += example(f"{module}.{name}")
        else:
            fails = isinstance(value, type) and issubclass(value, Exception)
            lines += directives(module, [name], members=not fails)
    return "\n".join(lines)


def directives(module: str, names: list[str], members: bool = True) -> list[str]:
    """Return what shows names with their docstrings, and an example behind each."""
    lines = []
    for name in names:
        kind = "class" if name[0].isupper() else "function"
        lines += ["```{eval-rst}", f".. auto{kind}:: {module}.{name}"]
        lines += ["   :members:"] * (kind == "class" and members)
        lines += ["```", "", *example(f"{module}.{name}")]
    return lines


def kernel_pages() -> dict[str, str]:
    """Return a page for every file of ``kernels_cu``, one of instructions, and their index.

    A page is the comment that opens the file and, from ``tests/costs.toml``, what every
    variant takes.
    """
    _, lines = budget.read()
    pages, summary = {}, []
    for path in sorted(source_root().glob("*.cu")):
        source = path.read_text()
        header = re.match(r"(?://.*\n)+", source)
        text = re.sub(r"^// ?", "", header[0], flags=re.M) if header else ""
        page = [f"# {path.stem}", "", "```text", text.rstrip(), "```"]
        for kernel in re.findall(r"^(?:CLUSTER_)?KERNEL\([^)]*\)\s*(\w+)\(", source, re.M):
            table = lines.get(kernel, {})
            summary.append(
                f"| [{kernel}]({path.stem}.md#{kernel}) | {' | '.join(_ranges(table))} |"
            )
            page += ["", f"({kernel})=", f"## {kernel}", "", _head("variant")]
            for label, by in table.items():
                cells = (_cell(by.get(arch)) for arch in ARCHITECTURES)
                page.append(f"| {label} | {' | '.join(cells)} |")
        pages[path.stem] = "\n".join([*page, ""])
    pages["instructions"] = f"{INSTRUCTIONS}\n{fixtures.table()}\n"
    tree = ["```{toctree}", ":hidden:", "", *pages, "```", ""]
    pages["index"] = "\n".join([KERNELS, _head("kernel"), *summary, "", *tree])
    return pages


KERNELS = """\
# Kernels

Collected from the files of `kernels_cu/`: maths, traffic, constants; and from what NVRTC says of
every variant that the library asks for, which the tests hold it to. Cells give registers of a
thread, bytes of static and dynamic shared memory, and the share of an SM's threads that can be
resident at once. How two kernels come to what they are, step by step, stands under
[ladders](../ladders.md). What a GPU confirmed of their speed stands under
[performance](../performance.md); of the instructions that they use, under
[instructions](instructions.md).
"""
INSTRUCTIONS = """\
# Instructions

Each instruction that kernels may use is tested alone, on the CPU, against arithmetic.
`python -m tests.hardware` asks a GPU for the same bits and keeps the date.
"""


def _head(first: str) -> str:
    named = [first, *(f"sm_{arch}" for arch in ARCHITECTURES)]
    return f"| {' | '.join(named)} |\n|{'---|' * len(named)}"


def _cell(numbers: list[int] | None) -> str:
    if numbers is None:
        return "-"
    registers, static, dynamic, percent = numbers
    return f"{registers}, {static} + {dynamic}, {percent} %"


def _ranges(table: Mapping[str, Mapping[str, list[int]]]) -> Iterator[str]:
    """Yield for each architecture from what to what the numbers of a kernel's variants go."""
    for arch in ARCHITECTURES:
        found = [by[arch] for by in table.values() if arch in by]
        sides = [(min(column), max(column)) for column in zip(*found, strict=True)]
        words = [f"{low} - {high}" if low < high else f"{low}" for low, high in sides]
        yield "{}, {} + {}, {} %".format(*words) if words else "-"


def write_pages(app: Sphinx) -> None:
    """Write api/*.md and kernels/*.md, each with the index that lists them."""
    pages = {title: page(title, "unsloth_cupy", names) for title, names in groups().items()}
    for module, title in MODULES.items():
        space = importlib.import_module(module)
        own = [
            name
            for name in dir(space)
            if not name.startswith("_")
            and str(getattr(getattr(space, name), "__module__", "")).startswith(module)
        ]
        pages[title] = page(title, module, own)
    for module, title in ELSEWHERE.items():
        pages[title] = "\n".join([f"# {title}", "", *directives(module, exported(module))])
    files = {title: re.sub(r"\W+", "-", title).lower() for title in pages}
    index = ["# API", "", "Everything is importable from `unsloth_cupy` unless a module is named."]
    index += ["", "```{toctree}", "", *files.values(), "```", ""]
    texts = {files[title]: text for title, text in pages.items()}
    _write(Path(app.srcdir) / "api", texts | {"index": "\n".join(index)})
    _write(Path(app.srcdir) / "kernels", kernel_pages())


def _write(folder: Path, pages: dict[str, str]) -> None:
    """Make a folder hold these pages and no other."""
    folder.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # unchanged pages are not rebuilt
            path.write_text(text)
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()


def add_signature(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Put the signature string of an op under the first line of its docstring.

    ``(*rows, hidden)`` stands in docstrings as it does in signatures; for Sphinx a star opens
    emphasis, so those outside of quotes and examples are escaped.
    """
    kept = re.compile(r"\s*(>>>|\.\.\.) |.*`")
    lines[:] = [x if kept.match(x) else re.sub(r"(?<!\*)\*(?=\w)", r"\*", x) for x in lines]
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
