"""In-place ops, which write results over their arguments, and checks of these arguments.

f_over_ = written_over(f, "x")       the op, which checks no overlaps
f_ = in_place(f_over_)               the public function, which checks its arguments
"""

import inspect
import itertools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from ...core.op import Op, Traced
from ...core.stand_in import is_planned
from ...errors import ConfigError, GradientError


def check_writable(call: str, otherwise: str, **arrays: Any) -> None:
    """Raise if an array is on a tape, read-only or overlaps itself; ``otherwise`` is the cure."""
    for name, array in arrays.items():
        if isinstance(array, Traced):
            raise GradientError(f"{call}: {name} is on a tape; {otherwise}, which leaves it as is")
        frozen = type(array).__module__.partition(".")[0] in ("jax", "jaxlib")
        if isinstance(array, np.ndarray):
            frozen = not array.flags.writeable
        if frozen or not hasattr(array, "__setitem__"):
            raise ConfigError(f"{call}: {name} is read-only; {otherwise}, or pass a copy")
        own = _start(array) is not None  # an array of NumPy or CuPy
        if own and not array.flags.c_contiguous and overlapping({name: array}):
            problem = f"elements of {name} share memory"
            raise ConfigError(f"{call}: {problem}; {otherwise}, or pass a copy")


def check_apart(call: str, **arrays: Any) -> None:
    """Raise if two arrays share memory: a write to one would change values of the other."""
    for (one, a), (other, b) in itertools.combinations(arrays.items(), 2):
        if _same_memory(a, b):
            raise ConfigError(f"{call}: {one} and {other} share memory; copy one")


def check_overlap(call: str, changed: dict[str, Any], read: dict[str, Any]) -> None:
    """Raise if an array that is read partly overlaps an array that is changed.

    A thread would read elements that another thread has already overwritten.  Arrays that coincide
    exactly are fine: a thread reads an element before it writes it.
    """
    for (one, a), (other, b) in itertools.product(changed.items(), read.items()):
        if _same_memory(a, b) and _form(a) != _form(b):
            raise ConfigError(f"{call}: {other} partly overlaps {one}, which changes; copy one")


def _form(array: Any) -> tuple[Any, ...]:
    """Return a key that is equal for two arrays only if they coincide element by element."""
    return _start(array), array.shape, array.strides, array.dtype


def _start(array: Any) -> int | None:
    """Return the address of an array of NumPy or CuPy; None for other arrays."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return getattr(getattr(array, "data", None), "ptr", None)


def _same_memory(a: Any, b: Any) -> bool:
    """Return whether two arrays share an element."""
    one, other = _start(a), _start(b)
    if one is None or other is None or not a.size * b.size:
        return False
    if is_planned(a) or is_planned(b):  # no elements: only an address
        return one == other
    return np.shares_memory(_shadow(a), _shadow(b))


def _shadow(array: Any) -> Any:
    """Return a NumPy array with the address and layout of this array; it must never be read."""
    if isinstance(array, np.ndarray):
        return array
    layout = {"shape": array.shape, "strides": array.strides, "data": (array.data.ptr, False)}
    interface = layout | {"typestr": array.dtype.str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _extent(array: Any) -> tuple[int, int]:
    """Return the address of the first byte of an array, and the address after its last byte."""
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    start = _start(array) or 0
    last = start + sum(step for step in steps if step > 0) + array.itemsize
    return start + sum(step for step in steps if step < 0), last


def overlapping(arrays: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the names of two arrays that share an element, or None.

    For an array whose elements overlap each other, that is its name twice.
    """
    real = {name: a for name, a in arrays.items() if a.size and not is_planned(a)}
    extents = sorted((*_extent(array), name) for name, array in real.items())
    active: list[tuple[int, str]] = []  # arrays that end after the next one begins
    for first, last, name in extents:
        if last - first < real[name].nbytes:  # more elements than its memory has room for
            return name, name
        active = [(end, other) for end, other in active if end > first]
        for _, other in active:
            if _same_memory(real[name], real[other]):
                one, two = sorted((name, other), key=[*arrays].index)
                return one, two
        active.append((last, name))
    return None


def all_contiguous(*arrays: Any) -> bool:
    """Return whether all arrays are contiguous, so that a kernel can read each as one row."""
    return all(array.flags.c_contiguous for array in arrays)


def written_over(op: Op[..., Any], *names: str) -> Op[..., Any]:
    """Return an op that computes ``op`` and writes its results over the operands ``names``."""

    def definition(**operands: Any) -> Any:
        results: Any = op(**operands)
        for name, result in zip(names, results if len(names) > 1 else (results,), strict=True):
            operands[name][...] = result
        changed = tuple(operands[name] for name in names)
        return changed if len(names) > 1 else changed[0]

    definition.__name__ = f"{op.__name__}_over_"
    definition.__module__ = op.definition.__module__
    definition.__doc__ = f"Write ``{op.__name__}`` over {' and '.join(names)}, and return them."
    definition.__signature__ = inspect.signature(op.definition)  # type: ignore[attr-defined]
    reason = "it changes arrays that a tape would save"
    # widen=False: a widened copy would receive the results, and the argument would stay as it is
    return Op(op.signature, definition, widen=False, no_gradient=reason, over=names)


def in_place(op: Op[..., Any]) -> Callable[..., Any]:
    """Return the public function of a ``written_over`` op: it checks operands and returns them."""
    of, names = op.__name__.removesuffix("_over_"), op.facts["over"]

    def function(*arrays: Any, **more: Any) -> Any:
        operands = dict(zip(op.names, arrays, strict=False)) | more
        changed = {name: operands[name] for name in names if name in operands}
        check_writable(f"{of}_", f"call {of}", **changed)
        check_apart(f"{of}_", **changed)
        read = {n: operands[n] for n in op.names if n in operands and n not in names}
        check_overlap(f"{of}_", changed, read)
        op(*arrays, **more)
        return tuple(changed.values()) if len(names) > 1 else changed[names[0]]

    function.__name__ = function.__qualname__ = f"{of}_"
    function.__module__ = op.definition.__module__
    function.__signature__ = inspect.signature(op.definition)  # type: ignore[attr-defined]
    function.__doc__ = _document(op, of, names)
    return function


def _document(op: Op[..., Any], of: str, names: tuple[str, ...]) -> str:
    """Return the docstring of an in-place function."""
    form = lambda o: f"({', '.join(o.axes)}) {o.kind}{', optional' * o.optional}"  # noqa: E731
    operands = [
        f"{', '.join(o.name for o in alike)} : {shape}"
        for shape, alike in itertools.groupby(op.contract.inputs, form)
    ]
    both, either, options = " and ".join(names), " or ".join(names), ", ".join(sorted(op.options))
    shared = f", {both} share memory" if len(names) > 1 else ""
    shared += f", or another array partly overlaps {either}"
    lines = [
        *(f"Write the results of ``{of}`` over {both}; no array is allocated.", ""),
        *("Parameters", "----------", *operands, f"    The results are written over {both}."),
        *([options, f"    As in ``{of}``."] if options else []),
        *("", "Returns", "-------", f"{', '.join(names)} : the arguments themselves", ""),
        *("Raises", "------", "ConfigError", f"    {either} cannot be written to{shared}."),
        *("GradientError", f"    {either} is on a tape; a change would falsify its record."),
        *("RangeError, ShapeError, DTypeError", f"    As ``{of}``; no array is then changed."),
    ]
    return "\n".join(lines)
