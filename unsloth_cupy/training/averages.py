"""Moments of an optimizer in 8 or 32 bits, in the form of a checkpoint for any grid of ranks.

    mean.NAME, square.NAME                        float32, or 8-bit codes and
    mean_scale.NAME, square_scale.NAME            the scale of each block of 256 codes

The blocks of a part of a weight differ from those of the whole weight.  So for weights that ranks
divide, a checkpoint stores one scale for each code; a part with the same blocks as at saving
resumes with identical bits.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.arrays import Unwritten
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
            result[key] = _spread(codes.shape, scale)
    return result


def wide_moments(state: Collection[str], groups: Sequence[Any]) -> set[str]:
    """Return the parameters whose moments a checkpoint stores as float32, equal on all ranks.

    Only parts of 4096 values or more have moments in codes.  If the part of any rank of a group has
    float32 moments, the checkpoint does.  A rank that loads them encodes them again, which may
    change a code by one step.
    """
    names = sorted(key.partition(".")[2] for key in state if key.startswith("mean."))
    wide = np.array([f"mean_scale.{name}" not in state for name in names], int)
    for group in groups if names else ():
        wide = group.all_reduce(wide, "max")
    return {name for name, is_wide in zip(names, wide.tolist(), strict=True) if is_wide}


def in_one_form(key: str, state: Mapping[str, Unwritten], wide: Collection[str]) -> Any:
    """Return an array of the state in the form of a checkpoint; None if that form lacks it.

    The form is float32 for parameters in ``wide``, else codes with one scale per code.
    """
    field, _, name = key.partition(".")
    own, moment = state[key], field.removesuffix("_scale")
    if moment not in SIGNED or f"{moment}_scale.{name}" not in state:
        return own
    if field in SCALES:
        shape = state[f"{moment}.{name}"].shape
        scaled = Unwritten(own.dtype, shape, lambda: _spread(shape, own.read()))
        return None if name in wide else scaled
    if name not in wide:
        return own
    needed = [each for each in (f"mean.{name}", key, f"{moment}_scale.{name}") if each in state]

    def read() -> Any:
        return stored_form({each: state[each].read() for each in needed}, ())[key]

    return Unwritten(np.dtype(np.float32), own.shape, read)


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
    return to_device_of(dynamic_map(signed), codes)[codes] * _spread(codes.shape, scale)


def _spread(shape: tuple[int, ...], scale: Any) -> Any:
    """Return one scale per code in this shape, from one scale per code or per block."""
    if scale.shape == shape:
        return scale
    return np.repeat(scale, BLOCK)[: math.prod(shape)].reshape(shape)
