"""Fields of settings have the types of their annotations, whoever writes them."""

import dataclasses
import json
import math
import re
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
from unsloth_cupy.finetune.methods.registry import METHODS
from unsloth_cupy.finetune.run import settings as settings_module
from unsloth_cupy.finetune.run.training_config import read_training_config
from unsloth_cupy.memory.stage_plan import Layout, plan_ranks
from unsloth_cupy.models.optimizers import OPTIMIZERS

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


HERE = Path()
NEW, OLD, ROWS = (None, False), (HERE, False), (HERE, True)  # source, and whether data are rows
MERGED: dict[str, Any] = {"lora": 4, "merge_into": "nf4"}
CHECKED: list[tuple[dict[str, Any], Any, str]] = [  # settings, data, what is said; "": accepted
    ({"pack": True}, OLD, "pack=True and pack=False apply only to data in rows, such as"),
    ({"pack": False}, OLD, "pack=True and pack=False apply only to data in rows, such as"),
    ({"pack": True}, ROWS, ""),
    ({}, ROWS, ""),
    ({"steps": 2, "epochs": 1}, OLD, "steps and epochs both set the length of the run"),
    ({"steps": 2}, OLD, ""),
    ({"epochs": 1}, OLD, ""),
    ({"layers": 2}, OLD, "layers, hidden and vocabulary describe a new model"),
    ({"hidden": 32}, OLD, "layers, hidden and vocabulary describe a new model"),
    ({"vocabulary": 300}, OLD, "layers, hidden and vocabulary describe a new model"),
    ({"layers": 2, "hidden": 32, "vocabulary": 300}, NEW, ""),
    ({"lora": 2}, NEW, "lora requires an existing model; pass model"),
    ({"method": "dpo"}, NEW, "method=dpo requires an existing model; pass model"),
    ({"method": "dpo"}, ROWS, ""),
    ({"base": "there"}, NEW, "base requires an existing model"),
    ({"base": "there"}, OLD, ""),
    ({"new_tokens": "none.txt"}, NEW, "new_tokens requires an existing model"),
    ({"new_tokens": "none.txt"}, OLD, "new_tokens=none.txt cannot be read"),
    ({"train_weights": True}, NEW, "train_weights is for a new model with quantize=ternary"),
    ({"train_weights": True, "quantize": "nf4"}, NEW, "train_weights is for a new model with"),
    ({"train_weights": True, "quantize": "ternary"}, OLD, "train_weights is for a new model with"),
    ({"train_weights": True, "quantize": "ternary"}, NEW, ""),
    ({"quantize": "nf4"}, NEW, "quantize requires an existing model"),
    ({"quantize": "nf4", "lora": 2}, OLD, ""),
    ({"loss": "ipo"}, ROWS, "method=sft does not use loss; leave it out, or choose "),
    ({"method": "dpo", "loss": "hinge"}, ROWS, ""),
    ({"method": "dpo", "loss": "kto"}, ROWS, "method=dpo has no loss=kto; choose from sigmoid, "),
    ({"method": "distill"}, ROWS, "method=distill needs a teacher"),
    ({"method": "grpo", "expert_parallel": 2}, ROWS, "expert_parallel=2 does not work with method"),
    ({"beta": 0.1}, ROWS, "method=sft does not use beta; leave it out, or choose "),
    ({"warmup": 1.5}, NEW, "warmup=1.5: pass a whole number, or a fraction below 1"),
    ({"warmup": 1}, NEW, ""),
    ({"warmup": 2.0}, NEW, ""),
    ({"warmup": 0.5}, NEW, ""),
    ({"eval": 0}, NEW, "eval=0: pass a file, or a fraction between 0 and 1"),
    ({"eval": 1}, NEW, "eval=1: pass a file, or a fraction between 0 and 1"),
    ({"eval": 1.5}, NEW, "eval=1.5: pass a file, or a fraction between 0 and 1"),
    ({"eval": 0.99}, NEW, ""),
    ({"eval": "held_out.txt"}, NEW, ""),
    ({"min_delta": 0.1}, NEW, "min_delta requires patience; give both"),
    ({"min_delta": 0.1, "patience": 1}, NEW, ""),
    ({"patience": 1}, NEW, ""),
    ({"lora_alpha": 4}, OLD, "lora_alpha=4 applies to new adapters only; add lora, as in lora=16"),
    ({"lora_dropout": 0.1, "dora": True}, OLD, "lora_dropout=0.1, dora=True applies to new"),
    ({"lora_targets": "attention"}, OLD, "lora_targets=attention applies to new adapters only"),
    ({"rslora": True}, OLD, "rslora=True applies to new adapters only"),
    ({"lora": 2, "lora_alpha": 4, "lora_dropout": 0.1, "rslora": True, "dora": True}, OLD, ""),
    ({"offload": True}, NEW, "offload=True moves the inputs of recomputed blocks, and none is"),
    ({"offload": False}, NEW, ""),
    ({"offload": True, "recompute_every": 1}, NEW, ""),
    ({"merge_from": 1}, OLD, "merge_from requires merge_into; give both"),
    (MERGED, OLD, ""),
    (MERGED | {"merge_from": 1, "zero": 1, "tensor_parallel": 1}, OLD, ""),
    (MERGED | {"keep_best": True}, OLD, ""),
    (MERGED | {"dora": True}, OLD, "merge_into=nf4: the merged file would not hold the weights of"),
    (MERGED | {"dora": True}, OLD, "the last step; leave dora=True out"),
    (MERGED | {"save_dtype": "float16"}, OLD, "the last step; leave save_dtype=float16 out"),
    (MERGED | {"merge_from": 2, "patience": 1}, OLD, "leave merge_from=2, keep_best=True out"),
    *(
        (MERGED | {name: number}, OLD, f"ranks would split the quantization blocks of the merged"
         f" file; leave {name}={number} out")
        for name, number in (("zero", 3), ("tensor_parallel", 2), ("pipeline_parallel", 2),
                             ("expert_parallel", 2))
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "data", "said"), CHECKED)
def test_settings_that_need_or_exclude_each_other(
    settings: dict[str, Any], data: Any, said: str
) -> None:
    source, lines = data
    if not said:
        Settings(**settings).check(source, lines=lines)
        return
    with pytest.raises(ConfigError, match=re.escape(said)):
        Settings(**settings).check(source, lines=lines)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "muon"}, ""),
        ({"optimizer": "muon", "tensor_parallel": 1, "expert_parallel": 2}, ""),
        ({"optimizer": "adamw8bit", "tensor_parallel": 2, "zero": 1}, ""),
        ({"optimizer": "lion", "tensor_parallel": 2, "expert_parallel": 2}, ""),
        ({"optimizer": "adafactor", "expert_parallel": 1}, ""),
        (
            {"optimizer": "muon", "tensor_parallel": 2},
            "optimizer=muon: its steps need whole matrices; leave tensor_parallel=2 out, or give"
            " optimizer=adamw",
        ),
        ({"optimizer": "adafactor", "expert_parallel": 2}, "leave expert_parallel=2 out"),
        ({"optimizer": "lion", "state_bits": 8}, "leave state_bits=8 out"),
        ({"optimizer": "muon", "zero": 1}, "leave zero=1 out"),
        ({"optimizer": "schedulefree", "decay": "constant"}, ""),
        ({"optimizer": "adamw", "decay": "linear"}, ""),
        (
            {"optimizer": "schedulefree", "decay": "linear"},
            "optimizer=schedulefree averages steps, which requires a constant learning rate; leave"
            " decay=linear out",
        ),
        ({"lora_dropout": 0}, ""),
        ({"lora_dropout": 1}, "lora_dropout=1: give a number of 0 or more, below 1"),
        ({"timeout": 0}, "timeout=0: give a number above 0"),
        ({"seed": 2**63 - 1}, ""),
        ({"seed": 2**63}, f"seed={2**63}: give a whole number of 0 or more"),
        ({"weight_decay": 1e300}, ""),
        ({"reward": print}, "Settings(reward=): pass a function to Trainer(reward=)"),
        ({"reward": ["a.py:f", print]}, "Settings(reward=): pass a function to Trainer(reward=)"),
    ],
)
def test_values_and_optimizers_that_exclude_each_other(settings: dict[str, Any], said: str) -> None:
    if not said:
        Settings(**settings)
        return
    with pytest.raises(ConfigError) as error:
        Settings(**settings)
    assert said in str(error.value)
    assert str(error.value).endswith(said) or "leave" in said


def test_a_plan_has_what_settings_leave_open() -> None:
    plan = Settings(seed=3).decided(new=True)
    assert (plan.data_seed, plan.decay, plan.tokens, plan.dtype) == (3, "cosine", 128, "float32")
    assert (plan.state_bits, plan.quantize, plan.checkpoint, plan.adapters) == (
        32,
        None,
        None,
        None,
    )
    given = Settings(
        seed=3, data_seed=0, decay="linear", tokens=9, dtype="float16", state_bits=8,
        quantize="nf4", lora=2, recompute_every=2, keep=("rope",), offload=True,
    ).decided(new=False)  # fmt: skip
    assert (given.data_seed, given.decay, given.tokens, given.dtype) == (0, "linear", 9, "float16")
    assert (given.state_bits, given.quantize) == (8, "nf4")
    assert given.checkpoint == CheckpointConfig(recompute_every=2, keep=("rope",), offload=True)
    assert Settings(optimizer="adamw8bit").decided(new=True).state_bits == 8
    assert Settings(optimizer="adamw8bit").kind == "adamw"
    assert Settings(optimizer="schedulefree").decided(new=True).decay == "constant"
    assert Settings(train_weights=True, quantize="ternary").decided(new=True).quantize is None
    rates = [Settings(optimizer="adafactor", lora=lora).decided(new=False).lr for lora in (None, 2)]
    assert rates == pytest.approx([1e-3, 0.3])
    dpo = [Settings(method="dpo", lora=lora).decided(new=False).lr for lora in (None, 2)]
    assert dpo == pytest.approx([*METHODS["dpo"].rates])  # type: ignore[misc]
    assert [Settings(patience=1).keeps_best, Settings(keep_best=True).keeps_best] == [True, True]
    assert not Settings().keeps_best
    Settings(method="distill").check_method(whole=False)
    assert Settings(decay="LINEAR", dtype="BFloat16").decided(new=True).decay == "linear"
    assert sorted(settings_module.NAMES) == sorted([*OPTIMIZERS, "adamw8bit"])
    assert Settings().precision == MixedPrecisionConfig("float32", loss_scale=65536.0)
