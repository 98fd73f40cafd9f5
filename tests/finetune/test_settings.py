"""Fields of settings have the types of their annotations, whoever writes them."""

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AttentionConfig, CheckpointConfig, MixedPrecisionConfig, TrainingConfig
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Lora, Settings

from ..cli.test_cli import assert_one_clear_error, run

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
