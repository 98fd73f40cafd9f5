"""Write the API pages, one for each group of ``unsloth_cupy/__init__.py``, and the kernel pages.

An op's page shows the signature string that checks its calls, so a new op documents itself.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from sphinx.application import Sphinx

import unsloth_cupy
from tests.code.hardware import fixtures
from tests.code.programs import budget
from tests.code.programs.variants import ARCHITECTURES
from unsloth_cupy.cli.commands import group as commands
from unsloth_cupy.cli.options import HELP_ALL, OTHERS
from unsloth_cupy.core.op import OPS, Op
from unsloth_cupy.core.source import source_root
from unsloth_cupy.finetune import Settings

# Modules whose names are not also names of the package.
MODULES = {
    "unsloth_cupy.models": "Models",
    "unsloth_cupy.finetune": "Fine-tuning",
    "unsloth_cupy.serving": "Many prompts",
    "unsloth_cupy.parallel": "Many devices",
    "unsloth_cupy.errors": "Errors",
}
# Modules that import torch or transformers, which building the documentation does not need: names
# are read from the module's text, and autodoc imports it with mocks.
ELSEWHERE = {
    "unsloth_cupy.interop.huggingface": "Hugging Face",
    "unsloth_cupy.losses": "Losses of texts",
}
PARTS = ("_forward", "_backward")
EXAMPLES = Path(__file__).with_name("examples") / "api.md"


def groups() -> dict[str, list[str]]:
    """Return the public names of the package, by the comment above their group."""
    grouped: dict[str, list[str]] = {}
    names: list[str] = []
    for line in Path(unsloth_cupy.__file__).read_text().splitlines():
        if line.startswith("# "):
            names = grouped.setdefault(line[2:], [])
        elif (hit := re.search(r" as (\w+),?$", line)) and hit[1] != "__version__":
            names.append(hit[1])
    return grouped


def exported(module: str) -> list[str]:
    """Return the functions and classes that a module re-exports, read from its text."""
    text = (Path(unsloth_cupy.__file__).parents[1] / module.replace(".", "/")).with_suffix("")
    names = re.findall(r"^ *from .* as (\w+)$", (text / "__init__.py").read_text(), re.M)
    return [name for name in names if name[0] != "_" and not name.isupper()]


@functools.cache
def examples() -> dict[tuple[str, ...], str]:
    """Return the examples by the full names that they show: from docstrings and from api.md."""
    text = EXAMPLES.read_text(encoding="utf-8")
    blocks = re.findall(r"^## (.+)\n\n```python\n((?:.*\n)*?)```$", text, re.M)
    return of_docstrings() | {
        tuple(f"unsloth_cupy.{name}" for name in heading.split(", ")): block
        for heading, block in blocks
    }


def of_docstrings() -> dict[tuple[str, ...], str]:
    """Return the docstrings' examples; one is also for other names of its group that it calls."""
    by_names = {}
    for group in groups().values():
        own = {name: block for name in group if (block := in_docstring(name))}
        left = [name for name in group if name not in own]
        for name, block in own.items():
            also = [other for other in left if re.search(rf"\b{other}\b", called(block))]
            left = [other for other in left if other not in also]
            by_names[tuple(f"unsloth_cupy.{each}" for each in (name, *also))] = block
    return by_names


def in_docstring(name: str) -> str:
    """Return the Examples section of the docstring of a name of the package, if it has one."""
    text = inspect.getdoc(getattr(unsloth_cupy, name)) or ""
    return text.partition("\nExamples\n--------\n")[2]


def called(block: str) -> str:
    """Return an example without its imports and comments."""
    return re.sub(r"^(>>> )?(from|import) .*|#.*", "", block, flags=re.M)


def public() -> list[str]:
    """Return the full names of public functions, and those of the package's public classes."""
    names = [f"unsloth_cupy.{name}" for group in groups().values() for name in group]
    for module in MODULES:
        space = vars(importlib.import_module(module))
        functions = {name: f for name, f in space.items() if inspect.isfunction(f)}
        own = [name for name, f in functions.items() if f.__module__.startswith(module)]
        names += [f"{module}.{name}" for name in own if name[0] != "_"]
    return names + [f"{module}.{name}" for module in ELSEWHERE for name in exported(module)]


def example(name: str) -> list[str]:
    """Return the lines that follow the docstring of a name: its example, or a link to one."""
    for names, block in examples().items():
        if name == names[0] and block.startswith(">>>"):
            return []  # the docstring itself has it
        if name == names[0]:
            return ["Example:", "", "```python", block.rstrip(), "```", ""]
        if name in names:
            return ["```{eval-rst}", f"Example: with :obj:`{names[0]}`.", "```", ""]
    return []


def page(title: str, module: str, names: list[str]) -> str:
    """Return a page with the docstring of every name; forward and backward ops come last."""
    lines = [f"# {title}", ""]
    space = importlib.import_module(module)
    for name in sorted(names, key=lambda name: (name.endswith(PARTS), names.index(name))):
        value = getattr(space, name)
        home = value.__module__
        if home in MODULES and home != module:  # documented there; viewcode links to one place only
            kind = "class" if isinstance(value, type) else "function"
            lines += ["```{eval-rst}", f".. py:{kind}:: {module}.{name}", ""]
            lines += [f"   :py:obj:`{home}.{name}`, by a shorter name.", "```", ""]
            lines += example(f"{module}.{name}")
        else:
            fails = isinstance(value, type) and issubclass(value, Exception)
            lines += directives(module, [name], members=not fails)
    return "\n".join(lines)


def listed(text: str) -> list[str]:
    """Return a row for all that a page documents but the parts of ops: its name and summary."""
    names = re.findall(r"^\.\. (?:auto|py:)(?:function|class):: ([\w.]+)$", text, re.M)
    links = {n: f"{{py:obj}}`{n.rpartition('.')[2]} <{n}>`" for n in names if not n.endswith(PARTS)}
    return [f"| {link} | {summary(name)} |" for name, link in links.items()]


def summary(name: str) -> str:
    """Return the first sentence of a docstring, which may be read from the text of its module."""
    module, _, last = name.rpartition(".")
    if module not in ELSEWHERE:
        value = getattr(importlib.import_module(module), last)
        return _first_sentence(inspect.getdoc(value) or "")
    folder = Path(unsloth_cupy.__file__).parents[1] / module.replace(".", "/")
    texts = (file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py")))
    nodes = (node for text in texts for node in ast.parse(text).body)
    kinds = (ast.FunctionDef, ast.ClassDef)
    own = (node for node in nodes if isinstance(node, kinds) and node.name == last)
    return _first_sentence(next(filter(None, map(ast.get_docstring, own)), ""))


def directives(module: str, names: list[str], members: bool = True) -> list[str]:
    """Return the autodoc directives of names, each followed by its example."""
    lines = []
    for name in names:
        kind = "class" if name[0].isupper() else "function"
        fields = "(**settings)" * (name == Settings.__name__)  # they have tables of their own
        lines += ["```{eval-rst}", f".. auto{kind}:: {module}.{name}{fields}"]
        lines += ["   :members:"] * (kind == "class" and members and not fields)
        lines += ["   :inherited-members: Network"] * (name == "Transformer")  # of adapters
        lines += ["```", "", *example(f"{module}.{name}")]
    return lines


def settings() -> list[str]:
    """Return tables of the settings, one for each group, with the default and the help of each."""
    fields = [each for each in dataclasses.fields(Settings) if "group" in each.metadata]
    code = {_cell(each.name): f"`{each.name}`" for each in fields}  # as the text is escaped
    lines = ["## Settings, by group", ""]
    for group in dict.fromkeys(each.metadata["group"] for each in fields):
        lines += [f"### {group.capitalize()}", "", "| setting | default | meaning |"]
        lines += ["|---|---|---|"]
        for each in fields:
            if each.metadata["group"] == group:
                text = _cell(each.metadata["text"]).format_map(code)
                lines.append(f"| `{each.name}` | `{each.default!r}` | {text} |")
        lines.append("")
    return lines


def command_page() -> str:
    """Return the page of the command line: a part for each command, a heading for each option."""
    lines = ["# Command line", "", "All options, as `--help-all` shows them. The"]
    lines += ["[guide](../guide/command-line.md) says what the commands do.", ""]
    for name, command in commands.commands.items():
        context = click.Context(command, info_name=f"unsloth-cupy {name}")
        context.meta[HELP_ALL.name] = True
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        lines += [f"({name})=", f"## {name}", "", "```text", usage, "```", ""]
        lines += [re.sub(r"([*_|<>`])", r"\\\1", inspect.cleandoc(command.help or "")), ""]
        groups: dict[str, list[str]] = {}
        for option in command.get_params(context):
            record = option.get_help_record(context)
            if record and isinstance(option, click.Option) and not option.name.startswith("help"):
                own = groups.setdefault(getattr(option, "group", None) or OTHERS, [])
                anchor = f"({name}-{max(option.opts, key=len).lstrip('-')})="
                own += [anchor, f"#### `{record[0]}`", "", _cell(record[1]), ""]
        for group in sorted(groups, key=OTHERS.__eq__):
            lines += [f"### {group.capitalize()}", "", *groups[group]]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Return a help text as Markdown of one line."""
    return re.sub(r"([*_|<>`])", r"\\\1", " ".join(text.split()))


def kernel_pages() -> dict[str, str]:
    """Return a page for every file of ``kernels_cu``, one of instructions, and their index.

    A page has the file's header comment and, from ``tests/code/programs/costs.toml``, the
    resources of every variant of its kernels.
    """
    _, lines = budget.read()
    pages, summary = {}, []
    for path in sorted(source_root().glob("*.cu")):
        source = path.read_text()
        header = re.match(r"(?://.*\n)+", source)
        text = re.sub(r"^// ?", "", header[0], flags=re.M) if header else ""
        page = [f"# {path.stem}", "", "```text", text.rstrip(), "```", "", CELLS]
        first = _first_sentence(text)
        for kernel in re.findall(r"^(?:CLUSTER_)?KERNEL\([^)]*\)\s*(\w+)\(", source, re.M):
            table = lines.get(kernel, {})
            every = [by[arch] for by in table.values() for arch in ARCHITECTURES if arch in by]
            link = f"[{kernel}]({path.stem}.md#{kernel})"
            summary.append(f"| {link}<br>{first} | {' | '.join(_cells(every, _range))} |")
            first = ""
            page += ["", f"({kernel})=", f"## {kernel}", "", _head("variant")]
            for label, by in table.items():
                each = [by.get(arch) for arch in ARCHITECTURES]
                page.append(f"| {label} | {' | '.join(_cells(each, _list))} |")
        pages[path.stem] = "\n".join([*page, ""])
    pages["instructions"] = f"{INSTRUCTIONS}\n{fixtures.table()}\n"
    tree = ["```{toctree}", ":hidden:", "", *pages, "```", ""]
    pages["index"] = "\n".join([KERNELS, _head("kernel"), *summary, "", *tree])
    return pages


KERNELS = """\
# Kernels

The pages have the header comments of the files of `kernels_cu/` (maths, traffic, constants) and the
resources that NVRTC reports for every variant that the library launches; tests compare them with
new builds. Here are the smallest and the largest numbers of all variants on all GPUs: registers of
a thread, bytes of static + dynamic shared memory, and the share of an SM's threads that can be
resident at once. [Ladders](../ladders.md) shows the optimizations of two kernels step by step.
[Performance](../performance.md) has the speeds that were measured on a GPU, and
[instructions](instructions.md) the instructions that a GPU has confirmed.
"""
CELLS = f"""\
A cell has one number, or one for each of {", ".join(f"sm_{arch}" for arch in ARCHITECTURES)}, in
this order: registers of a thread, bytes of static + dynamic shared memory, and the share of an SM's
threads that can be resident at once, in percent."""
INSTRUCTIONS = """\
# Instructions

Each instruction that kernels may use is tested alone, on the CPU, against plain arithmetic.
`python -m tests.code.hardware` compares the bits with those of a GPU and records the date.
"""


def _first_sentence(text: str) -> str:
    """Return what the first paragraph of a header comment says, up to a full stop or a colon."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=\w\w)[.:;] ", f"{paragraph} ", maxsplit=1)[0].strip().rstrip(".")
    parts = re.split(r"(``.*?``)", sentence)  # words and code, in turns
    parts[::2] = (re.sub(r"([*_|<>`])", r"\\\1", words) for words in parts[::2])
    return "".join([part.replace("|", r"\|") if i % 2 else part for i, part in enumerate(parts)])


def _head(first: str) -> str:
    titles = [first, "registers", "shared memory", "resident"]
    return f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"


def _cells(rows: list[list[int] | None], shown: Callable[[list[str]], str]) -> list[str]:
    """Return the cells of numbers: registers, static + dynamic shared memory, percent."""
    known = [row for row in rows if row is not None]
    if not known:
        return ["-"] * 3
    columns = [["-" if row is None else str(row[place]) for row in rows] for place in range(4)]
    registers, static, dynamic, percent = map(shown, columns)
    return [registers, f"{static} + {dynamic}", f"{percent}\N{NO-BREAK SPACE}%"]


def _list(column: list[str]) -> str:
    """Return one number if all are equal, or all of them."""
    return column[0] if len({*column}) == 1 else " ".join(column)


def _range(column: list[str]) -> str:
    """Return the smallest and the largest of numbers."""
    low, high = min(column, key=int), max(column, key=int)
    return low if low == high else f"{low} - {high}"


def write_pages(app: Sphinx) -> None:
    """Write api/*.md and kernels/*.md, each folder with an index."""
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
    pages["Fine-tuning"] += "\n".join(["", *settings()])
    for module, title in ELSEWHERE.items():
        pages[title] = "\n".join([f"# {title}", "", *directives(module, exported(module))])
    pages["Command line"] = command_page()
    files = {title: re.sub(r"\W+", "-", title).lower() for title in pages}
    index = ["# API", "", "Everything is importable from `unsloth_cupy` unless a module is named."]
    index += ["", "```{include} ../ops.md", ":heading-offset: 1", "```"]
    for title, text in pages.items():
        index += ["", f"## [{title}]({files[title]}.md)", ""]
        index += ["| name | what it does |", "|---|---|", *listed(text)]
    index += [
        f"| [{name}](command-line.md#{name}) | {_cell(command.get_short_help_str(200))} |"
        for name, command in commands.commands.items()
    ]
    index += ["", "```{toctree}", ":hidden:", "", *files.values(), "```", ""]
    texts = {files[title]: text for title, text in pages.items()}
    _write(Path(app.srcdir) / "api", texts | {"index": "\n".join(index)})
    _write(Path(app.srcdir) / "kernels", kernel_pages())


def _write(folder: Path, pages: dict[str, str]) -> None:
    """Write these pages to a folder and delete all others from it."""
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
    """Insert the signature string of an op below the first line of its docstring.

    Docstrings have shapes such as ``(*rows, hidden)``, as signatures do.  A star opens emphasis in
    Sphinx, so stars outside of quotes and examples are escaped.
    """
    kept = re.compile(r"\s*(>>>|\.\.\.) |.*`")
    lines[:] = [x if kept.match(x) else re.sub(r"(?<!\*)\*(?=\w)", r"\*", x) for x in lines]
    last = name.rpartition(".")[2]
    op = value if isinstance(value, Op) else OPS.get(f"{last}_forward")
    if what != "function" or op is None or not lines:
        return
    inputs, _, outputs = op.signature.partition(" -> ")
    operands = re.sub(r"(\)|: \w+(?: < \w+)?), ", r"\1,\n", inputs).splitlines()
    block = [f"   {text}" for text in [*operands, f"-> {outputs}"]]
    runs = "CUDA kernel: yes" if op.launch is not None else "CUDA kernel: no; runs its definition"
    first = lines.index("") if "" in lines else len(lines)
    lines[first:first] = ["", "::", "", *block, "", runs, ""]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension; its priority puts it before numpydoc, which rewrites docstrings."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-docstring", add_signature, priority=400)
    return {"parallel_read_safe": True}
