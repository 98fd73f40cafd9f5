"""README.md and docs/ops.md are true: commands, numbers, table of ops, example and links."""

import doctest
import json
import re
import shlex
from pathlib import Path

import click.testing
import pytest

import unsloth_cupy
from unsloth_cupy.cli.commands import group
from unsloth_cupy.core.op import OPS, Op
from unsloth_cupy.finetune import Lora, Trainer
from unsloth_cupy.models.configs.families import FAMILIES

from ..harness.tracked import ROOT, tracked

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)]+#[^)]+)\)")
TABLE = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")


def table() -> list[tuple[str, str, str]]:
    """Return (op, gradient, kernel) of every op of the table."""
    rows = re.findall(
        r"^\| (?:\*\*\w+\*\* )?(`.*`) \| .* \| (yes|no) \| (yes|forward|no) \|$", TABLE, re.M
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
    """Of the table, of the public names, and of the folders; each op stands in its own."""
    families = re.findall(r"^\| \*\*(\w+)\*\* ", TABLE, re.M)
    folders = {path.parent.name for path in tracked("unsloth_cupy/ops/*/__init__.py")}
    assert {family.lower() for family in families} == folders - {"common", "optimizers"}
    face = (ROOT / "unsloth_cupy/__init__.py").read_text()
    assert re.findall(r"^# (\w+)$", face, re.M)[: len(families)] == families
    for family, rows in zip(families, re.split(r"^\| \*\*", TABLE, flags=re.M)[1:], strict=True):
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


def test_commands_and_code_run_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small model in place of the one that the first command downloads."""
    monkeypatch.chdir(tmp_path)

    def run(line: str) -> None:
        words = shlex.split(line.removeprefix("unsloth-cupy "))
        result = click.testing.CliRunner().invoke(group, words, input="What is 2 plus 3?")
        assert result.exit_code == 0, f"{line}\n{result.output}"

    chats = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]
        for n in range(12)
    ]
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    run("finetune --data chat.jsonl --layers 1 --hidden 32 --vocabulary 300 --steps 1 --out new")
    Path("new/model").rename("qwen")
    download, *commands = re.findall(r"```bash\n(.*?)```", README, re.S)[0].splitlines()
    assert download.endswith("--local-dir qwen")
    for command in commands:
        run(command)
    assert Path("my-model.gguf").exists()
    code = re.search(r"`(Trainer\(.*\)\.train\(\))`", README)[1]
    rows = [{"messages": chat} for chat in chats]
    exec(code, {"Trainer": Trainer, "Lora": Lora, "rows": rows})
    pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")
    code = next(text for text in re.findall(r"```python\n(.*?)```", README, re.S) if text[0] != ">")
    capsys.readouterr()
    exec(code, {})
    assert "attention" in capsys.readouterr().out


def test_families_are_counted() -> None:
    assert f"[{len(FAMILIES)} model families]" in README


def test_links_lead_somewhere() -> None:
    """To a file and, after ``#``, to a heading in it."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    assert [link for link in links if anchor_of(link) not in anchors(link)] == []


def anchor_of(link: str) -> str:
    return link.partition("#")[2]


def anchors(link: str) -> set[str]:
    """Return the anchors of the headings of a link's page, and ""; nothing if there is no page."""
    path = ROOT / link.partition("#")[0]
    if path.suffix != ".md":
        return {""} if path.is_file() else set()
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {"", *(re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles)}


def test_numbers_stand_in_one_row_of_the_section_that_they_link_to() -> None:
    """Of each measurement, and of the table of installs, whose link is below it."""
    points = re.findall(r"^(- \*\*\d.*\n(?:  .*\n)+)", README, re.M)
    points += re.findall(r"^(\| .*\| \d.*\|)$", README, re.M)
    assert len(points) == 5
    for point in points:
        link = LINK.search(point) or re.search(r"\]\(([^)]+#time-and-size)\)", README)
        assert link is not None
        text = (ROOT / link[1].partition("#")[0]).read_text(encoding="utf-8")
        sections = re.split(r"^(?=#)", text, flags=re.M)
        title = anchor_of(link[1]).replace("-", " ")
        section = next(s for s in sections if s.partition("\n")[0].strip("# ").lower() == title)
        numbers = {*re.findall(r"(?<![\w.])\d+(?= MiB| TFLOP/s| MB| s\b|,|;)", measured(point))}
        rows = [{*re.findall(r"\d+", line)} for line in section.splitlines()]
        assert len(numbers) > 1
        assert any(numbers <= row for row in rows), (point, numbers)


def measured(point: str) -> str:
    """Return a measurement without its link and conditions, or the numbers of a row of a table."""
    if point.startswith("|"):
        return " ".join(point.split("|")[-3:])
    return point.partition("([")[0].replace("\n", ",")


def test_attention_is_as_often_faster_as_it_says() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    part = page.partition("\n## Attention on Hopper\n")[2].partition("\n## ")[0]
    lines = (line.split("|") for line in part.splitlines() if re.match(r"\| \d", line))
    rows = [[int(line[place]) for place in (4, 6, 8, 11)] for line in lines]
    forward, backward = (sum(row[i] > row[i + 1] for row in rows) for i in (0, 2))
    expected = (
        f"the forward pass is faster than cuDNN at {forward}, the backward pass at {backward}."
    )
    assert f"Of {len(rows)} sizes, {expected}" in README


def test_fits_two_screens() -> None:
    lines = README.splitlines()
    assert len(lines) <= 110
    assert max(len(line) for line in lines) <= 110
