"""README.md tells the truth: its commands, its table of ops, its example and its links."""

import doctest
import re

import pytest

import unsloth_cupy
from unsloth_cupy.core.op import OPS, Op

from ..harness.tracked import ROOT, tracked

README = (ROOT / "README.md").read_text(encoding="utf-8")


def table() -> list[tuple[str, str, str]]:
    """Return (op, gradient, kernel) of every op of the table."""
    rows = re.findall(
        r"^\| (?:\*\*\w+\*\* )?(`.*`) \| .* \| (yes|no) \| (yes|forward|no) \|$", README, re.M
    )
    return [(name, *marks) for names, *marks in rows for name in re.findall(r"`(\w+)`", names)]


def public_ops() -> set[str]:
    """Return the public names that are ops, without the parts an op is made of."""
    names = set()
    for name, value in vars(unsloth_cupy).items():
        module = getattr(value, "__module__", "")
        rooms = ("unsloth_cupy.ops.", "unsloth_cupy.models.layers.attention_layer")
        made_here = isinstance(module, str) and module.startswith(rooms) and "common" not in module
        function = isinstance(value, Op) or (callable(value) and not isinstance(value, type))
        if made_here and function and not name.endswith(("_forward", "_backward")):
            names.add(name)
    return names


def test_commands_are_what_the_ci_runs() -> None:
    commands = re.findall(r"```sh\n(.*?)\n```", README, re.S)
    assert len(commands) == 2
    assert all("\n" not in command for command in commands), "one line each, to copy"
    assert commands[0].endswith("unsloth-cupy finetune")
    install, tests = re.fullmatch(r"(.* && .*) && (.*)", commands[1]).groups()
    _, actual, rest = (ROOT / ".ci" / "run").read_text().partition(f"\n{install}\n")
    assert actual
    assert f"\n{tests}\n" in rest  # after it has installed more, for which tests skip otherwise


def test_headings_of_the_table_are_the_families_of_ops() -> None:
    """Of the README, of the public names, and of the folders; each op stands in its own."""
    families = re.findall(r"^\| \*\*(\w+)\*\* ", README, re.M)
    folders = {path.parent.name for path in tracked("unsloth_cupy/ops/*/__init__.py")}
    assert {family.lower() for family in families} == folders - {"common", "optimizers"}
    face = (ROOT / "unsloth_cupy/__init__.py").read_text()
    assert re.findall(r"^# (\w+)$", face, re.M)[: len(families)] == families
    for family, rows in zip(families, re.split(r"^\| \*\*", README, flags=re.M)[1:], strict=True):
        cells = re.findall(r"^(?:\w+\*\*|\|) (`.*?) \|", rows, re.M)
        for name in re.findall(r"`(\w+)`", "".join(cells)):
            module = getattr(unsloth_cupy, name).__module__
            assert f".{family.lower()}." in module or name == "attention_layer", name


def test_table_lists_every_public_op() -> None:
    assert sorted(name for name, *_ in table()) == sorted(public_ops())


@pytest.mark.parametrize(("name", "gradient", "kernel"), table())
def test_table_is_true(name: str, gradient: str, kernel: str) -> None:
    op = OPS.get(name) or OPS.get(f"{name}_forward")
    if op is not None:  # what is not an op is made of ops and has what they have
        assert (op.backward is not None) == (gradient == "yes")
        free = op.backward is None or name == "add"  # whose backward op hands on what it gets
        ways = [op] if free else [op, op.backward]
        actual = [way.launch is not None for way in ways]
        assert kernel == ("yes" if all(actual) else "forward" if actual[0] else "no")


def test_example_runs() -> None:
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert result.attempted
    assert not result.failed


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_fits_one_screen() -> None:
    lines = README.splitlines()
    assert len(lines) < 92
    assert max(len(line) for line in lines) <= 110
