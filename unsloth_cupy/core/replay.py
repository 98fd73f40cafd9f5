"""Records what a launch allocates and starts; later calls with the same key repeat only that.

A launch may depend on shapes, dtypes, strides, addresses modulo 16, options and ``choices``; all of
them are in a call's key, so that no op has to say on which it depends.  The
second call with equal ones runs on ``Recorded`` arrays, which have these properties and no others,
and its allocations and kernel starts are recorded; later calls replay them.  A launch that needs
more of an array, such as a copy or a sum, is not recorded and runs at each call.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np

from . import gpu
from .stand_in import StandIn

Run = Callable[[list[Any], dict[str, Any]], Any]  # (arrays, options)

KEPT = 256  # recordings per form of call; a learning rate may change with every step
# what launches choose by besides the arguments of a call, such as an AttentionConfig
choices: ContextVar[tuple[Any, ...]] = ContextVar("choices", default=())
FIXED = "fixed order"  # among them: the order of a row's sums depends on nothing but the row
GRADIENTS = "of gradients too"  # with FIXED: also in backward passes
persistent_arrays: list[Any] = []  # they outlive every call: kernels report to some of them
ALLOWED = {"data", "ctypes", "device", "base"}  # for addresses and for limits of the device


def choosing(marks: tuple[Any, ...], function: Any, *arguments: Any, **options: Any) -> Any:
    """Call a function; its launches choose by ``marks``, if there are any: those of its forward."""
    token = choices.set(marks or choices.get())
    try:
        return function(*arguments, **options)
    finally:
        choices.reset(token)


def is_fixed() -> bool:
    """Return whether the bits of a row may not depend on the rows that are computed beside it."""
    return FIXED in choices.get()


@contextmanager
def fixed_order(wanted: bool = True, *, gradients: bool = False) -> Iterator[None]:
    """Fix the order of the sums of each row inside a ``with`` block; False: leave it free.

    With ``gradients`` it is that of their backward passes, too.
    """
    others = tuple(each for each in choices.get() if each not in (FIXED, GRADIENTS))
    marks = (FIXED, GRADIENTS) if gradients else (FIXED,)
    token = choices.set((*marks, *others) if wanted else others)
    try:
        yield
    finally:
        choices.reset(token)


class UnknownError(Exception):
    """A launch needs more than layouts; not an AttributeError, which getattr would hide."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise UnknownError


class Recorded(StandIn):
    """Stands for an array, and shows only its layout; isinstance finds the class of the array."""

    __array__ = __array_ufunc__ = __array_function__ = __bool__ = __eq__ = steps = _refuse
    __setitem__ = _refuse
    __hash__ = object.__hash__
    __class__ = property(lambda self: type(self.form))

    def __init__(self, array: Any, recording: "Recording", start: Any = None) -> None:
        self.form, self.recording, self.start = array, recording, start

    def __getattr__(self, name: str) -> Any:
        return getattr(self.form, name) if name in ALLOWED else _refuse()

    def empty(self, shape: Any, dtype: Any, new: Any = None) -> Any:
        """Return a new array that ``new`` allocates, as every replay does again."""
        return self.recording.allocate(shape, dtype, new or _allocator(self))

    def __len__(self) -> int:
        """Return the length of the first axis, which is a part of the layout."""
        return len(self.form)

    T = property(lambda self: self.lying(self.form.T))
    first = property(lambda self: self if self.start is None else self.start)

    def reshape(self, *shape: int) -> Any:
        """Return the same elements in another shape, for a product."""
        other = self.form.reshape(shape)
        copied = isinstance(other, np.ndarray) or other.data.ptr != self.form.data.ptr
        return _refuse() if copied else self.lying(other)

    def lying(self, form: Any) -> Any:
        """Return another form of this array, from the same address on, for a product or kernel."""
        return Recorded(form, self.recording, self.first)

    def __getitem__(self, key: Any) -> Any:
        """Return a view of rows or columns, ``[..., start:stop]``; every replay makes it again."""
        last = key[1] if type(key) is tuple and len(key) == 2 and key[0] is Ellipsis else key
        part = type(last) is slice and last.step is None
        return self.recording.view(self, key) if part else _refuse()

    def spanned(self, size: int) -> Any:
        """Return the array itself: a kernel gets only its address."""
        return self


class Recording:
    """The allocations and kernel starts of a launch."""

    def __init__(self) -> None:
        self.arrays: list[Recorded] = []  # those of the call, then those that are allocated
        # of the latter: allocator, shape, dtype; of a view: None, number of its array, key
        self.forms: list[tuple[Any, Any, Any]] = []
        self.starts: list[tuple[Any, ...]] = []  # launch, grid, block, arguments, shared memory

    def enter(self, array: Any) -> Any:
        """Return what the launch gets in place of an array: a stand-in, or None or an integer."""
        self.arrays.append(Recorded(array, self))
        return array if array is None or type(array) is int else self.arrays[-1]

    def allocate(self, shape: Any, dtype: Any, new: Callable[..., Any]) -> Any:
        """Record an allocation by ``new``; return the stand-in of the array."""
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        self.forms.append((new, sizes, np.dtype(dtype)))
        return self.enter(new(sizes, np.dtype(dtype)))

    def view(self, of: Recorded, key: Any) -> Any:
        """Record a view of an array; return its stand-in."""
        self.forms.append((None, next(n for n, a in enumerate(self.arrays) if a is of), key))
        return self.enter(of.form[key])

    def calling(self, start: Callable[..., None], *operands: Recorded) -> None:
        """Record a call that is not a kernel, with the arrays as its third argument."""
        self.starts.append((start, (), (), [operand.first for operand in operands], 0))

    def starting(self, kernel: Any) -> Callable[..., None]:
        """Return a function that records a launch of a kernel instead of starting it."""

        def start(grid: Any, block: Any, values: Any, shared: int) -> None:
            firsts = (v.first if type(v) is Recorded else v for v in values)  # only addresses
            ready = [kernel.ready(v) if isinstance(v, np.generic) else v for v in firsts]
            self.starts.append((kernel.launch, grid, block, ready, shared))

        return start

    def finished(self, result: Any) -> Run:
        """Return a function that repeats the allocations and starts, and returns the results."""
        numbers = {id(array): number for number, array in enumerate(self.arrays)}
        fixed: list[Any] = []

        def number_of(value: Any) -> int:
            if id(value) not in numbers:
                scalar = isinstance(value, np.generic) or not hasattr(value, "shape")
                if not (scalar or any(value is each for each in persistent_arrays)):
                    _refuse()  # the next call may create another array
                numbers[id(value)] = len(self.arrays) + len(fixed)
                fixed.append(value)
            return numbers[id(value)]

        def picker(values: Sequence[Any]) -> Callable[[list[Any]], Any]:
            return operator.itemgetter(*map(number_of, values))

        results = picker(result if type(result) is tuple else (result,))
        starts = [(*start[:3], picker(start[3]), start[4]) for start in self.starts]
        forms = self.forms
        views = any(new is None for new, *_ in forms)

        def replay(arrays: list[Any], options: dict[str, Any]) -> Any:
            if views:
                live = [*arrays]
                for new, one, other in forms:
                    live.append(live[one][other] if new is None else new(one, other))
                live += fixed
            else:
                live = [*arrays, *[new(shape, dtype) for new, shape, dtype in forms], *fixed]
            for launch, grid, block, pick, shared in starts:
                launch(grid, block, pick(live), shared)
            return results(live)

        return replay


def _allocator(like: Any) -> Callable[..., Any]:
    """Return the function of like's library that allocates an array of a shape and a dtype."""
    if like.__class__ is np.ndarray:
        return np.empty
    return gpu.cupy().ndarray if gpu.is_cupys(like.__class__) else _refuse


def replaying(
    run: Run,
    check: Run,
    defined: Callable[[list[Any]], Run],
    host: bool,
    more: Callable[[Sequence[Any]], Any] | None = None,
) -> Run:
    """Return ``run`` for calls of one form, on host or device, replayed once it is recorded.

    ``check`` runs once for each key, of which ``more(arrays)`` is a part: what the launch depends
    on besides.
    Where ``run`` returns NotImplemented, as there is no kernel for these options, the function that
    ``defined(arrays)`` returns runs instead.
    """
    known: dict[Any, Run | None] = {}  # None: met once
    fallback: list[Run] = []
    chosen = choices.get
    plain = layouts_of = _layouts_on_host if host else _layouts_on_gpu
    if more is not None:
        layouts_of = lambda arrays: [*plain(arrays), more(arrays)]  # noqa: E731 -- others pay nothing

    def replayed(arrays: list[Any], options: dict[str, Any]) -> Any:
        key = (chosen(), *layouts_of(arrays), *options.values())
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
            fallback[:] = fallback or [defined(arrays)]
            known[key] = fallback[0]
            result = fallback[0](arrays, options)
        return result

    return replayed


def _layouts_on_gpu(arrays: Sequence[Any]) -> list[Any]:
    """Return the layouts of CuPy's arrays, and integers as they are: a kernel gets their values."""
    return [a if a is None or a.__class__ is int else (a.strides, a.data.ptr % 16) for a in arrays]


def _layouts_on_host(arrays: Sequence[Any]) -> list[Any]:
    """Return the same for NumPy's arrays."""
    return [a if a is None or type(a) is int else (a.strides, a.ctypes.data % 16) for a in arrays]


def _recorded(run: Run, arrays: Sequence[Any], options: dict[str, Any]) -> Run:
    recording = Recording()
    try:
        return recording.finished(run([*map(recording.enter, arrays)], options))
    except Exception:  # a refusal, or an error that run raises again
        return run
    finally:  # break the cycle of arrays and recording, or the garbage collector would have to
        recording.arrays.clear()
        recording.starts.clear()
