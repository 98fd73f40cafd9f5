"""A run that is asked to stop, one that is given more, and one that is asked for something else."""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy.finetune import Listener, Lora, Settings, Trainer
from unsloth_cupy.finetune.run import interrupt
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.finetune.run.resume import differences, own_settings
from unsloth_cupy.finetune.run.run_folder import RunFolder, model_without_weights
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
        assert f"stopped after step {step - 1}, saved in" in result.stderr
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
    assert "stopped before the first evaluation: nothing was saved" in result.stderr
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
    assert table.startswith(f"steps {first} to {last}\n")
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
    assert (out / "profile.txt").read_text().startswith("steps 1 to 3\n")
    assert run(*command).exit_code == 0
    assert (out / "profile.txt").read_text().startswith("steps 3 to 6\n")


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
