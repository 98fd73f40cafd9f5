"""What a run chooses where nothing is asked for, and names that people bring from elsewhere."""

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import machine, models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Run, Settings, Trainer, evaluate
from unsloth_cupy.finetune.listener import Listener
from unsloth_cupy.finetune.run import preparation
from unsloth_cupy.finetune.run.preparation import dtype_of
from unsloth_cupy.finetune.run.resume import OUTLIER
from unsloth_cupy.models.adapters.adapter_base import cached

from ..cli.test_cli import assert_one_clear_error, run
from ..machines.stand_in import gpu


class Words(Listener):
    def __init__(self) -> None:
        self.said: list[str] = []

    def announce(self, text: str) -> None:
        self.said.append(text)


def rows(path: Path, lengths: list[int]) -> Path:
    each = [{"prompt": f"{n}", "completion": "x" * length} for n, length in enumerate(lengths)]
    lines = [json.dumps(row) for row in each]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    text = folder / "sums.txt"
    text.write_text("\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(200)))
    size = {"batch": 2, "tokens": 16, "layers": 1, "hidden": 32, "vocabulary": 300}
    return Trainer(None, text, Settings(**size, steps=1, out=folder / "run")).train().files.model


def heard(base: Path | None, data: Path, out: Path, **settings: Any) -> tuple[Run, str]:
    words = Words()
    made = Trainer(base, data, Settings(out=out, **settings), listener=words).train()
    return made, "\n".join(words.said)


def test_rows_are_as_long_as_most_lines_need(base: Path, tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", [*range(1, 200), 3000])
    made, said = heard(base, data, tmp_path / "run", steps=1)
    assert made.loop is not None
    lengths = [int(n) for n in made.loop.training_data.batches.lengths]
    tokens = made.loop.plan.tokens
    assert (
        f"maximum length {tokens} tokens: covers 99 % of the examples (set tokens to change)"
        in said
    )
    assert np.mean([length < tokens for length in lengths]) > 0.97
    assert tokens < 2048 == made.model.config.positions
    again, said = heard(base, data, tmp_path / "run", steps=1)
    assert again.loop is None
    long, said = heard(base, data, tmp_path / "long", steps=1, tokens=2000, batch=1)
    assert long.loop is not None
    assert long.loop.plan.tokens == 2000
    assert "99 %" not in said


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("most", "whole"), [(149, True), (300, False)])
def test_the_longest_row_is_whole_unless_it_is_far_longer(
    most: int, whole: bool, sampled: bool, base: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Also if it is not in the sample that is counted of a large file."""
    if sampled:
        monkeypatch.setattr(preparation, "COUNTED_ROWS", 120)
        monkeypatch.setattr(preparation, "LONGEST_ROWS", 2)
    data = rows(tmp_path / "rows.jsonl", [*[100] * 150, most, *[100] * 49])
    made, said = heard(base, data, tmp_path / "run", steps=1)
    assert made.loop is not None
    tokens = made.loop.plan.tokens
    assert ("the longest example" in said) == whole
    assert ("covers 99 % of the examples" in said) != whole
    assert ("none dropped or truncated" in said) == whole
    assert (max(made.loop.training_data.batches.lengths) == tokens) or whole
    assert settings_of(made)["outlier"] == OUTLIER


def test_a_run_of_before_keeps_its_rows(base: Path, tmp_path: Path) -> None:
    """They were cut above what 99 % of them need, and so they are in more steps."""
    data = rows(tmp_path / "rows.jsonl", [*[100] * 200, 140])
    made, _ = heard(base, data, tmp_path / "run", steps=1)
    assert made.loop is not None
    path = made.files.settings
    kept = settings_of(made)
    del kept["outlier"]
    path.write_text(json.dumps(kept))
    for steps in (2, 3):
        again, said = heard(base, data, tmp_path / "run", steps=steps)
        assert again.loop is not None
        assert "covers 99 % of the examples" in said
        assert again.loop.plan.tokens < made.loop.plan.tokens


def test_rows_are_not_longer_than_the_model(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "short"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20}))
    made, _ = heard(folder, rows(tmp_path / "rows.jsonl", [90] * 9), tmp_path / "run", steps=1)
    assert made.loop is not None
    assert made.loop.plan.tokens == 20


@pytest.mark.parametrize(("most", "epochs"), [(1000, 3), (20, 2), (5, 1)])
def test_steps_are_one_to_three_epochs_by_size(
    most: int, epochs: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (steps,) = (field for field in dataclasses.fields(Settings) if field.name == "steps")
    assert f"more than {preparation.MOST_STEPS} steps" in steps.metadata["text"]
    monkeypatch.setattr(preparation, "MOST_STEPS", most)
    data = rows(tmp_path / "rows.jsonl", [10] * 40)
    made, said = heard(base, data, tmp_path / "run", batch=4, tokens=16, pack=False)
    assert made.loop is not None
    assert made.loop.plan.steps == -(-36 * epochs // 4)
    assert made.loop.plan.evaluate_every == -(-made.loop.plan.steps // 10)
    assert f"{epochs}.0 epochs = {made.loop.plan.steps} steps (set epochs or steps to" in said
    again, _ = heard(base, data, tmp_path / "run", batch=4, tokens=16, pack=False)
    assert again.loop is None, "the same run"


OTHERS = {
    "--learning-rate": "--lr", "--learning_rate": "--lr", "--max-seq-length": "--tokens",
    "--num-epochs": "--epochs", "--batch-size": "--batch", "--warmup-ratio": "--warmup",
    "--evaluate": "--eval", "--schedule": "--pipeline-schedule", "--output-dir": "--out",
    "--lora-r": "--lora",
}  # fmt: skip


@pytest.mark.parametrize(("theirs", "own"), OTHERS.items(), ids=OTHERS)
def test_names_of_others_get_the_right_suggestion(theirs: str, own: str) -> None:
    result = run("finetune", theirs, "1")
    assert result.exit_code == 2
    assert f"No such option: {theirs}" in result.output or f"No such option '{theirs}'" in (
        result.output
    )
    assert f"Did you mean {own}?" in result.output or f"Did you mean '{own}'?" in result.output


def test_a_file_of_data_by_another_name_is_suggested_as_the_command_has_it() -> None:
    from unsloth_cupy.cli.finetune import finetune

    known = {flag for each in finetune.params for flag in each.opts}
    own = "--data" if "--data" in known else "--text"
    assert own in run("finetune", "--dataset", "x.jsonl").output
    assert "--data" in run("evaluate", "x", "--text", "x.jsonl").output


def test_a_model_is_found_in_the_local_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "hub" / "models--some-owner--some-model"
    shutil.copytree(base, home / "snapshots" / "abc123")
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("abc123")
    assert cached("some-owner/some-model") == [home / "snapshots" / "abc123"]
    data = rows(tmp_path / "rows.jsonl", [10] * 9)
    done = run("finetune", "some-owner/some-model", "--text", data, "--steps", 1, "--lora", 2)
    assert done.exit_code == 0, done.output
    settings = json.loads(Path("runs/some-model-rows/model/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "some-owner/some-model"
    (result,) = evaluate("some-owner/some-model", data)
    assert result.tokens
    other = run("finetune", "some-owner/other-model", "--text", data)
    assert_one_clear_error(other, "hf download some-owner/other-model")
    assert cached("../some-owner") == cached("some-model") == []
    made = Trainer("some-owner/some-model", data, Settings(steps=1), lora=Lora(2)).train()
    assert made.loop is None, "the run of the command"


@contextmanager
def one_gpu(capability: str = "80") -> Iterator[Any]:
    """Replace CuPy by a stand-in for a GPU, whose launches write some numbers."""
    with pytest.MonkeyPatch.context() as patch, gpu("80", devices=1) as device:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        device.strict, device.runs, device.capability = False, True, capability
        yield device


def settings_of(run: Run) -> Any:
    return json.loads(run.files.settings.read_text())


NEW = {"batch": 2, "tokens": 16, "layers": 1, "hidden": 32, "vocabulary": 300, "evaluate_every": 9}


def test_a_run_is_on_the_gpu_in_sixteen_bits_and_goes_on_anywhere_in_them(
    base: Path, tmp_path: Path
) -> None:
    text = base.parents[1] / "sums.txt"
    with one_gpu():
        first, said = heard(None, text, tmp_path / "run", steps=1, **NEW)
        assert first.loop is not None
        assert type(first.model.table) is sys.modules["cupy"].ndarray
    assert "training on a GPU, bfloat16" in said
    assert settings_of(first)["dtype"] == "bfloat16"
    second, said = heard(None, text, tmp_path / "run", steps=2, **NEW)
    assert second.loop is not None
    assert "training on the CPU, bfloat16" in said
    other, said = heard(None, text, tmp_path / "other", steps=1, **NEW)
    assert "training on the CPU, float32" in said
    with one_gpu():
        third, said = heard(None, text, tmp_path / "other", steps=2, **NEW)
        assert third.loop is not None
    assert "training on a GPU, float32" in said, "the dtype of the run"
    assert settings_of(other)["dtype"] == "float32"


@pytest.mark.parametrize(
    ("stored", "lora", "expected"),
    [
        ("float32", None, "bfloat16"),
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "float16"),
        ("float16", {"lora": 2}, "float16"),
        ("float32", {"lora": 2, "merge_into": "q4_0"}, "float32"),
        ("bfloat16", {"lora": 2, "merge_into": "q4_0"}, "bfloat16"),
    ],
)
@pytest.mark.parametrize("in_memory", [False, True])
def test_the_dtype_on_a_gpu_is_the_models_own_of_sixteen_bits(
    stored: str, lora: Any, expected: str, in_memory: bool, base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    models.load(base, dtype=stored).save(folder)
    with one_gpu():
        model: Any = models.load(folder, device="auto") if in_memory else folder
        settings = Settings(steps=1, out=tmp_path / "run", **(lora or {}))
        trainer = Trainer(model, rows(tmp_path / "rows.jsonl", [10] * 9), settings)
        chosen = dtype_of(trainer.settings, trainer.source, trainer.transformer, trainer.ranks)
    assert chosen == expected


def test_commands_and_models_are_on_the_gpu(base: Path, tmp_path: Path) -> None:
    data = rows(tmp_path / "rows.jsonl", [10] * 3)
    commands = {
        "tokens in .* s": ("generate", base, "x", "--max-new-tokens", 2),
        "evaluating": ("evaluate", base, "--data", data),
        "computing predictions": ("teach", base, "--data", data, "--out", tmp_path / "taught"),
    }
    for what, command in commands.items():
        with one_gpu():
            done = run(*command)
        assert done.exit_code == 0, done.output
        assert re.search(f"{what} on a GPU", done.stderr)
        shutil.rmtree(tmp_path / "taught", ignore_errors=True)
        done = run(*command)
        assert done.exit_code == 0, done.output
        assert re.search(f"{what} on the CPU", done.stderr)
    with one_gpu():
        assert type(models.load(base).table) is np.ndarray
        assert type(models.load(base, device="auto").table) is sys.modules["cupy"].ndarray
        with pytest.raises(ConfigError, match=r"choose 'cpu' .*, 'auto', 'cuda' or 'cuda:1'"):
            models.load(base, device="gpu")
    assert type(models.load(base, device="auto").table) is np.ndarray


@contextmanager
def unusable(problem: str, patch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Make a GPU that is there one that cannot be used."""
    (folder / "nvidia0").touch()
    patch.setattr(machine, "GPU_FILES", [str(folder / "nvidia[0-9]*")])
    patch.delenv("CUDA_VISIBLE_DEVICES")
    if problem == "CuPy is not installed":
        with patch.context() as inner:
            inner.setitem(sys.modules, "cupy", None)
            yield
        return
    with one_gpu("75" if "sm_75" in problem else "80"):
        runtime = sys.modules["cupy.cuda.runtime"]
        if "sm_75" not in problem:

            def fails() -> None:
                raise runtime.CUDARuntimeError(problem)

            patch.setattr(runtime, "getDeviceCount", fails)
            patch.setattr(sys.modules["cupy"].cuda, "is_available", lambda: False)
        yield


CURES = {
    "CuPy is not installed": "pip install 'unsloth-cupy[cuda12]'",
    "a GPU is sm_75, and kernels need sm_80": "use a newer GPU",
    "cudaErrorInsufficientDriver: CUDA driver version is insufficient": "update the driver",
}


@pytest.mark.parametrize("problem", CURES)
def test_a_gpu_that_cannot_be_used_is_named_with_its_cure(
    problem: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows(tmp_path / "rows.jsonl", [10] * 9)
    with unusable(problem, monkeypatch, tmp_path):
        _, said = heard(base, data, tmp_path / "run", steps=1)
        done = run("generate", base, "x", "--max-new-tokens", 2)
        with pytest.warns(UserWarning, match="load: the GPU is not used"):
            assert type(models.load(base, device="auto").table) is np.ndarray
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        hidden = machine.resolve_device("auto")
    assert done.exit_code == 0, done.output
    assert "training on the CPU, float32" in said
    assert "on the CPU, float32: " in done.stderr
    for text in (said, done.stderr):
        (line,) = (line for line in text.splitlines() if "the GPU is not used" in line)
        assert problem in line
        assert CURES[problem] in line
    assert hidden == (None, ""), "nothing is said of a GPU that is hidden"


def test_without_a_gpu_nothing_is_said_of_one(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(machine, "GPU_FILES", [str(tmp_path / "nvidia0")])
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert machine.resolve_device("auto") == (None, "")
    assert machine.resolve_device("cpu") == machine.resolve_device(None) == (None, "")
    assert machine.resolve_device("cuda:1") == ("cuda:1", "")
