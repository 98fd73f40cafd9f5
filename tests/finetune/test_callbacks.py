"""Callbacks hear the events of transformers, may steer a run, and report it to loggers."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Callback, Control, Run, Settings, Trainer
from unsloth_cupy.finetune.run.arguments import FIXED, NAMES
from unsloth_cupy.finetune.run.callbacks import EVENTS, Callbacks, State
from unsloth_cupy.finetune.run.ranks import Ranks
from unsloth_cupy.parallel import Communicator
from unsloth_cupy.parallel.grid import grid

from ..cli.test_cli import ROOT, assert_one_clear_error, numbers, run, weights
from ..parallel.threads import by_threads

TINY: dict[str, Any] = {"batch": 2, "tokens": 16, "layers": 1, "hidden": 32, "vocabulary": 300}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text("\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(40)))
    return path


def trained(text: Path, out: Path, callbacks: Any, **settings: Any) -> Run:
    each = Settings(**TINY | {"out": out} | settings)
    return Trainer(None, text, each, callbacks=callbacks).train()


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, Any]] = []
        for event in EVENTS:
            setattr(self, event, self.hears(event))

    def hears(self, event: str) -> Any:
        def heard(args: Any, state: Any, control: Any, **more: Any) -> None:
            assert more["model"].config.hidden == 32
            assert more["processing_class"].encode("1 and 2").ids
            assert more["optimizer"].step is not None
            assert args.steps == state.max_steps
            self.events.append((event.removeprefix("on_"), state.global_step))
            self.logs += [more["logs"]] if event == "on_log" else []

        return heard


def test_events_come_in_the_order_of_transformers(text: Path, tmp_path: Path) -> None:
    heard = Recorder()
    made = trained(
        text, tmp_path / "run", [heard], steps=2, accumulate=2, evaluate_every=2, save_every=1
    )
    step = ["step_begin", "substep_end", "pre_optimizer_step", "optimizer_step"]
    assert heard.events == [
        *(("init_end", 0), ("train_begin", 0), ("epoch_begin", 0), ("log", 0), ("evaluate", 0)),
        *((event, 0) for event in step), ("step_end", 1), ("log", 1), ("save", 1),
        *((event, 1) for event in step), ("step_end", 2), ("log", 2), ("log", 2), ("evaluate", 2),
        ("save", 2), ("train_end", 2),
    ]  # fmt: skip
    lines = made.files.lines()
    assert [logs.get("loss") for logs in heard.logs] == [line.get("loss") for line in lines]
    assert [logs.get("eval_loss") for logs in heard.logs] == [
        line.get("held_out_loss") for line in lines
    ]
    assert {*heard.logs[1]} == {"loss", "grad_norm", "learning_rate", "epoch"}
    assert heard.logs[0].keys() - {"epoch"} == {
        "eval_loss", "eval_perplexity", "eval_token_accuracy", "eval_entropy",
    }  # fmt: skip


def test_epochs_begin_and_end(text: Path, tmp_path: Path) -> None:
    heard = Recorder()
    trained(text, tmp_path / "run", [heard], epochs=2, batch=8)
    kinds = [event for event, _ in heard.events if event.startswith("epoch")]
    assert kinds == ["epoch_begin", "epoch_end", "epoch_begin", "epoch_end"]
    assert heard.logs[-1]["epoch"] >= 2


class Steers(Callback):
    def __init__(self, at: int, *flags: str) -> None:
        self.at, self.flags = at, flags

    def on_step_end(self, args: Any, state: Any, control: Control, **more: Any) -> Control:
        for flag in self.flags if state.global_step == self.at else ():
            setattr(control, flag, True)
        return control


def test_a_callback_stops_a_run_which_is_then_finished(text: Path, tmp_path: Path) -> None:
    made = trained(text, tmp_path / "run", [Steers(2, "should_training_stop")], steps=5)
    assert len(made.losses) == 2
    assert made.files.finished
    again = trained(text, tmp_path / "run", [], steps=5)
    assert again.loop is None
    assert again.stopped == "stopped at step 2: requested by a callback"


def test_a_callback_asks_for_more(text: Path, tmp_path: Path) -> None:
    rare = {"steps": 4, "evaluate_every": 100, "save_every": 100, "log_every": 100}
    heard = Recorder()
    flags = "should_evaluate", "should_save", "should_log"
    made = trained(text, tmp_path / "run", [Steers(2, *flags), heard], **rare)
    at_two = [event for event, step in heard.events if step == 2]
    assert {"log", "evaluate", "save"} <= {*at_two}
    assert [line["step"] for line in made.files.lines()] == [0, 2, 2, 4, 4]
    plain = trained(text, tmp_path / "plain", [], **rare)
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")
    assert [line["step"] for line in plain.files.lines()] == [0, 4, 4]


def test_callbacks_of_transformers_work(text: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="its callbacks are run")

    class Stops(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> Any:
            if state.global_step == 1 and "loss" in logs:
                control.should_training_stop = True
            return control

    assert len(trained(text, tmp_path / "run", [Stops], steps=4).losses) == 1


class Compares(Callback):
    def __init__(self) -> None:
        self.pairs: list[Any] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **more: Any):
        self.pairs.append((state.best_metric, metrics["eval_loss"]))


def test_an_evaluation_is_compared_with_the_best_before_it(text: Path, tmp_path: Path) -> None:
    each = Compares()
    trained(text, tmp_path / "run", [each], steps=6, evaluate_every=2, lr=1e-2)
    losses = [loss for _, loss in each.pairs]
    assert [best for best, _ in each.pairs] == [
        None, *(min(losses[:number]) for number in range(1, len(losses)))
    ]  # fmt: skip


@pytest.mark.parametrize("rate", [1e-2, 0.0], ids=["falls", "stays"])
def test_callbacks_that_come_with_transformers_work(text: Path, tmp_path: Path, rate: float):
    """Early stopping ends a run whose loss stays, and only that; the others change nothing."""
    transformers = pytest.importorskip("transformers", reason="its callbacks are run")
    from transformers import trainer_callback

    others = [trainer_callback.DefaultFlowCallback, transformers.PrinterCallback]
    stops = transformers.EarlyStoppingCallback(2)
    options = {"steps": 8, "evaluate_every": 2, "lr": 1e-2, "weight_decay": 0.0}
    if not rate:
        stops.early_stopping_threshold = 99.0  # nats, by which no evaluation is better
    run = trained(text, tmp_path / "run", [*others, stops], **options)
    assert len(run.losses) == (8 if rate else 4)
    plain = trained(text, tmp_path / "plain", [], **options | {"steps": len(run.losses)})
    if rate:
        assert weights(tmp_path / "run") == weights(tmp_path / "plain")
        assert [line["step"] for line in run.files.lines()] == [
            line["step"] for line in plain.files.lines()
        ]


def test_arguments_have_the_names_of_transformers(text: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="its arguments have these names")
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    names |= {name for name in dir(transformers.TrainingArguments) if not name.startswith("_")}
    assert {*NAMES, *FIXED, "bf16", "fp16", "to_dict"} <= names
    states = {field.name for field in dataclasses.fields(transformers.TrainerState)}
    assert states - {"stateful_callbacks"} <= {each.name for each in dataclasses.fields(State)}
    seen: dict[str, Any] = {}

    class Reads(Callback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            seen.update(args.to_dict(), optimizer_of_run=more["optimizer"])
            with pytest.raises(AttributeError, match="no setting 'other'"):
                _ = args.other

    trained(text, tmp_path / "run", [Reads()], steps=1, lr=2e-3, batch=2)
    assert seen["learning_rate"] == seen["lr"] == 2e-3
    assert (seen["max_steps"], seen["train_batch_size"]) == (1, 2)
    assert seen["output_dir"] == str(tmp_path / "run")


def test_the_end_of_an_epoch_ends_the_run(text: Path, tmp_path: Path) -> None:
    made = trained(text, tmp_path / "run", [Steers(2, "should_epoch_stop")], steps=5)
    assert len(made.losses) == 2
    assert made.files.finished


def test_what_is_no_callback_is_named(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks=\[3\]\) handles no event; subclass Callback"):
        trained(text, tmp_path / "run", [3], steps=1)
    with pytest.raises(ConfigError, match="pass a list"):
        trained(text, tmp_path / "run", Recorder(), steps=1)
    with pytest.raises(ConfigError, match="report_to names 'visdom'; choose from tensorboard"):
        trained(text, tmp_path / "run", [], steps=1, report_to=["visdom"])
    with pytest.raises(ConfigError, match=r"report_to='wandb'\): report_to must be a list"):
        trained(text, tmp_path / "run", [], steps=1, report_to="wandb")


def test_a_missing_logger_is_said_before_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import util

    monkeypatch.setattr(util, "find_spec", lambda name: None)
    result = run("finetune", "--text", text, "--out", tmp_path / "run", "--report-to", "wandb")
    assert_one_clear_error(result, "install it with pip install 'unsloth_cupy[wandb]'")


def reported(name: str, text: Path, folder: Path, **environment: str) -> Path:
    """Run with a logger in a process of its own, as they keep state."""
    pytest.importorskip(name, reason="a logger that is reported to")
    flags = [word for key, value in TINY.items() for word in (f"--{key}", str(value))]
    command = [
        sys.executable, "-m", "unsloth_cupy", "finetune", "--text", str(text), "--out",
        str(folder / "run"), "--steps", "3", "--evaluate-every", "3", "--report-to", name, *flags,
    ]  # fmt: skip
    own = {"PYTHONPATH": str(ROOT), "HOME": str(folder), **environment}
    done = subprocess.run(
        command, env=os.environ | own, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in numbers(folder) if "loss" in line]


def test_tensorboard(text: Path, tmp_path: Path) -> None:
    folder = reported("tensorboard", text, tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert {"train/loss", "train/learning_rate", "eval/loss"} <= {*events.Tags()["scalars"]}
    values = [(each.step, each.value) for each in events.Scalars("train/loss")]
    assert values == [(n, pytest.approx(loss)) for n, loss in enumerate(losses(folder), 1)]


@pytest.mark.slow
def test_wandb(text: Path, tmp_path: Path) -> None:
    folder = reported("wandb", text, tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    (record,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data = record.read_bytes()
    for name in ("train/loss", "eval/loss", "train/global_step"):
        assert name.encode() in data
    assert json.dumps(losses(folder)[1]).encode() in data


@pytest.mark.slow
def test_mlflow(text: Path, tmp_path: Path) -> None:
    place = {"MLFLOW_TRACKING_URI": (tmp_path / "ml").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    folder = reported("mlflow", text, tmp_path, **place)
    (metric,) = (tmp_path / "ml").rglob("metrics/train/loss")
    rows = [line.split() for line in metric.read_text().splitlines()]
    assert [float(row[1]) for row in rows] == losses(folder)
    assert [int(row[2]) for row in rows] == [1, 2, 3]
    (tokens,) = (tmp_path / "ml").rglob("params/tokens")
    assert tokens.read_text() == "16"


@pytest.mark.slow
def test_trackio(text: Path, tmp_path: Path) -> None:
    import sqlite3

    folder = reported("trackio", text, tmp_path, TRACKIO_DIR=str(tmp_path / "tracked"))
    (database,) = (tmp_path / "tracked").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = [json.loads(row) for (row,) in connection.execute("select metrics from metrics")]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == losses(folder)


def test_requests_of_the_first_rank_are_those_of_all() -> None:
    """Callbacks run on rank 0 alone; each request reaches all ranks once, and an end stays."""
    flags = [field.name for field in dataclasses.fields(Control)]

    def requests(comm: Communicator) -> list[tuple[Control, Control]]:
        each = Callbacks.__new__(Callbacks)
        each.callbacks = [Callback()]
        each.loop = SimpleNamespace(ranks=Ranks(comm, grid(comm)))
        taken = []
        for flag in flags:
            each.control = Control(**{flag: comm.rank == 0})
            if comm.rank != 0:  # what another rank has of its own does not count
                each.control.should_log = each.control.should_save = True
            taken.append((each.take(), each.control))
        return taken

    ends = {"should_training_stop", "should_epoch_stop"}
    for taken in by_threads(3, requests):
        for flag, (control, after) in zip(flags, taken, strict=True):
            expected = {flag: True, "should_training_stop": flag in ends}
            assert control == Control(**expected)
            assert after == Control(should_training_stop=flag in ends)
