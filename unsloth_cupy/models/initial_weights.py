"""Low-rank weights that begin with a part of the weight itself, which is taken out of the base.

    W + scale (B A - B0 A0)    B0 A0 scale: the part of W that A and B begin with

    pissa    B0 A0 scale = the sum of the largest r terms of W = Σ s u vᵀ
    olora    B0 A0       = the first r columns of Q and rows of R in W = Q R

Meng et al., PiSSA, 2024.  Büyükakyüz, OLoRA, 2024.  peft takes the part out of the base's weight;
here W stays as it is, and -B0 A0 is the other half of a product of twice the rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..core.dtypes import FLOAT32, Array
from ..core.gpu import device_of
from ..errors import ConfigError
from ..ops.quantized.weight import Quantized
from .names import ADAPTED

INITIAL = ("pissa", "olora")  # values of init_lora_weights


def initial_pair(kind: str, weight: Array, rank: int, scale: float) -> tuple[Array, Array]:
    """Return (A0, B0) of a weight, in float32: (rank, inputs) and (outputs, rank)."""
    with device_of(weight):
        wide = weight.astype(FLOAT32)
        if kind == "olora":
            b, a = np.linalg.qr(wide)
            return np.ascontiguousarray(a[:rank]), np.ascontiguousarray(b[:, :rank])
        u, s, v = np.linalg.svd(wide, full_matrices=False)
        root = np.sqrt(s[:rank] / np.float32(scale))
        return root[:, None] * v[:rank], u[:, :rank] * root


def initial_pairs(
    call: str,
    kind: str,
    scales: Mapping[str, float],
    own: Mapping[str, Array],
    read: Callable[[str], Any],
) -> dict[tuple[str, str], tuple[Array, Array]]:
    """Return (A0, B0) of each layer that has a scale, by the names of A and B in ``own``.

    ``read`` returns the weight of a name.

    Raises
    ------
    ConfigError
        A weight is quantized, smaller than the rank, or outside of the blocks.
    """
    pairs = {}
    for module, scale in scales.items():
        names = f"{ADAPTED}{module}.lora_A.weight", f"{ADAPTED}{module}.lora_B.weight"
        if ".layers." not in module:
            problem = f"{call}: {kind} takes a part of {module}, which is outside of the blocks"
            raise ConfigError(f"{problem}; leave it out")
        weight, rank, problem, cure = read(f"{module}.weight"), len(own[names[0]]), "", "lower it"
        if isinstance(weight, Quantized):
            problem = "its weight is quantized, and what it was before is not known"
            cure = "take the dense base"
        elif rank > min(weight.shape):
            problem = f"a weight {weight.shape} has no {rank} of them"
        if problem:
            raise ConfigError(f"{call}: {kind} takes a part of {module}: {problem}; {cure}")
        pairs[names] = initial_pair(kind, weight, rank, scale)
    return pairs


def joined(down: Array, up: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return A and B of twice the rank, whose product is B A - B0 A0, in float32 at least."""
    wide = np.promote_types(down.dtype, FLOAT32)
    with device_of(down):
        a = np.concatenate([down.astype(wide, copy=False), pair[0].astype(wide, copy=False)])
        return a, np.concatenate([up.astype(wide, copy=False), -pair[1].astype(wide)], 1)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter_config.json of twice the rank, with the scales of the given one."""
    factor = 2**0.5 if settings.get("use_rslora") else 2
    facts = dict(settings, init_lora_weights=True)
    for key, times in (("r", 2), ("lora_alpha", factor)):
        facts[key] = facts.get(key, 8) * times
    for key, times in (("rank_pattern", 2), ("alpha_pattern", factor)):
        if facts.get(key):
            facts[key] = {name: value * times for name, value in facts[key].items()}
    return facts
