"""Convert adapters of single experts, as of transformers 4, to adapters of stacks.

    model.layers.0.mlp.experts.7.up_proj.lora_A.weight     (rank, in), lora_B (inner, rank)

The adapter of a stack of gate and up has the sum of their ranks: A of up follows A of gate, and the
two B are diagonal blocks.  peft does the same conversion when it reads the file, but doubles alpha
also for rsLoRA, where the scale in training corresponds to sqrt(2) alpha; here the scale is the one
in training.
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
    """Return settings and tensors of an adapter, with single experts joined to stacks.

    Routers with an old name get the current one.

    Raises
    ------
    ConfigError
        An expert of a stack has no adapter, or one of another rank than in the settings; or a
        pattern sets another rank or alpha for an expert.
    """
    homes = {
        f"{ADAPTED}{name.removesuffix('weight')}": place
        for name, place in places(config).items()
        if name.endswith(".weight") and (place.parts > 1 or is_router(place.parameter))
    }
    kept, single = dict[str, Array](), dict[str, dict[tuple[int, str], Array]]()
    renamed = set[str]()
    for name, array in tensors.items():
        layer, _, part = name.partition("lora_")
        place = homes.get(layer)
        if place is None or f"lora_{part}" not in (DOWN, UP):
            kept[name] = array
            continue
        renamed.add(layer.removeprefix(ADAPTED).removesuffix("."))
        if place.parts == 1:
            kept[f"{ADAPTED}{place.parameter.removesuffix('weight')}lora_{part}"] = array
        else:
            single.setdefault(place.parameter, {})[place.part, f"lora_{part}"] = array
    for key in ("rank_pattern", "alpha_pattern"):
        values = by_pattern(path, settings, key, sorted(renamed), None)
        if named := [
            m for m, value in zip(sorted(renamed), values, strict=True) if value is not None
        ]:
            problem = f"{key} names {named[0]}, which is now a part of a stack or has another name"
            raise ConfigError(f"{path}: {problem}; {MERGE}")
    stacks = stacks_of(config, single.__contains__)
    for module, stack in stacks.items():
        pair = _pair(path, settings, stack, single[stack.parameter])
        kept |= {f"{ADAPTED}{module}.{n}": each for n, each in zip((DOWN, UP), pair, strict=True)}
    return (_settings(path, config, settings, stacks) if stacks else settings), kept


def _pair(
    path: Path, settings: Mapping[str, Any], stack: Stack, own: Mapping[tuple[int, str], Array]
) -> tuple[Array, Array]:
    """Return A and B of a stack in peft's layout, from A and B of its experts."""
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
    up = up.transpose(1, 2, 0).reshape(outputs, -1)  # (outputs, rank * experts)
    return down, np.ascontiguousarray(up)


def _settings(
    path: Path, config: Config, settings: Mapping[str, Any], stacks: Mapping[str, Stack]
) -> dict[str, Any]:
    """Return the settings for the stacks, with the scales of the experts' adapters."""
    experts: Any = config.experts
    facts, listed = dict(settings), [*(settings.get("target_parameters") or [])]
    for own in experts.names:
        named = [each.parameter for each in stacks.values() if each.parameter.endswith(own)]
        whole = len(named) == sum(experts.sparse)
        listed += [f"{experts.prefix}experts.{own}"] if whole else named
    facts["target_parameters"] = listed
    both = f"experts.{STACKS[0]}"
    root = math.sqrt if settings.get("use_rslora") else float
    patterns = (("r", "rank_pattern", 2), ("lora_alpha", "alpha_pattern", root(2)))
    for key, least, times in patterns if experts.names == STACKS else ():
        facts[least] = {both: facts.get(key, 8) * times, **(facts.get(least) or {})}
    if dropout := settings.get("lora_dropout"):
        problem = f"lora_dropout={dropout} is ignored: stacks of experts do not support it"
        warnings.warn(f"{path}: {problem}; further training differs slightly", stacklevel=5)
        facts["lora_dropout"] = 0.0
    return facts
