"""Arrays that are a shape, a dtype and strides alone: code runs on them to plan its memory.

NumPy's functions and operators give arrays like them, whose elements nobody can read, so that a
definition or a launch allocates and lets go of what it would with numbers.
"""

import itertools
import math
from collections.abc import Callable, Iterator
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
from .planned_functions import FUNCTIONS, METHODS, SCIPY, dtypes_of, packed, reshaped


class Ledger(Protocol):
    """What sees memory that is taken and given back."""

    def take(self, size: int) -> int:
        """Enter so many bytes; return their number."""

    def give_back(self, number: int) -> None:
        """Take the bytes of this number off."""


_ledger: ContextVar[tuple[Ledger, int] | None] = ContextVar("ledger", default=None)
_addresses = itertools.count(256, 256)  # no two arrays lie in one place


@contextmanager
def keeping(ledger: Ledger) -> Iterator[None]:
    """Enter what planned arrays take, inside a ``with`` block."""
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
    """What an array and its views lie in; it is given back when the last of them is gone."""

    def __init__(self, size: int) -> None:
        ledger = _ledger.get()
        self.address, self.ledger, self.number = next(_addresses), None, -1
        if ledger is not None:
            self.ledger, self.number = ledger[0], ledger[0].take(size * ledger[1])

    def __del__(self) -> None:
        """Give the bytes back."""
        if self.ledger is not None:
            self.ledger.give_back(self.number)


class Cpu(str):
    """Where NumPy says that its arrays are, with the number that devices have."""

    id = 0


HERE = Cpu("cpu")


class Planned(StandIn, np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a GPU that has no elements, and takes no memory.

    Its form is an array of NumPy's with the right strides, never read: it lies in one byte.
    """

    memory: Memory
    planned = True
    scipy = SCIPY

    @classmethod
    def of(cls, shape: Any, dtype: Any) -> Any:
        """Return a new array, in memory of its own."""
        sizes = (shape,) if isinstance(shape, int | np.integer) else tuple(map(int, shape))
        form = packed(sizes, np.dtype(dtype))
        return cls._made(form, Memory(form.nbytes))

    @classmethod
    def _made(cls, form: Any, memory: Memory) -> Any:
        kind: Any = cls
        made = np.ndarray.__new__(kind, ()) if issubclass(kind, np.ndarray) else kind.__new__(kind)
        made.form, made.memory = form, memory
        return made

    def empty(self, shape: Any, dtype: Any, new: Any = None) -> Any:
        """Return a new array."""
        return self.of(shape, dtype)

    def side_by_side(self, count: int) -> AbstractContextManager[None]:
        """Enter what is taken inside a ``with`` block count times: as many threads do the same."""
        return _times(count)

    def placed(self, array: Any) -> Any:
        """Return a new array of the form of a real one."""
        return self.of(array.shape, array.dtype)

    def _view(self, form: Any) -> Any:
        return self._made(form, self.memory)

    T = property(lambda self: self._view(self.form.T))
    base = property(lambda self: None)
    device = property(lambda self: HERE)
    ctypes = property(lambda self: SimpleNamespace(data=self.memory.address))
    data = property(lambda self: SimpleNamespace(ptr=self.memory.address))
    __dlpack__ = None  # it is an array, though nobody else can have it
    __hash__ = object.__hash__

    def __len__(self) -> int:
        """Return the length of the first axis."""
        return int(self.shape[0])

    def __bool__(self) -> bool:
        """Return False: elements are taken for zeros."""
        return False

    def __int__(self) -> int:
        """Return 0."""
        return 0

    __float__ = lambda self: 0.0  # noqa: E731 -- as __int__

    def __getitem__(self, index: Any) -> Any:
        """Return a view, or, where arrays are the index, a new array."""
        index = index if isinstance(index, tuple) else (index,)
        chosen = [i for i, part in enumerate(index) if isinstance(part, Planned | np.ndarray)]
        gap = next((i for i, part in enumerate(index) if part is Ellipsis), len(index))
        if not chosen:
            return self._view(self.form[index if gap < len(index) else (*index, ...)])
        rest = self.ndim - sum(part is not Ellipsis for part in index)
        index = (*index[:gap], *(slice(None),) * rest, *index[gap + 1 :])
        arrays = [part for part in index if isinstance(part, Planned | np.ndarray)]
        if any(array.dtype == bool for array in arrays):  # elements are zeros: none is chosen
            return self.of((0, *self.shape[arrays[0].ndim :]), self.dtype)
        first = next(i for i, part in enumerate(index) if part is arrays[0])
        plain = tuple(slice(1) if isinstance(i, Planned | np.ndarray) else i for i in index)
        sizes = list(self.form[plain].shape)
        sizes[first : first + len(arrays)] = np.broadcast_shapes(*(a.shape for a in arrays))
        return self.of(sizes, self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Leave everything as it is."""

    def reshape(self, *shape: Any, **_: Any) -> Any:
        """Return a view, or a copy where the elements lie in another order."""
        asked = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        known = math.prod(n for n in asked if n != -1)
        sizes = [self.size // max(known, 1) if n == -1 else int(n) for n in asked]
        if math.prod(sizes) != self.size:
            problem = f"reshape: {self.shape} does not make {tuple(asked)}"
            raise ShapeError(problem, expected=tuple(asked), actual=self.shape)
        strides = reshaped(self.shape, self.strides, sizes)
        if strides is None:
            return self.of(sizes, self.dtype)
        return self._view(np.lib.stride_tricks.as_strided(self.form, sizes, strides))

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
        """Return a view of so many elements from the first on, as one axis."""
        return self._view(np.lib.stride_tricks.as_strided(self.form, (size,), (self.itemsize,)))

    def astype(self, dtype: Any, *_: Any, copy: bool = True, **__: Any) -> Any:
        """Return an array of a dtype."""
        return self if not copy and self.dtype == dtype else self.of(self.shape, dtype)

    def view(self, dtype: Any) -> Any:
        """Return the same memory as numbers of another dtype, along the last axis."""
        return self._view(self.form.view(dtype))

    def copy(self, *_: Any) -> Any:
        """Return a packed copy."""
        return self.of(self.shape, self.dtype)

    def fill(self, value: Any) -> None:
        """Leave everything as it is."""

    def _reduced(self, name: str, axis: Any = None, dtype: Any = None, **options: Any) -> Any:
        axes = range(self.ndim) if axis is None else np.atleast_1d(axis) % max(self.ndim, 1)
        one = 1 if options.get("keepdims") else 0
        sizes = [one if i in axes else n for i, n in enumerate(self.shape)]
        kept = sizes if one else [n for i, n in enumerate(self.shape) if i not in axes]
        found = dtype or getattr(np.ones(1, self.dtype), name)().dtype
        return self.of(kept, found)

    sum = partialmethod(_reduced, "sum")
    max = partialmethod(_reduced, "max")
    min = partialmethod(_reduced, "min")
    any = partialmethod(_reduced, "any")
    all = partialmethod(_reduced, "all")
    mean = partialmethod(_reduced, "mean")

    def clip(self, *bounds: Any, **_: Any) -> Any:
        """Return a new array of the same form."""
        return self.copy()

    def cumsum(self, *_: Any, **__: Any) -> Any:
        """Return the sums; integers are added in 64 bits."""
        return self.of(self.shape, np.ones(1, self.dtype).cumsum().dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Return what a ufunc gives: an array of the broadcast shape, or the one to write to."""
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
            (*left, m, _), (*right, _, n) = shapes
            shape: Any = (*np.broadcast_shapes(tuple(left), tuple(right)), m, n)
        else:
            shape = np.broadcast_shapes(*shapes)
        dtypes = options.get("dtype")
        given = tuple(getattr(v, "dtype", None) or type(v) for v in inputs)
        found = (dtypes,) if dtypes is not None else dtypes_of(ufunc, given)
        made = tuple(self.of(shape, dtype) for dtype in found)
        return made if len(made) > 1 else made[0]

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        """Return what one of NumPy's functions gives; TypeError for one that is not known here."""
        if function.__name__ in METHODS:
            return getattr(args[0], function.__name__)(*args[1:], **options)
        known = FUNCTIONS.get(function.__name__)
        return NotImplemented if known is None else known(self.of, *args, **options)


class PlannedOnHost(Planned, np.ndarray[Any, Any]):  # type: ignore[misc]
    """An array of NumPy's that has no elements."""


class Shapes:
    """The GPU that planned arrays live on: it runs nothing; its numbers are those of an H200."""

    def owns(self, array: Any) -> bool:
        """Say whether array is a planned array of a GPU."""
        return array.__class__ is Planned

    def compile(self, name: str, source: str) -> Callable[..., None]:
        """Return a launch that does nothing."""
        return lambda grid, block, args, shared: None

    def limits(self, array: Any) -> Limits:
        """Return the limits of an H200."""
        return Limits(90, 227 * 1024, 132, clusters=True)

    def tensor_map(self, box: tuple[int, ...], array: Any) -> None:
        """Return no map, which takes no memory: kernels that get maps are planned too."""

    def empty(self, shape: Any, dtype: Any, like: Any) -> Any:
        """Return a new planned array."""
        return like.of(shape, dtype)


target.targets += (Shapes(),)
