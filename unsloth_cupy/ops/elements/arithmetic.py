"""Basic ops that connect others on a tape: add, multiply, scale, reshape, transpose and index."""

import math
import reprlib
import sys
from types import EllipsisType
from typing import Any

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import Array
from ...core.op import op
from ...errors import ConfigError, RangeError, ShapeError
from ..common.checks import check_shape
from ..common.elementwise import by_element

Key = int | slice | EllipsisType | tuple[int | slice | EllipsisType | None, ...] | None


@op("a(*axes), b(*axes) -> c(*axes)", torch=lambda nn, t, o: t["a"] + t["b"])
def add(a: Array, b: Array) -> Array:
    """Return ``c = a + b``, element by element; both have the same shape and dtype.

    Examples
    --------
    >>> import numpy as np
    >>> import unsloth_cupy as ops
    >>> a, b = np.array([1.0, 4.0], np.float32), np.array([2.0, 2.0], np.float32)
    >>> np.testing.assert_array_equal(ops.add(a, b), [3, 6])
    >>> np.testing.assert_array_equal(ops.subtract(a, b), [-1, 2])
    >>> np.testing.assert_array_equal(ops.multiply(a, b), [2, 8])
    >>> np.testing.assert_array_equal(ops.divide(a, b), [0.5, 2])
    >>> np.testing.assert_array_equal(ops.scale(a, factor=10.0), [10, 40])
    >>> np.testing.assert_array_equal(ops.power(a, exponent=2.0), [1, 16])
    >>> np.testing.assert_allclose(ops.log(ops.exp(a)), a, rtol=1e-6)
    """
    return a + b


@add.gradient(widen=False)
def add_backward(dc: Array) -> tuple[Array, Array]:
    """Return the gradients of a and b."""
    return dc, dc


@op("a(*axes), b(*axes) -> c(*axes)", torch=lambda nn, t, o: t["a"] * t["b"])
def multiply(a: Array, b: Array) -> Array:
    """Return ``c = a * b``, element by element; both have the same shape and dtype."""
    return a * b


@multiply.gradient
def multiply_backward(dc: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Return the gradients of a and b."""
    return dc * b, dc * a


@op("x(*axes) -> y(*axes)", torch=lambda nn, t, o: t["x"] * o["factor"])
def scale(x: Array, *, factor: float) -> Array:
    """Return ``y = factor * x``, rounded once."""
    return x * x.dtype.type(factor)


@scale.gradient
def scale_backward(dy: Array, *, factor: float) -> Array:
    """Return the gradient of x."""
    return dy * dy.dtype.type(factor)


@op("x(*axes), factor: table -> y(*axes)", autocast="float32")
def scale_by(x: Array, factor: Array) -> Array:
    """Return ``y = factor * x``, rounded once; the host does not read factor, of shape ()."""
    return x * factor


@scale_by.gradient
def scale_by_backward(dy: Array, factor: Array) -> tuple[Array, None]:
    """Return the gradient of x."""
    return dy * factor, None


def _reshaped(own: Any, *, shape: Any) -> dict[str, Any]:
    """Return the sizes of the result's axes by name; sizes may be symbolic."""
    known, size = math.prod(n for n in shape if n != -1), math.prod(own)
    if (size != known) if -1 not in shape else (known == 0 or size % known):
        problem = f"reshape: x {tuple(own)} has {size} elements; shape={shape} does not"
        raise ShapeError(problem, expected=tuple(shape), actual=tuple(own))
    return {"shape": tuple(size // known if n == -1 else n for n in shape)}


@op("x(*axes) -> y(*shape)", widen=False, sizes=_reshaped)
def reshape(x: Array, *, shape: tuple[int, ...]) -> Array:
    """Return the elements of x in another shape; one size may be -1: it is computed.

    y is a view of x if the order of the elements in memory allows that.

    Raises
    ------
    ShapeError
        x does not have as many elements as shape.

    Examples
    --------
    >>> import numpy as np
    >>> import unsloth_cupy as ops
    >>> x = np.arange(6, dtype=np.float32).reshape(2, 3)
    >>> assert ops.reshape(x, shape=(3, 2)).shape == (3, 2)
    >>> np.testing.assert_array_equal(ops.transpose(x), x.T)
    >>> np.testing.assert_array_equal(ops.index(x, key=(slice(None), 1)), [1, 4])
    >>> np.testing.assert_array_equal(ops.columns(x, start=1, stop=3), x[:, 1:])
    >>> np.testing.assert_array_equal(ops.broadcast_to(x[0], shape=(2, 3)), [x[0], x[0]])
    >>> np.testing.assert_array_equal(ops.sum(x, axis=1), [3, 12])
    >>> np.testing.assert_array_equal(ops.mean(x, axis=0), [1.5, 2.5, 3.5])
    """
    sizes: Any = shape
    valid = isinstance(sizes, tuple | list) and all(is_integer(n, -1) for n in sizes)
    if not valid or max(sizes, default=0) > sys.maxsize or list(sizes).count(-1) > 1:
        problem = f"reshape(shape={shape!r}): pass a tuple of sizes; one may be -1"
        raise ShapeError(problem, expected="a tuple of sizes", actual=shape)
    _reshaped(x.shape, shape=shape)
    try:
        return x.reshape(shape)
    except ValueError as error:  # NumPy refuses too many axes, and sizes whose product is too large
        problem = f"reshape(shape={reprlib.repr(shape)}): {error}"
        raise ShapeError(problem, expected="a shape of an array", actual=shape) from error


@reshape.gradient(widen=False)
def reshape_backward(dy: Array, x: Array) -> Array:
    """Return the gradient of x."""
    if dy.size != x.size:
        problem = f"reshape_backward: dy {dy.shape} has {dy.size} elements and x {x.shape} {x.size}"
        raise ShapeError(problem, expected=x.size, actual=dy.size)
    return dy.reshape(x.shape)


def _length(size: Any, part: slice) -> Any:
    """Return the number of elements of an axis that a slice selects; all may be symbolic."""
    step = 1 if part.step is None else part.step
    least, most = (0, size) if step > 0 else (-1, size - 1)  # the bounds of Python's slice.indices
    ends = (least, most) if step > 0 else (most, least)
    start, stop = (
        end if n is None else max(least, min(n + size if n < 0 else n, most))
        for n, end in zip((part.start, part.stop), ends, strict=True)
    )
    return max(0, -(-(stop - start) // step))


@op(
    "x(*rows, columns) -> y(*rows, part)",
    widen=False,
    sizes=lambda own, *, start, stop: {"part": _length(own[-1], slice(start, stop))},
)
def columns(x: Array, *, start: int, stop: int) -> Array:
    """Return ``y = x[..., start:stop]``, a view of x: for the parts of a fused projection."""
    return x[..., start:stop]


@columns.gradient(widen=False)
def columns_backward(dy: Array, x: Array, *, start: int, stop: int) -> Array:
    """Return the gradient of x: dy in its columns, zeros in the others."""
    dx = np.zeros_like(x)
    part = dx[..., start:stop]
    check_shape("columns_backward", "dy", dy.shape, part.shape)
    part[...] = dy
    return dx


def _transposed(own: Any, *, order: Any = None) -> dict[str, Any]:
    """Return the sizes of the result's axes by name; sizes may be symbolic."""
    order = None if order is None else [int(i) for i in order]
    return {"turned": tuple(own[i] for i in _places(own, order))}


@op(
    "x(*axes) -> y(*turned)",
    widen=False,
    sizes=_transposed,
)
def transpose(x: Array, *, order: tuple[int, ...] | None = None) -> Array:
    """Return a view of x with its axes in another order; None reverses them.

    Raises
    ------
    ShapeError
        order does not name each axis of x once.
    """
    return x.transpose(_places(x.shape, order))


@transpose.gradient(widen=False)
def transpose_backward(dy: Array, x: Array, *, order: tuple[int, ...] | None = None) -> Array:
    """Return the gradient of x."""
    places = _places(x.shape, order)
    check_shape("transpose_backward", "dy", dy.shape, tuple(x.shape[axis] for axis in places))
    return dy.transpose([places.index(axis) for axis in range(x.ndim)])


def _places(shape: Any, order: Any) -> list[int]:
    """Return the requested order of the axes of x, as numbers from 0 on."""
    axes = len(shape)
    if order is None:
        return list(range(axes))[::-1]
    valid = isinstance(order, tuple | list) and all(is_integer(n, -axes) for n in order)
    if not valid or sorted(n % axes if n < 0 else n for n in order) != list(range(axes)):
        cure = f"name each of its {axes} axes once"
        problem = f"transpose(order={order!r}): x is {tuple(shape)}; {cure}"
        raise ShapeError(problem, expected=tuple(range(axes)), actual=order)
    return [int(n) % axes for n in order]


def _indexed(own: Any, *, key: Any) -> dict[str, Any]:
    """Return the sizes of the result's axes by name; sizes may be symbolic."""
    parts = list(key) if isinstance(key, tuple) else [key]
    indexed = sum(part is not None and part is not ... for part in parts)
    if indexed > len(own):
        raise RangeError(f"index(key={key!r}): x is {tuple(own)}; too many indices")
    rest = [slice(None)] * (len(own) - indexed)
    ellipsis = next((i for i, part in enumerate(parts) if part is ...), len(parts))
    sizes, result = iter(own), []
    for part in [*parts[:ellipsis], *rest, *parts[ellipsis + 1 :]]:
        if part is None:
            result.append(1)
            continue
        size = next(sizes)
        if isinstance(part, slice):
            result.append(_length(size, part))
        elif not -size <= part < size:
            raise RangeError(f"index(key={key!r}): x is {tuple(own)}; {part} is out of bounds")
    return {"part": tuple(result)}


@op("x(*axes) -> y(*part)", widen=False, sizes=_indexed)
def index(x: Array, *, key: Key) -> Array:
    """Return ``y = x[key]``, a view of x.

    Parameters
    ----------
    x : (*axes) float
    key : int, slice, ``...``, None, or a tuple of them
        With the meaning of NumPy's basic indexing.

    Returns
    -------
    y : (*part) float
        The selected elements.

    Raises
    ------
    ConfigError
        key contains something else, such as an array.
    RangeError
        An index is out of bounds, or x has too few axes.
    """
    for each in key if isinstance(key, tuple) else (key,):
        basic = each is None or each is ... or isinstance(each, slice)
        if not (basic or is_integer(each, -math.inf)):
            raise ConfigError(f"index(key={key!r}): pass integers, slices, ... or None")
    try:
        return x[key]
    except (IndexError, ValueError, TypeError, OverflowError) as error:  # also a step of 0
        raise RangeError(f"index(key={key!r}): x is {tuple(x.shape)}; {error}") from error


@index.gradient(widen=False)
def index_backward(dy: Array, x: Array, *, key: Key) -> Array:
    """Return the gradient of x: dy at the selected elements, zeros elsewhere."""
    dx = np.zeros_like(x)
    check_shape("index_backward", "dy", dy.shape, dx[key].shape)
    dx[key] = dy
    return dx


columns_backward.facts["traffic"] = lambda a: a["dy"].nbytes + a["dx"].nbytes

by_element(add, "arithmetic.cu")
by_element(multiply, "arithmetic.cu")
by_element(multiply_backward, "arithmetic.cu")
by_element(scale, "arithmetic.cu")
by_element(scale_backward, "arithmetic.cu", "scale")
