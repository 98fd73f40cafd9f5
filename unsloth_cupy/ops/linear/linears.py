"""Linear layers with the same x, whose weights are rows of one matrix: q, k and v, or gate and up.

[y, y2, y3] = x [weight; weight2; weight3]^T         one product; each y is some of its columns

Weights that are separate arrays have a product each.  In the backward pass, upstream gradients that
are columns of one array need one product, too.  Separate ones are first copied into one array, if
this moves fewer bytes than to read x and to add to dx once for each.
"""

import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array, Stored
from ...core.op import op
from ...core.replay import Recorded
from ..common.checks import requested_gradients
from ..common.gemm import gemm
from ..elements.cast import concatenate
from .linear import flat

WEIGHTS = ("weight", "weight2", "weight3")


def rows_of_one(weights: Sequence[Any]) -> Any:
    """Return the matrix that consists of the rows of these weights, in order; None if none does."""
    if isinstance(weights[0], Stored):
        parts = [getattr(each, "part", None) or (None, 0, 0) for each in weights]
        whole, numbers = parts[0][0], range(parts[0][2])
        complete = [(each[0] is whole, each[1]) for each in parts] == [(True, n) for n in numbers]
        return whole if complete else None
    base = getattr(weights[0], "base", None)
    return _base_for(weights[0], base) if _parts_of(base, weights, axis=0) else None


def columns_of_one(arrays: Sequence[Any]) -> Any:
    """Return the array that consists of the columns of these arrays; None if none does."""
    base = getattr(arrays[0], "base", None)
    return _base_for(arrays[0], base) if _parts_of(base, arrays, axis=-1) else None


def _base_for(first: Any, base: Any) -> Any:
    """Return base, which begins with ``first``; its stand-in while a call is recorded."""
    return first.lying(base) if type(first) is Recorded else base


def _parts_of(base: Any, arrays: Sequence[Any], axis: int) -> bool:
    """Return whether the arrays are consecutive parts of base along an axis, and all of it."""
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
    products=True,
    operations=lambda a: 2 * a["x"].size * sum(len(a[n]) for n in WEIGHTS if a.get(n) is not None),
)
def linears(
    x: Array, weight: Array, weight2: Array, weight3: Array | None = None
) -> tuple[Array | None, ...]:
    """Return ``linear`` of x for each weight; None for an absent weight."""
    weights = [each for each in (weight, weight2, weight3) if each is not None]
    whole = rows_of_one(weights)
    matrices = weights if whole is None else [whole]
    ys = [empty((*x.shape[:-1], each.shape[0]), x.dtype, like=x) for each in matrices]
    for y, each in zip(ys, matrices, strict=True):
        gemm(flat(x), each.T, out=flat(y))
    if whole is not None:
        ys = [ys[0][..., part] for part in spans(weights)]
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
    """Return the gradients of x and of each weight; None for a gradient that is not ``wanted``."""
    by_name = dict(zip(WEIGHTS, (weight, weight2, weight3), strict=True))
    needed = requested_gradients("linears_backward", wanted, x=x, **by_name)
    weights = [each for each in by_name.values() if each is not None]
    dys = [
        np.zeros_like(x, shape=(*x.shape[:-1], each.shape[0])) if gradient is None else gradient
        for gradient, each in zip((dy, dy2, dy3), weights, strict=False)
    ]
    dx, dweights = None, dict.fromkeys(WEIGHTS)
    parts_of, rows = spans(weights), flat(x)
    joined = side_by_side(dys, weights, x, 1 + 2 * ("x" in needed))
    if "x" in needed:
        dx = input_gradient(dys, joined, weights, x)
    if needed.intersection(WEIGHTS):
        whole = empty((parts_of[-1].stop, x.shape[-1]), weight.dtype, like=x)
        parts = {n: whole[span] for n, span in zip(WEIGHTS, parts_of, strict=False)}
        pairs = zip(dys, parts.values(), strict=True) if joined is None else [(joined, whole)]
        for each, part in pairs:
            gemm(flat(each).T, rows, out=part)
        dweights |= {name: part for name, part in parts.items() if name in needed}
    return dx, *dweights.values()


def side_by_side(dys: Sequence[Any], weights: Sequence[Any], x: Any, times: int) -> Any:
    """Return the gradients dy as one array; None if they are separate and a copy does not pay.

    A copy pays if it moves fewer values than to move x or dx ``times`` more for each further dy.
    """
    joined, columns = columns_of_one(dys), sum(each.shape[0] for each in weights)
    # values in a row that one product moves less than several; a copy reads and writes each column
    spared = times * (len(weights) - 1) * x.shape[-1]
    if joined is None and rows_of_one(weights) is not None and 2 * columns <= spared:
        joined = empty((*x.shape[:-1], columns), x.dtype, like=x)
        concatenate(dys, joined)
    return joined


def input_gradient(dys: Sequence[Any], joined: Any, weights: Sequence[Any], x: Any) -> Any:
    """Return the gradient of x, by one product if both dys and weights are parts of one array."""
    dx, matrix = empty(x.shape, x.dtype, like=x), rows_of_one(weights)
    one = joined is not None and matrix is not None
    pairs = [(joined, matrix)] if one else zip(dys, weights, strict=True)
    for number, (dy, weight) in enumerate(pairs):
        gemm(flat(dy), weight, out=flat(dx), add=number > 0)
    return dx


def spans(weights: Sequence[Any]) -> list[slice]:
    """Return the columns of a joint product that belong to each weight."""
    sizes = [weight.shape[0] for weight in weights]
    stops = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]


def present(arrays: Sequence[Any]) -> list[Any]:
    """Return the arrays that are not None."""
    return [array for array in arrays if array is not None]


linears.facts["lying"] = lambda arrays: rows_of_one(present(arrays[1:])) is None
linears_backward.facts["lying"] = lambda arrays: (
    rows_of_one(present(arrays[4:])) is None,
    columns_of_one(present(arrays[:3]) or [None]) is None,
)
linears_backward.facts["products"] = True
linears_backward.facts["operations"] = lambda a: (
    2
    * math.prod(a["x"].shape)
    * sum(
        len(a[name]) * ((a.get("dx") is not None) + (a.get("d" + name) is not None))
        for name in WEIGHTS
        if a.get(name) is not None
    )
)
