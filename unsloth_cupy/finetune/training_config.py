"""A ``TrainingConfig`` in a file: JSON, or TOML where the name ends in .toml.

{"batch_size": 4, "max_seq_len": 512, "gradient_accumulation_steps": 2,
 "mixed_precision": {"compute_dtype": "bfloat16"}, "checkpoint": {"checkpoint_every": 2}}
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..training.checkpoint import CheckpointConfig
from ..training.precision import MixedPrecisionConfig, TrainingConfig

PARTS: Mapping[str, Any] = {"mixed_precision": MixedPrecisionConfig, "checkpoint": CheckpointConfig}


class Settings(NamedTuple):
    """What a TrainingConfig says to ``finetune``."""

    options: dict[str, Any]  # by the names of options, whose defaults they are
    rest: dict[str, Any]  # by the names of Settings: what no option says


def read_training_config(path: Path) -> Settings:
    """Return what a file says; what it leaves out is as in ``TrainingConfig()``.

    Raises
    ------
    ConfigError
        The file cannot be read, or holds a name or a value that a TrainingConfig does not have.
    """
    try:
        text = path.read_bytes().decode()
        values = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}; name a readable file") from None
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix.lower() == ".toml" else "JSON"
        raise ConfigError(
            f"--config {path} cannot be read as {kind}: {error}; correct it"
        ) from None
    try:
        values = _known("", values, TrainingConfig)
        for part, config in PARTS.items():
            if part in values:
                values[part] = config(**_known(f"{part}.", values[part], config))
        found = TrainingConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from None
    precision, checkpoint = found.mixed_precision, found.checkpoint
    every = checkpoint.checkpoint_every if checkpoint.enabled else None
    options = {
        "batch": found.batch_size, "tokens": found.max_seq_len,
        "accumulate": found.gradient_accumulation_steps, "dtype": precision.compute_dtype,
        "checkpoint_every": every,
    }  # fmt: skip
    rest = {
        "keep": tuple(checkpoint.keep), "offload": checkpoint.offload,
        "loss_scale": precision.loss_scale, "dynamic_scaling": precision.dynamic_scaling,
    }  # fmt: skip
    return Settings(options, rest)


def _known(part: str, values: Any, config: Any) -> dict[str, Any]:
    """Return an object whose names are all those of a config."""
    names = [field.name for field in dataclasses.fields(config)]
    if not isinstance(values, Mapping):
        name = part.removesuffix(".") or "the file"
        raise ConfigError(f"{name} holds {values!r:.40}; write an object of {', '.join(names)}")
    for name in values:
        if name not in names:
            raise ConfigError(f"{part}{name} is not known; choose from {', '.join(names)}")
    return dict(values)
