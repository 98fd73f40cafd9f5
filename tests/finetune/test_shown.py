"""What a run of Python shows: lines, a bar, a table; and what run, model and settings say."""

import io
import json
import re
import sys
from base64 import b64decode
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from unsloth_cupy.finetune import Listener, Lora, Run, Settings, Trainer, read_data
from unsloth_cupy.finetune.run import curve, printer, results, trainer
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.machine import SCREEN, echo, one_screen
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
    text = re.sub(r"[\d.]+ (s|[KMG]iB|B|tokens/s|steps/s)\b", "NUMBER", text)
    return re.sub(r"\([+-][\d.]+ %\)", "SHARE", text).replace("command/", "python/").splitlines()


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
        f"Run {run.name}\n", str(run.folder), "2, finished", f"best step        {best['step']} (",
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
