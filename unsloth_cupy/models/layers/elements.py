"""Element-wise and indexing functions that few families need, on arrays or on a tape."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.arrays import empty, rounded
from ...core.dtypes import FLOAT32
from ...ops.activations.geglu import geglu
from ...ops.activations.swiglu import sigmoid
from ...ops.elements.cast import PARTS, concatenate
from ...parallel.taped import taped, value_of


def gelu(x: Any, *, approximate: bool) -> Any:
    """Return the Gaussian error linear unit of x."""
    value = value_of(x)  # geglu(x, 1) is gelu(x): no op of its own is needed
    return geglu(x, np.ones_like(value), approximate=approximate)


def stacked(rows: Sequence[Any]) -> Any:
    """Return vectors as the rows of a matrix."""
    names = [f"row_{i}" for i in range(len(rows))]
    return taped(
        "stacked",
        np.stack([value_of(row) for row in rows]),
        lambda dy, wanted: {name: dy[i].copy() for i, name in enumerate(names) if name in wanted},
        **dict(zip(names, rows, strict=True)),
    )


def scaled_heads(x: Any, weight: Any) -> Any:
    """Return x * weight, rounded once; x is (batch, tokens, heads, dim), weight (heads, dim)."""
    arrays = value_of(x), value_of(weight)
    wide = np.promote_types(arrays[0].dtype, FLOAT32)
    value, scales = (array.astype(wide, copy=False) for array in arrays)

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dy = dy.astype(wide, copy=False)
        gradients = {"x": rounded(dy * scales, arrays[0].dtype)}
        if "weight" in wanted:
            gradients["weight"] = rounded((dy * value).sum(axis=(0, 1)), arrays[1].dtype)
        return gradients

    y = rounded(value * scales, arrays[0].dtype)
    return taped("scaled_heads", y, back, x=x, weight=weight)


def taken(x: Any, places: Any, axis: int) -> Any:
    """Return the slices of x at these distinct indices of an axis."""
    value, before = value_of(x), (slice(None),) * axis

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dx = np.zeros_like(value)
        dx[(*before, places)] = dy
        return {"x": dx}

    return taped("taken", value[(*before, places)], back, x=x)


def split(x: Any, sizes: Sequence[int]) -> Any:
    """Split the last axis of x into parts of these sizes; backward writes the gradient once."""
    value = value_of(x)
    places = [slice(*pair) for pair in pairwise(np.cumsum([0, *sizes]).tolist())]
    parts = tuple(value[..., place] for place in places)

    def back(*arguments: Any) -> dict[str, Any]:
        dx, (*dys, _) = empty(value.shape, value.dtype, like=value), arguments
        if len(dys) <= PARTS and all(dy is not None for dy in dys):
            concatenate(dys, dx)  # one launch
            return {"x": dx}
        for place, dy in zip(places, dys, strict=True):
            dx[..., place] = 0 if dy is None else dy
        return {"x": dx}

    return taped("split", parts, back, x=x)


def without_padding(x: Any, mask: Any) -> Any:
    """Return x, (batch, tokens, hidden), with zeros at padding."""
    real = (mask != 0)[..., None]

    def masked(array: Any) -> Any:
        return np.where(real, array, array.dtype.type(0))

    return taped("without_padding", masked(value_of(x)), lambda dy, wanted: {"x": masked(dy)}, x=x)


def joined(values: Sequence[Any]) -> Any:
    """Return arrays of one dtype joined along the last axis."""
    if len(values) > PARTS:
        return np.concatenate(values, axis=-1)
    shape = *values[0].shape[:-1], sum(value.shape[-1] for value in values)
    whole = empty(shape, values[0].dtype, like=values[0])
    concatenate(values, whole)
    return whole


def beside(*parts: Any) -> Any:
    """Return arrays joined along the last axis."""
    values = [value_of(part) for part in parts]
    ends = np.cumsum([0, *(value.shape[-1] for value in values)]).tolist()
    names = [f"part_{i}" for i in range(len(parts))]
    places = {n: slice(*each) for n, each in zip(names, pairwise(ends), strict=True)}
    return taped(
        "beside",
        joined(values),
        lambda dy, wanted: {n: dy[..., places[n]] for n in wanted},
        **dict(zip(names, parts, strict=True)),
    )


def gated(x: Any, gate: Any) -> Any:
    """Return x * sigmoid(gate), rounded once; gate may have one value per row of x."""
    arrays = value_of(x), value_of(gate)
    wide = np.promote_types(arrays[0].dtype, FLOAT32)
    value, factor = arrays[0].astype(wide, copy=False), sigmoid(arrays[1].astype(wide, copy=False))

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dy = dy.astype(wide, copy=False)
        slope = dy * value
        slope = slope if factor.shape == slope.shape else slope.sum(axis=-1, keepdims=True)
        slope = slope * factor * (1 - factor)
        return {"x": rounded(dy * factor, arrays[0].dtype), "gate": rounded(slope, arrays[1].dtype)}

    return taped("gated", rounded(value * factor, arrays[0].dtype), back, x=x, gate=gate)


def grown(call: Any, layer: int, q: Any) -> Any:
    """Return queries, (batch, tokens, heads, dim), scaled by their positions: see ``Rope``."""
    kind = call.config.layer_types[layer]
    rope, positions = call.config.ropes[kind], call.attention.positions
    if rope.growth is None or not rope.whole or (rope.still and call.config.rotates(layer)):
        return q
    factors = call.attention.tables[kind][2]  # (length, 1)
    factors = factors[None] if positions is None else factors[positions]
    value = value_of(q)
    wide = np.promote_types(value.dtype, FLOAT32)

    def scaled(x: Any) -> Any:
        return rounded(x.astype(wide, copy=False) * factors[..., None], value.dtype)

    return taped("grown", scaled(value), lambda dy, wanted: {"q": scaled(dy)}, q=q)


def clamped_swiglu(gate: Any, up: Any, *, limit: float, alpha: float) -> Any:
    """Return (u + 1) g sigmoid(alpha g) with g = min(gate, limit), u = clip(up, -limit, limit)."""
    arrays = value_of(gate), value_of(up)
    wide = np.promote_types(arrays[0].dtype, FLOAT32)
    g, u = (array.astype(wide, copy=False) for array in arrays)
    inside = g <= limit, np.abs(u) <= limit
    g, u = np.minimum(g, wide.type(limit)), u.clip(-limit, limit) + 1
    sigma = sigmoid(g * wide.type(alpha))

    def back(dy: Any, wanted: Any) -> dict[str, Any]:
        dy = dy.astype(wide, copy=False)
        dgate = dy * u * sigma * (1 + alpha * g * (1 - sigma)) * inside[0]
        dup = dy * g * sigma * inside[1]
        return {"gate": rounded(dgate, arrays[0].dtype), "up": rounded(dup, arrays[1].dtype)}

    y = rounded(u * g * sigma, arrays[0].dtype)
    return taped("clamped_swiglu", y, back, gate=gate, up=up)
