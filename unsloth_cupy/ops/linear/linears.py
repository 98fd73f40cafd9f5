"""Linear layers of the same x whose weights are the rows of one matrix: q, k and v, or gate and up.

[y, y2, y3] = x [weight; weight2; weight3]^T         one product, of which each y has some columns

Where the weights lie apart, there is a product for each.  In the backward pass gradients that lie
side by side are one product too; others are copied side by side if that moves fewer bytes than to
read x, and to add to dx, for each.
"""

import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.op import op
from ..common.checks import requested_gradients
from ..common.gemm import gemm
from .linear import flat

WEIGHTS = ("weight", "weight2", "weight3")


def rows_of_one(weights: Sequence[Any]) -> Any:
    """Return the matrix of which these are the rows, one after another; None if there is none."""
    base = getattr(weights[0], "base", None)
    return base if _parts_of(base, weights, axis=0) else None


def columns_of_one(arrays: Sequence[Any]) -> Any:
    """Return the array of which these are the columns, side by side; None if there is none."""
    base = getattr(arrays[0], "base", None)
    return base if _parts_of(base, arrays, axis=-1) else None


def _parts_of(base: Any, arrays: Sequence[Any], axis: int) -> bool:
    """Return whether arrays divide base along an axis, in order."""
    first: Any = arrays[0]
    if base is None or base.__class__ is not first.__class__ or base.ndim != first.ndim:
        return False
    if base.dtype != first.dtype or not base.flags.c_contiguous:
        return False
    start, step, strides, rest = _address(base), base.strides[axis], base.strides, [*base.shape]
    array: Any
    for array in arrays:
        shape, rest[axis] = array.shape, array.shape[axis]
        same = getattr(array, "base", None) is base and array.strides == strides
        if not same or [*shape] != rest or _address(array) != start:
            return False
        start += shape[axis] * step
    return start == _address(base) + base.shape[axis] * step


def _address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


@op(
    "x(*rows, inputs), weight(outputs, inputs): weight, weight2(outputs2, inputs): weight,"
    " weight3?(outputs3, inputs): weight"
    " -> y(*rows, outputs), y2(*rows, outputs2), y3(*rows, outputs3)",
    widen=False,  # products take 16-bit operands as they are
    operations=lambda a: 2 * a["x"].size * sum(len(a[n]) for n in WEIGHTS if a.get(n) is not None),
)
def linears(
    x: Array, weight: Array, weight2: Array, weight3: Array | None = None
) -> tuple[Array | None, ...]:
    """Return ``linear`` of x for each weight; None for an absent one."""
    weights = [each for each in (weight, weight2, weight3) if each is not None]
    whole = rows_of_one(weights)
    if whole is None:
        ys = [gemm(flat(x), each.T).reshape(*x.shape[:-1], len(each)) for each in weights]
    else:
        y = gemm(flat(x), whole.T).reshape(*x.shape[:-1], len(whole))
        ys = [y[..., part] for part in _spans([len(each) for each in weights])]
    return *ys, *[None] * (len(WEIGHTS) - len(ys))


@linears.gradient(widen=False)
def linears_backward(
    dy: Array | None,
    dy2: Array | None,
    dy3: Array | None,
    x: Array,
    weight: Array,
    weight2: Array,
    weight3: Array | None = None,
    *,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, ...]:
    """Return the gradients of x and of each weight; None for those that are not ``wanted``."""
    by_name = dict(zip(WEIGHTS, (weight, weight2, weight3), strict=True))
    needed = requested_gradients("linears_backward", wanted, x=x, **by_name)
    weights = [each for each in by_name.values() if each is not None]
    dys = [
        np.zeros_like(x, shape=(*x.shape[:-1], len(each))) if given is None else given
        for given, each in zip((dy, dy2, dy3), weights, strict=False)
    ]
    dx, dweights = None, dict.fromkeys(WEIGHTS)
    spans, rows = _spans([len(each) for each in weights]), flat(x)
    matrix, joined = rows_of_one(weights), columns_of_one(dys)
    moved, spared = 2 * spans[-1].stop, 3 * (len(weights) - 1) * x.shape[-1]  # values of a row
    if joined is None and matrix is not None and moved <= spared:
        joined = np.concatenate(dys, axis=-1)
    columns = [flat(each) for each in dys] if joined is None else [flat(joined)]
    if "x" in needed:
        dx = empty(rows.shape, x.dtype, like=x)
        matrices = weights if joined is None or matrix is None else [matrix]
        pieces = columns if len(columns) == len(matrices) else [flat(each) for each in dys]
        for number, (piece, each) in enumerate(zip(pieces, matrices, strict=True)):
            gemm(piece, each, out=dx, add=number > 0)
        dx = dx if x.ndim == 2 else dx.reshape(x.shape)
    if needed.intersection(WEIGHTS):
        whole = empty((spans[-1].stop, x.shape[-1]), weight.dtype, like=x)
        for piece, span in zip(columns, spans if joined is None else [slice(None)], strict=True):
            gemm(piece.T, rows, out=whole[span])
        dweights |= {n: whole[span] for n, span in zip(WEIGHTS, spans, strict=False) if n in needed}
    return dx, *dweights.values()


def _spans(sizes: Sequence[int]) -> list[slice]:
    """Return a slice of each size, one after another."""
    stops = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


linears_backward.facts["operations"] = lambda a: (
    2
    * math.prod(a["x"].shape)
    * sum(
        len(a[name]) * ((a.get("dx") is not None) + (a.get("d" + name) is not None))
        for name in WEIGHTS
        if a.get(name) is not None
    )
)
