"""Initialize low-rank weights from the weight, and subtract their initial product.

    W + scale (B A - B0 A0)    A0, B0: the initial A and B

    pissa    B0 A0 scale = the sum of the largest r terms of W = Σ s u vᵀ
    olora    B0 A0       = the first r columns of Q and rows of R in W = Q R

Meng et al., PiSSA, 2024.  Büyükakyüz, OLoRA, 2024.  peft subtracts scale B0 A0 from the base's
weight; here W is unchanged, and -B0 A0 is the other half of a product with twice the rank.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...core.gpu import device_of
from ...errors import ConfigError
from ...ops.quantized.weight import Quantized
from ...placement import to_device_of, to_numpy
from ..configs.names import ADAPTED

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

    ``read`` returns a weight by its name.

    Raises
    ------
    ConfigError
        A weight is quantized, smaller than the rank, or outside of the blocks.
    """
    pairs = {}
    for module, scale in scales.items():
        names = f"{ADAPTED}{module}.lora_A.weight", f"{ADAPTED}{module}.lora_B.weight"
        if ".layers." not in module:
            problem = f"{call}: {kind} does not support {module}, which is outside of the blocks"
            raise ConfigError(f"{problem}; leave it out")
        weight, rank, problem, cure = read(f"{module}.weight"), len(own[names[0]]), "", "lower it"
        if isinstance(weight, Quantized):
            problem = "its weight is quantized, and the dense weight is not known"
            cure = "load the dense base"
        elif rank > min(weight.shape):
            problem = f"the rank is {rank}, and the weight is {weight.shape}"
        elif scale <= 0:
            problem, cure = f"the scale is {scale:g}", "pass an alpha above 0"
        if problem:
            raise ConfigError(f"{call}: {kind} cannot initialize {module}: {problem}; {cure}")
        pairs[names] = initial_pair(kind, weight, rank, scale)
    return pairs


def loftq(
    call: str, own: dict[str, Array], scales: Mapping[str, float], weights: Mapping[str, Any],
    read: Callable[[str], Any],
) -> None:  # fmt: skip
    """Initialize A and B from the quantization error; ``read`` returns a dense weight by name.

    Li et al., LoftQ, 2023, with one step.
    """
    problem, cure = (
        f"{call}: loftq uses the error of load(quantize=)",
        "load a dense folder with quantize=",
    )
    quantized = [name for name in scales if isinstance(weights[f"{name}.weight"], Quantized)]
    if not quantized:
        raise ConfigError(f"{problem}, and this model has no quantized weight; {cure}")
    for module in quantized:
        name = f"{module}.weight"
        dense = read(name)
        if isinstance(dense, Quantized):
            raise ConfigError(f"{problem}, and the folder's {name} is quantized; {cure}")
        error = dense.astype(FLOAT32) - to_numpy(weights[name].dequantize(FLOAT32))
        down, up = (own[f"{ADAPTED}{module}.lora_{part}.weight"] for part in "AB")
        pair = initial_pair("pissa", error, len(down), scales[module])
        for old, new in zip((down, up), pair, strict=True):
            old[...] = to_device_of(new, old)


def beside(own: Array, other: Array, axis: int) -> Array:
    """Return two arrays concatenated along an axis, in the dtype of the first."""
    with device_of(own):
        return np.concatenate([own, other.astype(own.dtype)], axis)


def joined(down: Array, up: Array, pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return A and B of twice the rank, whose product is B A - B0 A0, in float32 or wider."""
    wide = np.promote_types(down.dtype, FLOAT32)
    a, b = pair
    return beside(down.astype(wide), a, 0), beside(up.astype(wide), -b, 1)


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for twice the rank with the same scales."""
    factor = 2**0.5 if settings.get("use_rslora") else 2
    facts = dict(settings, init_lora_weights=True)
    for key, times in (("r", 2), ("lora_alpha", factor)):
        facts[key] = facts.get(key, 8) * times
    for key, times in (("rank_pattern", 2), ("alpha_pattern", factor)):
        if facts.get(key):
            facts[key] = {name: value * times for name, value in facts[key].items()}
    return facts
