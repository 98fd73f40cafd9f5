"""A run stops where a value is not finite, says where that began, and keeps the last good state."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from unsloth_cupy.finetune.run import loop
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.finetune.run.run_folder import RunFolder

from ..cli.test_cli import assert_one_clear_error, numbers, run, weights

SMALL = (
    "--steps", "8", "--batch", "2", "--tokens", "16", "--layers", "1", "--hidden", "32",
    "--vocabulary", "300", "--evaluate-every", "9", "--lr", "0.01",
)  # fmt: skip


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "numbers.txt"
    path.write_text("\n\n".join(f"{i} and {i * i} are numbers." for i in range(200)))
    return path


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    result = run("finetune", "--text", text, "--out", folder, *SMALL)
    assert result.exit_code == 0, result.output
    return folder


def stopped(*arguments: Any) -> Any:
    with np.errstate(all="ignore"):
        return run("finetune", *arguments)


def explode(patch: pytest.MonkeyPatch, at: int) -> None:
    """Let the rate of one step be far too large."""
    rate = loop.rate_of
    patch.setattr(loop, "rate_of", lambda step, plan: 1e25 if step == at else rate(step, plan))


@pytest.mark.slow
def test_looking_changes_no_bit(finished: Path, text: Path, tmp_path: Path) -> None:
    result = run("finetune", "--text", text, "--out", tmp_path / "run", *SMALL, "--find-nan")
    assert result.exit_code == 0, result.output
    assert weights(tmp_path / "run") == weights(finished)
    assert numbers(tmp_path / "run") == numbers(finished)


@pytest.mark.parametrize("every", [1, 9], ids=["held out", "learned"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_weight_is_named(
    value: float, every: int, finished: Path, text: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(finished / "model" / "model.safetensors")
    tensors[name][3, 4] = value
    for path in (finished / "model").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    options = (tmp_path, "--text", text, "--steps", 2, "--batch", 2, "--tokens", 16)
    if every == 9:  # as if nothing were held out
        monkeypatch.setattr(Loop, "_evaluate", lambda *_: None)
    where = "step 1: batch 0 (rows from tokens" if every > 1 else "after step 0: evaluation batch"
    result = stopped(*options, "--out", tmp_path / "run", "--find-nan")
    assert_one_clear_error(
        result, where, f"linear at {name} returned the first value that is not finite: y (2, 16, ",
        f"not finite before: weight ({name})", "copy the model again",
    )  # fmt: skip
    result = stopped(*options, "--out", tmp_path / "run")
    assert_one_clear_error(
        result, where.partition(":")[0], "loss is nan", "--find-nan reports the layer"
    )


@pytest.mark.slow
def test_the_batch_names_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explode(monkeypatch, 3)
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(f'{{"text": "{i} and {i + 1}."}}\n' for i in range(60)))
    result = stopped("--text", path, "--out", tmp_path / "run", *SMALL, "--find-nan")
    assert_one_clear_error(result, "step 4: batch 3 (lines ", " of lines.jsonl): ", "all its arg")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--find-nan",), ("--accumulate", 2, "--find-nan")])
def test_the_last_good_state_is_kept(
    more: Any, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that explode are saved before a loss can show it: the state before them stays."""
    folder = tmp_path / "run"
    command = ("--text", text, "--out", folder, *SMALL, "--save-every", 1, *more)
    with monkeypatch.context() as patch:
        explode(patch, 4)
        result = stopped(*command)
    good = folder / "checkpoint-00000003"
    assert_one_clear_error(result, "step 5: ", f"the last good checkpoint is {good}")
    assert ("batch 8 (" if "--accumulate" in more else "batch 4 (") in result.stderr or not more
    actual = [path.name for path in RunFolder(folder).checkpoints()]
    assert actual == ["checkpoint-00000003", "checkpoint-00000004"]
    assert all(np.isfinite(a).all() for a in load_file(good / "model.safetensors").values())
    again = stopped(*command)  # from the newest: it says the same, and keeps the same
    assert_one_clear_error(again, "step 5: ", f"the last good checkpoint is {good}")
    rest = ("--steps", 2, "--batch", 2, "--tokens", 16, "--lr", 0.001)
    assert stopped(good, "--text", text, "--out", tmp_path / "new", *rest).exit_code == 0


@pytest.mark.slow
def test_weights_that_are_not_finite_are_not_saved(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Loop._one_step

    def overflowing(self: Loop) -> None:
        step(self)
        if self.step == 4:
            next(iter(self.checkpoints.part().trained.values()))[0, 0] = np.inf

    monkeypatch.setattr(Loop, "_one_step", overflowing)
    folder = tmp_path / "run"
    result = stopped("--text", text, "--out", folder, *SMALL, "--save-every", 2)
    assert_one_clear_error(result, "after step 4: the weight model.embed_tokens.weight is not")
    assert [path.name for path in RunFolder(folder).checkpoints()] == ["checkpoint-00000002"]


@pytest.mark.slow
def test_one_checkpoint_is_left_once_it_is_known_to_be_good(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    step = Loop._one_step

    def looking(self: Loop) -> None:
        step(self)
        seen.append([path.name[-1] for path in self.run.checkpoints()])

    monkeypatch.setattr(Loop, "_one_step", looking)
    options = (*SMALL, "--save-every", 2)
    assert run("finetune", "--text", text, "--out", tmp_path / "run", *options).exit_code == 0
    assert seen == [[], [], ["2"], ["2"], ["4"], ["4"], ["6"], ["6"]]


@pytest.mark.slow
def test_skipped_steps_of_float16_are_no_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scaler shrinks its scale where gradients overflow; looking for NaN does not stop that."""
    from unsloth_cupy.training.precision import MixedPrecisionConfig

    scaler = MixedPrecisionConfig.scaler

    def large(self: MixedPrecisionConfig) -> Any:
        made = scaler(self)
        made.value = 2.0**28
        return made

    monkeypatch.setattr(MixedPrecisionConfig, "scaler", large)
    options = (*SMALL, "--dtype", "float16")
    logs = []
    for name, more in (("plain", ()), ("looking", ("--find-nan",))):
        result = run("finetune", "--text", text, "--out", tmp_path / name, *options, *more)
        assert result.exit_code == 0, result.output
        assert not re.search("Warning", result.output)
        logs.append(numbers(tmp_path / name))
    assert logs[0] == logs[1]
    assert logs[0][-2]["skipped_steps"] > 0
