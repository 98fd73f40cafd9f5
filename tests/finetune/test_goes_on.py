"""A run that is asked to stop, one that is given more, and one that is asked for something else."""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Listener, Lora, Settings, Trainer
from unsloth_cupy.finetune.data.iterables import NAME
from unsloth_cupy.finetune.data.records import Records
from unsloth_cupy.finetune.data.text import Text
from unsloth_cupy.finetune.listener import hearing
from unsloth_cupy.finetune.run import interrupt, run_folder
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.finetune.run.new_model import SIZES
from unsloth_cupy.finetune.run.resume import (
    differences,
    own_settings,
    read_settings,
    requests_more,
    stored_settings,
)
from unsloth_cupy.finetune.run.run_folder import (
    RunFolder,
    config_file,
    fingerprints,
    is_past_best,
    log_reason,
    model_folder,
    model_without_weights,
    words_folder,
)
from unsloth_cupy.models import load
from unsloth_cupy.models.transformer import Transformer

from ..cli.test_cli import assert_one_clear_error, numbers, run, weights

SMALL = (
    "--batch", "2", "--tokens", "16", "--layers", "1", "--hidden", "32", "--vocabulary", "300",
    "--evaluate-every", "3", "--save-every", "100", "--lr", "0.01",
)  # fmt: skip
STOPPED = Path(__file__).parents[1] / "golden" / "stopped"
ADAPTED = ("--steps", 4, "--batch", 2, "--tokens", 16, "--lora", 2, "--save-every", 2)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("\n\n".join(f"{i} and {i * i} are numbers." for i in range(200)))
    return path


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = run("finetune", "--text", text, "--out", folder, *SMALL, "--steps", 6)
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@contextmanager
def asked_to_stop(patch: pytest.MonkeyPatch, method: str, at: int, number: int) -> Iterator[Any]:
    """Ask a run to stop in the middle of what it does at some step: it would go on for ever."""
    whole: Any = getattr(Transformer, method)
    heard: list[float] = []
    calls = []

    def slow(self: Transformer, *arguments: Any, **options: Any) -> Any:
        batch = getattr(arguments[0], "keywords", {}) if arguments else {}
        planning = type(batch.get("tokens", np.zeros(0))) is not np.ndarray
        calls.extend([] if planning else [0])
        if len(calls) == at and not heard:
            heard.append(time.monotonic())
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
            while True:
                time.sleep(0.01)
        return whole(self, *arguments, **options)

    with patch.context() as inner:
        inner.setattr(Transformer, method, slow)
        yield heard


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_step_is_left_where_it_stands(
    number: int, finished: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last whole step is saved; the run ends with the bits of one that never stopped."""
    command = ("finetune", "--text", text, "--out", tmp_path / "run", *SMALL, "--steps", 6)
    for at, step in ((1, 1), (5, 5)):  # before the first step, and between evaluations
        with asked_to_stop(monkeypatch, "passes", at, number) as heard:
            result = run(*command)
        assert time.monotonic() - heard[0] < 5
        assert result.exit_code == 128 + number, result.output
        assert f"Stopping after step {step - 1}. " in result.stderr
        saved = rf"stopped after step {step - 1}, which is saved in .* \(\d+\.\d s\); resume with"
        assert re.search(saved, result.stderr)
    assert run(*command).exit_code == 0
    assert weights(tmp_path / "run") == weights(finished)
    assert numbers(tmp_path / "run") == numbers(finished)


@pytest.mark.slow
def test_an_evaluation_is_left_and_made_up_for(
    finished: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("finetune", "--text", text, "--out", tmp_path / "run", *SMALL, "--steps", 6)
    held_out = Loop._evaluate
    calls: list[int] = []

    def stopping(self: Loop) -> None:
        calls.append(self.step)
        if calls == [0, 3]:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        held_out(self)

    monkeypatch.setattr(Loop, "_evaluate", stopping)
    result = run(*command)
    assert result.exit_code == 130
    assert "Stopping after step 3, without its evaluation. Press Ctrl-C again" in result.stderr
    assert run(*command).exit_code == 0
    assert calls == [0, 3, 3, 6]
    assert numbers(tmp_path / "run") == numbers(finished)
    assert weights(tmp_path / "run") == weights(finished)


@pytest.mark.parametrize("method", ["loss", "add_adapter"])
def test_nothing_is_left_behind_before_the_first_evaluation(
    method: str, finished: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "runs" / "new"
    command = ("finetune", finished, "--text", text, "--out", out, *ADAPTED)
    with asked_to_stop(monkeypatch, method, 1, signal.SIGTERM):
        result = run(*command)
    assert result.exit_code == 143, result.output
    assert "stopped before the first evaluation; nothing was saved" in result.stderr
    with monkeypatch.context() as patch:
        patch.setattr(Transformer, method, None)
        assert run(*command).exit_code == 1
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def test_signals_are_left_as_they_were() -> None:
    signals, (receiver, sender) = (signal.SIGINT, signal.SIGTERM), socket.socketpair()
    sender.setblocking(False)
    expected = sender.fileno(), *map(signal.getsignal, signals)
    previous = signal.set_wakeup_fd(sender.fileno())
    with interrupt.stop_request(say) as stop:
        assert stop.signal is None
    actual = signal.set_wakeup_fd(previous), *map(signal.getsignal, signals)
    receiver.close()
    sender.close()
    assert actual == expected


def test_a_request_is_answered_while_python_runs_no_handler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As within a product of large matrices: here in one long call that computes a hash."""
    times: dict[str, float] = {}
    monkeypatch.setattr(
        interrupt.Stop, "request", lambda *_: times.setdefault("handled", time.monotonic())
    )
    with interrupt.stop_request(say) as stop:
        stop.uninterruptible("after step 7")

        def ask() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            if stop.announcement.wait(60):
                times["told"] = time.monotonic()

        asking = threading.Timer(0.05, ask)
        asking.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)  # half a second at the least
        asking.join()
    assert times["handled"] - times["told"] > 0.1
    said = "\nStopping after step 7. A second SIGTERM quits without saving.\n"
    assert capsys.readouterr().err == said


def test_a_request_waits_for_no_more_than_it_must() -> None:
    before = [signal.getsignal(number) for number in interrupt.SIGNALS]
    with interrupt.stop_request(say) as stop:
        stop.uninterruptible("after step 7")
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(interrupt.Interrupted), stop.interruptible_block("", ""):
            raise AssertionError("the next step begins")
        with pytest.raises(interrupt.Interrupted):
            stop.check()
    assert [signal.getsignal(number) for number in interrupt.SIGNALS] == before


@pytest.mark.parametrize("together", [False, True])
def test_a_request_abandons_a_block_alone(together: bool) -> None:
    """Not what comes before or after it; on several ranks, no rank abandons any work."""
    stop = interrupt.Stop()
    assert stop.interruptible
    stop.together = together
    for fails in (False, True):
        stop.uninterruptible("after step 1")
        assert not stop.interruptible
        with contextlib.suppress(KeyError), stop.interruptible_block("at once", "after step 2"):
            assert stop.interruptible is not together
            assert stop.ending == ("after step 2" if together else "at once")
            if fails:
                raise KeyError
        assert not stop.interruptible
    stop.request(signal.SIGINT)
    assert stop.signal == signal.SIGINT
    with pytest.raises(interrupt.Interrupted) if not together else contextlib.nullcontext():
        stop.check()
    first = interrupt.Stop()
    first.together = together
    raises = pytest.raises(interrupt.Interrupted)
    with raises if not together else contextlib.nullcontext(), first.interruptible_block("", ""):
        first.request(signal.SIGTERM)
        first.request(signal.SIGTERM)
    assert first.signal == signal.SIGTERM


def test_a_finished_run_is_given_more_steps(copied: Path, text: Path) -> None:
    """It goes on from its end, with the rates of all steps; then it is a run of so many."""
    command = ("finetune", "--text", text, "--out", copied, *SMALL, "--steps")
    first = numbers(copied)
    result = run(*command, 9)
    assert result.exit_code == 0, result.output
    lines = numbers(copied)
    assert lines[: len(first)] == first
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 10)]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [0, 3, 6, 9]
    assert "is finished" in run(*command, 9).output
    assert_one_clear_error(run(*command, 3), "steps 9 (now 3)", "for more --steps")
    for path in RunFolder(copied).checkpoints():
        shutil.rmtree(path)
    assert_one_clear_error(run(*command, 12), "no checkpoint to resume from")


@pytest.mark.slow
def test_more_steps_that_are_stopped_go_on(
    copied: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.copytree(copied, tmp_path / "whole")
    command = ("finetune", "--text", text, *SMALL, "--steps", 9, "--out")
    assert run(*command, whole).exit_code == 0
    with asked_to_stop(monkeypatch, "passes", 2, signal.SIGINT):
        assert run(*command, copied).exit_code == 130
    assert run("generate", copied, "1 and", "--max-new-tokens", 2).exit_code == 0
    assert run(*command, copied).exit_code == 0
    assert weights(copied) == weights(whole)
    assert numbers(copied) == numbers(whole)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [False, True])
def test_epochs_are_so_many_steps(lines: bool, text: Path, tmp_path: Path) -> None:
    if lines:
        path = tmp_path / "lines.jsonl"
        path.write_text("".join(f'{{"text": "{i} and {i + 1}."}}\n' for i in range(60)))
    else:
        path = text
    taken = []
    command = ("--text", path, *SMALL, "--batch", 8, "--evaluate-every", 100)
    for epochs, more in ((1, ()), (2, ()), (2, ("--accumulate", 2))):
        out = tmp_path / f"run{len(taken)}"
        result = run("finetune", *command, *more, "--out", out, "--epochs", epochs)
        assert result.exit_code == 0, result.output
        taken.append(max(line["step"] for line in numbers(out)))
        assert f"{epochs}.0 epochs = {taken[-1]} steps" in result.stderr
    assert taken[1] in (2 * taken[0], 2 * taken[0] - 1)  # the last batch of an epoch may be shared
    assert taken[2] == -(-taken[1] // 2)
    more_epochs = (*command, "--out", tmp_path / "run0", "--epochs", 2)
    assert run("finetune", *more_epochs).exit_code == 0
    assert max(line["step"] for line in numbers(tmp_path / "run0")) == taken[1]
    both = run("finetune", "--text", path, "--epochs", 1, "--steps", 1, "--out", tmp_path / "x")
    assert_one_clear_error(both, "--steps and --epochs both set the length of the run")


def test_a_text_that_has_changed_is_named(copied: Path, text: Path, tmp_path: Path) -> None:
    settings = json.loads((copied / "settings.json").read_text())
    changed = {**settings, "text_sha256": "0" * 64, "text_bytes": settings["text_bytes"] + 1}
    size = settings["text_bytes"]
    (said,) = differences(settings, changed, ended=True)
    assert said == (
        f"another text: {text} has changed since ({size:,} bytes then, {size + 1:,} now)"
    )
    other = tmp_path / "others.txt"
    other.write_text(text.read_text() + "!")
    result = run("finetune", "--text", other, "--out", copied, *SMALL, "--steps", 6)
    assert_one_clear_error(result, f"another text: {text} (now {other})")
    assert "sha256" not in result.output
    earlier = {key: value for key, value in settings.items() if "epochs" not in key}
    assert differences({"steps": 6, "seed": 0}, earlier, ended=True) == [], "of another version"


def test_files_of_another_base_are_named() -> None:
    before = {"base": {"a": {"sha256": "1"}, "b": {"sha256": "2"}, "reward c.py": {"sha256": "3"}}}
    now = {"base": {"b": {"sha256": "4"}, "d": {"sha256": "5"}, "reward c.py": {"sha256": "6"}}}
    assert differences(before, now, ended=False) == [
        "another base model: a is gone",
        "another base model: b has changed since",
        "another base model: d is new",
        "reward c.py has changed since",
    ]
    in_memory = {"base": {"the model": {"sha256": "7"}}}
    names = "a folder", "a model in memory"
    for (then, other), pair in ((names, (now, in_memory)), (names[::-1], (in_memory, now))):
        assert differences(*pair, ended=False) == [f"another base model: {then} (now {other})"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_adapters_go_on_with_the_base_that_they_began_with(
    name: str, finished: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shutil.copytree(finished / "model", tmp_path / "base")
    command = ("finetune", base, "--text", text, "--out", tmp_path / "run", *ADAPTED)
    with asked_to_stop(monkeypatch, "passes", 3, signal.SIGINT):
        assert run(*command).exit_code == 130
    if name == "config.json":
        (base / name).write_text((base / name).read_text() + "\n")
    else:
        tensors = load_file(base / name)
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(0.5)
        save_file(tensors, base / name)
    result = run(*command)
    assert_one_clear_error(result, f"another base model: {name} has changed since")
    shutil.copy(finished / "model" / name, base / name)  # other times, the same content
    assert run(*command).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("lora", [(), ("--lora", 2)])
def test_the_model_is_saved_in_the_dtype_that_is_asked_for(
    dtype: str, lora: Any, finished: Path, text: Path, tmp_path: Path
) -> None:
    out, options = tmp_path / "run", (*ADAPTED[:6], *lora)
    command = ("finetune", finished, "--text", text, "--out", out, *options)
    assert run(*command, "--save-dtype", dtype).exit_code == 0
    (file,) = (out / "model").glob("*.safetensors")
    assert {array.dtype.name for array in load_file(file).values()} == {dtype}
    if lora:
        adapter = load(finished / "model", lora=out / "model").adapter
        assert adapter is not None
    else:
        assert load(out / "model").table.dtype.name == dtype
    (kept,) = out.glob("checkpoint-*/*model.safetensors")
    assert {array.dtype for array in load_file(kept).values()} == {np.dtype(np.float32)}
    assert run("generate", out, "1 and", "--max-new-tokens", 2).exit_code == 0


class TestTrainingConfig:
    VALUES = {  # noqa: RUF012 -- a constant
        "batch_size": 2, "max_seq_len": 16, "gradient_accumulation_steps": 3,
        "mixed_precision": {"compute_dtype": "bfloat16"},
        "checkpoint": {"recompute_every": 1, "keep": ["attention_forward"]},
    }  # fmt: skip
    TOML = """
    batch_size = 2
    max_seq_len = 16
    gradient_accumulation_steps = 3
    mixed_precision.compute_dtype = "bfloat16"
    checkpoint = {recompute_every = 1, keep = ["attention_forward"]}
    """
    SIZES = ("--layers", 1, "--hidden", 32, "--vocabulary", 300, "--steps", 2)

    def trained(self, tmp_path: Path, text: Path, *options: Any) -> click.testing.Result:
        return run("finetune", "--text", text, "--out", tmp_path / "run", *self.SIZES, *options)

    @pytest.mark.slow
    @pytest.mark.parametrize("suffix", [".json", ".toml"])
    def test_it_is_read(self, suffix: str, text: Path, tmp_path: Path) -> None:
        path = tmp_path / f"config{suffix}"
        path.write_text(self.TOML if suffix == ".toml" else json.dumps(self.VALUES))
        result = self.trained(tmp_path, text, "--batch", 4, "--config", path)
        assert result.exit_code == 0, result.output
        actual = json.loads((tmp_path / "run" / "settings.json").read_text())
        asked = {
            "batch": 4, "tokens": 16, "accumulate": 3, "dtype": "bfloat16", "recompute_every": 1,
            "keep": ["attention_forward"], "offload": False, "loss_scale": 65536.0,
            "dynamic_scaling": True,
        }  # fmt: skip
        assert {key: actual[key] for key in asked} == asked
        assert "is finished" in self.trained(tmp_path, text, "--batch", 4, "--config", path).output

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("a.json", "{", "cannot be read as JSON"),
            ("a.toml", "=", "cannot be read as TOML"),
            ("a.json", "[]", "the file holds []; write an object of batch_size"),
            ("a.json", '{"batch": 2}', "batch is not known; choose from batch_size"),
            ("a.json", '{"batch_size": 0}', "TrainingConfig(batch_size=0): pass an integer"),
            ("a.json", '{"checkpoint": {"every": 2}}', "checkpoint.every is not known"),
            ("a.json", '{"checkpoint": 2}', "checkpoint holds 2; write an object of enabled"),
            ("a.json", '{"mixed_precision": {"compute_dtype": "int8"}}', "compute_dtype='int8'"),
            ("b.json", None, "No such file or directory; name a readable file"),
        ],
    )
    def test_what_is_wrong_is_named(
        self, name: str, content: str | None, said: str, text: Path, tmp_path: Path
    ) -> None:
        if content is not None:
            (tmp_path / name).write_text(content)
        result = self.trained(tmp_path, text, "--config", tmp_path / name)
        assert_one_clear_error(result, f"--config {tmp_path / name}", said)
        assert not (tmp_path / "run").exists()


def test_a_config_is_the_models_before_its_weights_are_read(finished: Path, tmp_path: Path) -> None:
    """End tokens of generation_config.json too: lines are made before a model is loaded."""
    folder = shutil.copytree(finished / "model", tmp_path / "model")
    values = {"eos_token_id": [7, 9], "pad_token_id": 8}
    (folder / "generation_config.json").write_text(json.dumps(values))
    model = load(folder)
    model.add_adapter(2, seed=0, base=str(folder))
    model.save_adapter(tmp_path / "adapter")
    for path in (folder, tmp_path / "adapter"):
        config, adapter, quantized = model_without_weights(path)
        assert quantized is None
        assert config == model.config
        assert (config.end_tokens, config.pad_token) == ((7, 9), 8)
        assert (adapter is None) == (path == folder)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "steps"), [(2, (3, 4)), (99, (1, 6))])
def test_profiled_steps_are_the_same_steps(
    asked: int, steps: tuple[int, int], finished: Path, text: Path, tmp_path: Path
) -> None:
    """The first two count their arrays, and are timed where too few others are left."""
    out, (first, last) = tmp_path / "run", steps
    result = run("finetune", "--text", text, "--out", out, *SMALL, "--steps", 6, "--profile", asked)
    assert result.exit_code == 0, result.output
    table = (out / "profile.txt").read_text()
    assert table.startswith(f"profile of steps {first} to {last}; times of an op exclude")
    assert table in result.output
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    known = [e for e in events if e["name"] in ("embedding", "adamw_step", "embedding_backward")]
    called = {name: sum(e["name"] == name for e in known) for name in {e["name"] for e in known}}
    assert set(called.values()) == {last - first + 1}, "held-out losses are none of it"
    assert {e["args"]["layer"] for e in events} >= {"layer 0", "embedding"}
    assert weights(out) == weights(finished)
    assert numbers(out) == numbers(finished)


@pytest.mark.slow
def test_a_run_that_stops_keeps_its_profile(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    command = ("finetune", "--text", text, "--out", out, *SMALL, "--steps", 6, "--profile", 6)
    with asked_to_stop(monkeypatch, "passes", 3, signal.SIGINT):
        assert run(*command).exit_code == 130
    assert (out / "profile.txt").read_text().startswith("profile of steps 1 to 3; ")
    assert run(*command).exit_code == 0
    assert (out / "profile.txt").read_text().startswith("profile of steps 3 to 6; ")


@pytest.mark.parametrize("name", ["full", "adapter"])
def test_a_run_of_an_earlier_version_goes_on(name: str, tmp_path: Path) -> None:
    """Weights and averages are those of its files, and its log goes on."""
    root = shutil.copytree(STOPPED, tmp_path / "stopped")
    for path in root.glob("*/**/*.json"):  # they name folders
        path.write_text(path.read_text().replace('"stopped/', f'"{root}/'))
    (checkpoint,) = (root / name).glob("checkpoint-*")
    steps = list[int]()

    class Resumed(Listener):
        def prepared(self, run: Any) -> None:
            steps.append(run.loop.step)
            trained, averages = run.loop.checkpoints.part()
            weights = load_file(next(checkpoint.glob("*model.safetensors")))  # by names of peft
            assert sorted(a.tobytes() for a in weights.values()) == sorted(
                np.ascontiguousarray(array).tobytes() for array in trained.values()
            )
            stored = load_file(checkpoint / "optimizer.safetensors")
            assert all(np.array_equal(array, averages[each]) for each, array in stored.items())

    base = None if name == "full" else root / "full" / checkpoint.name
    sizes: dict[str, Any] = {"layers": 1, "hidden": 8, "vocabulary": 257} if base is None else {}
    settings = Settings(steps=4, batch=2, tokens=16, lr=0.01, out=root / name, **sizes)
    lora = None if base is None else Lora(2)
    Trainer(base, root / "text.txt", settings, lora=lora, listener=Resumed()).train()
    assert steps == [2]
    assert [line["step"] for line in RunFolder(root / name).lines() if "loss" in line] == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("name", ["full", "adapter"])
def test_a_run_of_an_earlier_version_goes_on_without_its_settings(
    name: str, tmp_path: Path
) -> None:
    """Its bits are those of the same run by all its settings, and a line names them."""
    root = shutil.copytree(STOPPED, tmp_path / "stopped")
    for path in root.glob("*/**/*.json"):  # they name folders
        path.write_text(path.read_text().replace('"stopped/', f'"{root}/'))
    base = () if name == "full" else (root / "full" / "checkpoint-00000002",)
    whole = ("--steps", 4, "--batch", 2, "--tokens", 16, "--lr", 0.01)
    whole += ("--lora", 2) if base else ("--layers", 1, "--hidden", 8, "--vocabulary", 257)
    files = {}
    for options in (whole, ()):
        folder = tmp_path / f"{len(options)}"
        shutil.copytree(root / name, folder)
        command = ("finetune", *base, "--text", root / "text.txt", "--out", folder)
        done = run(*command, *options)
        assert done.exit_code == 0, done.output
        assert ("settings taken from the earlier run: " in done.output) == (not options)
        files[options] = next((folder / "model").glob("*model.safetensors")).read_bytes()
        assert run(*command).output.count("is finished") == 1, "it takes no more steps"
    assert files[whole] == files[()]


KEPT = [each for each in dataclasses.fields(Settings) if each.metadata.get("kept", True)]
NOT_OWN = {"method"}  # the data are read for it


@pytest.mark.parametrize("field", KEPT, ids=lambda field: field.name)
def test_a_setting_that_is_not_given_is_that_of_the_run(field: Any) -> None:
    """And one that is given is compared, unless it changes no bit."""
    default = {"dtype": "float32"}.get(field.name, field.default)
    before = {field.name: ["other"], "text": "a.txt"}
    now = {field.name: default, "text": "a.txt"}
    own = own_settings(Settings(), now, before)
    assert own == ({} if field.name in NOT_OWN else {field.name: ["other"]})
    settings: Any = types.SimpleNamespace(**{each.name: each.default for each in KEPT}, epochs=None)
    setattr(settings, field.name, "given")
    assert own_settings(settings, now | {field.name: "given"}, before) == {}
    actual = differences(before, now | {field.name: "given"}, ended=False)
    assert bool(actual) == (field.name not in ("recompute_every", "keep", "offload", "save_every"))


# ---- files of a run, and the rules by which it goes on ------------------------------------------
@pytest.mark.parametrize(
    ("before", "now", "ended", "expected"),
    [
        ({"steps": 4}, {"steps": 4}, False, ""),
        ({"steps": 4}, {"steps": 6}, False, "steps 4 (now 6)"),
        ({"steps": 4}, {"steps": 6}, True, ""),
        ({"steps": 4}, {"steps": 3}, True, "steps 4 (now 3)"),
        ({"epochs": 1.0, "steps": None}, {"epochs": 2.0, "steps": None}, True, ""),
        ({"epochs": None}, {"epochs": 2.0}, True, "epochs None (now 2.0)"),
        ({"steps": 4, "evaluate_every": 1}, {"steps": 6, "evaluate_every": 2}, True, ""),
        ({"steps": 4, "lr": 0.1}, {"steps": 6, "lr": 0.2}, True, "lr 0.1 (now 0.2)"),
        ({}, {"lr": 0.2}, False, ""),
        ({"keep": ["rope"]}, {"keep": ("rope",)}, False, ""),
        ({"lora_targets": ["a"]}, {"lora_targets": ("a",)}, False, ""),
        ({"text": "a"}, {"text": "b"}, False, "text a (now b)"),
        (
            {"text": "a", "text_sha256": "1", "text_bytes": 1000, "text_file": "/a"},
            {"text": "a", "text_sha256": "2", "text_bytes": 2000, "text_file": "/a"},
            False, "another text: /a has changed since (1,000 bytes then, 2,000 now)",
        ),
        (
            {"text": "python-docs", "text_sha256": "1", "text_bytes": 1000},
            {"text": "python-docs", "text_sha256": "2", "text_bytes": 1000},
            False, "another text: Python's documentation has changed since (1,000 bytes both)",
        ),
        (
            {"text": NAME, "text_sha256": "1"}, {"text": NAME, "text_sha256": "2"},
            False, "another text: an iterable of rows has changed since (0 bytes both)",
        ),
        (
            {"text": "a", "text_sha256": "1", "text_file": "/a"},
            {"text": "b", "text_sha256": "2", "text_file": "/b"}, False,
            "another text: /a (now /b)",
        ),
        (
            {"text": "a", "text_sha256": "1", "text_file": "/a"},
            {"text": "python-docs", "text_sha256": "2", "text_file": None}, False,
            "another text: /a (now python-docs)",
        ),
        ({"base": None}, {"base": {}}, False, ""),
        (
            {"base": {"reward a/m": {"sha256": 1}, "new tokens": {"sha256": 1}}},
            {"base": {"reward a/m": {"sha256": 1, "bytes": 2}, "new tokens": {"sha256": 2}}},
            False, "new tokens has changed since",
        ),
        ({"base": {}}, {"base": {"the model": {"sha256": 1}}}, False,
         "another base model: the model is new"),
    ],
)  # fmt: skip
def test_what_differs_from_the_run_before(
    before: Any, now: Any, ended: bool, expected: str
) -> None:
    assert "; ".join(differences(before, now, ended=ended)) == expected


def test_settings_of_before_stand_in_for_defaults() -> None:
    before = {"steps": 9, "epochs": None, "evaluate_every": 3, "lr": 0.5, "dtype": "float32",
              "method": "dpo", "base": "b", "eval": 0.1, "text": "a"}  # fmt: skip
    whole = {"steps": 9, "evaluate_every": 3, "lr": 0.5, "dtype": "float32"}
    none = dict.fromkeys(before)
    assert own_settings(Settings(), none, before) == whole
    assert own_settings(Settings(), before, before) == {"dtype": "float32"}
    for given in ({"steps": 2}, {"epochs": 2.0}):
        assert own_settings(Settings(**given), none, before) == {"lr": 0.5, "dtype": "float32"}
    given = own_settings(Settings(lr=0.1), none, before)
    assert given == {name: value for name, value in whole.items() if name != "lr"}


def test_broken_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    for text in ("[]", "{", '{"base": 1}', '{"base": {"a": 1}}', '{"steps": "4"}',
                 '{"text_bytes": []}', '{"outlier": true}'):  # fmt: skip
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"settings\.json is broken; name a new folder with"):
            read_settings(path)
    values = {"base": None, "steps": None, "epochs": 1.5, "outlier": 1.0, "offload": True}
    for offload in (True, None):
        path.write_text(json.dumps(values | {"offload": offload}))
        assert read_settings(path) == values | {"offload": offload}
    path.write_text(json.dumps(values | {"offload": False, "base": {"a": {}}}))
    assert read_settings(path) == {n: v for n, v in values.items() if n != "offload"} | {
        "base": {"a": {}}
    }
    assert not requests_more({"steps": 4, "epochs": None}, {"steps": 4, "epochs": 2})
    assert requests_more({"steps": 4}, {"steps": 5})
    assert requests_more({"epochs": 1}, {"epochs": 1.5})


def test_stored_settings_are_those_of_the_user(tmp_path: Path) -> None:
    text = Text("a.txt", tmp_path / "a.txt", BytesIO, 14, 9, "words", "digest", "")
    new = stored_settings(Settings(lr=0.5), text, None, {"a": 1})
    assert new["model"] is None
    assert new["text_file"] == str((tmp_path / "a.txt").resolve())
    sizes = Settings().decided(new=True)
    assert (new["steps"], new["evaluate_every"]) == (sizes.steps, sizes.evaluate_every)
    assert {n: new[n] for n in SIZES} == SIZES
    assert (new["base"], new["lr"], new["keeps_best"], new["reference"]) == ({"a": 1}, 0.5, 0, None)
    assert not {"pack", "outlier", "out", "epochs"} & new.keys()
    assert {"loss_scale", "dynamic_scaling", "keep", "lora", "trained_tokens"} & new.keys() == {
        "loss_scale", "dynamic_scaling", "keep", "lora",
    }  # fmt: skip
    rates = [stored_settings(Settings(), text, source, {})["lr"] for source in (None, tmp_path)]
    assert rates == [4e-3, 1e-4]
    by_epochs = stored_settings(Settings(epochs=2.0, evaluate_every=3), text, None, {})
    assert (by_epochs["steps"], by_epochs["epochs"], by_epochs["evaluate_every"]) == (None, 2.0, 3)
    old = stored_settings(Settings(reference="there", patience=2), text, tmp_path, {})
    assert (old["steps"], old["epochs"], old["evaluate_every"]) == (None, None, None)
    assert old["model"] == str(tmp_path.resolve())
    assert old["reference"] == str(Path("there").resolve())
    assert old["keeps_best"]
    assert not SIZES.keys() & old.keys()
    assert stored_settings(Settings(steps=3), text, tmp_path, {})["steps"] == 3
    rows: Any = Records.__new__(Records, *[()] * len(Records._fields))
    rows = rows._replace(name="rows", path=None, size=1, digest="digest")
    of_rows = stored_settings(Settings(), rows, tmp_path, {})
    assert (of_rows["pack"], of_rows["tokens"], of_rows["outlier"]) == (True, None, 1.5)
    assert of_rows["text_file"] is None
    assert not stored_settings(Settings(pack=False), rows, tmp_path, {})["pack"]
    assert stored_settings(Settings(pack=True, tokens=9), rows, None, {})["tokens"] == 9


STEP = {"step": 1, "loss": 2.0, "seconds": 1, "tokens_per_second": None, "memory_bytes": 9}
EVALUATED = {"step": 1, "held_out_loss": 2.0, "held_out_tokens": 5}


@pytest.mark.parametrize(
    ("line", "valid"),
    [
        (STEP, True), (STEP | {"kl": None, "gradient_norm": None}, True), (EVALUATED, True),
        (EVALUATED | {"accuracy": None}, True), ({"step": 1, "stopped": "why"}, True),
        ({"step": 1}, True), (STEP | {"loss": None}, False), (STEP | {"seconds": None}, False),
        (STEP | {"kl": "x"}, False), (STEP | {"stopped": 1}, False), ([], False),
        ({"loss": 1}, False), ({"step": 1.5}, False), ({"step": True}, False),
        ({n: v for n, v in STEP.items() if n != "memory_bytes"}, False),
        ({"step": 1, "held_out_loss": 2.0}, False), (EVALUATED | {"held_out_loss": None}, False),
        (STEP | EVALUATED, True),
    ],
)  # fmt: skip
def test_lines_of_a_log(line: Any, valid: bool, tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    assert files.lines() == []
    files.log.write_text(json.dumps(STEP) + "\n" + json.dumps(line) + '\n{"step": 2')
    if valid:
        assert files.lines() == [STEP, line]
        return
    with pytest.raises(ConfigError, match=r"log\.jsonl:2 is broken; remove this line, or name a"):
        files.lines()


def test_a_log_is_trimmed_to_a_step(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    lines = [EVALUATED | {"step": step, "held_out_loss": loss}
             for step, loss in ((0, 3.0), (1, 1.0), (2, 1.0), (3, 2.0))]  # fmt: skip
    for line in lines:
        files.append(line)
        files.append_sample({"step": line["step"], "text": "\u00e9"})
    files.samples.write_bytes(files.samples.read_bytes() + b'[]\n{"step": "1"}\n\xff\n{"step": 1')
    assert files.best() == lines[1], "the first of equal ones"
    assert [files.evaluated(step) for step in (1, 4)] == [True, False]
    files.trim(1)
    assert files.lines() == lines[:2]
    assert [*files.beside(files.samples)] == [{"step": n, "text": "\u00e9"} for n in (0, 1)]
    assert not files.routing.exists()
    files.append(STEP | {"step": 2})
    assert not files.evaluated(2)
    assert files.stopped is None
    files.append({"step": 2, "stopped": "why"})
    files.append(EVALUATED | {"step": 2})
    assert files.stopped == "why", "evaluations come later"
    files.append(STEP | {"step": 3})
    assert files.stopped is None, "it went on"
    assert RunFolder(tmp_path / "none").best() is None
    assert RunFolder(tmp_path / "none").stopped is None


def test_checkpoints_are_sorted_and_dropped(tmp_path: Path) -> None:
    files = RunFolder(tmp_path)
    assert files.newest_checkpoint() is None
    names = [f"checkpoint-{step:08d}" for step in (9, 200, 1000)]
    for name in [*names[::-1], "checkpoint-00002000.partial"]:
        (tmp_path / name).mkdir()
    assert [path.name for path in files.checkpoints()] == names
    assert files.newest_checkpoint() == tmp_path / names[-1]
    files.drop_checkpoints(before=names[1])
    assert [path.name for path in files.checkpoints()] == names[1:]
    files.drop_checkpoints()
    assert [*tmp_path.iterdir()] == []
    assert files.known() == {}
    files.settings.write_text('{"model": null, "outlier": 2}')
    assert files.known() == {}, "it has no run yet"
    assert (files.outlier, files.of_new_model) == (2.0, True)
    (tmp_path / names[0]).mkdir()
    assert files.known() == {"model": None, "outlier": 2}
    files.settings.write_text('{"model": "m"}')
    assert (files.outlier, files.of_new_model) == (1.0, False)


def claimed(folder: Path, **settings: Any) -> RunFolder:
    files = RunFolder(folder)
    with files.claimed({"text": "a", "steps": 4, "outlier": 1.5, **settings}):
        files.append(STEP)
    return files


def test_a_folder_is_claimed_for_one_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out=.*file is a file; name a folder"):
        claimed(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"out=.*/in: Not a directory; name another folder"):
        claimed(tmp_path / "file" / "in")
    with pytest.raises(ConfigError, match="is not empty and holds no run; name a new folder"):
        claimed(tmp_path)
    folder = tmp_path / "a" / "run"
    files = RunFolder(folder)
    with files.claimed({}):
        assert files.settings.is_file()
        with pytest.raises(ConfigError, match="is in use by another run; name a new folder"):
            claimed(folder)
        for path in (files.samples, files.reference, files.rows):
            path.touch()
        files.best_model.mkdir()
    assert not folder.parent.exists(), "as it was: nothing has begun"
    folder.parent.mkdir()
    (folder.parent / "other").touch()
    with pytest.raises(KeyError), files.claimed({}):
        raise KeyError
    assert [path.name for path in folder.parent.iterdir()] == ["other"]
    (folder / "x.partial").mkdir(parents=True)
    (folder / "settings.json").touch()
    claimed(folder)
    assert {path.name for path in folder.iterdir()} == {"settings.json", "log.jsonl"}
    claimed(folder, steps=5)
    assert json.loads(files.settings.read_text())["steps"] == 5, "without a checkpoint it is new"


def test_a_run_takes_more_steps_once_it_has_ended(tmp_path: Path) -> None:
    files = claimed(tmp_path / "run")
    checkpoint = files.folder / "checkpoint-00000002"
    checkpoint.mkdir()
    before = files.settings.read_bytes()
    same = "holds a run with {}. To resume that run, pass the same options; to start a new run"
    with pytest.raises(ConfigError, match=re.escape(same.format("steps 4 (now 6)"))):
        claimed(files.folder, steps=6)
    both = re.escape(same.format("text a (now b); steps 4 (now 6)"))
    with pytest.raises(ConfigError, match=both):
        claimed(files.folder, steps=6, text="b")
    claimed(files.folder)
    assert files.settings.read_bytes() == before
    checkpoint.rename(files.folder / "checkpoint-00000004")
    with pytest.raises(
        ConfigError, match="resume that run for more steps or epochs, pass the same"
    ):
        claimed(files.folder, text="b")
    claimed(files.folder, steps=6)
    assert read_settings(files.settings)["steps"] == 6
    files.model.mkdir()
    files._write({"text": "a", "steps": 6})
    claimed(files.folder, steps=7)
    assert not files.model.exists()
    assert read_settings(files.settings) == {"text": "a", "steps": 7, "outlier": 1.0}
    files.model.mkdir()
    files.drop_checkpoints()
    claimed(files.folder, steps=7)
    with pytest.raises(ConfigError, match="holds no checkpoint to resume from; name a new folder"):
        claimed(files.folder, steps=8)
    assert files.model.exists()


def test_the_reason_of_an_end_is_logged_once(tmp_path: Path) -> None:
    heard = list[str]()
    listener = Listener()
    listener.announce = heard.append  # type: ignore[method-assign]
    files = RunFolder(tmp_path)
    assert not is_past_best(files, Settings(patience=1).decided(new=True)), "no evaluation yet"
    for step, loss in enumerate((3.0, 2.0, 1.95, 2.5)):
        files.append(EVALUATED | {"step": step, "held_out_loss": loss})
    best = "; the saved model is from step 2, which has the lowest evaluation loss (1.950)"
    for settings, past, reason in (
        ({}, False, "requested by a callback"),
        ({"keep_best": True}, False, f"requested by a callback{best}"),
        ({"patience": 1}, True, f"no lower evaluation loss in 1 evaluation{best}"),
        ({"patience": 2}, False, f"requested by a callback{best}"),
        ({"patience": 2, "min_delta": 0.1}, True,
         f"no lower evaluation loss (by 0.1) in 2 evaluations{best}"),
    ):  # fmt: skip
        plan = Settings(**settings).decided(new=True)
        assert is_past_best(files, plan) == past
        for _ in range(2):
            with hearing(listener):
                log_reason(files, plan, 3)
        assert heard[-1] == heard[-2] == f"stopped at step 3: {reason}"
        assert files.stopped == heard[-1]
    assert len(files.lines()) == 4 + 5, "a reason that stands last is not repeated"


def test_an_adapter_has_its_own_tokenizer_or_that_of_its_base(tmp_path: Path) -> None:
    """And a run the folder of its model, or of its newest checkpoint."""
    for name in ("base", "adapter", "run/model"):
        (tmp_path / name).mkdir(parents=True)
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    (base / "config.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert words_folder(adapter) == base
    assert words_folder(base) == base
    other = shutil.copytree(base, tmp_path / "other")
    assert words_folder(adapter, other) == other
    (adapter / "tokenizer.json").write_text("{}")
    assert words_folder(adapter) == words_folder(adapter, other) == adapter
    assert config_file(base) == config_file(base / "config.json") == base / "config.json"
    assert config_file(adapter) == base / "config.json"
    assert model_folder(adapter) == adapter
    model = tmp_path / "run" / "model"
    (model / "config.json").write_text("{}")
    assert model_folder(tmp_path / "run") == model
    assert config_file(tmp_path / "run") == model / "config.json"
    for path, said in (
        (tmp_path / "none", "none does not exist; pass a folder that contains config.json"),
        (tmp_path / "base" / "config.json", "is a file; name the folder that holds config.json"),
        (tmp_path, "holds no config.json; name a Hugging Face model folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            model_folder(path)
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(ConfigError, match="has not finished, and has saved no checkpoint yet; res"):
        model_folder(tmp_path)


def test_files_are_read_again_if_they_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "BLOCK", 7)
    content = {"config.json": b"{}", "a.safetensors": b"0123456789", "other.bin": b"x"}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    known = fingerprints(tmp_path, {})
    assert [*known] == ["a.safetensors", "config.json"]
    for name, each in known.items():
        assert each["sha256"] == hashlib.sha256(content[name]).hexdigest()
        assert each["bytes"] == len(content[name])
    told = {name: each | {"sha256": "known"} for name, each in known.items()}
    assert fingerprints(tmp_path, told) == told, "they are not read"
    for key in ("bytes", "changed", "inode"):
        stale = {name: each | {key: 0} for name, each in told.items()}
        assert fingerprints(tmp_path, stale) == known
