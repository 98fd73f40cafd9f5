"""The averages of an optimizer, of 8 bits or 32, as a checkpoint keeps them for any grid of ranks.

    mean.NAME, square.NAME                        float32, or codes of 8 bits and
    mean_scale.NAME, square_scale.NAME            the scale of each 256 of them

A part of a weight has other blocks than the whole.  Of weights that ranks divide, a checkpoint has
the scale of each code; a part whose blocks are those that were saved goes on with equal bits.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..ops.common.dynamic_codes import BLOCK, dynamic_map, encode
from ..placement import placed

SIGNED = {"mean": True, "square": False}
SCALES = ("mean_scale", "square_scale")


def spread(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return averages with a scale of each code, in the shape of the parameter."""
    found = dict(state)
    for key, scale in state.items():
        field, _, name = key.partition(".")
        if field in SCALES:
            codes = state[f"{field.removesuffix('_scale')}.{name}"]
            found[key] = _spread(codes, scale)
    return found


def fitted(state: Mapping[str, Any], narrow: Collection[str]) -> dict[str, Any]:
    """Return averages by their names, as codes where the parameter is one of these alone."""
    found = {}
    for key, array in state.items():
        field, _, name = key.partition(".")
        if field in SCALES:
            continue
        scale = state.get(f"{field}_scale.{name}")
        if field not in SIGNED or (scale is None and name not in narrow):
            found[key] = array
        elif name not in narrow:
            found[key] = _decoded(array, scale, SIGNED[field])
        else:
            codes, found[f"{field}_scale.{name}"] = _in_blocks(array, scale, SIGNED[field])
            found[key] = codes.reshape(array.shape)
    return found


def _in_blocks(array: Any, scale: Any, signed: bool) -> tuple[Any, Any]:
    """Return codes, and the scale of each block, of codes with any scale or of float32."""
    if scale is None:
        return encode(array.reshape(-1), signed=signed)
    if scale.shape != array.shape:
        return array, scale
    flat = scale.reshape(-1)
    first = flat[::BLOCK]
    if bool((np.repeat(first, BLOCK)[: flat.size] == flat).all()):
        return array, first.copy()
    return encode(_decoded(array, scale, signed).reshape(-1), signed=signed)


def _decoded(codes: Any, scale: Any, signed: bool) -> Any:
    return placed(dynamic_map(signed), codes)[codes] * _spread(codes, scale)


def _spread(codes: Any, scale: Any) -> Any:
    if scale.shape == codes.shape:
        return scale
    return np.repeat(scale, BLOCK)[: codes.size].reshape(codes.shape)
