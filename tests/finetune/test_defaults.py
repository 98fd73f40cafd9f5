"""What a run chooses where nothing is asked for, and names that people bring from elsewhere."""

import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import machine, models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Run, Settings, Trainer, evaluate
from unsloth_cupy.finetune.data.records import Records
from unsloth_cupy.finetune.data.text import Text
from unsloth_cupy.finetune.listener import Listener, hearing
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.finetune.run import preparation
from unsloth_cupy.finetune.run.preparation import dtype_of
from unsloth_cupy.finetune.run.resume import OUTLIER
from unsloth_cupy.finetune.run.settings import Plan
from unsloth_cupy.models.adapters.adapter_base import cached
from unsloth_cupy.models.configs.names import TABLE
from unsloth_cupy.models.parse import parse

from ..cli.test_cli import assert_one_clear_error, run
from ..machines.stand_in import gpu
from ..models.peers import CONFIGS, SIZES


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
    counted, lengths_in = list[int](), preparation.lengths_in

    def noted(*arguments: Any) -> list[int]:
        counted.append(len(arguments[-1]))
        return lengths_in(*arguments)

    monkeypatch.setattr(preparation, "lengths_in", noted)
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
    assert max(counted) <= (120 if sampled else 200)


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
    assert f"as many as fit in {preparation.MOST_STEPS} steps" in steps.metadata["text"]
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


def test_an_adapter_through_a_quantizer_stays_float32_on_a_gpu(base: Path, tmp_path: Path) -> None:
    """A folder of the adapter says so, if the settings do not."""
    data, first = rows(tmp_path / "rows.jsonl", [10] * 9), tmp_path / "first"
    Trainer(base, data, Settings(steps=1, lora=2, merge_into="q4_0", out=first)).train()
    with one_gpu():
        trainer = Trainer(first / "model", data, Settings(steps=1, out=tmp_path / "run"))
        chosen = dtype_of(trainer.settings, trainer.source, trainer.transformer, trainer.ranks)
    assert chosen == "float32"


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


# ---- rules of the preparation -------------------------------------------------------------------
def plan_of(**settings: Any) -> Plan:
    return Settings(**settings).decided(new=False)


RECORDS: Any = Records(None, "rows", "digest", 1, [], [])
TEXT: Any = Text("a.txt", None, BytesIO, 1, 1, "", "digest", "")


@pytest.mark.parametrize(
    ("text", "pack", "method", "pad", "expected"),
    [
        (RECORDS, None, "sft", 7, (True, 7)), (RECORDS, True, "sft", 8, (True, 8)),
        (RECORDS, False, "sft", 9, (False, 0)), (RECORDS, None, "sft", None, (True, 0)),
        (RECORDS, None, "grpo", 7, (False, 7)), (RECORDS, None, "dpo", 10, (True, 0)),
        (TEXT, None, "sft", 0, (False, 0)),
    ],
)  # fmt: skip
def test_the_shape_of_a_batch(
    text: Any, pack: bool | None, method: str, pad: int | None, expected: tuple[bool, int]
) -> None:
    """Padding is a token that the model has."""
    config: Any = SimpleNamespace(pad_token=pad, vocab=9)
    own = METHODS[method]
    shape = preparation.shape_of(plan_of(pack=pack, batch=3, tokens=8), text, config, own)
    assert shape == (3, 8, expected[0], expected[1], own)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"), (999, "999"), (1000, "1.00k"), (9994, "9.99k"), (9996, "10.0k"),
        (99_940, "99.9k"), (99_960, "100k"), (999_499, "999k"), (999_501, "1.00M"),
        (1_437_184, "1.44M"), (999_500_000, "1.00B"), (123_000_000_000, "123B"),
    ],
)  # fmt: skip
def test_a_number_in_three_digits(number: int, shown: str) -> None:
    assert preparation.compact(number) == shown


def test_parameters_are_counted_over_all_ranks() -> None:
    trained = {"a": np.zeros((2, 3)), "b": np.zeros(4)}
    model: Any = SimpleNamespace(trainable=trained, division=None)
    assert preparation.trainable_count(model) == 10
    assert preparation.trainable_count(model, ["b", "c"]) == 4
    assert preparation.trainable_count(model, []) == 0
    model.division = SimpleNamespace(whole_shape=lambda name, shape: (2, *shape), stages=None)
    assert preparation.trainable_count(model) == 20
    model.division.stages = SimpleNamespace(
        comm=SimpleNamespace(all_reduce=lambda counts: counts + 1)
    )
    assert preparation.trainable_count(model, ["a"]) == 13


@pytest.mark.parametrize(
    ("end", "known", "stored", "expected"),
    [
        (7, (), {}, {"eos_token_id": 7}), (7, (7,), {}, {"eos_token_id": 7}),
        (7, (3,), {}, {"eos_token_id": [3, 7]}), (7, (3, 7), {}, {"eos_token_id": [3, 7]}),
        (7, (), {"eos_token_id": 1, "top_k": 2}, {"eos_token_id": 7, "top_k": 2}),
        (None, (3,), {"top_k": 2}, None), (ConfigError("refused"), (3,), {}, None),
    ],
)  # fmt: skip
def test_a_model_ends_where_its_answers_end(
    end: Any, known: Any, stored: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ending(chat: Any, tokenizer: Any, tokens: Any) -> Any:
        if isinstance(end, ConfigError):
            raise end
        assert tokens == known
        return SimpleNamespace(token=end)

    monkeypatch.setattr(preparation, "ending", ending)
    chat: Any = None
    model: Any = SimpleNamespace(
        config=SimpleNamespace(end_tokens=known),
        texts={"generation_config.json": stored} if stored else {},
    )
    files = preparation.ends_file(model, chat, None)
    if expected is None:
        assert files == {}
    else:
        assert {name: json.loads(text) for name, text in files.items()} == {
            "generation_config.json": expected
        }


@pytest.mark.parametrize("dropout", [None, 0.0, 0.5])
@pytest.mark.parametrize("asked", [0.0, 0.5])
@pytest.mark.parametrize("divided", [False, True])
def test_ranks_that_split_a_model_have_no_dropout(
    divided: bool, asked: float, dropout: float | None
) -> None:
    adapter = None if dropout is None else SimpleNamespace(dropout=dropout, into=None)
    sizes = list[int]()
    model: Any = SimpleNamespace(
        config=SimpleNamespace(vocab=9), division=1 if divided else None, adapter=adapter,
        resize=sizes.append,
    )  # fmt: skip
    plan = plan_of(lora=None if adapter else 2, lora_dropout=asked)
    for rows_ in (9, 10):
        if divided and (asked or dropout):
            cure = "set it to 0 in adapter_config.json" if dropout else "leave lora_dropout out"
            said = "lora_dropout is not supported when ranks split the model; " + cure
            with pytest.raises(ConfigError, match=re.escape(said)):
                preparation.add_adapters(model, plan, rows_, new=False)
        else:
            preparation.add_adapters(model, plan, rows_, new=False)
    assert sizes == [10], "a table grows for new tokens"


def test_new_adapters_are_in_the_order_of_a_file() -> None:
    config = SimpleNamespace(vocab=9)
    for settings, new, added in (({"lora": 2}, True, 1), ({"lora": 2}, False, 0), ({}, True, 0)):
        given = list[Any]()
        model: Any = SimpleNamespace(config=config, division=None, adapter=None)

        def add(model: Any = model, given: Any = given, **options: Any) -> None:
            given.append(options)
            model.adapter = SimpleNamespace(parameters={"b": 1, "a": 2}, into=None)

        model.add_adapter = add
        plan = plan_of(seed=4, **settings)
        lora: Any = SimpleNamespace(options=lambda config, tokens: {"rank": 2, "tokens": tokens})
        plan_: Any = SimpleNamespace(
            adapters=plan.adapters and lora, trained_tokens=(5,), seed=4, lora_dropout=0.0,
            merge_into=None,
        )  # fmt: skip
        preparation.add_adapters(model, plan_, 9, new=new)
        assert given == [{"rank": 2, "tokens": (5,), "seed": 4}] * added
        if added:
            assert [*model.adapter.parameters] == ["a", "b"]


@pytest.mark.parametrize(
    ("own", "asked", "through", "said"),
    [
        (None, None, None, ""), (None, "nf4", "nf4", ""), ("q4_0", None, None, ""),
        ("q4_0", "q4_0", None, ""), ("q4_0", "other name", None, ""),
        ("q4_0", "nf4", None, "merge_into=nf4: the adapter was trained through q4_0; leave merge"),
    ],
)  # fmt: skip
def test_an_adapter_is_trained_through_one_quantizer(
    own: Any, asked: Any, through: Any, said: str
) -> None:
    heard, used = Words(), list[str]()
    kinds = {
        kind: SimpleNamespace(kind=kind, names=(kind, "other name")) for kind in ("q4_0", "nf4")
    }
    adapter = SimpleNamespace(into=None if own is None else kinds[own])
    model: Any = SimpleNamespace(adapter=adapter)

    def train_through(kind: str) -> None:
        used.append(kind)
        adapter.into = kinds[kind]

    model.train_through = train_through
    plan: Any = SimpleNamespace(merge_into=asked)
    with hearing(heard):
        if said:
            with pytest.raises(ConfigError, match=re.escape(said)):
                preparation._train_through(model, plan)
        else:
            preparation._train_through(model, plan)
    assert used == ([] if through is None else [through])
    kind = through or own
    note = f"training through the {kind} quantizer: use the merged file, not the adapter alone"
    assert heard.said == ([note] if kind and not said else [])
    none: Any = SimpleNamespace(adapter=None)
    preparation._train_through(none, plan)


def test_tokens_that_are_new_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "add_tokens", lambda tokenizer, file: [3, 9])
    whole: Any = SimpleNamespace(whole=True)
    split: Any = SimpleNamespace(whole=False)
    config = parse(SIZES | CONFIGS["llama"] | {"vocab_size": 9})
    settings = Settings(new_tokens="signs.txt")
    assert preparation.with_new_tokens(Settings(), None, config, None, split) == (
        Settings(),
        config,
    )
    changed, wider = preparation.with_new_tokens(settings, None, config, None, whole)
    assert (changed.trained_tokens, wider.vocab) == ([3, 9], 64)
    with pytest.raises(ConfigError, match=r"new_tokens=signs\.txt: each rank stores a part of the"):
        preparation.with_new_tokens(settings, None, config, None, split)
    table = replace(config, vocab=10)
    assert preparation.with_new_tokens(settings, None, table, None, split)[1].vocab == 10
    for known, fits in (((3, 9, 1), True), ((3,), False), (None, False)):
        tokens = {} if known is None else {TABLE: known}
        adapter = SimpleNamespace(tokens=tokens)
        if fits:
            preparation.with_new_tokens(settings, None, config, adapter, whole)
            continue
        with pytest.raises(ConfigError, match="the model has adapters that do not train these tok"):
            preparation.with_new_tokens(settings, None, config, adapter, whole)


@pytest.mark.parametrize(
    ("settings", "new", "expected", "said"),
    [
        ({"steps": 9}, False, 9, "noted"), ({}, True, 1200, "noted"),
        ({"epochs": 2}, False, 20, "noted\ntraining for 2.0 epochs = 20 steps"),
        ({"epochs": 2, "accumulate": 3}, False, 7, "noted\ntraining for 2.0 epochs = 7 steps"),
        ({"epochs": 0.01}, False, 1, "noted\ntraining for 0.01 epochs = 1 step"),
        ({}, False, 30,
         "noted\ntraining for 3.0 epochs = 30 steps (set epochs or steps to change)"),
    ],
)  # fmt: skip
def test_the_steps_of_a_run(settings: Any, new: bool, expected: int, said: str) -> None:
    heard = Words()
    data: Any = SimpleNamespace(note="noted", batches=SimpleNamespace(count=lambda n: int(10 * n)))
    each = Settings(**settings)
    with hearing(heard):
        plan = preparation.with_steps(each, each.decided(new=new), data, new=new)
    assert plan.steps == expected
    assert heard.said == [said]
    data.note = ""
    heard.said.clear()
    with hearing(heard):
        preparation.with_steps(Settings(steps=2), each.decided(new=new), data, new=new)
    assert heard.said == []


@pytest.mark.parametrize(("batches", "epochs"), [(333, 3), (334, 2), (500, 2), (501, 1), (5000, 1)])
def test_epochs_of_a_default_have_1000_steps_at_most(batches: int, epochs: int) -> None:
    data: Any = SimpleNamespace(note="", batches=SimpleNamespace(count=lambda n: int(batches * n)))
    plan = preparation.with_steps(Settings(), plan_of(), data, new=False)
    assert plan.steps == epochs * batches


@pytest.mark.parametrize("method", ["sft", "grpo"])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("device", [None, "cuda:0"])
@pytest.mark.parametrize("graph", [None, False])
def test_the_largest_step_is_planned(
    graph: bool | None,
    device: str | None,
    alone: bool,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    padded_, replaced = list[bool](), dict[str, Any]()

    def passes_of(lines: Any, step: int, accumulate: int, own: Any, *, padded: bool) -> list[int]:
        padded_.append(padded)
        return [step]

    monkeypatch.setattr(preparation, "passes_of", passes_of)
    monkeypatch.setattr(
        preparation, "with_savings", lambda sizes, plan: replace(plan, offload=True)
    )
    checked = lambda sizes, plan, limit: ("checked", sizes.inputs, limit)  # noqa: E731
    monkeypatch.setattr(preparation, "checked_plan", checked)
    monkeypatch.setattr(preparation, "Memory", lambda *given, **more: (given, more))

    class Of:
        def __init__(self, inputs: Any = ()) -> None:
            self.inputs, self.device, self.objective = inputs, device, METHODS["dpo"]
            self.batch, self.tokens = 7, 16

        def _replace(self, inputs: Any = (), **sizes: Any) -> Any:
            replaced.update(sizes)
            return Of(inputs)

        def planned(self, plan: Any) -> Any:
            return SimpleNamespace(
                total={3: 50, 5: 70, 9: 60}[self.inputs[0]] if self.inputs else 1
            )

    for steps, number in (([3, 5, 9], 5), ([3], 3)):
        lines: Any = SimpleNamespace(
            batches=SimpleNamespace(largest=lambda *_, steps=steps, **__: steps)
        )
        context = SimpleNamespace(
            context=SimpleNamespace(size=1 if alone else 3), pipeline=SimpleNamespace(size=1)
        )
        ranks: Any = SimpleNamespace(
            alone=alone, whole=True, beside=lambda: 2, groups=context, schedule=None,
            data=SimpleNamespace(size=1 if alone else 2),
        )  # fmt: skip
        plan = plan_of(method=method, graph=graph, limit_memory=99)
        padded_.clear()
        sizes: Any = Of()
        changed, memory = preparation.planned_memory(sizes, plan, ranks, lines)
        by_lines = alone and method == "sft"
        assert changed.offload is True
        share = (7, 16) if alone else (4, 6)
        assert (replaced["batch"], replaced["tokens"]) == share
        assert (replaced["beside"], replaced["whole"]) == (2, True)
        (step_plan, limit, place), options = memory  # type: ignore[misc]
        assert (limit, place, options["counts"]) == (99, device, alone)  # type: ignore[has-type]
        assert step_plan == ("checked", [number] if by_lines else (), 99)  # type: ignore[has-type]
        assert options["largest"] == (number if by_lines else 0)  # type: ignore[has-type]
        assert (options["bytes_of"] is None) != by_lines  # type: ignore[has-type]
        assert {*padded_} == ({device is not None and graph is None} if by_lines else set())
        ranks.whole, ranks.schedule = False, "gpipe"
        plan = replace(plan, accumulate=6)
        context.pipeline.size = 2
        preparation.planned_memory(sizes, plan, ranks, None)
        assert (replaced["beside"], replaced["whole"]) == (2 * 3, False)
        ranks.schedule, ranks.chunks = "interleaved", 4
        preparation.planned_memory(sizes, plan, ranks, None)
        assert replaced["beside"] == 3  # 2 ranks, each with 1.25 times a pass
