"""Sums and means over axes, and broadcasting along axes, which is the gradient of a sum.

y = sum of x over axes        y = sum of x / number of elements        y = x, repeated
"""

import math
import reprlib
import sys
from typing import Any

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import Array
from ...core.op import op
from ...errors import ConfigError, ShapeError
from ..common.checks import check_shape

Axes = int | tuple[int, ...] | None


def _rest(own: Any, *, axis: Axes = None, keepdims: bool = False) -> dict[str, Any]:
    """Return the sizes of the remaining axes by name; sizes may be symbolic."""
    listed = axis if isinstance(axis, tuple | list) else () if axis is None else (axis,)
    axes = _axes("sum", own, None if axis is None else [int(i) for i in listed])
    rest = [1 if i in axes else n for i, n in enumerate(own) if keepdims or i not in axes]
    return {"rest": tuple(rest)}


@op("x(*axes) -> y(*rest)", autocast="float32", sizes=_rest)
def sum(x: Array, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """Return the sum of x over some axes, computed in float32 and rounded once.

    Parameters
    ----------
    x : (*axes) float
    axis : int, tuple of int, or None
        The axes to sum over; negative ones count from the last.  None: all.
    keepdims : bool
        Whether to keep these axes, with size 1.

    Returns
    -------
    y : (*rest) float
        0 for an empty sum.

    Raises
    ------
    ConfigError
        axis is not an integer, a tuple of integers, or None.
    ShapeError
        There is no such axis, or it occurs twice.
    """
    return x.sum(axis=_axes("sum", x.shape, axis), keepdims=keepdims)


@sum.gradient(widen=False)
def sum_backward(dy: Array, x: Array, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """Return the gradient of x: dy, repeated."""
    return _repeated("sum_backward", dy, x, _axes("sum", x.shape, axis), keepdims)


@op("x(*axes) -> y(*rest)", autocast="float32", sizes=_rest)
def mean(x: Array, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """Return the mean of x over some axes, computed in float32 and rounded once.

    Parameters
    ----------
    x : (*axes) float
    axis : int, tuple of int, or None
        The axes to average over; negative ones count from the last.  None: all.
    keepdims : bool
        Whether to keep these axes, with size 1.

    Returns
    -------
    y : (*rest) float
        0 for a mean of no elements.

    Raises
    ------
    ConfigError
        axis is not an integer, a tuple of integers, or None.
    ShapeError
        There is no such axis, or it occurs twice.
    """
    axes = _axes("mean", x.shape, axis)
    return x.sum(axis=axes, keepdims=keepdims) / x.dtype.type(_count(x, axes))


@mean.gradient
def mean_backward(dy: Array, x: Array, *, axis: Axes = None, keepdims: bool = False) -> Array:
    """Return the gradient of x: dy divided by the number of averaged elements, repeated."""
    axes = _axes("mean", x.shape, axis)
    dy = dy / dy.dtype.type(_count(x, axes))
    return _repeated("mean_backward", dy, x, axes, keepdims)


def _broadcast(own: Any, *, shape: Any) -> dict[str, Any]:
    """Return the sizes of the result's axes by name; sizes may be symbolic."""
    padded = (1,) * (len(shape) - len(own)) + tuple(own)
    fits = len(padded) == len(shape)
    if not fits or any(n not in (1, m) for n, m in zip(padded, shape, strict=True)):
        cure = "sizes must be equal or 1, from the last axis on"
        problem = f"broadcast_to(shape={shape}): x is {tuple(own)}; {cure}"
        raise ShapeError(problem, expected=tuple(shape), actual=tuple(own))
    return {"shape": tuple(shape)}


@op("x(*axes) -> y(*shape)", widen=False, sizes=_broadcast)
def broadcast_to(x: Array, *, shape: tuple[int, ...]) -> Array:
    """Return x repeated along new leading axes, and along axes of size 1.

    Parameters
    ----------
    x : (*axes) float
    shape : tuple of int
        The result's shape; x must broadcast to it by NumPy's rules.

    Returns
    -------
    y : (*shape) float
        A view of x, to be read only.

    Raises
    ------
    ShapeError
        x does not broadcast to this shape.
    """
    sizes: Any = shape
    valid = isinstance(sizes, tuple | list) and all(map(is_integer, sizes))
    if not valid or max(sizes, default=0) > sys.maxsize:
        problem = f"broadcast_to(shape={shape!r}): pass a tuple of sizes"
        raise ShapeError(problem, expected="a tuple of sizes", actual=shape)
    _broadcast(x.shape, shape=shape)
    try:
        return np.broadcast_to(x, shape)
    except ValueError as error:  # NumPy refuses too many elements, and too many axes
        problem = f"broadcast_to(shape={reprlib.repr(shape)}): {error}"
        raise ShapeError(problem, expected="a shape of an array", actual=shape) from error


@broadcast_to.gradient
def broadcast_to_backward(dy: Array, x: Array) -> Array:
    """Return the gradient of x: the sum of dy over the repeated axes, in float32."""
    _broadcast(x.shape, shape=dy.shape)
    lead = dy.ndim - x.ndim
    repeated = [lead + axis for axis, size in enumerate(x.shape) if size == 1]
    return dy.sum(axis=(*range(lead), *repeated)).reshape(x.shape)  # the shape of x


def _axes(call: str, shape: Any, axis: Any) -> tuple[int, ...]:
    """Return the axes as a tuple of non-negative integers; raise if they are invalid."""
    count = len(shape)
    if axis is None:
        return tuple(range(count))
    listed = axis if isinstance(axis, tuple | list) else (axis,)
    if not all(is_integer(each, -math.inf) for each in listed):
        raise ConfigError(f"{call}(axis={axis!r}): pass an integer, a tuple of them, or None")
    if not all(-count <= each < count for each in listed):
        problem = f"{call}(axis={axis!r}): x is {tuple(shape)}, with {count} axes"
        raise ShapeError(problem, expected=range(-count, count), actual=axis)
    axes = tuple(int(each) % count for each in listed)
    if len(set(axes)) < len(axes):
        problem = f"{call}(axis={axis!r}): an axis of {tuple(shape)} occurs twice"
        raise ShapeError(problem, expected="each axis once", actual=axis)
    return axes


def _count(x: Array, axes: tuple[int, ...]) -> int:
    """Return the number of elements of a mean; 1 if there are none, to avoid a division by 0."""
    return max(math.prod(x.shape[axis] for axis in axes), 1)


def _repeated(call: str, dy: Array, x: Array, axes: tuple[int, ...], keepdims: bool) -> Array:
    """Return dy repeated along the summed axes, in a new array of the shape of x."""
    whole = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    rest = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    check_shape(call, "dy", dy.shape, whole if keepdims else rest)
    dx: Array = np.empty_like(x)
    dx[...] = dy.reshape(whole)  # the shape of x, with 1 for the summed axes
    return dx
