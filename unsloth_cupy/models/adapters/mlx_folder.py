"""Convert adapters of mlx-lm to the settings and tensors of peft.

    model.layers.0.self_attn.q_proj.lora_a     (inputs, rank)       A^T
    model.layers.0.self_attn.q_proj.lora_b     (rank, outputs)      B^T
    model.layers.0.self_attn.q_proj.m          (outputs,)           the magnitude, only of DoRA

The file is adapters.safetensors.  adapter_config.json has ``lora_parameters`` with the rank and the
scale; peft stores alpha, and the scale is alpha / rank.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...core.call import is_integer, is_number
from ...core.dtypes import Array
from ...errors import ConfigError
from ..configs.config import Config
from ..folders.checkpoint_files import opened
from .adapter import CONFIG, DOWN, EMBEDDING_DOWN, EMBEDDING_UP, MAGNITUDE, PREFIX, UP
from .adapter_base import BASE
from .outer_weights import TIED

MLX_WEIGHTS, PARAMETERS = "adapters.safetensors", "lora_parameters"
FUSE = "fuse it there: mlx_lm.fuse --model BASE --adapter-path ADAPTER --save-path FOLDER"
NAMES = {"lora_a": DOWN, "lora_b": UP, "m": MAGNITUDE}
OF_TABLE = {"lora_a": EMBEDDING_DOWN, "lora_b": EMBEDDING_UP}


def is_of_mlx(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether mlx-lm wrote an adapter's folder."""
    named = PARAMETERS in settings or (folder / MLX_WEIGHTS).exists()
    return "peft_type" not in settings and named


def read_mlx(
    folder: Path, config: Config, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the settings and the tensors of an mlx-lm adapter in peft's format.

    Raises
    ------
    ConfigError
        A setting or a tensor is not of LoRA or DoRA for matrices, or belongs to another model.
    """
    path, kind = folder / CONFIG, settings.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        problem = f"{path}: fine_tune_type of mlx-lm is {kind!r}; it must be lora or dora"
        raise ConfigError(f"{problem}: {FUSE}")
    values: Any = settings.get(PARAMETERS)
    values = values if isinstance(values, Mapping) else {}
    rank, scale, dropout = (values.get(name) for name in ("rank", "scale", "dropout"))
    if not is_integer(rank, 1) or not is_number(scale) or not math.isfinite(scale):
        problem = f"{path}: {PARAMETERS} of mlx-lm has rank={rank!r} and scale={scale!r}"
        raise ConfigError(f"{problem}; they must be an integer, 1 or more, and a number")
    layers: Any = settings.get("num_layers")
    if is_integer(layers) and layers > config.layers:
        problem = f"{path}: num_layers of mlx-lm is {layers}, and the model has {config.layers}"
        raise ConfigError(f"{problem}; pass the model that the adapter is for")
    tensors, modules = dict[str, Array](), set[str]()
    with opened(folder / MLX_WEIGHTS) as file:
        for name in file.keys():  # noqa: SIM118 -- it is not a dict
            array: Array = file.get_tensor(name)
            module, _, part = name.rpartition(".")
            own = (OF_TABLE if module.endswith("embed_tokens") else NAMES).get(part)
            if own is None or array.ndim != (1 if part == "m" else 2):
                problem = f"{folder / MLX_WEIGHTS}: tensor {name[:200]!r} {array.shape}"
                raise ConfigError(f"{problem} is not of a matrix with LoRA or DoRA; {FUSE}")
            tensors[f"{PREFIX}{module}.{own}"] = np.ascontiguousarray(array.T)
            modules.add(module.rpartition(".")[2])
    as_peft = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank}
    as_peft |= {"lora_alpha": scale * rank, "lora_dropout": dropout or 0.0}
    as_peft |= {BASE: settings["model"]} if isinstance(settings.get("model"), str) else {}
    as_peft |= {"use_dora": kind == "dora", "target_modules": sorted(modules)}
    as_peft |= {TIED: True} if config.tied and "embed_tokens" in modules else {}
    return as_peft, tensors
