"""Names of formats are known in any case, wherever one is expected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from unsloth_cupy import models, nf4_quantize, plan_memory
from unsloth_cupy.cli.commands import COMMANDS
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.finetune import Settings
from unsloth_cupy.memory.stage_plan import Layout, plan_ranks
from unsloth_cupy.models.gguf import TYPES
from unsloth_cupy.models.quantizer import CHOICES

from .peers import SIZES

CONFIG = SIZES | {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
PLANNED: dict[str, Any] = {"batch": 1, "tokens": 8, "dtype": "float32", "rank": 2}


def new(rank: int | None = None, **options: Any) -> models.Transformer:
    model = models.create(CONFIG, seed=0)
    if rank is not None:
        model.add_adapter(rank, **options)
    return model


def loaded(kind: str, folder: Path) -> str:
    if not folder.exists():
        new().save(folder)
    return repr(models.load(folder, quantize=kind))


def through(kind: str) -> Any:
    model = new(2)
    model.train_through(kind)
    return model.adapter.into.kind  # type: ignore[union-attr]


CALLS: dict[str, tuple[str, Callable[[str, Path], Any]]] = {
    "quantize": ("nf4-double", lambda kind, _: models.quantize(new(), kind).kind),
    "load": ("nf4", lambda kind, path: loaded(kind, path / "model")),
    "nf4_quantize": ("fp4", lambda kind, _: nf4_quantize(np.ones((2, 64), "f"), kind=kind).kind),
    "train_through": ("q4_0", lambda kind, _: through(kind)),
    "add_adapter": ("q4_k", lambda kind, _: new(2, merge_into=kind).adapter.into.kind),
    "Settings(quantize)": ("int8", lambda kind, _: Settings(quantize=kind).quantize),
    "Settings(merge_into)": ("q4_k_m", lambda kind, _: Settings(merge_into=kind).merge_into),
    "plan_memory": ("nf4", lambda kind, _: plan_memory(CONFIG, **PLANNED, quantization=kind).total),
    "plan_memory(merge_into)": (
        "nf4", lambda kind, _: plan_memory(CONFIG, **PLANNED, merge_into=kind).total,
    ),
    "plan_ranks": (
        "nf4",
        lambda kind, _: [
            each.total for each in plan_ranks(CONFIG, Layout(), **PLANNED, quantization=kind)
        ],
    ),
    # after the kind comes the tokenizer, which this model has not
    "export_gguf": ("q4_k_m", lambda kind, path: models.export_gguf(new(), path / "m", kind=kind)),
    "export_adapter_gguf": (
        "bf16", lambda kind, path: models.export_adapter_gguf(new(), path / "a", kind=kind),
    ),
}  # fmt: skip


def outcome(call: Callable[[str, Path], Any], kind: str, folder: Path) -> Any:
    """Return what a call returns, or the message with which it fails."""
    try:
        return call(kind, folder)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("name", CALLS)
def test_kinds_in_any_case(name: str, tmp_path: Path) -> None:
    kind, call = CALLS[name]
    expected = outcome(call, kind, tmp_path)
    assert "choose from" not in str(expected)
    for other in (kind.upper(), kind.title()):
        assert outcome(call, other, tmp_path) == expected
    with pytest.raises(ConfigError, match="Q9_z"):
        call("Q9_z", tmp_path)


def test_commands_take_kinds_in_any_case() -> None:
    seen = set()
    for command in COMMANDS:
        for option in command.params:
            if option.name == "cache_dtype":  # a dtype
                continue
            choices = getattr(option.type, "choices", ())
            for kind in {*choices} & {*CHOICES, *TYPES}:
                for other in (kind, kind.upper(), kind.title()):
                    context = click.Context(command)
                    assert option.type.convert(other, option, context) == kind
                seen.add(f"{command.name} {option.name}")
    assert {"finetune quantize", "finetune merge_into", "plan merge_into", "export kind"} <= seen
