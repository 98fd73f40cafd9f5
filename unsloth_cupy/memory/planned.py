"""Planned arrays, which have a shape, a dtype and strides, but no elements, to plan memory.

NumPy functions and operators return planned arrays for planned arrays, so a definition or a launch
allocates and frees as much memory as with real arrays.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partialmethod
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from ..core import target
from ..core.stand_in import StandIn
from ..core.target import Limits
from ..errors import ShapeError
from . import planned_functions as functions
from .planned_functions import FUNCTIONS, METHODS, SCIPY, broadcast, contiguous_form


class Ledger(Protocol):
    """A record of allocations and frees."""

    def take(self, size: int) -> int:
        """Record an allocation of ``size`` bytes; return its number."""

    def give_back(self, number: int) -> None:
        """Record that the allocation of this number is freed."""


_ledger: ContextVar[tuple[Ledger, int] | None] = ContextVar("ledger", default=None)
NUMBERS = int, np.integer
_addresses = itertools.count(256, 256)  # unique, and aligned to 256 bytes


@contextmanager
def recording_in(ledger: Ledger) -> Iterator[None]:
    """Record the memory of planned arrays in a ledger, inside a ``with`` block."""
    token = _ledger.set((ledger, 1))
    try:
        yield
    finally:
        _ledger.reset(token)


@contextmanager
def _times(count: int) -> Iterator[None]:
    now = _ledger.get()
    token = _ledger.set(None if now is None else (now[0], now[1] * count))
    try:
        yield
    finally:
        _ledger.reset(token)


class Memory:
    """The memory of an array and its views, freed with the last of them."""

    __slots__ = "address", "ledger", "number"

    def __init__(self, size: int) -> None:
        ledger = _ledger.get()
        self.address, self.ledger, self.number = next(_addresses), None, -1
        if ledger is not None:
            self.ledger, self.number = ledger[0], ledger[0].take(size * ledger[1])

    def __del__(self) -> None:
        """Free the bytes."""
        if self.ledger is not None:
            self.ledger.give_back(self.number)


class Cpu(str):
    """The ``device`` of NumPy's arrays, with the ``id`` that CuPy's devices have."""

    id = 0


HERE = Cpu("cpu")


class Planned(StandIn, np.lib.mixins.NDArrayOperatorsMixin):
    """A GPU array without elements, which needs no memory.

    ``form`` is a NumPy array with the same shape and strides, backed by one element and never read.
    """

    memory: Memory
    planned = True
    scipy = SCIPY

    @classmethod
    def of(cls, shape: Any, dtype: Any) -> Any:
        """Return a new array with memory of its own."""
        sizes = (int(shape),) if isinstance(shape, NUMBERS) else tuple(map(int, shape))
        form = contiguous_form(sizes, np.dtype(dtype))
        return cls._made(form, Memory(form.nbytes))

    @classmethod
    def _made(cls, form: Any, memory: Memory) -> Any:
        new: Any = cls.__new__(cls)
        new.form, new.memory = form, memory
        return new

    def empty(self, shape: Any, dtype: Any, new: Any = None) -> Any:
        """Return a new array."""
        return self.of(shape, dtype)

    def steps(self, steps: Iterable[Any]) -> Iterable[Any]:
        """Return only the first step of a loop: all steps use the same memory."""
        return itertools.islice(steps, 1)

    def side_by_side(self, count: int) -> AbstractContextManager[None]:
        """Count allocations inside a ``with`` block ``count`` times, once per thread."""
        return _times(count)

    def placed(self, array: Any) -> Any:
        """Return a new array with the shape and dtype of a real one."""
        return self.of(array.shape, array.dtype)

    def offloaded(self) -> Any:
        """Return this array in the memory of the host, if the ledger counts that memory."""
        now = _ledger.get()
        return PlannedOffload(self, now[0]) if now and hasattr(now[0], "offload") else self

    def _view(self, form: Any) -> Any:
        return self._made(form, self.memory)

    T = property(lambda self: self._view(self.form.T))
    base = property(lambda self: None)
    device = property(lambda self: HERE)
    ctypes = property(lambda self: SimpleNamespace(data=self.memory.address))
    data = property(lambda self: SimpleNamespace(ptr=self.memory.address))
    __dlpack__ = None  # looks like an array, but cannot be exported
    __hash__ = object.__hash__

    def __len__(self) -> int:
        """Return the length of the first axis."""
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        """Yield views along the first axis."""
        return (self[index] for index in range(len(self)))

    def __bool__(self) -> bool:
        """Return False: elements count as zeros."""
        return False

    def __int__(self) -> int:
        """Return 0."""
        return 0

    __float__ = lambda self: 0.0  # noqa: E731 -- as __int__

    def __getitem__(self, index: Any) -> Any:
        """Return a view, or a new array if the index contains arrays."""
        index = index if isinstance(index, tuple) else (index,)
        arrays = [part for part in index if isinstance(part, ARRAYS)]
        if not arrays:
            return self._view(self.form[index if ... in index else (*index, ...)])
        gap = next((i for i, part in enumerate(index) if part is Ellipsis), len(index))
        rest = self.ndim - sum(part is not Ellipsis for part in index)
        index = (*index[:gap], *(slice(None),) * rest, *index[gap + 1 :])
        if any(array.dtype == bool for array in arrays):  # elements count as False
            return self.of((0, *self.shape[arrays[0].ndim :]), self.dtype)
        plain = tuple(slice(1) if isinstance(i, ARRAYS) else i for i in index)
        chosen = [at for at, part in enumerate(index) if isinstance(part, (*ARRAYS, int))]
        axes = [part for part in index if not isinstance(part, int)]
        own = [at for at, part in enumerate(axes) if isinstance(part, ARRAYS)]
        sizes = [size for at, size in enumerate(self.form[plain].shape) if at not in own]
        first = own[0] if chosen[-1] - chosen[0] < len(chosen) else 0  # apart, they come first
        sizes[first:first] = np.broadcast_shapes(*(array.shape for array in arrays))
        return self.of(sizes, self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Do nothing: there are no elements."""

    def reshape(self, *shape: Any, **_: Any) -> Any:
        """Return a view, or a copy if the strides do not allow a view."""
        requested = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        known = math.prod(n for n in requested if n != -1)
        sizes = tuple(self.size // max(known, 1) if n == -1 else int(n) for n in requested)
        if math.prod(sizes) != self.size:
            problem = f"reshape: {self.shape} does not make {tuple(requested)}"
            raise ShapeError(problem, expected=tuple(requested), actual=self.shape)
        form = functions.view_of(self.shape, self.strides, self.dtype, sizes)
        return self.of(sizes, self.dtype) if form is None else self._view(form)

    def ravel(self) -> Any:
        """Return all elements on one axis."""
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> Any:
        """Return a view with the axes in this order."""
        return self._view(self.form.transpose(*axes))

    def swapaxes(self, one: int, other: int) -> Any:
        """Return a view with two axes exchanged."""
        return self._view(self.form.swapaxes(one, other))

    def spanned(self, size: int) -> Any:
        """Return a view of the first ``size`` elements, as one axis."""
        return self._view(np.lib.stride_tricks.as_strided(self.form, (size,), (self.itemsize,)))

    def astype(self, dtype: Any, *_: Any, copy: bool = True, **__: Any) -> Any:
        """Return an array of a dtype."""
        return self if not copy and self.dtype == dtype else self.of(self.shape, dtype)

    def view(self, dtype: Any) -> Any:
        """Return a view of the memory with another dtype, along the last axis."""
        return self._view(self.form.view(dtype))

    def copy(self, *_: Any) -> Any:
        """Return a copy in C order."""
        return self.of(self.shape, self.dtype)

    def fill(self, value: Any) -> None:
        """Do nothing: there are no elements."""

    def _reduced(self, name: str, axis: Any = None, dtype: Any = None, **options: Any) -> Any:
        axes = range(self.ndim) if axis is None else np.atleast_1d(axis) % max(self.ndim, 1)
        one = 1 if options.get("keepdims") else 0
        sizes = [one if i in axes else n for i, n in enumerate(self.shape)]
        kept = sizes if one else [n for i, n in enumerate(self.shape) if i not in axes]
        return self.of(kept, dtype or functions.reduced_dtype(name, self.dtype))

    sum = partialmethod(_reduced, "sum")
    max = partialmethod(_reduced, "max")
    min = partialmethod(_reduced, "min")
    any = partialmethod(_reduced, "any")
    all = partialmethod(_reduced, "all")
    mean = partialmethod(_reduced, "mean")

    def argmax(self, axis: Any = None) -> Any:
        """Return the indices of the largest elements."""
        return self._reduced("max", axis, np.dtype(np.int64))

    def clip(self, *bounds: Any, **_: Any) -> Any:
        """Return a new array of the same shape and dtype."""
        return self.copy()

    def cumsum(self, *_: Any, **__: Any) -> Any:
        """Return the cumulative sums; integers are summed in 64 bits."""
        return self.of(self.shape, np.ones(1, self.dtype).cumsum().dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Return the result of a ufunc: a planned array of the broadcast shape, or ``out``."""
        out = options.get("out")
        if method == "reduce":
            names = {np.add: "sum", np.maximum: "max", np.minimum: "min"}
            return inputs[0]._reduced(names[ufunc], options.pop("axis", 0), **options)
        if method != "__call__":
            return NotImplemented
        if out is not None:
            return out[0] if len(out) == 1 else out
        shapes: Any = [getattr(value, "shape", ()) for value in inputs]
        if ufunc is np.matmul:
            left, right = shapes  # a vector has no axis in the result
            outer = broadcast(tuple(left[:-2]), tuple(right[:-2]))
            shape: Any = (*outer, *left[:-1][-1:], *(right[-1:] if len(right) > 1 else ()))
        else:
            shape = broadcast(*shapes)
        dtypes = options.get("dtype")
        if dtypes is not None:
            return self.of(shape, dtypes)
        kinds = [getattr(v, "dtype", None) or type(v) for v in inputs]
        results = [self.of(shape, dtype) for dtype in functions.dtypes_of(ufunc, (*kinds,))]
        return (*results,) if len(results) > 1 else results[0]

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        """Return the result of a NumPy function; NumPy raises a TypeError for other functions."""
        if function.__name__ in METHODS:
            return getattr(args[0], function.__name__)(*args[1:], **options)
        known = FUNCTIONS.get(function.__name__)
        return NotImplemented if known is None else known(self.of, *args, **options)


ARRAYS = Planned, np.ndarray


class PlannedOffload:
    """A planned array that is offloaded, as ``training.offload.Offloaded`` is for real arrays.

    The newest one keeps its GPU memory until the next array is offloaded: it may be copied yet.
    """

    def __init__(self, array: Planned, ledger: Any) -> None:
        self.shape, self.dtype, self.size = array.shape, array.dtype, array.nbytes
        self.array: Planned | None = array
        self.ledger, self.fetched = ledger, False
        ledger.offload(self)

    def fetch(self) -> Any:
        """Allocate the array on its GPU again, unless it is there; return it."""
        if self.array is None:
            self.array, self.fetched = Planned.of(self.shape, self.dtype), True
        return self.array

    def back(self) -> Any:
        """Return the array on its GPU again."""
        array = self.fetch()
        if self.fetched:
            self.array, self.fetched = None, False
        return array

    def __del__(self) -> None:
        """Free the memory of the host."""
        self.ledger.host -= self.size


class PlannedOnHost(Planned, np.ndarray[Any, Any]):  # type: ignore[misc]
    """A planned array that is an instance of ``np.ndarray``."""

    def __new__(cls) -> Any:
        """Return an array without axes; ``form`` has the shape."""
        return super().__new__(cls, ())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Return the result of a ufunc; NumPy copies operands that it broadcasts to buffers."""
        result = super().__array_ufunc__(ufunc, method, *inputs, **options)
        if method == "__call__" and ufunc is not np.matmul and isinstance(result, Planned):
            for each in inputs:
                if 1 < getattr(each, "size", 1) < result.size:
                    self.of(min(result.size, np.getbufsize()), each.dtype)  # freed at once
        return result

    def offloaded(self) -> Any:
        """Return the array itself: it is in the memory of the host."""
        return self


def as_input(array: Any, like: Any) -> Any:
    """Return an input of a planned model: the array itself on a host, where ops read values."""
    return array if isinstance(like, np.ndarray) else like.placed(array)


def placed_inputs(inputs: Mapping[str, Any], arrays: Any) -> dict[str, Any]:
    """Return the inputs of a pass: planned arrays on a GPU, the same arrays on a host."""
    if arrays is not Planned:
        return {**inputs}
    each = inputs.items()
    return {n: a if a is None else arrays.of(a.shape, a.dtype) for n, a in each}


class Shapes:
    """The target of planned GPU arrays: runs nothing, and has the limits of an H200."""

    def owns(self, array: Any) -> bool:
        """Return whether ``array`` is a planned GPU array."""
        return array.__class__ is Planned

    def compile(self, name: str, source: str) -> Callable[..., None]:
        """Return a launch that does nothing."""
        return lambda grid, block, args, shared: None

    def limits(self, array: Any) -> Limits:
        """Return the limits of an H200."""
        return Limits(90, 227 * 1024, 132, clusters=True)

    def tensor_map(self, box: tuple[int, ...], array: Any) -> None:
        """Return None: a tensor map needs no memory, and kernels with maps are planned too."""

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        """Return a new planned array."""
        return like.of(shape, dtype)


target.targets += (Shapes(),)
