"""Weights of compressed-tensors: weight_packed (outputs, inputs bits / 32), or 8-bit weight.

An 8-bit weight is int8 or e4m3.  The other tensors of a layer are weight_scale, weight_zero_point,
weight_g_idx and weight_shape.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from .foreign import ANY, Weight, numbers, ordered, scaled, unpacked

PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")
FORMATS = (
    *("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mixed-precision"),
    "dense",
)
KEYS: Mapping[str, Any] = {
    "format": FORMATS,
    **dict.fromkeys(("config_groups", "ignore", "quantization_status", "version"), ANY),
    **dict.fromkeys(("global_compression_ratio", "run_compressed", "kv_cache_scheme"), ANY),
}
GROUP: Mapping[str, Any] = {  # keys of a group of layers
    "format": FORMATS,
    **dict.fromkeys(("targets", "weights", "input_activations", "output_activations"), ANY),
}
WEIGHTS: Mapping[str, Any] = {
    "type": ("int", "float"),
    "strategy": ("tensor", "channel", "group", "block"),
    "num_bits": range(1, 9),
    "dynamic": (False,),
    **dict.fromkeys(("symmetric", "group_size", "block_structure", "actorder"), ANY),
    **dict.fromkeys(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"), ANY),
}


def reader(weight: Weight) -> "partial[Array]":
    """Return the function that computes the dense weight from its tensors."""
    if "weight_packed" not in weight.parts:
        return numbers(weight)
    outputs, inputs = weight.shape
    grid, rows, columns = weight.scales()
    zeros = weight.parts.get("weight_zero_point")
    words = weight.parts["weight_packed"].shape
    bits = weight.bits(words[-1], weight.values_of("num_bits", default=8))
    weight.check("weight_packed", (outputs, words[-1]))
    if zeros is not None and zeros.code == "I32":
        counts = (-(-grid[0] * bits // 32), -(-grid[0] // (32 // bits)))
        weight.check("weight_zero_point", *((count, grid[1]) for count in counts))
    elif zeros is not None:
        weight.check("weight_zero_point", grid, weight.parts["weight_scale"].shape)
    if "weight_g_idx" in weight.parts:
        weight.check("weight_g_idx", (inputs,))
    if "weight_shape" in weight.parts:
        weight.check("weight_shape", (2,))
    how: Any = {"name": weight.name, "shape": weight.shape, "bits": bits, "grid": grid}
    order = partial(ordered, weight.name, columns)
    return partial(_of_packed, rows=rows, columns=order, label=f"{bits} bits", **how)


def _of_packed(
    state: Mapping[str, Array],
    *,
    name: str,
    shape: tuple[int, ...],
    bits: int,
    grid: tuple[int, int],
    rows: Array,
    columns: Callable[[Array | None], Array],
    label: str,
) -> Array:
    """Return the dense weight; codes and zeros are stored plus 2^(bits - 1)."""
    half, stored_shape = 1 << (bits - 1), tuple(map(int, state.get("weight_shape", shape)))
    if stored_shape != shape:
        problem = f"{name}: weight_shape is {stored_shape}; config.json implies {shape}"
        raise ConfigError(f"{problem}; copy the checkpoint again, or correct config.json")
    zeros: Any = np.full(grid, half)
    stored = state.get("weight_zero_point")
    if stored is not None and stored.dtype == np.int32:  # packed along the rows
        zeros = unpacked(stored.T, bits, grid[0]).T
    elif stored is not None:
        zeros = zeros + stored.reshape(grid)
    codes, order = unpacked(state["weight"], bits, shape[1]), columns(state.get("weight_g_idx"))
    return scaled(codes, state["weight_scale"].reshape(grid), zeros, rows, order)
