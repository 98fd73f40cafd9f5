"""Functions of NumPy and SciPy for planned arrays: see ``planned.py``."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import ShapeError

New = Callable[[Any, Any], Any]  # (shape, dtype) -> a new planned array


class Sparse:
    """A csr_matrix of planned arrays: like SciPy, it copies indices to 32 bits if they fit."""

    def __init__(self, arrays: Sequence[Any], shape: tuple[int, int]) -> None:
        data, *indices = arrays
        self.held = [data, *(i if max(shape) >= 2**31 else i.astype(np.int32) for i in indices)]
        self.rows = shape[0]

    def __matmul__(self, dense: Any) -> Any:
        """Return the product with a matrix."""
        return dense.of(
            (self.rows, dense.shape[1]), np.result_type(self.held[0].dtype, dense.dtype)
        )


SCIPY = {
    "sparse": SimpleNamespace(csr_matrix=Sparse),
    "special": SimpleNamespace(erfc=lambda x, out: out),
}
METHODS = (  # methods of arrays, equivalent to the functions
    "sum",
    "max",
    "min",
    "any",
    "all",
    "mean",
    "clip",
    "cumsum",
    "reshape",
    "transpose",
)


def _arange(new: New, start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Any:
    start, stop = (0, start) if stop is None else (start, stop)
    whole = all(isinstance(n, int | np.integer) for n in (start, stop, step))
    return new(max(0, math.ceil((stop - start) / step)), dtype or (np.int64 if whole else float))


def _like(new: New, array: Any, *fill: Any, dtype: Any = None, shape: Any = None, **_: Any) -> Any:
    dtype = next((d for d in fill if isinstance(d, np.dtype | type)), dtype)
    return new(array.shape if shape is None else shape, dtype or array.dtype)


def _einsum(new: New, letters: str, *arrays: Any) -> Any:
    sides = letters.split("->")
    sizes = {
        letter: size
        for axes, array in zip(sides[0].split(","), arrays, strict=True)
        for letter, size in zip(axes, array.shape, strict=True)
    }
    return new([sizes[letter] for letter in sides[1]], np.result_type(*(a.dtype for a in arrays)))


def _joined(new: New, arrays: Sequence[Any], axis: int = 0, out: Any = None) -> Any:
    if out is not None:
        return out
    sizes = list(arrays[0].shape)
    sizes[axis] = sum(array.shape[axis] for array in arrays)
    return new(sizes, np.result_type(*(array.dtype for array in arrays)))


def _each_broadcast(_: New, *arrays: Any) -> Any:
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    return [array._view(np.broadcast_to(array.form, shape)) for array in arrays]


def _repeated(new: New, x: Any, times: int, axis: int | None = None) -> Any:
    if axis is None:
        return new(x.size * times, x.dtype)
    return new([n * (times if i == axis else 1) for i, n in enumerate(x.shape)], x.dtype)


def _stacked(new: New, arrays: Sequence[Any], axis: int = 0) -> Any:
    sizes = list(arrays[0].shape)
    sizes.insert(axis % (len(sizes) + 1), len(arrays))
    return new(sizes, np.result_type(*(array.dtype for array in arrays)))


def _where(new: New, *arrays: Any) -> Any:
    dtypes = [np.empty(0, a.dtype) if hasattr(a, "dtype") else a for a in arrays[1:]]
    return new(np.broadcast_shapes(*(np.shape(a) for a in arrays)), np.result_type(*dtypes))


def _full(new: New, shape: Any, value: Any, dtype: Any = None, **_: Any) -> Any:
    return new(shape, dtype or np.asarray(value).dtype)


def _plain(new: New, shape: Any, dtype: Any = float, **_: Any) -> Any:
    return new(shape, dtype)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("zeros", "ones", "empty"), _plain),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like"), _like),
    "arange": _arange,
    "argsort": lambda new, x, **_: new(x.shape, np.int64),
    "asarray": lambda new, x, dtype=None: new(np.shape(x), dtype or np.asarray(x).dtype),
    "bincount": lambda new, x, minlength: new(minlength, np.int64),
    "broadcast_arrays": _each_broadcast,
    "broadcast_to": lambda new, x, shape: x._view(np.broadcast_to(x.form, shape)),
    "concatenate": _joined,
    "copyto": lambda new, *_, **__: None,
    "dot": lambda new, a, b: new((), a.dtype),
    "einsum": _einsum,
    "full": _full,
    "moveaxis": lambda new, x, source, to: x._view(np.moveaxis(x.form, source, to)),
    "put_along_axis": lambda new, *_, **__: None,
    "repeat": _repeated,
    "searchsorted": lambda new, x, values, **_: new(values.shape, np.int64),
    "shape": lambda new, x: x.shape,
    "shares_memory": lambda new, a, b: False,  # there are no elements
    "sort": lambda new, x, **_: new(x.shape, x.dtype),
    "stack": _stacked,
    "take": lambda new, x, index, axis: new(
        (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]), x.dtype
    ),
    "take_along_axis": lambda new, x, index, axis: new(index.shape, x.dtype),
    "tile": lambda new, x, times: new(x.size * times, x.dtype),
    "tril": lambda new, x, k=0: new(x.shape, x.dtype),
    "where": _where,
}


@lru_cache(maxsize=4096)
def contiguous_form(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return a C-contiguous array that is backed by one element and never read."""
    strides = [dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    try:
        return np.lib.stride_tricks.as_strided(np.empty((), dtype), shape, strides)
    except ValueError as error:
        problem = f"{shape} {dtype}: {error}; pass smaller sizes"
        raise ShapeError(problem, expected="less than 2**63 bytes", actual=shape) from error


broadcast = lru_cache(maxsize=4096)(np.broadcast_shapes)


@cache
def dtypes_of(ufunc: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result dtypes of a ufunc for arguments of these dtypes or Python types."""
    values = [np.empty(0, a) if isinstance(a, np.dtype) else a(1) for a in arguments]
    with np.errstate(all="ignore"):
        results = ufunc(*(v.reshape(0, 0) if ufunc is np.matmul else v for v in values))
    return tuple(a.dtype for a in (results if type(results) is tuple else (results,)))


@cache
def reduced_dtype(name: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the result dtype of a reduction, such as "sum", of an array of this dtype."""
    result: np.dtype[Any] = getattr(np.ones(1, dtype), name)().dtype
    return result


@lru_cache(maxsize=4096)
def view_of(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any], target: tuple[int, ...]
) -> Any:
    """Return a view with another shape; None if the reshape needs a copy."""
    new_strides = reshaped(shape, strides, target)
    if new_strides is None:
        return None
    return np.lib.stride_tricks.as_strided(np.empty((), dtype), target, new_strides)


def reshaped(
    shape: Sequence[int], strides: Sequence[int], target: Sequence[int]
) -> list[int] | None:
    """Return the strides of a view with another shape; None if the reshape needs a copy.

    NumPy has no function for this that does not make the copy.
    """
    axes = [(n, stride) for n, stride in zip(shape, strides, strict=True) if n != 1]
    result: list[int] = []
    if 0 in target:
        return [0] * len(target)
    for size in reversed(target):  # from the last axis: each new axis is a part of an old axis
        if size == 1:
            result.append(0)
            continue
        length, stride = axes.pop()
        while length % size and axes and axes[-1][1] == length * stride:
            length *= axes.pop()[0]
        if length % size:
            return None
        result.append(stride)
        if length > size:
            axes.append((length // size, stride * size))
    return result[::-1]
