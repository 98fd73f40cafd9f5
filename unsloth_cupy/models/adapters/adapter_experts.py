"""Adapters of single experts, as of models of transformers 4, as those of stacks.

    model.layers.0.mlp.experts.7.up_proj.lora_A.weight     (rank, in), lora_B (inner, rank)

A stack of gate and up has the rank of both: A of one stands behind A of the other, and their B are
on a diagonal.  peft converts them so as it reads them, with the scale of twice the alpha also for
rsLoRA, where it is that of sqrt(2) times; here it is what was trained.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ..configs.config import STACKS, Config
from ..configs.names import ADAPTED, is_router
from ..folders.expert_files import places
from .adapter_base import MERGE
from .adapter_patterns import by_pattern
from .adapter_stacks import Stack, stacks_of

DOWN, UP = "lora_A.weight", "lora_B.weight"


def of_stacks(
    path: Path, config: Config, settings: dict[str, Any], tensors: Mapping[str, Array]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the settings and tensors of an adapter in which single experts are parts of stacks.

    Routers that had another name get the one of now.

    Raises
    ------
    ConfigError
        Not all experts of a stack have an adapter of the rank that the settings say, or a pattern
        gives some another rank or alpha.
    """
    homes = {
        f"{ADAPTED}{name.removesuffix('weight')}": place
        for name, place in places(config).items()
        if name.endswith(".weight") and (place.parts > 1 or is_router(place.parameter))
    }
    kept, single = dict[str, Array](), dict[str, dict[tuple[int, str], Array]]()
    moved = set[str]()
    for name, array in tensors.items():
        layer, _, part = name.partition("lora_")
        place = homes.get(layer)
        if place is None or f"lora_{part}" not in (DOWN, UP):
            kept[name] = array
            continue
        moved.add(layer.removeprefix(ADAPTED).removesuffix("."))
        if place.parts == 1:
            kept[f"{ADAPTED}{place.parameter.removesuffix('weight')}lora_{part}"] = array
        else:
            single.setdefault(place.parameter, {})[place.part, f"lora_{part}"] = array
    for key in ("rank_pattern", "alpha_pattern"):
        values = by_pattern(path, settings, key, sorted(moved), None)
        if named := [
            m for m, value in zip(sorted(moved), values, strict=True) if value is not None
        ]:
            problem = f"{key} is of {named[0]}, which is a part of a stack or has another name now"
            raise ConfigError(f"{path}: {problem}; {MERGE}")
    stacks = stacks_of(config, single.__contains__)
    for module, stack in stacks.items():
        pair = _pair(path, settings, stack, single[stack.parameter])
        kept |= {f"{ADAPTED}{module}.{n}": each for n, each in zip((DOWN, UP), pair, strict=True)}
    return (_settings(path, config, settings, stacks) if stacks else settings), kept


def _pair(
    path: Path, settings: Mapping[str, Any], stack: Stack, own: Mapping[tuple[int, str], Array]
) -> tuple[Array, Array]:
    """Return A and B of a stack in peft's layout, of those of its experts."""
    count, outputs, inputs = stack.shape
    parts = 2 if stack.parameter.endswith(STACKS[0]) else 1
    rank, height = settings.get("r", 8), outputs // parts
    sizes = {DOWN: (rank, inputs), UP: (height, rank)}
    for number in range(count * parts):
        for name, size in sizes.items():
            if (number, name) not in own or own[number, name].shape != size:
                has = own[number, name].shape if (number, name) in own else "missing"
                problem = f"{name} of expert {number // parts} of {stack.parameter} is {has}"
                raise ConfigError(f"{path}: {problem}, and all must be {size}; {MERGE}")
    up = np.zeros((count, outputs, parts * rank), own[0, UP].dtype)
    for number in range(count * parts):
        expert, at = divmod(number, parts)
        rows, columns = (slice(at * size, (at + 1) * size) for size in (height, rank))
        up[expert, rows, columns] = own[number, UP]
    down = np.concatenate([own[number, DOWN] for number in range(count * parts)])
    return down, np.ascontiguousarray(up.transpose(1, 2, 0).reshape(outputs, -1))


def _settings(
    path: Path, config: Config, settings: Mapping[str, Any], stacks: Mapping[str, Stack]
) -> dict[str, Any]:
    """Return the settings with the stacks, whose scales are those of the experts."""
    experts: Any = config.experts
    facts, listed = dict(settings), [*(settings.get("target_parameters") or [])]
    for own in experts.names:
        named = [each.parameter for each in stacks.values() if each.parameter.endswith(own)]
        whole = len(named) == sum(experts.sparse)
        listed += [f"{experts.module}.experts.{own}"] if whole else named
    facts["target_parameters"] = listed
    both = f"experts.{STACKS[0]}"
    root = math.sqrt if settings.get("use_rslora") else float
    patterns = (("r", "rank_pattern", 2), ("lora_alpha", "alpha_pattern", root(2)))
    for key, least, times in patterns if experts.names == STACKS else ():
        facts[least] = {both: facts.get(key, 8) * times, **(facts.get(least) or {})}
    if dropout := settings.get("lora_dropout"):
        problem = f"lora_dropout={dropout} is left out, as stacks of experts have none"
        warnings.warn(f"{path}: {problem}; further training differs a little", stacklevel=5)
        facts["lora_dropout"] = 0.0
    return facts
