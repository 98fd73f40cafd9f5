"""Fields of settings have the types of their annotations, whoever writes them."""

import dataclasses
import json
import math
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from unsloth_cupy import (
    AttentionConfig,
    CheckpointConfig,
    MixedPrecisionConfig,
    TrainingConfig,
    estimate_forward_memory,
    plan_memory,
)
from unsloth_cupy.cli.commands import COMMANDS, current_flags
from unsloth_cupy.core.names import RENAMED
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.files import read_json
from unsloth_cupy.finetune import Lora, Settings
from unsloth_cupy.finetune.run.training_config import read_training_config
from unsloth_cupy.memory.stage_plan import Layout, plan_ranks

from ..cli.test_cli import LLAMA, assert_one_clear_error, run

CLASSES: dict[type[Any], dict[str, Any]] = {  # with the fields that have no default
    Settings: {}, Lora: {"rank": 4}, TrainingConfig: {}, MixedPrecisionConfig: {},
    CheckpointConfig: {}, AttentionConfig: {},
}  # fmt: skip
VALUES: list[tuple[Any, set[Any]]] = [  # each with the types that it has
    (True, {bool}), (np.False_, {bool}), (1, {int, float}), (np.int64(2), {int, float}),
    (0.5, {float}), (np.float32(0.5), {float}), (math.nan, set()), (math.inf, set()),
    ("false", {str}), ("0.1", {str}), ("4", {str}), (b"x", set()), (Path("x"), {Path}),
    (None, {types.NoneType}), (["x"], {Sequence[str]}), ([1], {Sequence[int]}),
    ([True], set()), ((), {Sequence[str], Sequence[int]}), ({}, set()), (object(), set()),
]  # fmt: skip


def kinds_of(field: "dataclasses.Field[Any]") -> set[Any]:
    if isinstance(field.type, types.UnionType):
        return {*typing.get_args(field.type)}
    return {Sequence[str]} if field.type == tuple[str, ...] else {field.type}


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        pytest.param(settings, field, id=f"{settings.__name__}-{field.name}")
        for settings in CLASSES
        for field in dataclasses.fields(settings)
    ],
)
def test_a_field_takes_values_of_its_type(
    settings: type[Any], field: "dataclasses.Field[Any]"
) -> None:
    """A number of NumPy becomes Python's, as settings are written as JSON."""
    for value, types_of in VALUES:
        fits = {Any, *types_of} & kinds_of(field)
        options = CLASSES[settings] | {field.name: value}
        if not fits:
            with pytest.raises(ConfigError, match=field.name):
                settings(**options)
            continue
        with suppress(ConfigError):  # out of range
            assert not isinstance(getattr(settings(**options), field.name), np.generic)


def test_types_in_files_and_of_callers(tmp_path: Path) -> None:
    for text in ('{"batch_size": "4"}', '{"checkpoint": {"offload": "false"}}',
                 '{"mixed_precision": {"dynamic_scaling": 0}}'):  # fmt: skip
        (tmp_path / "config.json").write_text(text)
        done = run("finetune", "--config", tmp_path / "config.json", "--out", tmp_path / "run")
        assert_one_clear_error(done, text.rpartition('{"')[2].partition('"')[0])
    with pytest.raises(ConfigError, match=r"Settings\(keep_best='false'\): .* True or False"):
        Settings(keep_best="false")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Lora\(dropout='0\.1'\): .* a finite number"):
        Lora(4, dropout="0.1")  # type: ignore[arg-type]


FORWARD = {"batch_size": 1, "seq_len": 2, "hidden_size": 4, "num_layers": 4}
PLANNED = {"batch": 1, "tokens": 8, "dtype": "float32"}
LLAMA_CONFIG = read_json(LLAMA / "config.json")
CALLS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "Settings": (partial(Settings, patience=1), ("checkpoint_every", "threshold")),
    "CheckpointConfig": (CheckpointConfig, ("checkpoint_every",)),
    "plan_memory": (partial(plan_memory, LLAMA_CONFIG, **PLANNED), ("checkpoint_every",)),
    "plan_ranks": (partial(plan_ranks, LLAMA_CONFIG, Layout(), **PLANNED), ("checkpoint_every",)),
    "estimate_forward_memory": (
        partial(estimate_forward_memory, **FORWARD), ("checkpoint_every",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_names_of_before_are_taken_with_a_warning(name: str) -> None:
    call, names = CALLS[name]
    for old in names:
        new = RENAMED[old]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            expected = call(**{new: 2})
        with pytest.warns(FutureWarning, match=f"{name}: {old} is named {new} now") as caught:
            assert call(**{old: 2}) == expected
        assert caught[0].filename == __file__
        with pytest.raises(ConfigError, match=f"{old} is the old name of {new}; pass {new} alone"):
            call(**{old: 2, new: 2})
    for old in RENAMED.keys() - names:
        with pytest.raises((TypeError, ConfigError), match=old):
            call(**{old: 2})


@pytest.mark.parametrize("value", [Settings(patience=1, min_delta=2), CheckpointConfig(True, 2)])
def test_fields_of_before_are_read_with_a_warning(value: Any) -> None:
    for old, new in RENAMED.items():
        if hasattr(value, new):
            with pytest.warns(FutureWarning, match=rf"\w+\.{old} is named {new} now") as caught:
                assert getattr(value, old) == getattr(value, new)
            assert caught[0].filename == __file__
        else:
            assert not hasattr(value, old)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_options_of_before_are_taken_with_a_line(command: click.Command) -> None:
    """In both spellings of a value; a word behind -- and the value of an option stay."""
    known = {flag for each in command.params for flag in each.opts}
    for old, new in ((f"--{a}", f"--{b}") for a, b in map(as_dashes, RENAMED.items())):
        words = [old, "2", f"{old}=3", "--", old]
        expected = [new, "2", f"{new}=3", "--", old] if new in known else words
        assert current_flags(command, words) == expected
    assert not {f"--{old}" for old, _ in map(as_dashes, RENAMED.items())} & known


def as_dashes(names: tuple[str, str]) -> tuple[str, str]:
    old, new = (name.replace("_", "-") for name in names)
    return old, new


def test_a_run_with_names_of_before_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{i} and {i * i} are numbers." for i in range(200)))
    sizes = ("--layers", 2, "--hidden", 32, "--vocabulary", 300, "--tokens", 16, "--steps", 2)
    command = ("finetune", "--text", text, "--out", tmp_path / "run", *sizes)
    old = run(*command, "--checkpoint-every", 2, "--patience", 9, "--threshold=0.1")
    assert old.exit_code == 0, old.output
    assert old.stderr.count("--checkpoint-every is now named --recompute-every") == 1
    assert old.stderr.count("--threshold is now named --min-delta") == 1
    path = tmp_path / "run" / "settings.json"
    values = json.loads(path.read_text())
    values["checkpoint_every"] = values.pop("recompute_every")
    path.write_text(json.dumps(values))
    again = run(*command, "--recompute-every", 2, "--patience", 9)
    assert again.exit_code == 0, again.output
    assert "is finished" in again.output
    assert json.loads(path.read_text())["checkpoint_every"] == 2, "written as it was"
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"checkpoint": {"checkpoint_every": 2}}))
    with pytest.warns(FutureWarning, match="checkpoint_every is named recompute_every now"):
        assert read_training_config(config)["recompute_every"] == 2
