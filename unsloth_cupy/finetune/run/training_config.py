"""Reads a ``TrainingConfig`` from a file: TOML if its name ends in .toml, else JSON.

{"batch_size": 4, "max_seq_len": 512, "gradient_accumulation_steps": 2,
 "mixed_precision": {"compute_dtype": "bfloat16"}, "checkpoint": {"recompute_every": 2}}
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.names import current_names
from ...errors import ConfigError
from ...files import read_text
from ...training.checkpoint import CheckpointConfig
from ...training.precision import MixedPrecisionConfig, TrainingConfig
from ..naming import named

PARTS: Mapping[str, Any] = {"mixed_precision": MixedPrecisionConfig, "checkpoint": CheckpointConfig}


def read_training_config(path: Path) -> dict[str, Any]:
    """Return the settings in a file; missing names have the defaults of ``TrainingConfig``.

    Raises
    ------
    ConfigError
        The file cannot be read, or has an unknown name or an invalid value.
    """
    try:
        text = read_text(path)
        values = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except ConfigError as error:
        raise ConfigError(f"{named(config=path)}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{named(config=path)}: {error.strerror}; name a readable file") from None
    except (ValueError, RecursionError) as error:
        syntax = "TOML" if path.suffix.lower() == ".toml" else "JSON"
        raise ConfigError(
            f"{named(config=path)} cannot be read as {syntax}: {error}; correct it"
        ) from None
    try:
        values = _known("", values, TrainingConfig)
        for part, kind in PARTS.items():
            if part in values:
                values[part] = kind(**_known(f"{part}.", values[part], kind))
        config = TrainingConfig(**values)
    except (ConfigError, RecursionError) as error:  # TOML nests without end
        raise ConfigError(f"{named(config=path)}: {error}") from None
    precision, checkpoint = config.mixed_precision, config.checkpoint
    every = checkpoint.recompute_every if checkpoint.enabled else None
    return {
        "batch": config.batch_size, "tokens": config.max_seq_len,
        "accumulate": config.gradient_accumulation_steps, "dtype": precision.compute_dtype,
        "recompute_every": every, "keep": tuple(checkpoint.keep), "offload": checkpoint.offload,
        "loss_scale": precision.loss_scale, "dynamic_scaling": precision.dynamic_scaling,
    }  # fmt: skip


def _known(part: str, values: Any, config: Any) -> dict[str, Any]:
    """Return an object of the file as a dict; raise if the config has no field of a name."""
    names = [field.name for field in dataclasses.fields(config)]
    if not isinstance(values, Mapping):
        name = part.removesuffix(".") or "the file"
        raise ConfigError(f"{name} holds {values!r:.40}; write an object of {', '.join(names)}")
    values = current_names("TrainingConfig", values, names)
    for name in values:
        if name not in names:
            raise ConfigError(f"{part}{name} is not known; choose from {', '.join(names)}")
    return values
