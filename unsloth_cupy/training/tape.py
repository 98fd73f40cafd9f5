"""A tape, which records ops as they run and calls their backward ops in reverse order.

    tape = Tape()
    w = tape.watch(weight)
    loss = rms_norm(x, w)
    (dw,) = tape.gradients(loss, [w], dy)

Arguments are matched by name.  A backward op accepts inputs and outputs of its forward op, and the
upstream gradient of each output (named d + output); it returns the gradients of inputs (named
d + input).  (Reverse accumulation: Griewank and Walther, Evaluating Derivatives.)
"""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import common, framework_of
from ..core.dtypes import DIFFERENTIABLE, Stored
from ..core.gpu import device_of
from ..core.replay import GRADIENTS, choices, choosing, fixed_order, is_fixed
from ..errors import DTypeError, GradientError, ShapeError
from ..placement import full_like
from .variable import Var

Gradients = dict[int, Any]  # by the index of a Var
watch_memory: Callable[[str], None] | None = None  # called with each op's name after it returns
Watch = Callable[[Any, Sequence[Any], Any], None]  # (op, values, result)
watch_results: ContextVar[Watch | None] = ContextVar("watch_results", default=None)  # per thread
Take = Callable[[Any, Any], Any]  # (value of a Var, its gradient): what Tape.gradients returns
take_gradients: ContextVar[Take | None] = ContextVar("take_gradients", default=None)  # per thread


class Entry(NamedTuple):
    """A recorded call: op, arrays by name, indices of inputs and outputs that are Vars, options."""

    op: Any
    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]
    options: dict[str, Any]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Call the backward op with upstream gradients; add the gradients of inputs to grads."""
        op, backward = self.op, self.op.backward
        if backward is None:
            why = f", as {reason}" if (reason := op.facts.get("no_gradient")) else ""
            problem = f"{op.called} has no gradient{why}; compute the loss without it"
            raise GradientError(problem)
        known = self.values | {"d" + name: grad for name, grad in take.items()}
        known |= {n: known[h] for n, h in _alike(backward).items() if n in self.inputs}
        for operand in backward.contract.inputs:
            if known.get(operand.name) is None and not operand.optional:  # the output was not used
                value, arrays = self.values[operand.name[1:]], [*known.values()]
                unread = type(value) is Unread
                known[operand.name] = value.zeros(arrays) if unread else full_like(value, 0)
        options = {name: self.options[name] for name in backward.options & self.options.keys()}
        if "wanted" in backward.options:
            options["wanted"] = frozenset(inputs)
        arrays = [known.get(name) for name in backward.names]
        forward_alone = is_fixed() and GRADIENTS not in choices.get()
        with fixed_order(False) if forward_alone else nullcontext():
            result = called(backward, arrays, options)
        result = result if type(result) is tuple else (result,)
        returned = {o.name[1:]: g for o, g in zip(backward.contract.outputs, result, strict=True)}
        for operand in op.contract.inputs:
            if operand.name not in self.inputs or operand.kind in ("int", "bool", "byte", "code"):
                continue
            index, grad = inputs.get(operand.name), returned.get(operand.name)
            constant = operand.kind not in DIFFERENTIABLE
            if constant or (grad is None and index is not None):
                why = "is a constant" if constant else "has no gradient"
                raise GradientError(f"{op.called}: {operand.name} {why}; do not watch it")
            if index is not None:
                grads[index] = add_up(grads.get(index), grad)


class Tape:
    """The ops of one forward pass, in order."""

    def __init__(self) -> None:
        self.entries: list[Any] = []  # Entry objects, or others with inputs, outputs and add_back
        self.choices: dict[int, Any] = {}  # kernel variants of calls, by index of the entry
        self.issued = 0

    def watch(self, array: Any) -> Var:
        """Return a Var of an array; the tape records ops on it."""
        framework_of(array, "Tape.watch: its argument")
        if isinstance(array, Stored):
            cure = "watch the adapter of lora_linear, or dequantize it"
            raise GradientError(f"Tape.watch: {array!r} is frozen: it has no gradient; {cure}")
        return Var(array, self)

    def gradients(
        self, of: Var, wrt: Sequence[Var], dy: Any = None, *, release: bool = False
    ) -> list[Any]:
        """Return the gradient of ``sum(dy * of)`` with respect to each Var in wrt.

        Parameters
        ----------
        of : Var
            The result to differentiate.
        wrt : sequence of Var
            Vars of this tape; the gradient is 0 if ``of`` does not depend on a Var.
        dy : array, optional
            The upstream gradient, in the shape of ``of``; 1 if ``of`` is a scalar.
        release : bool
            Drop each call once its gradient is computed: the memory of the tape shrinks while the
            memory of gradients grows, and the tape is empty afterwards.

        Raises
        ------
        GradientError
            The backward pass reaches an op, or an input, that has no gradient.
        ShapeError
            dy is missing although ``of`` is not a scalar, or has another shape than ``of``.
        DTypeError, FrameworkError
            dy has another dtype, or another library, than ``of``.
        """
        if not hasattr(wrt, "__iter__") or hasattr(wrt, "dtype"):
            raise GradientError(f"Tape.gradients: wrt={wrt!r}; pass a list of Vars")
        wrt = [*wrt]
        if any(getattr(var, "tape", None) is not self for var in (of, *wrt)):
            raise GradientError("Tape.gradients: pass Vars of this tape: watch them on it")
        with device_of(of.value):
            return self._gradients(of, wrt, dy, release)

    def _gradients(self, of: Var, wrt: list[Var], dy: Any, release: bool) -> list[Any]:
        if dy is None and of.shape != ():
            problem = f"Tape.gradients: of has shape {of.shape}; pass dy of that shape"
            raise ShapeError(problem, expected=(), actual=tuple(of.shape))
        dy = full_like(of.value, 1) if dy is None else dy
        framework_of(dy, "Tape.gradients: dy")  # raises for a number too
        common("Tape.gradients", ("of", "dy"), (of.value, dy))
        if tuple(dy.shape) != tuple(of.shape):
            expected, actual = tuple(of.shape), tuple(dy.shape)
            problem = f"Tape.gradients: dy has shape {actual}; it must be {expected}"
            raise ShapeError(problem, expected=expected, actual=actual)
        if dy.dtype != of.dtype:
            raise DTypeError(f"Tape.gradients: dy is {dy.dtype}; it must be {of.dtype}")
        values = [value for entry in self.entries for value in entry.values.values()]
        if release:  # results of ops are dropped: only arrays that callers hold can be shared
            values = [var.value for var in wrt]
        shared = {_owner(a) for a in (dy, *values) if hasattr(a, "__dlpack__")}
        del values
        grads: Gradients = {of.index: dy}
        if take := take_gradients.get():
            return self._taken(grads, wrt, release, take)
        self.walk_back(grads, {var.index for var in wrt}, release)
        result = []
        spans: dict[
            int, list[tuple[float, float]]
        ] = {}  # addresses of returned gradients, by owner
        for var in wrt:
            grad = grads.get(var.index)
            if grad is None:
                grad = full_like(var.value, 0)
            elif _owner(grad) in shared or _overlaps(grad, spans.get(_owner(grad), ())):
                grad = add_up(grad, full_like(grad, 0))  # a caller may scale gradients in place
            spans.setdefault(_owner(grad), []).append(_span(grad))
            result.append(grad)
        return result

    def _taken(self, grads: Gradients, wrt: list[Var], release: bool, take: Take) -> list[Any]:
        """Call ``take`` with each gradient as soon as it is complete; return its results."""
        last: dict[int, list[Var]] = {}  # by the entry after which their gradients are complete
        for var in {var.index: var for var in wrt}.values():
            uses = (n for n, entry in enumerate(self.entries) if var.index in entry.inputs.values())
            last.setdefault(next(uses, 0), []).append(var)
        result = dict[int, Any]()

        def done(place: int) -> None:
            for var in last.get(place, ()):
                grad = grads.pop(var.index, None)
                grad = full_like(var.value, 0) if grad is None else grad
                result[var.index] = take(var.value, grad)

        if not self.entries:
            done(0)
        self.walk_back(grads, {var.index for var in wrt}, release, done)
        return [result[var.index] for var in wrt]

    def walk_back(
        self,
        grads: Gradients,
        kept: Collection[int],
        release: bool = True,
        done: Callable[[int], None] = lambda place: None,
    ) -> None:
        """Propagate gradients of results back to the Vars whose indices are in ``kept``.

        ``done(place)`` is called after each entry, with the index of the entry.
        """
        targets = set(kept)  # and all Vars between them and the results
        for entry in self.entries:
            if not targets.isdisjoint(entry.inputs.values()):
                targets.update(entry.outputs.values())
        entries = self.entries if release else self.entries.copy()
        while entries:
            entry = entries.pop()
            take = {
                name: grads.get(i) if i in kept else grads.pop(i, None)
                for name, i in entry.outputs.items()
            }
            inputs = {name: i for name, i in entry.inputs.items() if i in targets}
            if inputs and any(grad is not None for grad in take.values()):
                marks = self.choices.get(len(entries), ())
                choosing(marks, entry.add_back, take, inputs, grads)
            done(len(entries))

    def record(self, op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run an op on the values of Vars and arrays, and record the call."""
        if any(array.tape is not self for array in arrays if type(array) is Var):
            raise GradientError(f"{op.called}: arguments are on two tapes; watch them on one")
        values = [array.value if type(array) is Var else array for array in arrays]
        result = self.run(op, list(values), options)
        results = result if type(result) is tuple else (result,)
        outputs = [None if value is None else Var(value, self) for value in results]
        names = [operand.name for operand in op.contract.outputs]
        read, zeros = _read(op, op.backward)
        stored = {n: each for n, each in zip(op.names, values, strict=True) if n in read}
        for name, value in zip(names, results, strict=True):
            if name in read:
                stored[name] = value
            elif name in zeros and value is not None:
                stored[name] = Unread(value.shape, value.dtype)
        entry = Entry(
            op,
            stored,
            {n: a.index for n, a in zip(op.names, arrays, strict=True) if type(a) is Var},
            {n: v.index for n, v in zip(names, outputs, strict=True) if v is not None},
            dict(options),
        )
        self.note(entry)
        return tuple(outputs) if type(result) is tuple else outputs[0]

    def run(self, op: Any, values: list[Any], options: dict[str, Any]) -> Any:
        """Call an op; ``record`` records the call afterwards."""
        return called(op, values, options)

    def note(self, entry: Any) -> None:
        """Append a call to the tape."""
        if (marks := choices.get()) or self.choices:
            self.choices[len(self.entries)] = marks
        self.entries.append(entry)


class Unread(NamedTuple):
    """The shape and dtype of a result whose values backward does not read."""

    shape: tuple[int, ...]
    dtype: Any

    def zeros(self, arrays: Sequence[Any]) -> Any:
        """Return zeros in the library and on the device of the first array."""
        like = next(array for array in arrays if hasattr(array, "__dlpack__"))
        array = full_like(like, 0, tuple(self.shape))
        return array.astype(self.dtype) if hasattr(array, "astype") else array.to(self.dtype)


@cache
def _read(op: Any, backward: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of inputs and outputs that a backward op reads; then outputs with zeros.

    Where an op has several outputs, backward may need zeros in the shape of the gradient of one.
    """
    outputs = {operand.name for operand in op.contract.outputs}
    if backward is None:
        return frozenset((*op.names, *outputs)), frozenset()
    upstream = (each for each in backward.contract.inputs if not each.optional)
    zeros = {each.name[1:] for each in upstream if each.name[0] == "d"} & outputs
    return (
        frozenset(backward.names) - {*_alike(backward)},
        frozenset(zeros if len(outputs) > 1 else ()),
    )


def _alike(backward: Any) -> dict[str, str]:
    """Return the inputs that a backward op only compares with None, and an array of each shape."""
    alike: dict[str, str] = backward.facts.get("alike", {})
    return alike


def called(op: Any, values: list[Any], options: dict[str, Any]) -> Any:
    """Call an op, then the hooks ``watch_memory`` and ``watch_results``."""
    result = op.call(values, options)
    if watch_memory is not None:
        watch_memory(op.__name__)
    watch = watch_results.get()
    if watch is not None:
        watch(op, values, result)
    return result


def add_up(a: Any, b: Any) -> Any:
    """Return the sum of two gradients; the first may be None."""
    if a is None:
        return b
    total = a + b
    return np.asarray(total) if isinstance(total, np.generic) else total


def _overlaps(array: Any, spans: Sequence[tuple[float, float]]) -> bool:
    """Return whether an array overlaps one of the spans of addresses."""
    first, last = _span(array)
    return any(start < last and first < stop for start, stop in spans)


def _span(array: Any) -> tuple[float, float]:
    """Return the span of addresses of an array; all addresses for other libraries."""
    strides: Sequence[int] = getattr(array, "strides", ())
    if framework_of(array, "it") not in ("numpy", "cupy") or min(strides, default=0) < 0:
        return 0, math.inf
    start = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    extent = sum((n - 1) * step for n, step in zip(array.shape, strides, strict=True))
    return start, start + extent + array.itemsize


def _owner(array: Any) -> int:
    """Return a number that is equal for two arrays of a library that share memory."""
    library = framework_of(array, "it")
    if library == "torch":
        return int(array.untyped_storage().data_ptr())
    if library not in ("numpy", "cupy"):
        return id(array)
    while hasattr(array.base, "base"):
        array = array.base
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
