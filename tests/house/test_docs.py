"""All examples and Python blocks of the documentation run, and it builds without a warning."""

import configparser
import dataclasses
import doctest
import functools
import html
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import click
import click.testing
import pytest

import unsloth_cupy
import unsloth_cupy.finetune
import unsloth_cupy.models
from unsloth_cupy.bench import report
from unsloth_cupy.cli.commands import group
from unsloth_cupy.core import source
from unsloth_cupy.core.op import OPS
from unsloth_cupy.finetune import Settings
from unsloth_cupy.finetune.run.callbacks import EVENTS
from unsloth_cupy.models.configs.families import FAMILIES
from unsloth_cupy.models.configs.family import Family

from ..code.programs.compilers import NEWEST, OLDEST
from ..conftest import FOLDER
from ..golden.golden import op_cases
from ..harness.sampling import Sample
from ..harness.tracked import ROOT, tracked
from ..machines.cuda_on_cpu import missing
from ..parallel.ranks import MPIEXEC, THREADS, needs_mpi

DOCS = ROOT / "docs"
EXAMPLES, NOTEBOOKS = tracked("docs/examples/*.py"), tracked("docs/examples/*.ipynb")
PAGES = [page for folder in ("", "guide/", "tutorials/") for page in tracked(f"docs/{folder}*.md")]

PACKAGES = ("sphinx", "numpydoc", "myst_parser", "pydata_sphinx_theme", "sphinx_copybutton")
LARGE = {"numba"}  # tests/interop/test_stacks.py runs what needs it


def loaded(name: str) -> Any:
    """Return a module of docs/."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


outputs = loaded("outputs")


def blocks(page: Path) -> list[str]:
    """Return the Python code of a page, each block at its line number in the page."""
    return outputs.blocks(page.read_text(encoding="utf-8"))


def walk(line: str) -> None:
    """Run a command of a page."""
    words = shlex.split(line.removeprefix(outputs.COMMAND))
    result = click.testing.CliRunner().invoke(group, words)
    assert result.exit_code == 0, f"{line}\n{result.output}"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page share their names, as for a reader who runs them in order."""
    monkeypatch.chdir(tmp_path)
    if any(outputs.EMULATOR in block for block in blocks(page)) and (reason := missing()):
        pytest.skip(reason)

    def left_out(package: str) -> bool:
        if package not in LARGE:
            pytest.importorskip(package, reason=f"needs the extra `peers` ({package})")
        return package in LARGE

    outputs.run_blocks(page, left_out, walk=walk if outputs.walked(page) else None)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    done = outputs.run_example(example, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert list(tmp_path.iterdir()) == [], "an example leaves nothing behind"


def test_the_page_of_examples_has_all_of_them() -> None:
    page = (DOCS / "guide" / "examples.md").read_text()
    included = re.findall(r"^```\{literalinclude\} \.\./examples/(.*)$", page, re.M)
    assert sorted(included) == [path.name for path in EXAMPLES]
    assert sorted(outputs.INCLUDED.findall(page)) == sorted(included)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/guide/examples.md" in readme


PAGE = """\
# A page

```python
x = 2
print("out", x)
```

```python
# needs nothing_like_this
print("left out")
```

```python
print(x + 1)
```

```text
by hand
```

```python
assert x == 2
```

```{literalinclude} ../examples/simple_attention.py
:language: python
```
"""


def test_outputs_stand_under_their_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(outputs, "_of_example", lambda name: f"<{name}>\n")
    actual = outputs.shown(PAGE, page)
    expected = PAGE.replace("x)\n```\n", "x)\n```\n\n```text\nout 2\n```\n")
    assert actual == f"{expected}<simple_attention.py>\n"
    assert [*tmp_path.iterdir()] == [page]


@needs_mpi
def test_the_page_on_many_devices_runs_in_two_ranks(tmp_path: Path) -> None:
    """With the communicator that its first block names for mpiexec."""
    page = DOCS / "guide" / "many-devices.md"
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks(page)).replace("SingleComm", "MpiComm"))
    assert "MpiCommunicator()  # one process; use MpiCommunicator() under mpiexec" in (
        program.read_text()
    )
    command = [MPIEXEC, "-n", "2", sys.executable, "-W", "error", str(program)]
    env = os.environ | THREADS | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def collect() -> Any:
    """The module that writes the API pages."""
    pytest.importorskip("sphinx", reason="needs the extra `docs`")
    return loaded("collect")


def test_public_functions_have_an_example(collect: Any) -> None:
    named = [name for names in collect.examples() for name in names]
    assert [name for name in collect.public() if name not in named] == []
    assert len({*named}) == len(named), "a name has two"
    beside = [
        name for names, block in collect.examples().items() if block[0] != ">" for name in names
    ]
    lasts = {name.removeprefix("unsloth_cupy.") for name in beside}
    assert not lasts & {op.removesuffix("_forward") for op in OPS}, "its docstring has its example"
    here = [name for name in named if not name.startswith(tuple(collect.ELSEWHERE))]
    strange = [n for n in here if not functools.reduce(getattr, n.split(".")[1:], unsloth_cupy)]
    assert strange == []
    assert {*named} - {*here} == {
        f"{m}.{n}" for m in collect.ELSEWHERE for n in collect.exported(m)
    }


def test_examples_of_the_api_run(
    collect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs by itself, and calls all names that it is for."""
    monkeypatch.chdir(tmp_path)
    for names, block in collect.examples().items():
        needs = re.search(r"^# needs (\w+)$", block, re.M)
        if needs and importlib.util.find_spec(needs[1]) is None:
            continue
        if block.startswith(">>>"):
            case, said = doctest.DocTestParser().get_doctest(block, {}, names[0], None, 0), []
            assert not doctest.DocTestRunner().run(case, out=said.append).failed, "".join(said)
        else:
            exec(compile(block, names[0], "exec"), {})
        code, lasts = collect.called(block), [name.rpartition(".")[2] for name in names]
        assert [last for last in lasts if not re.search(rf"\b{last}\b", code)] == [], names


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_prints_what_it_shows(
    notebook: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    book = json.loads(notebook.read_text(encoding="utf-8"))
    cells = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    for name in ("torch", "transformers"):
        if re.search(rf"^(import|from) {name}\b", "".join(cells[0]["source"]), re.M):
            pytest.importorskip(name, reason=f"needs the extra `peers` ({name})")
    names: dict[str, Any] = {}
    for count, cell in enumerate(cells, 1):
        exec(compile("".join(cell["source"]), f"{notebook.name}, {cell['id']}", "exec"), names)
        shown = ["".join(output["text"]) for output in cell["outputs"]]
        assert capsys.readouterr().out == "".join(shown), cell["id"]
        assert cell["execution_count"] == count


def test_the_first_screen_has_an_install_line_and_the_doors_of_the_readme() -> None:
    index, readme = ((ROOT / name).read_text() for name in ("docs/index.md", "README.md"))
    screen = index.partition("```{raw}")[0]
    assert screen.index("pip install") < screen.index("doors")
    doors = re.findall(r"^\*\*(.*)\*\*\n\n```.*\n((?:.*\n)*?)```", screen, re.M)
    assert len(doors) == 3
    for title, code in doors:
        assert f"\n## {title}\n" in readme
        assert code.count("\n") <= 5


def test_the_bar_has_performance_and_contributing() -> None:
    pages = re.findall(
        r"^[\w/-]+$", (DOCS / "index.md").read_text().rpartition(":hidden:")[2], re.M
    )
    count = re.search(r'"header_links_before_dropdown": (\d+)', (DOCS / "conf.py").read_text())
    assert count is not None
    assert {"performance", "contributing"} < {*pages[: int(count[1])]}


def test_performance_opens_with_a_picture_beside_peers_and_its_commit() -> None:
    head = (DOCS / "performance.md").read_text().partition("\n## ")[0]
    picture = re.match(r"# Performance\n\n!\[[^]]*cuDNN[^]]*\]\((pictures/.*\.svg)\)\n", head)
    assert picture is not None
    commit = re.search(r"commit (\w+) \((\S+)\)", head)
    assert commit is not None
    assert f"{commit[2]}, commit {commit[1]}" in (DOCS / picture[1]).read_text()


def test_measurements_stand_in_one_page() -> None:
    """A how-to has no machine and no day of a measurement: it links to the page that has them."""
    lab = re.compile(r"EPYC|Xeon|\d{4}-\d\d-\d\d|\d+ (?:November|December|January) \d{4}")
    pages = tracked("docs/guide/*.md")
    assert [(page.name, hits) for page in pages if (hits := lab.findall(page.read_text()))] == []
    sections = (DOCS / "measurements.md").read_text().split("\n## ")[1:]
    links = re.findall(r"measurements\.md#([\w-]+)", "".join(page.read_text() for page in pages))
    titles = (section.partition("\n")[0] for section in sections)
    slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert {*links} == slugs


@pytest.mark.parametrize("place", Sample.one_in(45, range(45)))
def test_the_table_of_longest_rows_is_that_of_plans(place: int) -> None:
    """A cell in each run, and the published numbers in all."""
    longest = loaded("longest")
    text = longest.PAGE.read_text()
    table = text.partition(longest.BEGIN)[2].partition(longest.END)[0].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    model, method, card = longest.CELLS[place]
    (row,) = (row for row in rows if row[:2] == [model, method])
    expected = longest.longest(model, method, card)
    actual = int(row[2 + longest.CARDS.index(card)].replace(",", "").replace("-", "0"))
    # a search that begins at other plans may end a few steps away
    assert abs(actual - expected) <= 4 * longest.STEP, "run python docs/longest.py"
    peers = [row[2:] for row in rows if row[1] == "QLoRA, Unsloth"]
    known = longest.PUBLISHED
    assert peers == [[known.get((m, c), "-") for c in longest.CARDS] for m in longest.MODELS]


def test_the_table_of_families_is_that_of_the_registries() -> None:
    families = loaded("families")
    assert families.page() == families.PAGE.read_text(), "run python docs/families.py"


PROPERTIES: dict[str, Callable[[Family], Any]] = {  # rows of the table, by their first words
    "sliding-window": lambda family: (
        "sliding_window" in family.defaults
        if family.windows == "typed"
        else family.windows not in ("none", "linear", "chunked")
    ),
    "norms after": lambda family: family.norms.after_attention,
    "norms of queries": lambda family: family.query_key_norm,
    "layer norm": lambda family: family.norms.kind == "layer",
    "attention and MLP in parallel": lambda family: family.parallel,
    "no gate in the MLP": lambda family: not family.gate,
    "layers without rotary": lambda family: family.rotates != "all",
    "rotary embedding of adjacent pairs": lambda family: family.interleaved,
    "rotary embedding of a part": lambda family: family.partial,
    "scale factors": lambda family: family.scaled_embedding or {*family.factors} - {"clip_qkv"},
    "queries, keys and values clipped": lambda family: "clip_qkv" in family.factors,
    "weights rounded": lambda family: family.sub_norms,
    "[mixtures of experts]": lambda family: family.experts,
    "a [gated delta rule]": lambda family: family.delta,
    "the [recurrence of Mamba2]": lambda family: family.space,
    "the [recurrence of Mamba]": lambda family: family.mamba,
    "a [short convolution]": lambda family: family.conv,
    "[lightning attention]": lambda family: family.lightning,
    "latent attention": lambda family: family.latent,
}


@pytest.mark.parametrize("row", PROPERTIES)
def test_the_table_of_properties_lists_every_family_that_has_them(row: str) -> None:
    text = (DOCS / "guide" / "models.md").read_text(encoding="utf-8")
    (cell,) = re.findall(rf"^\| {re.escape(row)}[^|]*\| (.*) \|$", text, re.M)
    actual = {*re.findall(r"\w+", cell)} & {*FAMILIES}
    assert actual == {name for name, family in FAMILIES.items() if PROPERTIES[row](family)}


def test_every_setting_and_option_is_in_the_reference(collect: Any) -> None:
    table, fields = "\n".join(collect.settings()), dataclasses.fields(Settings)
    for field in fields:
        grouped = f"| `{field.name}` | `{field.default!r}` |" in table
        assert grouped or f"    {field.name} : " in (Settings.__doc__ or ""), field.name
    page = collect.command_page()
    for name, command in group.commands.items():
        _, _, part = page.partition(f"\n## {name}\n")
        headings = re.findall(r"^#### `(.*)`$", part.partition("\n## ")[0], re.M)
        flags = {flag for heading in headings for flag in re.findall(r"--[\w-]+", heading)}
        options = (each for each in command.params if isinstance(each, click.Option))
        assert {flag for option in options for flag in option.opts if flag[1] == "-"} <= flags


def test_hooks_of_other_callbacks_are_listed() -> None:
    page = (DOCS / "guide" / "callbacks.md").read_text().partition("## Hooks")[2]
    rows = re.findall(r"^\| (`on_.*?) \| (.*?) \|", page, re.M)
    listed = {hook: what for hooks, what in rows for hook in re.findall(r"`(\w+)`", hooks)}
    assert {hook for hook, what in listed.items() if "never" not in what} == {*EVENTS}
    others = pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")
    hooks = {hook for hook in vars(others.TrainerCallback) if hook.startswith("on_")}
    assert hooks <= listed.keys()


OPTIONS = {"kind", "scale", "mask", "offsets", "q_offsets", "k_offsets"}  # of functions beside


def test_names_beside_those_of_others_exist() -> None:
    """In the right columns: functions with their keywords, methods and options."""
    text = (DOCS / "guide" / "from-others.md").read_text(encoding="utf-8")
    flags = {flag for each in group.commands["finetune"].params for flag in each.opts}
    door = (ROOT / "unsloth_cupy/interop/huggingface/__init__.py").read_text(encoding="utf-8")
    names, unknown = set(), []
    for cell in re.findall(r"^\|.*\| (.*) \|$", text, re.M):
        for words in re.findall(r"`([^`]+)`", cell):
            hit = re.fullmatch(r"(?:(\w+(?:\.\w+)*)\.)?([A-Za-z]\w{3,})(\(.*\))?", words)
            if words.startswith("--"):
                unknown += [words] * (words not in flags)
            elif hit and hit[2] not in OPTIONS:
                names.add(hit[2])
                unknown += [words] * (not known(*hit.groups(default=""), door))
    assert unknown == []
    assert len(names) > 30


def known(room: str, name: str, arguments: str, door: str) -> bool:
    """Return whether a module, or ``model``, has a function that takes these keywords."""
    if room == "interop.huggingface":  # its import needs torch
        return f" as {name}" in door
    if name == "add_adapter":  # hands its options on
        room, name = "models", "create_adapter"
    places = {"": unsloth_cupy, "model": unsloth_cupy.models.Transformer}
    place = places.get(room) or importlib.import_module(f"unsloth_cupy.{room}")
    value: Any = getattr(place, name, None)
    keywords = {*re.findall(r"(\w+)=", arguments)}
    return callable(value) and keywords <= {*inspect.signature(value).parameters}


def test_errors_in_the_guide_are_what_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    page = DOCS / "guide" / "getting-started.md"
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(block, names)
    shown = re.search(r"^```text\n(.*?)^```", page.read_text(), re.M | re.S)
    assert shown is not None
    assert capsys.readouterr().out == shown[1]


@pytest.mark.parametrize("page", ["docs/install.md", "README.md"])
def test_compilers_that_are_supported_are_named(page: str) -> None:
    text = (ROOT / page).read_text()
    assert re.search(rf"NVRTC,? {re.escape(OLDEST)}\b[^.]* {re.escape(NEWEST)}\b", text)


def test_every_extra_is_told_and_no_other() -> None:
    read = configparser.ConfigParser()
    read.read(ROOT / "setup.cfg")
    page = (DOCS / "install.md").read_text()
    table = page[page.index("## Extras") : page.index("## Without a network")]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in row.split("`")[1::2]
    }
    assert named == {*read["options.extras_require"]}
    asked = {name for actual in re.findall(r"\[([\w,]+)\]'", page) for name in actual.split(",")}
    assert asked <= named


def test_performance_lists_every_kernel() -> None:
    """It has the GPU results of the file next to the page, or says that there are none."""
    page = DOCS / "performance.md"
    block = page.read_text().partition(report.BEGIN)[2].partition(report.END)[0]
    listed = re.findall(r"^\| `(\w+)` \| (.*?) \|", block, re.M)
    kernels = {name for name, op in OPS.items() if op.launch is not None}
    cure = "python -m tests.code.programs.budget --write renews the table"
    assert {name for name, _ in listed} == kernels, cure
    kept = page.with_suffix(".json")
    confirmed = json.loads(kept.read_text()) if kept.exists() else {}
    said = {name for name, where in listed if where != "not yet timed on a GPU"}
    assert said == confirmed.keys(), cure


def test_a_time_of_code_that_changed_since_is_marked() -> None:
    """The table is written from the numbers beside the page, and from the code of kernels."""
    page = DOCS / "performance.md"
    table = page.read_text().partition(f"{report.BEGIN}\n")[2].partition(f"\n{report.END}")[0]
    cure = "python -m tests.code.programs.budget --write renews the table"
    assert table == report.block(report.confirmed(page)), cure


STEP = {  # kernels of a step of a Llama in bfloat16, and of a token of generate: name, sources
    "AdamW": ["adamw_step.cu"],
    "cross-entropy": ["cross_entropy.cu"],
    "attention": ["attention_forward_sm90.cu", "attention_backward_sm90.cu", "attention_delta.cu",
                  "attention_dq_sm90.cu", "attention_decode.cu"],
    "norms": ["norm.cu"],
    "rotary embeddings": ["rope.cu", "rope_append.cu"],
    "SwiGLU": ["swiglu.cu"],
    "embedding": ["embedding.cu"],
}  # fmt: skip


def test_the_time_of_a_whole_step_names_what_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "performance.md").read_text()
    commit = re.search(r"A whole step(?:.*\n)*?.*commit (\w+)", page)
    claim = re.search(r"kernels of this step, those of\s([^.]*?)\shave\schanged\ssince", page)
    assert commit is not None
    assert claim is not None
    now = {file: source.code_digest(file) for files in STEP.values() for file in files}
    assert None not in now.values()
    repository = os.environ.get("UNSLOTH_CUPY_GIT", str(ROOT))
    words = ["git", "-C", repository, "archive", "-o", str(tmp_path / "a.tar"), commit[1]]
    if subprocess.run([*words, "kernels_cu"], capture_output=True, check=False).returncode:
        pytest.skip("needs the repository's history")
    shutil.unpack_archive(tmp_path / "a.tar", tmp_path)
    monkeypatch.setattr(source, "source_root", lambda: tmp_path / "kernels_cu")
    source.with_headers.cache_clear()
    then = {file: source.code_digest.__wrapped__(file) for file in now}
    source.with_headers.cache_clear()
    changed = [name for name, files in STEP.items() if any(now[f] != then[f] for f in files)]
    assert re.split(r", | and ", claim[1]) == changed


def test_a_time_of_an_h200_has_its_source() -> None:
    """A section of a page names day and commit; an entry of the changelog has a time of a page."""
    measured = {word.strip(";,") for word in (DOCS / "performance.md").read_text().split()}
    lacking = []
    for page in (*PAGES, ROOT / "README.md"):
        text = re.sub(r"(?s)<!-- (\w+): begin -->.*?<!-- \1: end -->", "", page.read_text())
        entries = page.stem == "changelog"
        for part in re.split(r"\n(?=- )" if entries else r"\n(?=## )", text):
            times = re.findall(r"([\d.]+)\s(?:[mu]s|TFLOP/s|GB/s)\b", part)
            if not times or "H200" not in part or "predicted" in part.splitlines()[0].lower():
                continue
            dated = re.search(r"\d{4}-\d\d-\d\d", part) and re.search(r"commit\s\w{8}", part)
            if not (measured.issuperset(times) if entries else dated):
                lacking.append(f"{page.name}: {part.splitlines()[0]}")
    assert lacking == []


def test_no_entry_of_the_changelog_stands_twice() -> None:
    """An entry that another one extends is deleted: most of its words are in both."""
    page = (DOCS / "changelog.md").read_text(encoding="utf-8")
    section = page.split("\n## ")[1]  # the newest version, or what is not released yet
    entries = [{*re.findall(r"\w+", entry)} for entry in re.split(r"\n- ", section)[1:]]
    pairs = itertools.combinations(entries, 2)
    twice = [
        sorted(one & other) for one, other in pairs if len(one & other) > 0.6 * len(one | other)
    ]
    assert twice == []


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ("117 cases that TRL", {"losses": ("preference", "policy")}),
        ("26 cases that transformers", {
            "ops_next": ("router", "experts", "router_loss", "lora_experts")}),
        ("23 cases of transformers", {"ops_next": ("conv", "delta", "gated_norm")}),
        ("20 cases of transformers", {"losses": ("heads",)}),
    ],
)  # fmt: skip
def test_the_changelog_counts_stored_cases(said: str, parts: dict[str, tuple[str, ...]]) -> None:
    assert said in (DOCS / "changelog.md").read_text(encoding="utf-8")
    names = [
        case.name
        for folder, groups in parts.items()
        for group in groups
        for case in op_cases(FOLDER / folder, group)
    ]
    assert len(names) - names.count("sparsemixer") == int(said.split(maxsplit=1)[0])


def test_docstrings_say_which_arrays_are_float64_for_float64() -> None:
    """Statistics, of the kind `stat`, are float32, but for float64 arrays."""
    wrong = []
    for name, op in OPS.items():
        public = name.removesuffix("_forward")
        spaces = unsloth_cupy, unsloth_cupy.losses
        text = next(
            (getattr(space, public).__doc__ for space in spaces if hasattr(space, public)), ""
        )
        stats = {o.name for o in (*op.contract.inputs, *op.contract.outputs) if o.kind == "stat"}
        for names, said in re.findall(r"^ {4}(\w[\w, ]*) : (.*float32.*)$", text or "", re.M):
            if stats & {*names.split(", ")} and "float64" not in said:
                wrong.append(f"{public}: {names} : {said}")
    assert wrong == []


def lost(folder: Path) -> list[str]:
    """Return the broken links of built pages: without a file, or without an anchor in it."""
    made = (path.relative_to(folder) for path in folder.rglob("*.html"))
    own = [folder / path for path in made if path.parts[0] not in ("_static", "benchmarks")]
    texts = {path.resolve(): path.read_text(encoding="utf-8") for path in own}
    places = {path: {*re.findall(r'\bid="([^"]+)"', text)} for path, text in texts.items()}
    dead = []
    for path, text in texts.items():
        for link in {*re.findall(r'\b(?:href|src)="([^"]+)"', text)}:
            file, _, place = unquote(html.unescape(link)).partition("#")
            if re.match(r"[a-z]+:|//", file):
                continue
            there = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not there.exists() or (place and there in places and place not in places[there]):
                dead.append(f"{path.relative_to(folder.resolve())}: {link}")
    return dead


@pytest.mark.slow
def test_pages_build(collect: Any, tmp_path: Path) -> None:
    """With ``-W``, a docstring that numpydoc cannot parse, or a broken link, is an error."""
    for package in PACKAGES:
        pytest.importorskip(package, reason="needs the extra `docs`")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    command += ["-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "html")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lost(tmp_path / "html") == []
    for path in (tmp_path / "html").rglob("*.html"):  # tables scroll where a screen is narrow
        text = path.read_text(encoding="utf-8")
        scrolling = text.count('class="pst-scrollable-table-container"')
        assert scrolling == len(re.findall(r'<table class="(?!indextable)', text)), path
    pages = "".join(path.read_text() for path in (tmp_path / "html" / "api").glob("*.html"))
    assert "x(*rows, hidden)" in pages, "an op shows its signature"
    public = [
        (space.__name__, name)
        for space in (unsloth_cupy, unsloth_cupy.models, unsloth_cupy.finetune)
        for name in dir(space)
        if not name.startswith("_") and callable(getattr(space, name))
        if getattr(space, name).__module__.startswith("unsloth_cupy")
    ]
    others = *collect.MODULES, *collect.ELSEWHERE  # of what the package takes from them
    shown = [{f'id="{home}.{name}"' for home in (space, *others)} for space, name in public]
    assert [
        each
        for each, ids in zip(public, shown, strict=True)
        if not any(one in pages for one in ids)
    ] == []
    text = html.unescape(re.sub("<.*?>", "", pages))
    lines = {line for block in collect.examples().values() for line in block.splitlines()}
    assert sorted(line for line in lines if line not in text) == [], "an example is not shown"
    shown = html.unescape(
        re.sub("<.*?>", "", (tmp_path / "html" / "guide" / "examples.html").read_text())
    )
    for printed in ("after 3, 4, 5 comes [ 3  4  5", "the weights of both runs are equal: True"):
        assert printed in shown, "an output of an example"
    kernels = {path.stem for path in (tmp_path / "html" / "kernels").glob("*.html")}
    assert kernels > {path.stem for path in tracked("kernels_cu/*.cu")}
    page = (tmp_path / "html" / "history" / "index.html").read_text()
    if (reason := loaded("history").missing()) is not None:
        assert reason.replace("`", "") in re.sub("<.*?>", "", page)
        return
    site = json.loads((tmp_path / "html" / "benchmarks" / "index.json").read_text())
    assert "costs.Costs.track_instructions" in site["benchmarks"]
    assert len(site["revision_to_hash"]) > 10
    assert 'href="../benchmarks/index.html"' in page


def test_a_site_of_all_commits_or_a_word_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shallow clone has the branch, but not the commits of the results."""
    for package in ("sphinx", "asv"):
        pytest.importorskip(package, reason="needs the extra `docs`")
    history = loaded("history")
    monkeypatch.setattr(history, "GIT", tmp_path)
    assert "no branch" in history.missing()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (("init", "-q", "-b", "main"), ("commit", "-q", "--allow-empty", "-m", "a")):
        subprocess.run([*git, *words], check=True)
    assert history.missing() == "git lacks commits that results name"
    assert f"benchmarks: {history.missing()}." in history.page()


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("https://example.org/owner/name.git", "https://example.org/owner/name"),
        ("https://user:secret@example.org:8443/owner/name/", "https://example.org:8443/owner/name"),
        ("git@example.org:owner/name.git", "https://example.org/owner/name"),
        ("ssh://git@example.org/owner/name", "https://example.org/owner/name"),
        ("/a/folder/name.git", None),
        (None, None),
    ],
)
def test_pages_link_to_the_repository_that_was_cloned(origin, expected, tmp_path):
    pytest.importorskip("sphinx", reason="needs the extra `docs`")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    if origin is not None:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", origin], check=True)
    assert loaded("history").repository(tmp_path) == expected


@pytest.fixture(scope="module")
def pictures() -> Any:
    """The module that draws the pictures of the pages."""
    return loaded("pictures")


@pytest.mark.slow
def test_pictures_are_drawn(pictures: Any, tmp_path: Path) -> None:
    """A function of the same name draws each file; measurements have their facts."""
    drawn = {path.stem for path in tracked("docs/pictures/*.svg")}
    assert drawn == pictures.PICTURES.keys()
    for name in ("attention", "beside-transformers", "trace"):
        pictures.PICTURES[name](tmp_path / f"{name}.svg")
        pictures.shorten(tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").stat().st_size > 4096
    for path in tracked("docs/pictures/*.json"):
        facts = json.loads(path.read_text())
        assert all(facts[fact] for fact in ("machine", "date", "versions", "method")), path
    assert sum(path.stat().st_size for path in tracked("docs/pictures/*")) < 700 << 10


def test_what_was_measured_is_what_the_page_says(pictures: Any) -> None:
    assert pictures.page() == pictures.PAGE.read_text(), "run python docs/pictures.py"


DIAGRAMS = {"floors": ("floors.svg",), "one_op": ("one-op.svg", "one-op-narrow.svg")}


@pytest.mark.slow
@pytest.mark.parametrize("module", DIAGRAMS)
def test_diagrams_are_drawn_as_the_code_is(module: str) -> None:
    every = "(made.drawn(n) for n in made.FILES)" if module == "one_op" else "[made.drawn()]"
    command = [sys.executable, "-c", f"import {module} as made; print(*{every}, sep='', end='')"]
    done = subprocess.run(command, cwd=DOCS, capture_output=True, text=True, check=True)
    drawn = "".join((DOCS / file).read_text() for file in DIAGRAMS[module])
    assert done.stdout == drawn, f"run python docs/{module}.py"


def test_the_walk_of_a_model_names_what_is_there() -> None:
    """Each file and name of the table "One model, from top to bottom"."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    part = page.split("## One model, from top to bottom")[1].split("\n## ")[0]
    rows = re.findall(r"^\|[^|`]*\| `([\w/.]+\.py)` \| `(\w+)` \|", part, re.M)
    assert len(rows) >= 17
    for file, name in rows:
        source = (ROOT / "unsloth_cupy/models" / file).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(def|class) {name}\b|^{name}\b", source, re.M), (file, name)
