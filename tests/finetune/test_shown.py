"""What a run of Python shows: lines, a bar, a table; and what run, model and settings say."""

import io
import json
import math
import re
import sys
from base64 import b64decode
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Listener, Lora, Run, Settings, Trainer, read_data
from unsloth_cupy.finetune.methods.registry import MEASURES
from unsloth_cupy.finetune.run import curve, printer, results, trainer
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.machine import SCREEN, cut, echo, one_screen
from unsloth_cupy.models import create, load, quantize

from ..cli.test_cli import run as command
from ..models.peers import CONFIGS, MIXTURES, RELATIVES, SIZES

ROWS = [{"prompt": f"{i} and {i + 1}", "completion": f" make {2 * i + 1}."} for i in range(30)]
TINY: dict[str, Any] = {"batch": 2, "tokens": 32, "layers": 1, "hidden": 32, "vocabulary": 300}
TINY |= {"steps": 2, "weight_decay": 0.0}


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a Trainer print as it does outside of tests, with a short sample and without a curve."""
    monkeypatch.setattr(trainer, "Printer", printer.Printer)
    monkeypatch.setattr(printer, "draw_curve", lambda *_: None)
    monkeypatch.setattr(results, "SAMPLE_TOKENS", 8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown") / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a notebook without ipywidgets."""
    module: Any = ModuleType("IPython")
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    module.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", module)


def train(data: Any, out: Path, **more: Any) -> Run:
    return Trainer(None, data, Settings(**TINY, out=out), **more).train()


def plain(text: str) -> list[str]:
    """Return lines without what depends on the machine."""
    text = re.sub(r"[\d.,]+ (s|[KMG]iB|B|tokens/s|steps/s)\b", "NUMBER", text)
    return re.sub(r"[\d.]+ %", "SHARE", text).replace("command/", "python/").splitlines()


@pytest.mark.usefixtures("printing")
def test_python_prints_what_the_command_prints(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A new run and a finished one, but for the names of settings."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
    for _ in range(2):
        train(data, tmp_path / "python")
        actual = capfd.readouterr()
        done = command("finetune", "--data", data, "--out", tmp_path / "command", *flags)
        assert done.exit_code == 0, done.output
        out, err = (each.replace("--tokens 32", "tokens=32") for each in (done.stdout, done.stderr))
        for flag in ("steps", "epochs", "out"):
            out = out.replace(f"--{flag}", flag)
        expected = [line.replace("/command", "/python") for line in plain(out)]
        widths = [re.sub(r"[─ ]+", " ", line) for line in expected]
        assert [re.sub(r"[─ ]+", " ", line) for line in plain(actual.out)] == widths
        assert plain(actual.err) == [line.replace("/command", "/python") for line in plain(err)]


@pytest.mark.usefixtures("printing")
@pytest.mark.parametrize("how", [{"quiet": True}, {"listener": Listener()}], ids=["quiet", "heard"])
def test_a_quiet_run_and_one_with_a_listener_print_nothing(
    how: Any, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(data, tmp_path / "run", **how)
    assert capfd.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("printing")
def test_a_terminal_shows_a_bar(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    train(data, tmp_path / "run")
    assert re.search(r"2/2 \[.*loss \d\.\d{3}", screen.getvalue().rpartition("\r")[2])
    assert "step 2/2: evaluation loss" in screen.getvalue()


@pytest.mark.usefixtures("printing", "notebook")
def test_a_notebook_shows_all_in_one_place(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(data, tmp_path / "run")
    actual = capsys.readouterr()
    assert actual.err == ""
    assert re.search(r"2/2 \[.*loss \d\.\d{3}", actual.out)
    for said in ("step 2/2: evaluation loss", "loss curve", "sample: ", "next:"):
        assert said in actual.out


def test_a_stream_of_another_encoding_shows_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, "ascii"))
    echo("a \x1b\u732b", nl=False)
    assert file.getvalue() == rb"a \x1b\u732b"


# ---- run, model and settings --------------------------------------------------------------------
def fits(text: str) -> bool:
    lines = text.splitlines()
    return len(lines) <= SCREEN[0] and max(map(len, lines)) <= SCREEN[1]


def test_a_run_says_what_it_is_and_what_may_follow(data: Path, tmp_path: Path) -> None:
    seen = dict[str, str]()

    class Looks(Listener):
        def prepared(self, run: Run) -> None:
            seen["prepared"] = repr(run)

        def ended(self, run: Run) -> None:
            seen["ended"] = repr(run)

    run = train(data, tmp_path / "run", listener=Looks())
    text, best = repr(run), run.best
    assert best is not None
    held_out = [line["held_out_loss"] for line in run.files.lines() if "held_out_loss" in line]
    for part in (
        f"Run {run.name}\n", str(run.folder)[:24],  # a long path loses its middle
        "2, finished", f"best step        {best['step']} (",
        f"training loss    {run.losses[0]:.4g} -> {run.losses[-1]:.4g}\n",
        f"evaluation loss  {held_out[0]:.4g} -> {held_out[-1]:.4g}\n", "run.model.generate_text(",
        "models.export_gguf(",
    ):  # fmt: skip
        assert part in text
    assert "models.merge" not in text
    assert repr(train(data, tmp_path / "run")) == text, "of a finished run"
    assert "none, not finished" in seen["prepared"]
    assert "2, not finished" in seen["ended"]
    assert "Trainer(...).train() with the same arguments resumes it" in seen["ended"]
    assert all(map(fits, (text, *seen.values())))
    adapted = Trainer(
        run.folder, data, Settings(steps=1, tokens=32, out=tmp_path / "adapted"), lora=Lora(2)
    ).train()
    assert "models.merge(" in repr(adapted)


METHODS = {
    "dpo": ([{"prompt": f"{i}", "chosen": " 1", "rejected": " 2"} for i in range(9)], "generate_t"),
    "kto": ([{"prompt": f"{i}", "completion": " 1", "label": i > 4} for i in range(9)], "generate"),
    "reward": ([{"prompt": f"{i}", "chosen": " 1", "rejected": " 2"} for i in range(9)], "predict"),
    "classify": ([{"text": f"{i} and", "label": "ab"[i % 2]} for i in range(9)], "predict(["),
    "embed": ([{"anchor": f"{i} and", "positive": f"{i} a"} for i in range(9)], "embeddings("),
    "grpo": ([{"prompt": f"{i} and"} for i in range(9)], "generate_text("),
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_run_of_each_method_says_what_it_measures(
    method: str, data: Path, tmp_path: Path
) -> None:
    base = train(data, tmp_path / "base").folder
    rows, used = METHODS[method]
    options: dict[str, Any] = {"steps": 1, "batch": 2, "tokens": 24, "out": tmp_path / "run"}
    reward = None
    if method == "grpo":
        options |= {"samples": 2, "max_new_tokens": 2}

        def reward(completions: list[str]) -> list[float]:
            return [float(len(each)) for each in completions]

    run = Trainer(base, rows, Settings(method=method, **options), reward=reward).train()
    last = next(line for line in reversed(run.files.lines()) if "held_out_loss" in line)
    text = repr(run)
    assert f"run.model.{used}" in text
    assert fits(text)
    names = {"accuracy", "margin", "reward", "f1", "mrr"} & {n[9:] for n in last if last[n]}
    for name in names:
        assert f"evaluation {name} " in text


def test_a_run_that_is_broken_still_says_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("{}\n")
    text = repr(Run("name", RunFolder(tmp_path), None))
    assert "log.jsonl:1 is broken" in re.sub(r"\s+", " ", text)
    assert str(tmp_path)[:30] in text
    long = Run("n\r" + "x" * 300, RunFolder(tmp_path / ("y" * 200)), None)
    assert fits(repr(long))
    assert "\r" not in repr(long)


def test_a_curve_has_a_panel_for_each_measure() -> None:
    """The losses have twice the height of the others; a line has a point for each step."""
    pytest.importorskip("matplotlib", reason="needs the extra `curve`")
    names = [some[0] for some in curve.PANELS.values()]
    for count in (0, 1, len(names)):
        lines = [{"step": n, "loss": 2.0 / n, **dict.fromkeys(names[:count], 0.5)}
                 for n in range(1, 9)]  # fmt: skip
        lines += [{"step": n, "held_out_loss": 3.0 / n, "unigram_baseline": 4.0} for n in (4, 8)]
        lines += [{"step": 9, **dict.fromkeys(names, None)}]
        figure = curve.curve_of(lines, "a title")
        panels = figure.axes
        assert len(panels) == 1 + count
        assert panels[0].get_gridspec().get_height_ratios() == [2, *[1] * count]
        assert figure.get_size_inches().tolist() == [8, 4.5 + 2 * count]
        train, _, held, baseline = panels[0].get_lines()
        assert train.get_xydata().tolist() == [[n, 2 / n] for n in range(1, 9)]
        assert held.get_xydata().tolist() == [[4, 0.75], [8, 0.375]]
        assert {*baseline.get_ydata()} == {4.0}
        assert held.get_label() == "evaluation: 0.38"
        assert baseline.get_label() == "unigram baseline: 4.00"
        assert panels[0].get_ylabel() == ("loss" if count else "loss (nats per token)")
    bare = curve.curve_of([{"step": 1, "loss": 1.0}], "a title").axes[0].get_lines()
    assert len(bare) == 2


def test_a_notebook_gets_the_curve(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="which draws it")
    run = train(data, tmp_path / "<b>&")
    page = run._repr_html_()
    head, _, picture = page.partition('<img width="800" alt="losses" src="data:image/png;base64,')
    assert b64decode(picture.partition('"')[0]).startswith(b"\x89PNG")
    assert "&lt;b&gt;&amp;" in head
    assert "<b>" not in head
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert "<img" not in Run("<i>", RunFolder(tmp_path), None)._repr_html_()


@pytest.mark.parametrize("label", {**CONFIGS, **RELATIVES, **MIXTURES})
def test_a_model_of_every_family_fits_a_screen(label: str) -> None:
    config = SIZES | (CONFIGS | RELATIVES | MIXTURES)[label]
    model = create(config, seed=0)
    text = repr(model)
    assert fits(text)
    layers, count = model.config.layers, model.num_parameters()
    for part in (config["model_type"], f"{layers} layers", f"{count:,} parameters", "head causal_"):
        assert part in text
    assert "float32 on cpu" in text


def test_adapters_heads_and_kinds_of_weights_are_named(data: Path, tmp_path: Path) -> None:
    folder = train(data, tmp_path / "run").files.model
    model = load(folder, head="sequence_classification", labels=3, dtype="bfloat16")
    assert "head sequence_classification of 3 labels" in repr(model)
    assert "bfloat16 on cpu" in repr(model)
    model = load(folder)
    quantize(model, "nf4", least=0)
    model.add_adapter(2, name="first")
    model.add_adapter(2, name="second")
    for part in ("nf4 weights", "adapters by name: first, second", "adapter: "):
        assert part in repr(model).replace("\n ", "")


def test_settings_say_what_differs_from_the_defaults(data: Path) -> None:
    assert repr(Settings()) == "Settings()"
    assert repr(Settings(lora=16, lr=1e-4)) == "Settings(lora=16, lr=0.0001)"
    assert eval(repr(Settings(lora=16, out=Path("a"), reward=["a.py:b"]))) == Settings(
        lora=16, out="a", reward=["a.py:b"]
    )
    assert "eval=<Records sums>" in repr(Settings(eval=read_data(data)))
    assert repr(Settings(steps=3).decided(new=True)).startswith("Plan(")
    several = {name: ["x" * 70] * 9 for name in ("reward", "sample_prompt", "keep")}
    texts = dict.fromkeys(("out", "base", "new_tokens", "eval", "teacher", "reference"), "x" * 70)
    assert fits(repr(Settings(**texts, **several)))


@pytest.mark.parametrize("count", [0, 1, 5, 40, 400])
@pytest.mark.parametrize("size", [1, 30, 96, 97, 98, 99, 500])
def test_what_is_shown_fits_a_screen(count: int, size: int) -> None:
    text = one_screen("Name(", ["x" * size] * count, ")")
    assert fits(text)
    assert text.startswith("Name(")
    assert text.endswith(")")


# ---- results that are read from the files of a run ---------------------------------------------
LOGGED: list[dict[str, Any]] = [
    {"step": 0, "held_out_loss": 4.0, "held_out_tokens": 9, "held_out_accuracy": 0.25},
    {"step": 1, "loss": 3.5, "seconds": 2.0, "tokens_per_second": None, "memory_bytes": 3 << 20,
     "planned_bytes": 3 << 10, "peak_bytes": 2 << 10},
    {"step": 2, "loss": 3.0, "seconds": 1.0, "tokens_per_second": 100.0, "memory_bytes": 5 << 20,
     "peak_bytes": 1 << 10, "accuracy": 0.5},
    {"step": 2, "held_out_loss": 2.0, "held_out_tokens": 9, "held_out_accuracy": 0.75},
    {"step": 3, "loss": 1.0, "seconds": 3.0, "tokens_per_second": 60.0, "memory_bytes": 4 << 20},
    {"step": 3, "held_out_loss": 3.0, "held_out_tokens": 9, "held_out_accuracy": 0.5},
]  # fmt: skip


def logged(folder: Path, lines: list[dict[str, Any]] = LOGGED, **settings: Any) -> RunFolder:
    files = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    files.settings.write_text(json.dumps({"model": "base", **settings}))
    files.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return files


def table_of(files: RunFolder, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    results.report(files)
    rows = (re.findall(r"│ *([^│]*?) *│ *([^│]*?) *│", row)
            for row in capsys.readouterr().out.splitlines())  # fmt: skip
    return dict(row[0] for row in rows if row)


def test_the_table_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich", reason="which prints it")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)  # a long path of the run would take two rows
    table = table_of(logged(Path("run")), capsys)
    rows = {
        "best step": "2 of 3 (evaluation loss 2.000)",
        "evaluation loss": "4 -> 3",
        "evaluation accuracy": "0.25 -> 0.5",
        "time": "6 s for 3 steps",
        "speed": "70 tokens/s, not counting padding and 1 slower step that measured memory",
        "peak array memory": "planned 3.00 KiB, measured 2.00 KiB (plan 50.00 % too high)",
        "peak process memory": "5.00 MiB",
    }
    assert {name: table.get(name) for name in rows} == rows
    assert [*table] == [*rows, "model", "loss curve", "log"]
    stopped = [*LOGGED[:2], {"step": 1, "stopped": "stopped at step 1: no"}]
    table = table_of(logged(tmp_path / "one", stopped), capsys)
    assert table["best step"] == "0 of 1 (evaluation loss 4.000)"
    assert table["end"] == "stopped at step 1: no"
    assert table["time"] == "2 s for 1 step"
    best = table_of(logged(tmp_path / "best", keeps_best=True), capsys)
    assert (best["evaluation loss"], best["evaluation accuracy"]) == ("4 -> 2", "0.25 -> 0.75")
    without = [{n: v for n, v in line.items() if "_bytes" not in n or n == "memory_bytes"}
               for line in LOGGED]  # fmt: skip
    assert "peak array memory" not in table_of(logged(tmp_path / "plain", without), capsys)
    measured = [{n: v for n, v in line.items() if n != "planned_bytes"} for line in LOGGED]
    table = table_of(logged(tmp_path / "measured", measured), capsys)
    assert table["peak array memory"] == "planned 0 B, measured 2.00 KiB (plan 100.00 % too low)"
    monkeypatch.setenv("COLUMNS", "44")
    results.report(logged(tmp_path / "[bold]"))
    narrow = capsys.readouterr().out
    assert narrow.count("peak process memory") == 1
    shown = "".join(row.split("│")[2].strip() for row in narrow.splitlines() if "│" in row)
    assert str(tmp_path / "[bold]" / "log.jsonl") in shown, "a long path is folded"
    assert "best step" in narrow.splitlines()[1], "no line of titles"
    with pytest.raises(ConfigError, match=r"log\.jsonl holds no evaluation; it is not the log of"):
        results.report(logged(tmp_path / "none", LOGGED[1:3]))


def test_losses_are_compared_with_the_baseline_or_the_model_before() -> None:
    after: dict[str, Any] = {"held_out_loss": 2.0, "unigram_baseline": 2.5, "held_out_error": None}
    before = {"held_out_loss": 3.0, "held_out_error": 0.5}

    def losses(new: bool, **more: Any) -> dict[str, str]:
        return dict(results.losses(before, after | more, of_new_model=new))

    assert losses(True) == {
        "unigram baseline": "2.500 nats per token",
        "evaluation loss": "2.000 nats per token (0.500 below the baseline)",
        "perplexity": "7.4 (baseline 12.2)",
    }
    higher = losses(True, held_out_loss=2.5)
    assert higher["evaluation loss"] == "2.500 nats per token (0.000 above the baseline)"
    assert losses(False) == {
        "evaluation loss": "3.000 -> 2.000 nats per token", "perplexity": "20.1 -> 7.4",
        "evaluation error": "0.5",
    }  # fmt: skip
    for new in (False, True):
        other = losses(new, unigram_baseline=None, held_out_loss=0.000123456)
        assert other == {"evaluation loss": "3 -> 0.0001235", "evaluation error": "0.5"}
    assert losses(False, held_out_loss=1e9)["perplexity"] == f"20.1 -> {math.exp(700):.1f}"


def test_results_for_programs(tmp_path: Path) -> None:
    files = logged(tmp_path / "run")
    assert results.results_of(files) == {
        **LOGGED[4], **LOGGED[5], "seconds": 6.0, "best": LOGGED[3],
        "model": str(files.model), "log": str(files.log),
    }  # fmt: skip
    empty = logged(tmp_path / "empty", [])
    expected = {"seconds": 0, "best": None, "model": str(empty.model), "log": str(empty.log)}
    assert results.results_of(empty) == expected


def test_a_summary_is_cut_to_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(results._facts(logged(tmp_path / "run")))
    assert rows == {
        "folder": str(tmp_path / "run"), "steps": "3, not finished",
        "best step": "2 (evaluation loss 2)", "training loss": "3.5 -> 1",
        "evaluation loss": "4 -> 3", "evaluation accuracy": "0.25 -> 0.5",
    }  # fmt: skip
    every = {f"held_out_{name}": 0.5 for name in MEASURES}
    crowded = [{**LOGGED[3], **every, "step": step} for step in (1000, 2000)]
    files = logged(tmp_path / "crowded", [*crowded, {"step": 2000, "stopped": "at 2000"}])
    rows = dict(results._facts(files))
    assert len(rows) == SCREEN[0] - len(results.CALLS) - 2
    assert (rows["steps"], rows["end"]) == ("2,000, not finished", "at 2000")
    assert rows["best step"].startswith("1,000 (")
    files.model.mkdir()
    rows = dict(results._facts(files))
    assert rows["steps"] == "2,000, finished"
    (files.model / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(
        results, "model_without_weights", raises(ConfigError("the base is elsewhere"))
    )
    lines, width = results.summary(files, "name").splitlines(), max(map(len, rows)) + 2
    assert len(lines) == SCREEN[0]
    assert lines[:3] == [
        "Run name", cut(f"  {'folder':<{width}}{files.folder}", SCREEN[1]),
        f"  {'steps':<{width}}2,000, finished",
    ]  # fmt: skip
    broken = raises(ConfigError("word " * 40))
    monkeypatch.setattr(results, "_facts", broken)
    _, _, *lines = results.summary(files, "name").splitlines()
    assert lines == ["  problem  " + " ".join(["word"] * 16), *["           " + " ".join(
        ["word"] * count) for count in (16, 8)]]  # fmt: skip
    monkeypatch.setattr(results, "_facts", raises(OSError()))
    assert results.summary(files, "name").splitlines()[2:] == ["  problem  OSError"]


@pytest.mark.parametrize("of_chats", [False, True])
@pytest.mark.parametrize(
    ("settings", "adapter", "expected"),
    [
        ({}, False, "generate;export --type q4_k_m"),
        ({"eval": 0.1}, False, "generate;export --type q4_k_m"),
        ({"eval": "e.jsonl"}, True, "generate;evaluate e.jsonl;merge;export --type q4_k_m"),
        ({"eval": "e.jsonl", "method": "dpo"}, False, "generate;export --type q4_k_m"),
        ({"merge_into": "nf4"}, True, "generate;merge"),
        ({"merge_into": "q4_0"}, True, "generate;export"),
        ({"method": "reward", "eval": "e.jsonl"}, False, "predict;evaluate e.jsonl"),
        ({"method": "embed", "pooling": "last"}, False, "embeddings last"),
        ({"method": "embed"}, False, "embeddings mean"),
    ],
)  # fmt: skip
def test_the_commands_and_calls_after_a_run(
    settings: Any, adapter: bool, expected: str, of_chats: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    files = logged(tmp_path / "run", **settings)
    files.model.mkdir()
    if adapter:
        (files.model / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(results, "Chat", lambda _: SimpleNamespace(stored=of_chats))
    monkeypatch.setattr(
        results, "model_without_weights", raises(ConfigError("the base is elsewhere"))
    )
    results.print_next_commands(files, err=False)
    head, *commands = capsys.readouterr().out.splitlines()
    assert head == "next:"
    folder, use = files.folder, "--chat" if of_chats else "'Once upon a time'"
    forms = {
        "generate": f"unsloth-cupy generate {folder} {use}",
        "evaluate e.jsonl": f"unsloth-cupy evaluate {folder} --data e.jsonl",
        "merge": f"unsloth-cupy merge {folder} {folder}-merged",
        "export --type q4_k_m": f"unsloth-cupy export {folder} {folder}.gguf --type q4_k_m"
        " --modelfile",
        "export": f"unsloth-cupy export {folder} {folder}.gguf --modelfile",
    }
    names = expected.split(";")
    for name, line in zip(names, commands, strict=True):
        if name in forms:
            assert line == f"  {forms[name]}"
        else:
            assert line.startswith("  python -c ")
            assert name.split(" ")[0] in line
            assert f'pooling="{name.split(" ")[-1]}"' in line or name == "predict"
    results.print_next_commands(files)
    assert capsys.readouterr().out == ""
    model, first, *calls = results._calls(files)
    assert model == ("model", str(files.model))
    use = '[{"role": "user", "content": "Hello"}]' if of_chats else '"Once upon a time"'
    if names[0] == "generate":
        assert first == ("next", f"run.model.generate_text({use})")
    assert all(word in first[1] for word in names[0].split(" ") if names[0] != "generate")
    assert all(name == "" for name, _ in calls)
    texts = [call for _, call in calls]
    assert f'finetune.evaluate("{folder}", "held_out.jsonl")' == texts[0]
    exports = [text for text in texts if "export_gguf" in text]
    assert len(exports) == ("export" in expected)
    assert all(("q4_k_m" in text) == ("q4_k_m" in expected) for text in exports)
    merges = [text for text in texts if "merge" in text]
    assert len(merges) == ("merge" in names)


def raises(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def test_what_llama_cpp_does_not_read_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "model_without_weights", lambda _: SimpleNamespace(config=None))
    for reason, count in (("", 1), ("of its norms", 0)):
        monkeypatch.setattr("unsloth_cupy.models.gguf.export.why_no_file", lambda _, r=reason: r)
        assert len(results.export_commands(Path("model"), Path("run"))) == count


# ---- progress -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (60, "1:00 min"), (360_000, "100:00 h"), (59.4, "59 s"), (59.6, "1:00 min"),
     (185, "3:05 min"), (3599, "59:59 min"),
     (3599.6, "1:00 h"), (8100, "2:15 h"), (8129, "2:15 h"), (36000, "10:00 h")],
)  # fmt: skip
def test_a_time_in_words(seconds: float, shown: str) -> None:
    assert printer.duration(seconds) == shown


def test_lines_of_progress(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Without a terminal: a line in ten seconds, with running means and the time that is left."""
    clock = [100.0]
    monkeypatch.setattr(printer.time, "monotonic", lambda: clock[0])
    shown = printer.Printer()
    shown.began(10, 20)
    line = {"step": 11, "loss": 2.0, "tokens_per_second": None, "memory_bytes": 1 << 20}
    shown.step(line)
    head = "step 11/20: loss 2.000, process memory 1.00 MiB, "
    assert capsys.readouterr().err == f"{head}0 s left\n", "nothing was printed before"
    clock[0] = 104.0
    shown.step(line | {"step": 12, "loss": 3.0, "tokens_per_second": 50.0})
    assert capsys.readouterr().err == ""
    clock[0] = 110.0
    shown.step(line | {"step": 13, "loss": 2.1, "tokens_per_second": 60.0, "kl": 0.5})
    assert capsys.readouterr().err == ""
    clock[0] = 112.0
    shown.step(line | {"step": 14, "loss": 2.1, "idle_experts": 2})
    assert capsys.readouterr().err == (
        "step 14/20: loss 2.100, idle experts 2, 51 tokens/s, process memory 1.00 MiB, 18 s left\n"
    )
    evaluation = {"step": 14, "held_out_loss": 2.5, "held_out_accuracy": 0.25}
    baseline = evaluation | {"unigram_baseline": 3.0}
    for new, lines, expected in (
        (True, (baseline, baseline), (" (unigram baseline 3.000)",) * 2),
        (True, (evaluation, evaluation), ("", " (initially 2.500)")),
        (False, (baseline, baseline), ("", " (initially 2.500)")),
    ):
        shown.first, shown.of_new_model = None, new
        for each, more in zip(lines, expected, strict=True):
            shown.evaluated(each)
            kind = ", accuracy 0.250" + more if "initially" in more else more + ", accuracy 0.250"
            text = f"step 14/20: evaluation loss 2.500{kind}\n"
            assert capsys.readouterr().err == text
    clock[0] = 121.0
    shown.step(line | {"step": 15})
    assert capsys.readouterr().err == "", "an evaluation is a line too"
    shown.sampled(15, "a", "b\n")
    assert capsys.readouterr().err == "step 15/20: sample 'a' -> 'b\\n'\n"
    quiet = printer.Printer(quiet=True)
    quiet.began(0, 2)
    quiet.step(line)
    quiet.evaluated(evaluation)
    quiet.sampled(1, "a", "b")
    quiet.finished(None)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("quiet", [False, True])
def test_lines_of_reading(quiet: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    clock = [0.0]
    monkeypatch.setattr(printer.time, "monotonic", lambda: clock[0])
    shown = printer.Printer(quiet=quiet)
    for context, expected in (
        (shown.reading("a file", 8 << 10), "a file: 4.00 KiB of 8.00 KiB, 341 B/s\n"),
        (
            shown.computing("reference", 8192),
            "reference: 4,096 tokens of 8,192 tokens, 341 tokens/s\n",
        ),
    ):
        start = clock[0]
        with context as count:
            for seconds, said in ((5.0, ""), (10.0, ""), (12.0, expected), (22.0, "")):
                clock[0] = start + seconds
                count(1024 if seconds != 5 else 2048)
                assert capsys.readouterr().err == ("" if quiet else said), seconds
        clock[0] += 100


@pytest.mark.parametrize(
    ("terminal", "in_notebook", "quiet", "tqdm", "shown"),
    [
        (True, False, False, True, True), (True, False, False, False, False),
        (True, False, True, True, False), (False, False, False, True, False),
        (False, True, False, True, True), (False, True, True, True, False),
    ],
)  # fmt: skip
def test_where_a_bar_is_shown(
    terminal: bool, in_notebook: bool, quiet: bool, tqdm: bool, shown: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    monkeypatch.setattr(printer, "in_notebook", lambda: in_notebook)
    monkeypatch.setattr(printer, "find_spec", lambda name: name if tqdm else None)
    own = printer.Printer(quiet=quiet)
    assert (own.terminal, own.err) == (shown, not in_notebook)
    monkeypatch.setattr(sys, "stderr", object())
    assert own.terminal == shown
    assert not printer.Printer().terminal or in_notebook, "a stream without isatty"


def test_a_bar_shows_steps_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[Any]()

    class Bar:
        def __init__(self, **options: Any) -> None:
            events.append(options)

        def __getattr__(self, name: str) -> Any:
            return lambda *given, **more: events.append((name, *given, *more.values()))

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            events.append("closed")

    own = printer.Printer()
    own.terminal, own.err = True, True
    monkeypatch.setattr(own, "_bar", Bar)
    with own.reading("a\rfile", 9) as count:
        count(4)
    form = {"total": 9, "desc": r"a\rfile", "unit": "B", "unit_scale": True, "leave": False}
    assert events == [form | {"delay": 1.0}, ("update", 4), "closed"]
    events.clear()
    own.began(2, 8)
    own.step({"step": 3, "loss": 2.0, "tokens_per_second": 7.0, "memory_bytes": 1024})
    own.sampled(3, "a", "b")
    own.ended(SimpleNamespace(files=SimpleNamespace(lines=lambda: []), loop=None))
    now = "loss 2.000, 7 tokens/s, process memory 1.00 KiB"
    assert events == [
        {"total": 8, "initial": 2, "unit": " steps"}, ("set_postfix_str", now, False),
        ("update",), ("write", "step 3/8: sample 'a' -> 'b'", sys.stderr), ("close",),
    ]  # fmt: skip


def test_a_run_is_drawn_by_its_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    drawn = list[Any]()
    monkeypatch.setattr(printer, "draw_curve", lambda *given: drawn.append(given))
    monkeypatch.setattr(printer, "draw_routing", lambda *given: drawn.append(given))
    files = logged(tmp_path / "run", [LOGGED[0]])

    def run(first: bool | None) -> Any:
        loop = None if first is None else SimpleNamespace(ranks=SimpleNamespace(first=first))
        return SimpleNamespace(files=files, loop=loop, name="name", folder=files.folder)

    own, curve = printer.Printer(), (files.curve, files.lines(), "name")
    for first in (None, False):
        own.prepared(run(first))
        own.ended(run(first))
    assert drawn == []
    assert (own.first, own.of_new_model) == (None, True)
    own.prepared(run(True))
    assert (own.first, own.of_new_model) == (4.0, False), "of a run that goes on"
    own.ended(run(True))
    files.routing.touch()
    own.ended(run(True))
    assert drawn == [curve, curve], "no routes are known yet"
    routes = {"step": 1, "layers": [0], "tokens": [[1]]}
    files.append_routes(routes)
    own.ended(run(True))
    assert drawn[3] == (files.routing_picture, [routes], "name")
    monkeypatch.setattr(printer, "draw_curve", raises(ValueError("no font")))
    own.ended(run(True))
    said = f"could not draw the plots in {files.folder}: no font\n"
    assert capsys.readouterr().err == said


def test_a_finished_run_shows_its_results(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A sample of a language model alone, and only after training."""
    seen = list[Any]()
    monkeypatch.setattr(printer, "report", lambda files: seen.append("report"))
    monkeypatch.setattr(printer, "sample", lambda loop: seen.append("sample"))
    commands = lambda files, err: seen.append(("commands", err))  # noqa: E731
    monkeypatch.setattr(printer, "print_next_commands", commands)

    def loop(head: str | None) -> Any:
        stop = SimpleNamespace(
            interruptible_block=lambda *words: seen.append(words) or nullcontext()
        )
        return SimpleNamespace(method=SimpleNamespace(head=head), stop=stop)

    ends = ("without the sample; the model is saved", "after the sample; the model is saved")
    for each, expected in (
        (None, ["report"]), (loop("none"), ["report"]), (loop(None), ["report", ends, "sample"]),
    ):  # fmt: skip
        run: Any = SimpleNamespace(loop=each, folder="there", files=None)
        seen.clear()
        printer.Printer().finished(run)
        assert seen == [*expected, ("commands", True)]
        shown = capsys.readouterr().out
        again = "the run in there is finished\n"
        again += "to continue it, increase steps or epochs; to start a new run, change out\n\n"
        assert shown == (again if each is None else "")
    seen.clear()
    monkeypatch.setattr(printer, "find_spec", lambda _: None)
    printer.Printer().finished(run)
    assert seen == [ends, "sample", ("commands", True)]
    assert "there" in capsys.readouterr().out


def test_a_sample_is_an_answer_or_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    streamed = list[Any]()
    monkeypatch.setattr(
        results, "stream_text", lambda *given, **more: streamed.append((given, more))
    )
    tokenizer = SimpleNamespace(
        decode=lambda tokens, skip_special_tokens: f"{tokens} {skip_special_tokens}"
    )
    model = SimpleNamespace(config=SimpleNamespace(positions=4), tokenizer="own")

    def sample(prompt: list[int], first: list[int] | None) -> list[str]:
        parts = None if first is None else [None, [SimpleNamespace(tokens=first)]]
        data = SimpleNamespace(prompt=prompt, examples=parts)
        results.sample(SimpleNamespace(
            model=model, tokenizer=tokenizer, training_data=data, plan=SimpleNamespace(seed=5)
        ))  # type: ignore[arg-type]  # fmt: skip
        shown: list[str] = capsys.readouterr().out.splitlines()
        return shown

    rule, answer = "-" * 80, "--- answer ".ljust(80, "-")
    title = "--- sample: answer to the first evaluation prompt ".ljust(80, "-")
    assert sample([1, 2], [1, 2, 3]) == [title, "[1, 2] False", answer, rule]
    title = "--- sample: continued evaluation text ".ljust(80, "-")
    assert sample([1, 2], [1, 2]) == [title, f"[1, 2] True{rule}"]
    assert sample([1, 2, 3, 4, 5], None) == [title, f"[1, 2, 3] True{rule}"], "room for one more"
    assert [given for given, _ in streamed] == [
        (model, "own", tokens) for tokens in ([1, 2], [1, 2], [1, 2, 3])
    ]
    options = {"max_new_tokens": results.NEW, "temperature": results.TEMPERATURE, "seed": 5}
    assert all(more == options for _, more in streamed)


# ---- pictures -----------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 40, 100, 149])
def test_a_smoothed_loss_is_a_mean_of_its_neighbours(count: int) -> None:
    """With the weights of a Hann window, and fewer neighbours at both ends."""
    draw = np.random.default_rng(0).normal(size=count)
    actual, reach = curve.smooth(draw), int(0.02 * count)
    weights = np.hanning(2 * reach + 3)[1:-1]
    for place in range(count):
        near = range(max(0, place - reach), min(count, place + reach + 1))
        w = np.array([weights[n - place + reach] for n in near])
        assert actual[place] == pytest.approx((w * draw[near.start : near.stop]).sum() / w.sum())
    assert len(actual) == count
    np.testing.assert_allclose(curve.smooth(np.ones(count)), 1)


def test_measures_of_steps_are_lines_and_of_evaluations_points() -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `curve`")
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0, "reward_chosen": 0.5, "reward_rejected": -0.5},
        {"step": 2, "loss": 1.0, "reward_chosen": 1.5, "reward_rejected": None},
        {"step": 2, "held_out_loss": 1.0, "held_out_reward_rejected": -2.0},
    ]
    figure = curve.curve_of(lines, "a title")
    losses, (panel,) = figure.axes[0], figure.axes[1:]
    drawn = [
        (each.get_label(), each.get_linestyle(), each.get_marker(), each.get_alpha(),
         each.get_color(), each.get_xydata().tolist())
        for each in panel.get_lines()
    ]  # fmt: skip
    assert drawn == [
        ("reward chosen", "-", "None", 1, curve.TRAIN, [[1, 0.5], [2, 1.5]]),
        ("reward rejected", "-", "None", 0.45, curve.TRAIN, [[1, -0.5]]),
        ("evaluation reward rejected", "None", "o", 0.45, curve.HELD_OUT, [[2, -2.0]]),
    ]
    assert panel.get_ylabel() == "reward"
    assert losses.get_title(loc="left") == "a title"
    assert losses.get_xlabel() == "step"
    texts = [text.get_text() for text in losses.get_legend().get_texts()]
    assert texts == ["training", "evaluation: 1.00"]
    for axes in figure.axes:
        assert axes.get_legend() is not None
        assert not axes.spines["top"].get_visible()
        assert axes.spines["left"].get_visible()
        ticks = axes.get_xticks()
        assert (ticks == ticks.round()).all(), "steps are whole numbers"
    only = curve.curve_of([{"step": 1, "held_out_loss": 1.0}], "a title").axes[0]
    assert [each.get_label() for each in only.get_lines()] == ["evaluation: 1.00"]
    none = curve.curve_of([], "").axes[0]
    assert (none.get_lines()[:], none.get_legend()) == ([], None)
