"""Launches worked out once: later calls like it allocate, start the same kernels and return.

A launch decides by shapes, dtypes, strides, addresses modulo 16 and options.  The second call
that agrees in them runs on ``Recorded`` arrays, which know these and nothing else, and what it
allocates and starts is taken down; from then on that is all that happens.  A launch that asks an
array for more, such as a copy or a sum, is not recorded and runs at each call.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from . import gpu
from .stand_in import StandIn

Run = Callable[[list[Any], dict[str, Any]], Any]  # (arrays, options)

KEPT = 256  # of the calls of one form; a learning rate may change with every step
lasting: list[Any] = []  # arrays that outlive every call, such as those that kernels report to
ALSO = {"data", "ctypes", "device"}  # for addresses, and for what is asked of a device


class UnknownError(Exception):
    """A launch asks for more than how arrays lie; no AttributeError, which getattr would hide."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnknownError


class Recorded(StandIn):
    """An array of which a launch learns how it lies; isinstance finds the class of the array."""

    __array__ = __array_ufunc__ = __array_function__ = __bool__ = __eq__ = _refuse
    __hash__ = object.__hash__
    __class__ = property(lambda self: type(self.form))

    def __init__(self, array: Any, recording: "Recording") -> None:
        self.form, self.recording = array, recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self.form, name) if name in ALSO else _refuse()

    def empty(self, shape: Any, dtype: Any, new: Any = None) -> Any:
        """Return a new array, as ``new`` makes it, which every replay makes again."""
        return self.recording.allocate(shape, dtype, new or _allocator(self))

    def spanned(self, size: int) -> Any:
        """Return the array: a kernel gets no more than its address."""
        return self


class Recording:
    """What a launch allocates and starts."""

    def __init__(self) -> None:
        self.arrays: list[Recorded] = []  # those of the call, then those that are allocated
        self.forms: list[tuple[Any, Any, Any]] = []  # of the latter: what makes it, shape, dtype
        self.starts: list[tuple[Any, ...]] = []  # of kernels: how, grid, block, arguments, shared

    def enter(self, array: Any) -> Any:
        """Return what the launch gets in place of an array."""
        self.arrays.append(Recorded(array, self))
        return array if array is None or type(array) is int else self.arrays[-1]

    def allocate(self, shape: Any, dtype: Any, new: Callable[..., Any]) -> Any:
        """Return what ``new`` makes of shape and dtype."""
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        self.forms.append((new, sizes, np.dtype(dtype)))
        return self.enter(new(sizes, np.dtype(dtype)))

    def starting(self, kernel: Any) -> Callable[..., None]:
        """Return what takes down a launch of a kernel."""

        def start(grid: Any, block: Any, values: Any, shared: int) -> None:
            ready = [kernel.ready(v) if isinstance(v, np.generic) else v for v in values]
            self.starts.append((kernel.launch, grid, block, ready, shared))

        return start

    def finished(self, result: Any) -> Run:
        """Return what allocates and starts the same, and picks the result."""
        numbers = {id(array): number for number, array in enumerate(self.arrays)}
        fixed: list[Any] = []

        def number_of(value: Any) -> int:
            if id(value) not in numbers:
                scalar = isinstance(value, np.generic) or not hasattr(value, "shape")
                if not (scalar or any(value is each for each in lasting)):
                    _refuse()  # the next call may make another array
                numbers[id(value)] = len(self.arrays) + len(fixed)
                fixed.append(value)
            return numbers[id(value)]

        def picker(values: Sequence[Any]) -> Callable[[list[Any]], Any]:
            return operator.itemgetter(*map(number_of, values))

        results = picker(result if type(result) is tuple else (result,))
        starts = [(*start[:3], picker(start[3]), start[4]) for start in self.starts]
        forms = self.forms

        def replay(arrays: list[Any], options: dict[str, Any]) -> Any:
            live = [*arrays, *[new(shape, dtype) for new, shape, dtype in forms], *fixed]
            for launch, grid, block, pick, shared in starts:
                launch(grid, block, pick(live), shared)
            return results(live)

        return replay


def _allocator(like: Any) -> Callable[..., Any]:
    """Return what makes arrays of a shape and a dtype, of like's library."""
    if like.__class__ is np.ndarray:
        return np.empty
    return gpu.cupy().ndarray if gpu.is_cupys(like.__class__) else _refuse


def replaying(run: Run, check: Run, defined: Callable[[list[Any]], Run], host: bool) -> Run:
    """Return run for calls of one form, on a host or a device, replayed where it is recorded.

    A check sees each way to lie once.  Where run returns NotImplemented, for these options there
    is no kernel, what ``defined`` makes of the arrays runs instead.
    """
    known: dict[Any, Run | None] = {}  # None: met once
    instead: list[Run] = []
    lie = _here if host else _there

    def replayed(arrays: list[Any], options: dict[str, Any]) -> Any:
        key = (*lie(arrays), *options.values())
        try:
            again = known[key]
        except (KeyError, TypeError) as error:
            check(arrays, options)
            if len(known) >= KEPT:
                known.clear()
            key = key if type(error) is KeyError else ()  # some options cannot be looked up
            known[key], again = None, run
        if again is None:
            again = known[key] = _recorded(run, arrays, options)
        result = again(arrays, options)
        if result is NotImplemented:
            instead[:] = instead or [defined(arrays)]
            known[key] = instead[0]
            result = instead[0](arrays, options)
        return result

    return replayed


def _there(arrays: Sequence[Any]) -> list[Any]:
    """Return how CuPy's arrays lie; integers are what they are, as a kernel gets them."""
    return [a if a is None or a.__class__ is int else (a.strides, a.data.ptr % 16) for a in arrays]


def _here(arrays: Sequence[Any]) -> list[Any]:
    """Return the same of NumPy's."""
    return [a if a is None or type(a) is int else (a.strides, a.ctypes.data % 16) for a in arrays]


def _recorded(run: Run, arrays: Sequence[Any], options: dict[str, Any]) -> Run:
    recording = Recording()
    try:
        return recording.finished(run([*map(recording.enter, arrays)], options))
    except Exception:  # whatever it was, run meets it again
        return run
    finally:  # or arrays would wait for the garbage collector: each knows its recording
        recording.arrays.clear()
        recording.starts.clear()
