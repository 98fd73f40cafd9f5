"""``Var``, an array on a tape, with operators that call ops.

    loss = ((x @ weight - target) ** 2).mean()

Operands broadcast as in NumPy; a number is cast to the dtype of the other operand.
"""

import math
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import numpy as np

from ..core.arrays import framework_of
from ..core.call import is_number
from ..core.op import OPS, Traced
from ..errors import ConfigError, ShapeError
from ..placement import full_like


def _operator(op: str, sign: str, *, reflected: bool = False) -> Callable[["Var", Any], "Var"]:
    """Return the method of a binary operator; the second operand is a Var, array or number."""

    def method(self: "Var", other: Any) -> "Var":
        if op == "multiply" and is_number(other) and abs(other) < math.inf:
            return _called("scale", self, factor=_as_float(other, sign))
        other = _operand(self, other, sign)
        pair = (other, self) if reflected else (self, other)
        return _called(op, *_broadcast(pair, sign))

    return method


class Var(Traced):
    """An array on a tape: ``value`` is the array; ops on a Var return Vars.

    ``+``, ``-``, ``*``, ``/`` and ``@`` accept on either side another Var of the tape, an array of
    the same library and dtype, or a number (except ``@``); ``**`` accepts a number.  Shapes
    broadcast as in NumPy, and gradients of repeated elements are summed.  ``x[key]`` accepts
    integers, slices, ``...`` and ``None``.
    """

    __slots__ = ("index", "tape", "value")
    __array_ufunc__ = None  # NumPy leaves array + Var to __radd__

    def __init__(self, value: Any, tape: Any) -> None:
        self.value, self.tape = value, tape
        self.index = tape.issued
        tape.issued += 1

    def run_op(self, op: Any, arrays: list[Any], options: dict[str, Any]) -> Any:
        """Run an op on the values, and record it on the tape."""
        return self.tape.record(op, arrays, options)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.value.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """The number of axes of the array."""
        return len(self.value.shape)

    @property
    def T(self) -> "Var":  # noqa: N802 -- as NumPy names it
        """The array with its axes in reverse order."""
        return _called("transpose", self)

    __add__ = _operator("add", "+")
    __radd__ = _operator("add", "+", reflected=True)
    __sub__ = _operator("subtract", "-")
    __rsub__ = _operator("subtract", "-", reflected=True)
    __mul__ = _operator("multiply", "*")
    __rmul__ = _operator("multiply", "*", reflected=True)
    __truediv__ = _operator("divide", "/")
    __rtruediv__ = _operator("divide", "/", reflected=True)

    def __neg__(self) -> "Var":
        """Return the negative of each element."""
        return _called("scale", self, factor=-1.0)

    def __pow__(self, exponent: Any) -> "Var":
        """Return each element to the power of a number."""
        return _called("power", self, exponent=exponent)

    def __matmul__(self, other: Any) -> "Var":
        """Multiply matrices, as NumPy does: (..., n, k) by (..., k, m), or by (k,)."""
        return _product(self, _operand(self, other, "@"))

    def __rmatmul__(self, other: Any) -> "Var":
        """Multiply a matrix that is not a Var by this one: ``other @ self``."""
        return _product(_operand(self, other, "@"), self)

    def __getitem__(self, key: Any) -> "Var":
        """Return a part of the array; the key has integers, slices, ``...`` and ``None``."""
        match key:
            case (EllipsisType(), slice(step=None | 1) as part) if self.ndim:
                start, stop, _ = part.indices(self.shape[-1])
                return _called("columns", self, start=start, stop=max(start, stop))
        return _called("index", self, key=key)

    def reshape(self, *shape: Any) -> "Var":
        """Return the same elements in another shape, on the tape; one size may be -1."""
        whole = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return _called("reshape", self, shape=tuple(whole))

    def transpose(self, *axes: Any) -> "Var":
        """Return the array with its axes in another order; without axes, in reverse."""
        whole = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        return _called("transpose", self, order=tuple(whole) or None)

    def sum(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> "Var":
        """Return the sum over axes; None: over all axes."""
        return _called("sum", self, axis=axis, keepdims=keepdims)

    def mean(self, axis: int | tuple[int, ...] | None = None, *, keepdims: bool = False) -> "Var":
        """Return the mean over axes; None: over all axes."""
        return _called("mean", self, axis=axis, keepdims=keepdims)

    def exp(self) -> "Var":
        """Return e to the power of each element."""
        return _called("exp", self)

    def log(self) -> "Var":
        """Return the natural logarithm of each element."""
        return _called("log", self)

    def __repr__(self) -> str:
        """Show shape and dtype, not the numbers."""
        return f"Var({self.shape}, {self.dtype})"


def _called(op: str, *arrays: Any, **options: Any) -> Any:
    return OPS[op](*arrays, **options)


def _operand(var: Var, other: Any, sign: str) -> Any:
    """Return the second operand as a Var or an array; a number becomes a 0-d array."""
    if (is_number(other) or type(other) is int) and sign != "@":
        try:
            with np.errstate(over="ignore"):  # float16 overflow gives inf, as on a GPU
                return full_like(var.value, _as_float(other, sign), shape=())
        except RuntimeError as error:  # torch refuses the number
            raise ConfigError(f"Var {sign} {other!r}: not a number of {var.dtype}") from error
    if type(other) is not Var:
        framework_of(other, f"Var {sign} other: other")
    return other


def _as_float(number: Any, sign: str) -> float:
    try:
        return float(number)
    except OverflowError as error:
        raise ConfigError(f"Var {sign} number: {error}; pass one in the range of float") from error


def _broadcast(arrays: Any, sign: str) -> list[Any]:
    """Broadcast two Vars or arrays to a common shape."""
    a, b = (tuple(array.shape) for array in arrays)
    shape = _joint(a, b, sign)
    return [_in_shape(array, shape) for array in arrays]


def _in_shape(array: Any, shape: tuple[int, ...]) -> Any:
    return array if tuple(array.shape) == shape else _called("broadcast_to", array, shape=shape)


def _joint(a: tuple[int, ...], b: tuple[int, ...], sign: str) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(a, b)
    except ValueError as error:
        cure = "sizes must be equal or 1, from the last axis on"
        problem = f"Var {sign} other: {a} {sign} {b} do not broadcast; {cure}"
        raise ShapeError(problem, expected=a, actual=b) from error


def _product(a: Any, b: Any) -> Any:
    """Return a @ b for arrays with one axis or more."""
    left, right = tuple(a.shape), tuple(b.shape)
    if not left or not right or left[-1] != right[max(len(right) - 2, 0)]:
        cure = "the last axis of the first must be as long as the second to last of the second"
        raise ShapeError(f"Var @ other: {left} @ {right}; {cure}", expected=left, actual=right)
    if len(right) == 1:
        return _called("reshape", _called("linear", a, _shaped(b, 1, -1)), shape=left[:-1])
    if len(right) == 2:
        return _called("linear", a, _called("transpose", b))
    if len(left) == 1:
        c = _product(_shaped(a, 1, -1), b)
        return _shaped(c, *c.shape[:-2], c.shape[-1])
    batch = _joint(left[:-2], right[:-2], "@")
    a, b = (_in_shape(array, batch + tuple(array.shape[-2:])) for array in (a, b))
    return _called("matmul", a, b)


def _shaped(array: Any, *shape: int) -> Any:
    return _called("reshape", array, shape=shape)
