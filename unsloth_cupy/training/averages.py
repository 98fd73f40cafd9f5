"""Moments of an optimizer in 8 or 32 bits, in the form of a checkpoint for any grid of ranks.

    mean.NAME, square.NAME                        float32, or 8-bit codes and
    mean_scale.NAME, square_scale.NAME            the scale of each block of 256 codes

The blocks of a part of a weight differ from those of the whole weight.  So for weights that ranks
divide, a checkpoint stores one scale for each code; a part with the same blocks as at saving
resumes with identical bits.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ..ops.common.dynamic_codes import BLOCK, dynamic_map, encode, without_zeros
from ..placement import to_device_of

SIGNED = {"mean": True, "square": False}
SCALES = ("mean_scale", "square_scale")


def scale_per_code(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return moments with one scale per code, in the shape of the parameter."""
    result = dict(state)
    for key, scale in state.items():
        field, _, name = key.partition(".")
        if field in SCALES:
            codes = state[f"{field.removesuffix('_scale')}.{name}"]
            result[key] = _spread(codes, scale)
    return result


def in_one_form(state: Mapping[str, Any], comm: Any) -> dict[str, Any]:
    """Return moments in the same form on all ranks, even if the parts of some ranks are small.

    Only parts of 4096 values or more have moments in codes.  If the part of any rank has float32
    moments, all ranks return float32.  A rank that loads them encodes them again, which may change
    a code by one step.
    """
    names = sorted(key.partition(".")[2] for key in state if key.startswith("mean."))
    if comm.size == 1 or not names:
        return dict(state)
    wide = comm.all_reduce(np.array([f"mean_scale.{n}" not in state for n in names], int), "max")
    return stored_form(state, {n for n, some in zip(names, wide.tolist(), strict=True) if not some})


def stored_form(state: Mapping[str, Any], narrow: Collection[str]) -> dict[str, Any]:
    """Return moments as 8-bit codes for the parameters in ``narrow``, else as float32."""
    result = {}
    for key, array in state.items():
        field, _, name = key.partition(".")
        if field in SCALES:
            continue
        scale = state.get(f"{field}_scale.{name}")
        repaired = field == "square" and scale is not None
        values = without_zeros(array, state[f"mean.{name}"]) if repaired else array
        if field not in SIGNED or (scale is None and name not in narrow):
            result[key] = values
        elif name not in narrow:
            result[key] = _decoded(values, scale, SIGNED[field])
        else:
            codes, result[f"{field}_scale.{name}"] = _in_blocks(values, scale, SIGNED[field])
            result[key] = codes.reshape(array.shape)
    return result


def own_form(
    state: Mapping[str, Any], shapes: Mapping[str, Any], narrow: Collection[str]
) -> dict[str, Any]:
    """Return the state of an optimizer with the moments of each parameter in ``stored_form``.

    Arrays that do not fit their parameter are not changed: ``load_state`` raises for them.
    """
    result = dict(state)
    for name, shape in shapes.items():
        blocks = (-(-math.prod(shape) // BLOCK),)
        layout: dict[str, Any] = {f"{field}.{name}": (np.uint8, tuple(shape)) for field in SIGNED}
        layout |= {f"{scale}.{name}": (np.float32, blocks) for scale in SCALES}
        facts = (
            (getattr(state.get(key), fact, None) for fact in ("dtype", "shape")) for key in layout
        )
        if [(dtype, shape) for dtype, shape in facts] == [*layout.values()]:
            result |= stored_form({key: result.pop(key) for key in layout}, narrow)
    return result


def _in_blocks(array: Any, scale: Any, signed: bool) -> tuple[Any, Any]:
    """Return codes and the scale of each block, from float32 or from codes with scales.

    ``scale`` is None for float32; else it holds one scale per block, or one per code.
    """
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
    """Return the float32 values of codes."""
    return to_device_of(dynamic_map(signed), codes)[codes] * _spread(codes, scale)


def _spread(codes: Any, scale: Any) -> Any:
    """Return one scale per code, from one scale per code or per block."""
    if scale.shape == codes.shape:
        return scale
    return np.repeat(scale, BLOCK)[: codes.size].reshape(codes.shape)
