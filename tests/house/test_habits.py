"""Contributors and citations are told what the project says of itself; variables are nouns."""

import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest

from unsloth_cupy import __version__

from ..harness.tracked import ROOT, tracked

INSTALL = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]'"


def test_contributors_need_three_commands() -> None:
    page = (ROOT / ".github/CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)\n```", page, re.S)
    commands = [line.partition("  #")[0].rstrip() for line in block.splitlines()]
    ci = (ROOT / ".ci/run").read_text().splitlines()
    tests = commands[1].removesuffix(" tests/ops")
    assert commands == [INSTALL, f"{tests} tests/ops", ".ci/run"]
    assert {INSTALL, tests} <= {*ci}
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert container["postCreateCommand"] == INSTALL
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (ROOT / ".github" / link).exists(), link


def test_the_citation_is_of_this_version() -> None:
    cited = (ROOT / ".github/CITATION.cff").read_text()
    (version, date) = re.findall(r"^(?:version|date-released): (.*)$", cited, re.M)
    assert version == __version__
    assert f"\n## {version} ({date})\n" in (ROOT / "docs/changelog.md").read_text()


def test_a_fault_comes_with_the_machine() -> None:
    form = (ROOT / ".github/ISSUE_TEMPLATE/fault.yml").read_text()
    assert "Output of `unsloth-cupy info`" in form


def test_the_image_installs_what_it_copies() -> None:
    """The files that a build needs, and an extra that exists."""
    image = (ROOT / ".devcontainer/Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", image, re.M) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    needed = {"unsloth_cupy", "kernels_cu", "README.md", "LICENSE", "setup.cfg", "pyproject.toml"}
    assert copied == needed
    setup = (ROOT / "setup.cfg").read_text()
    (extras,) = re.findall(r"'\.\[(.*?)\]'", image)
    assert all(f"\n{extra} =\n" in setup for extra in extras.split(","))


NO_NOUNS = [
    "found", "given", "told", "made", "said", "those", "heard", "begun", "around", "reached",
    "settled",
]  # fmt: skip
# attributes that other modules read, and what is named after a key of a tape entry
OTHERS = {"told": 2, "reached": 4}


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module binds: variables, attributes and parameters."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.ExceptHandler(name=str(name)):
                yield name


def test_variables_are_nouns() -> None:
    """A count may only shrink: a smaller one is written into ``OTHERS``."""
    modules = tracked("unsloth_cupy/**/*.py")
    names = Counter(name for path in modules for name in bound_names(ast.parse(path.read_bytes())))
    actual = {name: names[name] for name in NO_NOUNS if names[name]}
    larger = {name: count for name, count in actual.items() if count > OTHERS.get(name, 0)}
    assert not larger, "name these variables after what they hold"
    assert actual == OTHERS, f"there are fewer: set OTHERS to {actual}"


@pytest.mark.parametrize(
    "text",
    [
        "said = 1", "said += 1", "said: int = 1", "self.said = 1", "a, *said = b",
        "for said in a: pass", "with a as said: pass", "[said for said in a]", "f(said := 1)",
        "def f(said): pass", "def f(*said): pass", "def f(*, a, **said): pass", "lambda said: 1",
        "try: pass\nexcept E as said: pass", "match a:\n    case [said, *b]: pass",
    ],
)  # fmt: skip
def test_every_binding_is_a_name(text: str) -> None:
    assert "said" in bound_names(ast.parse(text))
    assert "said" not in bound_names(ast.parse("f(said, said=said.said)"))


PRONOUNS = re.compile(
    r"\b(?:that|those|these) of\b|\bof (?:which|it)\b|\bof th[eo]se(?=\W*$|[,.;:])"
)
UNCLEAR = 24  # first paragraphs of docstrings with such words; this number may only shrink


def test_docstrings_begin_with_nouns() -> None:
    """A first paragraph has no pronoun whose noun stands elsewhere, such as "those of the last"."""
    unclear = []
    for path in tracked("unsloth_cupy/**/*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                first = (ast.get_docstring(node) or "").split("\n\n")[0]
                unclear += [(path.name, first)] if PRONOUNS.search(" ".join(first.split())) else []
    assert len(unclear) <= UNCLEAR, unclear[-5:]
    assert len(unclear) == UNCLEAR, f"there are fewer: set UNCLEAR to {len(unclear)}"


BARE = re.compile(r"(?:Of|That|Those|These|As|With|For|In|It|Whether|If|By|To) ")


def options() -> Iterator[tuple[str, str]]:
    """Yield each option of each command, and its help."""
    commands = pytest.importorskip("unsloth_cupy.cli.commands", reason="needs the extra `cli`")
    for command in commands.COMMANDS:
        for option in command.params:
            if getattr(option, "help", None):
                yield f"{command.name} {option.opts[0]}", option.help


def test_help_is_a_phrase_with_a_noun_or_a_verb() -> None:
    bare = [f"{name}: {text}" for name, text in options() if BARE.match(text)]
    assert not bare, "begin with a verb, or with the noun that the value is"
    unended = [name for name, text in options() if not re.search(r"[.\]]$", text.strip())]
    assert not unended


LONG = 192  # subjects of commits of more than 72 characters, all of before the limit


def test_subjects_of_commits_fit_a_line() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a copy without its history")
    command = ["git", "log", "--format=%s"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    longer = [subject for subject in log.stdout.splitlines() if len(subject) > 72]
    assert len(longer) <= LONG, f"shorten {longer[0]!r}"
