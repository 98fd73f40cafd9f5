"""Records what a launch allocates and starts; later calls with an equal key repeat only that.

A launch may depend on shapes, dtypes, strides, addresses modulo 16, options and ``choices``.  The
key of a call contains all of them, so no op has to list what its launch depends on.  The second
call with a key runs on ``Recorded`` arrays, which have these properties and no others; its
allocations and kernel starts are recorded, and later calls replay them.  A launch that reads
anything else of an array, for instance to copy or sum it, is not recorded and runs in each call.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np

from . import gpu
from .stand_in import StandIn

Run = Callable[[list[Any], dict[str, Any]], Any]  # (arrays, options)

# Recordings per form of call; beyond it all are dropped, as each value of an option, such as the
# learning rate of a step, is a key of its own.
KEPT = 256
FREED = 2**20  # bytes; to save fewer, arrays are freed at the end of a replay, in less host time
# Settings besides the arguments of a call that launches read, such as an AttentionConfig.
choices: ContextVar[tuple[Any, ...]] = ContextVar("choices", default=())
FIXED = "fixed order"  # in choices: the order in which a row is summed depends only on that row
GRADIENTS = "of gradients too"  # in choices, with FIXED: in backward passes, too
persistent_arrays: list[Any] = []  # they outlive every call, as flags in which kernels set errors
ALLOWED = {"data", "ctypes", "device", "base"}  # attributes with the address and the device


def choosing(marks: tuple[Any, ...], function: Any, *arguments: Any, **options: Any) -> Any:
    """Call a function with ``choices`` set to ``marks``; empty marks leave the current choices.

    Launches of a backward pass choose the variants that its forward pass chose.
    """
    token = choices.set(marks or choices.get())
    try:
        return function(*arguments, **options)
    finally:
        choices.reset(token)


def is_fixed() -> bool:
    """Return whether the result of a row must have equal bits whatever other rows a call has."""
    return FIXED in choices.get()


@contextmanager
def fixed_order(enabled: bool = True, *, gradients: bool = False) -> Iterator[None]:
    """Fix the order in which each row is summed inside a ``with`` block; False: leave it free.

    ``gradients`` fixes the order in backward passes, too.
    """
    others = tuple(each for each in choices.get() if each not in (FIXED, GRADIENTS))
    marks = (FIXED, GRADIENTS) if gradients else (FIXED,)
    token = choices.set((*marks, *others) if enabled else others)
    try:
        yield
    finally:
        choices.reset(token)


class UnknownError(Exception):
    """A launch reads more than layouts.  No AttributeError: getattr and hasattr would hide it."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    """Raise: what a launch does cannot be recorded."""
    raise UnknownError


class Recorded(StandIn):
    """The stand-in for an array: only its layout can be read; isinstance sees the array's class."""

    __array__ = __array_ufunc__ = __array_function__ = __bool__ = __eq__ = steps = _refuse
    __setitem__ = _refuse
    __hash__ = object.__hash__
    __class__ = property(lambda self: type(self.form))

    def __init__(self, array: Any, recording: "Recording", start: Any = None) -> None:
        self.form, self.recording, self.start = array, recording, start

    def __getattr__(self, name: str) -> Any:
        return getattr(self.form, name) if name in ALLOWED else _refuse()

    def empty(self, shape: Any, dtype: Any, new: Any = None) -> Any:
        """Return the stand-in of a new array, which ``new`` allocates now and in each replay."""
        return self.recording.allocate(shape, dtype, new or _allocator(self))

    def __len__(self) -> int:
        """Return the size of the first axis, which is part of the layout."""
        return len(self.form)

    T = property(lambda self: self.lying(self.form.T))
    first = property(lambda self: self if self.start is None else self.start)

    def reshape(self, *shape: int) -> Any:
        """Return a view of the elements in another shape, for a product; refuse to copy them."""
        other = self.form.reshape(shape)
        copied = isinstance(other, np.ndarray) or other.data.ptr != self.form.data.ptr
        return _refuse() if copied else self.lying(other)

    def lying(self, form: Any) -> Any:
        """Return this array with another layout from the same address, for a product or kernel."""
        return Recorded(form, self.recording, self.first)

    def __getitem__(self, key: Any) -> Any:
        """Return a view of rows or columns, ``[..., start:stop]``; each replay creates it again."""
        last = key[1] if type(key) is tuple and len(key) == 2 and key[0] is Ellipsis else key
        part = type(last) is slice and last.step is None
        return self.recording.view(self, key) if part else _refuse()

    def spanned(self, size: int) -> Any:
        """Return the array itself: a kernel gets only its address."""
        return self


class Recording:
    """The allocations and kernel starts of a launch."""

    def __init__(self) -> None:
        self.arrays: list[Recorded] = []  # arrays of the call, then allocated arrays and views
        # an allocated array: (allocator, shape, dtype); a view: (None, index of its array, key)
        self.forms: list[tuple[Any, Any, Any]] = []
        self.starts: list[tuple[Any, ...]] = []  # launch, grid, block, arguments, shared memory

    def enter(self, array: Any) -> Any:
        """Return the argument of the launch for an array: a stand-in; None and integers as is."""
        self.arrays.append(Recorded(array, self))
        return array if array is None or type(array) is int else self.arrays[-1]

    def allocate(self, shape: Any, dtype: Any, new: Callable[..., Any]) -> Any:
        """Allocate with ``new`` and record that; return the stand-in of the array."""
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        self.forms.append((new, sizes, np.dtype(dtype)))
        return self.enter(new(sizes, np.dtype(dtype)))

    def view(self, of: Recorded, key: Any) -> Any:
        """Record a view of an array; return its stand-in."""
        self.forms.append((None, next(n for n, a in enumerate(self.arrays) if a is of), key))
        return self.enter(of.form[key])

    def calling(self, start: Callable[..., None], *operands: Recorded) -> None:
        """Record a call that is no kernel, such as cuBLAS; its third argument is the arrays."""
        self.starts.append((start, (), (), [operand.first for operand in operands], 0))

    def starting(self, kernel: Any) -> Callable[..., None]:
        """Return a function that records a launch of a kernel instead of starting it."""

        def start(grid: Any, block: Any, values: Any, shared: int) -> None:
            # a kernel reads only addresses: the array at the same address stands for each layout
            firsts = (v.first if type(v) is Recorded else v for v in values)
            ready = [kernel.ready(v) if isinstance(v, np.generic) else v for v in firsts]
            self.starts.append((kernel.launch, grid, block, ready, shared))

        return start

    def finished(self, result: Any) -> Run:
        """Return a function that repeats allocations and starts, then returns the results."""
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

        returned = result if type(result) is tuple else (result,)
        results = picker(returned)
        starts = [(*start[:3], picker(start[3]), start[4]) for start in self.starts]
        forms = self.forms
        uses = [[*map(number_of, start[3])] for start in self.starts]
        if (spans := self._spans(uses, [*map(number_of, returned)])) is not None:
            before = len(self.arrays) - len(forms)
            steps = [(*start, *span) for start, span in zip(starts, spans, strict=True)]
            return _freeing(steps, forms, before, fixed, results)
        views = any(new is None for new, *_ in forms)  # few have views: the others need no loop

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

    def _spans(
        self, uses: list[list[int]], returned: list[int]
    ) -> list[tuple[list[int], list[int]]] | None:
        """Return which ``forms`` to allocate before each start, and which to free after it.

        None: to hold all of them to the end takes less than FREED bytes more.
        """
        if not uses:
            return None
        before, bases = len(self.arrays) - len(self.forms), dict[int, int]()
        for n, (new, one, _) in enumerate(self.forms):  # a view is in the memory of another array
            bases[before + n] = before + n if new is not None else bases.get(one, one)
        last, places = len(uses) - 1, dict[int, list[int]]()  # the starts that use an array
        for place, numbers in [*enumerate(uses), (last, returned)]:
            for number in {*numbers, *(bases[n] for n in numbers if n in bases)}:
                places.setdefault(number, []).append(place)
        kept = {bases.get(number, number) for number in returned}
        makes: list[list[int]] = [[] for _ in uses]
        frees: list[list[int]] = [[] for _ in uses]
        changes = [0] * (len(uses) + 1)
        for n, (new, shape, dtype) in enumerate(self.forms):
            base = bases[before + n]
            uses_of_base = places.get(base, [0])  # the first also for a view that nothing uses
            start, stop = places.get(before + n, uses_of_base)[0], uses_of_base[-1]
            makes[start].append(n)
            size = 0 if new is None else math.prod(shape) * dtype.itemsize
            changes[start] += size
            if base not in kept:
                frees[stop].append(n)
                changes[stop + 1] -= size
        peak = max(accumulate(changes))
        whole = sum(
            math.prod(shape) * dtype.itemsize for new, shape, dtype in self.forms if new is not None
        )
        return [*zip(makes, frees, strict=True)] if whole - peak >= FREED else None


def _freeing(
    steps: Sequence[tuple[Any, ...]],
    forms: Sequence[tuple[Any, Any, Any]],
    before: int,
    fixed: Sequence[Any],
    results: Callable[[list[Any]], Any],
) -> Run:
    """Return a replay that allocates before each start, and frees after it."""

    def replay(arrays: list[Any], options: dict[str, Any]) -> Any:
        live = [*arrays, *[None] * len(forms), *fixed]
        for launch, grid, block, pick, shared, makes, frees in steps:
            for n in makes:
                new, one, other = forms[n]
                live[before + n] = live[one][other] if new is None else new(one, other)
            launch(grid, block, pick(live), shared)
            for n in frees:
                live[before + n] = None
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
    """Return a function that runs calls of one form, and replays ``run`` once it is recorded.

    ``check`` runs once for each key.  ``more(arrays)``, if passed, is part of the key: a further
    property on which the launch depends.  Where ``run`` returns NotImplemented, because no kernel
    has these options, the function that ``defined(arrays)`` returns runs instead.
    """
    known: dict[Any, Run | None] = {}  # None after the first call: the second one is recorded
    fallback: list[Run] = []
    chosen = choices.get
    plain = layouts_of = _layouts_on_host if host else _layouts_on_gpu
    if more is not None:
        # calls without ``more`` do not pay for it
        layouts_of = lambda arrays: [*plain(arrays), more(arrays)]  # noqa: E731

    def replayed(arrays: list[Any], options: dict[str, Any]) -> Any:
        key = (chosen(), *layouts_of(arrays), *options.values())
        try:
            again = known[key]
        except (KeyError, TypeError) as error:
            check(arrays, options)
            if len(known) >= KEPT:
                known.clear()
            key = key if type(error) is KeyError else ()  # TypeError: an option is not hashable
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
    """Return the layouts of CuPy arrays; integers as they are, as kernels get their values.

    Addresses count modulo 16 bytes, the widest access: see ``arrays.lanes``.
    """
    return [a if a is None or a.__class__ is int else (a.strides, a.data.ptr % 16) for a in arrays]


def _layouts_on_host(arrays: Sequence[Any]) -> list[Any]:
    """Return the layouts of NumPy arrays, as ``_layouts_on_gpu`` does."""
    return [a if a is None or type(a) is int else (a.strides, a.ctypes.data % 16) for a in arrays]


def _recorded(run: Run, arrays: Sequence[Any], options: dict[str, Any]) -> Run:
    """Return the replay of a launch, or ``run`` itself if the launch cannot be recorded."""
    recording = Recording()
    try:
        return recording.finished(run([*map(recording.enter, arrays)], options))
    except Exception:  # a refusal, or an error that run raises again
        return run
    finally:  # arrays and recording refer to each other: free them without the garbage collector
        recording.arrays.clear()
        recording.starts.clear()
