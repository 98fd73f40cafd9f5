"""Ops that write over their arguments, and what they ask of them.

f_over_ = written_over(f, "x")       the op, for whose kernel nothing is checked
f_ = in_place(f_over_)               what callers know
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


def check_changeable(call: str, otherwise: str, **arrays: Any) -> None:
    """Raise for an array that a tape remembers, or that is read-only; otherwise: what to call."""
    for name, array in arrays.items():
        if isinstance(array, Traced):
            raise GradientError(f"{call}: {name} is on a tape; {otherwise}, which leaves it")
        never = type(array).__module__.partition(".")[0] in ("jax", "jaxlib")
        if isinstance(array, np.ndarray):
            never = not array.flags.writeable
        if never or not hasattr(array, "__setitem__"):
            raise ConfigError(f"{call}: {name} is read-only; {otherwise}, or pass a copy")


def check_apart(call: str, **arrays: Any) -> None:
    """Raise for two arrays in the same memory, of which the second would be read after a write."""
    for (one, a), (other, b) in itertools.combinations(arrays.items(), 2):
        if _same_memory(a, b):
            raise ConfigError(f"{call}: {one} and {other} lie in the same memory; copy one")


def check_unshifted(call: str, changed: dict[str, Any], read: dict[str, Any]) -> None:
    """Raise where what is read lies over what is changed, but for each element over itself.

    Threads would read what others have written.
    """
    for (one, a), (other, b) in itertools.product(changed.items(), read.items()):
        if _same_memory(a, b) and _form(a) != _form(b):
            raise ConfigError(f"{call}: {other} lies partly over {one}, which changes; copy one")


def _form(array: Any) -> tuple[Any, ...]:
    return _start(array), array.shape, array.strides, array.dtype


def _start(array: Any) -> int | None:
    """Return the address of an array of NumPy or CuPy."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return getattr(getattr(array, "data", None), "ptr", None)


def _same_memory(a: Any, b: Any) -> bool:
    """Say whether elements are shared."""
    one, other = _start(a), _start(b)
    if one is None or other is None or not a.size * b.size:
        return False
    if is_planned(a) or is_planned(b):  # these have no elements
        return one == other
    return np.shares_memory(_shadow(a), _shadow(b))


def _shadow(array: Any) -> Any:
    """Return an array of NumPy that lies where this one does, never to be read."""
    if isinstance(array, np.ndarray):
        return array
    lies = {"shape": array.shape, "strides": array.strides, "data": (array.data.ptr, False)}
    facts = lies | {"typestr": array.dtype.str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=facts))


def _extent(array: Any) -> tuple[int, int]:
    """Return the address of the first byte of an array, and that after the last."""
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    start = _start(array) or 0
    last = start + sum(step for step in steps if step > 0) + array.itemsize
    return start + sum(step for step in steps if step < 0), last


def overlapping(arrays: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the names of two arrays that share an element, or twice that of one that does so."""
    held = {name: a for name, a in arrays.items() if a.size and not is_planned(a)}
    lies = sorted((*_extent(array), name) for name, array in held.items())
    before: list[tuple[int, str]] = []  # arrays that end after the next one begins
    for first, last, name in lies:
        if last - first < held[name].nbytes:
            return name, name
        before = [(end, other) for end, other in before if end > first]
        for _, other in before:
            if _same_memory(held[name], held[other]):
                one, two = sorted((name, other), key=[*arrays].index)
                return one, two
        before.append((last, name))
    return None


def in_one_piece(*arrays: Any) -> bool:
    """Say whether a kernel can write over all arrays from end to end."""
    return all(array.flags.c_contiguous for array in arrays)


def written_over(op: Op[..., Any], *names: str) -> Op[..., Any]:
    """Return an op that writes the results of another over its operands of these names."""

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
    reason = "it changes what a tape would remember"  # a widened copy would take the results
    return Op(op.signature, definition, widen=False, no_gradient=reason, over=names)


def in_place(op: Op[..., Any]) -> Callable[..., Any]:
    """Return the function of an op that is ``written_over``: it checks and returns its operands."""
    of, names = op.__name__.removesuffix("_over_"), op.facts["over"]

    def function(*arrays: Any, **more: Any) -> Any:
        operands = dict(zip(op.names, arrays, strict=False)) | more
        changed = {name: operands[name] for name in names if name in operands}
        check_changeable(f"{of}_", f"call {of}", **changed)
        check_apart(f"{of}_", **changed)
        read = {n: operands[n] for n in op.names if n in operands and n not in names}
        check_unshifted(f"{of}_", changed, read)
        op(*arrays, **more)
        return tuple(changed.values()) if len(names) > 1 else changed[names[0]]

    function.__name__ = function.__qualname__ = f"{of}_"
    function.__module__ = op.definition.__module__
    function.__signature__ = inspect.signature(op.definition)  # type: ignore[attr-defined]
    function.__doc__ = _document(op, of, names)
    return function


def _document(op: Op[..., Any], of: str, names: tuple[str, ...]) -> str:
    form = lambda o: f"({', '.join(o.axes)}) {o.kind}{', optional' * o.optional}"  # noqa: E731
    operands = [
        f"{', '.join(o.name for o in alike)} : {shape}"
        for shape, alike in itertools.groupby(op.contract.inputs, form)
    ]
    both, either, options = " and ".join(names), " or ".join(names), ", ".join(sorted(op.options))
    shared = f", {both} share memory" if len(names) > 1 else ""
    shared += ", or another array lies partly over what is changed"
    lines = [
        *(f"Write ``{of}`` over {both}: no array is allocated.", ""),
        *("Parameters", "----------", *operands, f"    The results lie over {both}."),
        *([options, f"    As in ``{of}``."] if options else []),
        *("", "Returns", "-------", f"{', '.join(names)} : the arguments themselves", ""),
        *("Raises", "------", "ConfigError", f"    {either} cannot be written to{shared}."),
        *("GradientError", f"    {either} is on a tape, whose record a change would falsify."),
        *("RangeError, ShapeError, DTypeError", f"    As ``{of}``; nothing is then changed."),
    ]
    return "\n".join(lines)
