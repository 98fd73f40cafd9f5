"""``programs.beside_peers`` on a CPU: every case but CUDA, the order of a run, and its report."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ..harness.sampling import Sample
from ..harness.tracked import ROOT
from .programs.beside_peers import __main__ as program
from .programs.beside_peers import report
from .programs.beside_peers.cases import OPS, OURS, Job, cases, jobs, small

TURNS = 5  # days in which every case has its turn
NEEDED = "needs the extra `peers`"
TRAINING = {case.name: case for case in cases() if case.kind == "training"}
GENERATION = {case.name: case for case in cases() if case.kind == "generation"}
STEPS = ("lora bf16 0.6B", "lora nf4 0.6B", "full 0.5B", "full 495M, new lengths", "packed 495M")


def test_whole_steps_come_first() -> None:
    """And of each case this library beside the first peer, before further peers."""
    names = [(job.case.name, job.contestant) for job in jobs()]
    assert names[:2] == [("lora bf16 0.6B", OURS), ("lora bf16 0.6B", "peft")]
    kinds = [job.case.kind for job in jobs()]
    assert kinds == sorted(kinds, key=["training", "op", "generation"].index)
    places = [job.case.contestants.index(job.contestant) for job in jobs() if job.contestant]
    training = places[: kinds.count("training")]
    assert [place > 1 for place in training] == sorted(place > 1 for place in training)
    assert len({*names}) == len(names) > 60
    only = jobs(["lora", "packed"])
    assert {job.case.name.split()[0] for job in only} == {"lora", "packed"}
    assert {len(case.contestants) for case in cases() if case.kind == "op"} == {0}


def comparison(job: Job, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make a comparison in this process; return its lines."""
    pytest.importorskip("torch", reason=NEEDED)
    pytest.importorskip("transformers", reason=NEEDED)
    from .programs.beside_peers import ops, training
    from .programs.beside_peers.machine import Machine

    machine, new, case = Machine(on_gpu=False), list[dict[str, Any]](), small(job.case)

    def say(**line: Any) -> None:
        new.append({"case": case.name, "contestant": job.contestant} | line)

    if case.kind == "op":
        getattr(ops, case.name)(machine).run(say)
    else:
        run = training.train if case.kind == "training" else training.generate
        run(case, job.contestant, machine, lines, say)
    return new


@pytest.mark.parametrize("name", Sample.one_in(TURNS, OPS))
def test_an_op_agrees_with_torch_before_it_is_timed(name: str) -> None:
    case = next(case for case in cases() if case.name == name)
    lines = {line["contestant"]: line for line in comparison(Job(case, ""), [])}
    timed = {who for who, line in lines.items() if "seconds" in line}
    assert OURS in timed, lines
    assert len(timed) > 1, lines
    for who, line in lines.items():
        if who in timed:
            low, high = line["quartiles"]
            assert 0 < low <= line["seconds"] <= high
            assert line["away"] < 1e-3, "float32 on a CPU, or the same 4-bit weight"
            assert {"moved", "flops"} & line.keys()
        else:
            assert line["note"].startswith(("left out: ", "fails: ", "differs: "))


def test_a_result_that_differs_is_named_and_has_no_time() -> None:
    torch = pytest.importorskip("torch", reason=NEEDED)
    from .programs.beside_peers.machine import Machine
    from .programs.beside_peers.ops import Comparison

    x = torch.ones(4)
    op = Comparison(Machine(on_gpu=False), lambda x: 2 * x, {"x": x}, "x", seed=x, moved=32)
    op.torch("same", lambda x: x + x)
    op.torch("other gradient", lambda x: x.detach() + x)
    op.torch("other shape", lambda x: 2 * x[:2])
    op.torch("not a number", lambda x: 2 * x * float("nan"))
    op.peer("absent", lambda: __import__("a_library_that_nobody_has"))
    lines: list[dict[str, Any]] = []
    op.run(lambda **line: lines.append(line))
    notes = {line["contestant"]: line.get("note", "timed") for line in lines}
    assert notes["same"] == "timed"
    assert notes["other gradient"] == "differs: 5.0e-01 of a norm"
    assert notes["not a number"] == "differs: inf of a norm"
    assert notes["other shape"].startswith("fails: RuntimeError: ")
    assert notes["absent"].startswith("left out: ModuleNotFoundError: ")


# peft reads an attribute that transformers renamed
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", Sample.one_in(TURNS, [*STEPS, *GENERATION]))
def test_a_contestant_computes_what_the_first_peer_does(name: str) -> None:
    """Losses and the norm of the first gradient, or the first new tokens."""
    case = (TRAINING | GENERATION)[name]
    pytest.importorskip("peft", reason=NEEDED)
    if case.sizes.get("quantized"):
        pytest.importorskip("bitsandbytes", reason=NEEDED)
    lines: list[dict[str, Any]] = []
    for contestant in case.contestants[:2]:
        lines += comparison(Job(case, contestant), lines)
    assert [line["contestant"] for line in lines] == [*case.contestants[:2]]
    assert all(line.get("tokens_per_second", 0) > 0 for line in lines), lines


@pytest.mark.parametrize(
    ("losses", "norm", "lora", "expected"),
    [
        ([5.0, 4.99, 4.98], 1.0, False, ""),
        ([5.0, 4.99, 4.8], 1.0, False, "a loss is 3.6% from that of first"),
        ([5.0, 4.99, 4.98], 1.1, False, "the norm of the gradient is 10.0% from that of first"),
        ([5.0, 4.99, 4.98], 1.08, True, ""),
        ([5.0, float("nan")], 1.0, True, "losses [5.0, nan], norm 1.0"),
    ],
)
def test_steps_that_differ_are_named(
    losses: list[float], norm: float, lora: bool, expected: str
) -> None:
    pytest.importorskip("torch", reason=NEEDED)
    from .programs.beside_peers.training import difference

    others: list[dict[str, Any]] = [{"contestant": "no time", "note": "fails", "losses": [0.0]}]
    others += [{"contestant": "first", "seconds": 1.0, "losses": [5.0, 4.99, 4.98], "norm": 1.0}]
    assert difference(losses, norm, others, lora=lora) == expected
    if "nan" not in expected:
        assert difference(losses, norm, [], lora=lora) == ""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of processes that are played: one writes its line, swiglu writes nothing."""
    commands: list[list[str]] = []

    def start(command: list[Any], **_: Any) -> Any:
        words = [*map(str, command)]
        if "--rates" in words:
            Path(words[words.index("--rates") + 1]).write_text('{"device": "none", "torch": "0"}')
        else:
            commands.append(words)
            case, contestant, file = words[words.index("--child") + 1 :][:3]
            if case != "swiglu":
                line = {"case": case, "contestant": contestant or OURS, "seconds": 0.5}
                with Path(file).open("a") as out:
                    out.write(json.dumps(line | {"tokens_per_second": 100.0}) + "\n")
        return SimpleNamespace(poll=lambda: 0, wait=lambda: 0)

    monkeypatch.setattr(program, "start", start)
    monkeypatch.setattr(program, "end", lambda process: 0)
    return commands


def test_a_second_call_continues(processes: list[list[str]], tmp_path: Path) -> None:
    program.compare(tmp_path, "cpu", 300, ["swiglu", "packed", "rms"])
    assert [words[words.index("--child") + 1] for words in processes] == [
        *["packed 495M"] * 2, "rms_norm", "swiglu",
    ]  # fmt: skip
    result = json.loads((tmp_path / "beside.json").read_text())
    assert result["facts"]["device"] == "none"
    assert result["lines"][-1] == {"case": "swiglu", "contestant": "", "note": "ended with 0"}
    assert "| packed 495M | transformers | 500 ms |" in (tmp_path / "beside.md").read_text()
    processes.clear()
    program.compare(tmp_path, "cpu", 300, ["swiglu", "packed", "rms", "log_probs"])
    assert [words[words.index("--child") + 1] for words in processes] == ["log_probs"]


def test_a_run_ends_with_its_time(processes: list[list[str]], tmp_path: Path) -> None:
    program.compare(tmp_path, "cpu", 5, [])
    assert processes == []
    assert json.loads((tmp_path / "beside.json").read_text())["lines"] == []


def test_a_process_writes_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever fails in it is a line, too."""
    pytest.importorskip("torch", reason=NEEDED)
    from .programs.beside_peers import ops

    def run(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["beside_peers", "--device", "cpu", *map(str, words)])
        program.main()

    file = tmp_path / "beside.jsonl"
    run("--child", "swiglu", "", file)
    monkeypatch.setattr(ops, "rms_norm", lambda machine: 1 / 0)
    run("--child", "rms_norm", "", file)
    lines = program.lines_of(file)
    assert {line["contestant"] for line in lines if "seconds" in line} == {OURS, "torch"}
    fault = {
        "case": "rms_norm",
        "contestant": "",
        "note": "fails: ZeroDivisionError: division by zero",
    }
    assert lines[-1] == fault
    run("--rates", tmp_path / "rates.json")
    assert json.loads((tmp_path / "rates.json").read_text())["device"] == "CPU"
    run("--list", "--only", "packed")
    assert capsys.readouterr().out.splitlines()[0] == " 90 s packed 495M unsloth_cupy"


RESULT: dict[str, Any] = {
    "facts": {"device": "a GPU", "torch": "2", "copy_gb_per_s": 1e3, "product_tflop_per_s": 500.0},
    "lines": [
        {"case": "lora bf16 8B", "contestant": "peft", "seconds": 2.0, "tokens_per_second": 8192.0},
        {"case": "lora bf16 8B", "contestant": OURS, "seconds": 1.0, "tokens_per_second": 16384.0},
        {"case": "lora bf16 8B", "contestant": "peft, liger", "note": "fails: no such module"},
        {"case": "swiglu", "contestant": OURS, "seconds": 2e-4, "moved": 1e8, "bytes": 1 << 20},
    ],
}


def test_the_table_has_ratios_of_one_run_and_marks_what_is_published() -> None:
    rows = report.table(RESULT).splitlines()
    assert rows[2] == "| lora bf16 8B | unsloth_cupy | 1 s | 16,384 |  | 1.00 |  |  |"
    assert rows[3] == "| lora bf16 8B | peft | 2 s | 8,192 |  | 2.00 |  |  |"
    assert "| lora bf16 8B | peft, liger | fails: no such module |" in rows[4]
    assert "| lora bf16 8B | Unsloth, bf16 | published, H200 | 9,100 | | 1.80 | | |" in rows
    assert "| swiglu | unsloth_cupy | 200 us |  | 0.50 | 1.00 |  | 1 MiB |" in rows
    section = "\n".join(report.section(RESULT))
    assert "Measured on a GPU, torch 2; a copy moves 1000 GB/s" in section
    assert "Published figures were measured by others" in section


def test_the_picture_names_every_contestant_and_what_is_published(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `cli`")
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        report.draw(tmp_path / "a.svg", RESULT)
    text = (tmp_path / "a.svg").read_text()
    for words in (
        f"{OURS}: 16,384",
        "peft: 8,192 (2.00x)",
        "Unsloth, bf16, published, H200: 9,100",
    ):
        assert words in text


def test_a_published_figure_has_its_card_source_and_case() -> None:
    names = {case.name for case in cases()}
    for who, figure in report.published().items():
        assert figure["card"] in ("H100", "H200"), who
        assert figure["source"]
        assert figure["how"]
        assert {*figure["tokens_per_second"]} <= names


def test_no_figure_stands_in_the_documentation_without_a_run_on_a_gpu() -> None:
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    exists = report.RESULTS.exists()
    assert ("## Beside other libraries" in page) == exists
    assert report.RESULTS.with_suffix(".svg").exists() == exists
    if exists:
        result = json.loads(report.RESULTS.read_text())
        assert result["facts"]["device"] != "CPU"
        assert report.table(result) in page
    else:
        assert report.untimed() == [case.name for case in cases()]


def test_a_package_that_is_carried_has_its_licence() -> None:
    folder = ROOT / "tests/code/programs/beside_peers"
    table = (folder / "README.md").read_text(encoding="utf-8").partition("| package | licence |")[2]
    own = {*sys.stdlib_module_names, "unsloth_cupy", "numpy", "cupy"}
    modules = set()
    for name in ("ops.py", "training.py", "machine.py"):
        text = (folder / name).read_text(encoding="utf-8")
        modules |= {
            *re.findall(r'of\("(\w+)', text),
            *re.findall(r"(?m)^ *(?:from|import) (\w+)", text),
        }
        modules |= {*re.findall(r'without_init\("(\w+)', text), *re.findall(r'= "(\w+)\.\w', text)}
    assert {"liger_kernel", "fla", "unsloth", "mamba_ssm", "peft", "bitsandbytes"} <= modules
    assert [name for name in modules - own if name.replace("_", "-") not in table] == []
