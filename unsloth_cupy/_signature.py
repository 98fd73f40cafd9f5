"""Op signatures: NumPy's gufunc notation, with names.

    x(*rows, hidden), weight(hidden): param, labels?(*rows): int < hidden -> y(*rows, hidden)

An operand is ``name(axes): kind``; ``name?`` may be None.  An axis is

    hidden      a name, bound to one size in the whole call, or a number
    hidden+1    one more than the size bound to the name;  keys/128  its quotient, rounded up
    *rows       any number of leading axes
    batch?      may be absent
    keys|1      may be 1, or absent together with all axes before it: NumPy's broadcasting

A kind names dtypes (``KINDS``); operands of kind float share one dtype, *the* dtype of the call.
``int < vocab`` bounds the values.  ``where heads % kv_heads`` after the outputs asks for a
multiple.  This one string checks calls, words errors, draws test inputs and heads the docs.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from .errors import DTypeError, ShapeError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype("float16"), BFLOAT16, np.dtype("float32"), np.dtype("float64"))
FLOAT32 = FLOATS[2]

KINDS: Mapping[str, tuple[np.dtype[Any], ...]] = {
    "float": FLOATS,  # the dtype of the call
    "param": FLOATS,  # the dtype of the call, or float32
    "table": FLOATS,  # as param, but a constant: it has no gradient
    "stat": FLOATS[2:],  # float32; float64 where the dtype of the call is float64
    "int": (np.dtype("int32"), np.dtype("int64")),
    "bool": (np.dtype("bool"),),
    "byte": (np.dtype("uint8"),),
    "code": (np.dtype("int8"),),
    "none": (),  # an output that is always None: the gradient of an integer
}
DIFFERENTIABLE = ("float", "param", "stat")


class Operand(NamedTuple):
    """One array of a signature."""

    name: str
    axes: tuple[str, ...] = ()
    kind: str = "float"
    below: str | None = None
    optional: bool = False

    def __str__(self) -> str:
        """Return the operand as the signature writes it."""
        tail = "" if self.kind == "float" else f": {self.kind}"
        return f"{self.name}{'?' * self.optional}({', '.join(self.axes)}){tail}"


class Form(NamedTuple):
    """What checking needs to know of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Contract(NamedTuple):
    """A parsed signature."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    multiples: tuple[tuple[str, str], ...]


class Bound(NamedTuple):
    """A call that obeys its contract: the size of every axis, the dtype of every output."""

    sizes: dict[str, Any]
    dtype: np.dtype[Any]
    outputs: tuple[np.dtype[Any] | None, ...]


def parse(signature: str) -> Contract:
    """Split a signature into its inputs, its outputs and the multiples it asks for."""
    arrays, _, multiples = signature.partition(" where ")
    inputs, outputs = arrays.split("->")
    pairs = re.findall(r"(\w+) % (\w+)", multiples)
    return Contract(tuple(_operands(inputs)), tuple(_operands(outputs)), tuple(pairs))


def _operands(side: str) -> Iterator[Operand]:
    pattern = r"(\w+)(\??)\s*(?:\(([^)]*)\))?(?:\s*:\s*(\w+)(?:\s*<\s*(\w+))?)?"
    for name, optional, axes, given, below in re.findall(pattern, side):
        words = tuple(re.findall(r"[^\s,]+", axes))
        kind: str = given or "float"
        if kind not in KINDS:
            raise ValueError(f"{name}: {kind!r} is no kind; choose from {', '.join(KINDS)}")
        yield Operand(name, words, kind, below or None, bool(optional))


def check(op: str, contract: Contract, forms: Sequence[Form | None]) -> Bound:
    """Bind every axis name to one size, or raise an error that shows the whole call."""
    dtype = next(
        (f.dtype for o, f in zip(contract.inputs, forms, strict=True) if f and o.kind == "float"),
        FLOAT32,
    )
    sizes: dict[str, Any] = {}
    for operand, form in zip(contract.inputs, forms, strict=True):
        if form is None:
            if not operand.optional:
                raise DTypeError(f"{op}: {operand.name} is missing; pass {operand}")
            continue
        wanted = allowed(operand.kind, dtype)
        if form.dtype not in wanted:
            name, cure = form.dtype.name, " or ".join(name.name for name in wanted)
            problem = f"{operand.name} is {name}; it must be {cure}"
            if not form.dtype.isnative:
                cure = f"{operand.name}.astype({name!r})"
                problem = f"{operand.name} is {name} with swapped bytes; pass {cure}"
            raise DTypeError(explain(op, problem, contract.inputs, forms))
        misfit = _bind(operand, form.shape, sizes)
        if misfit is not None:
            raise ShapeError(explain(op, misfit, contract.inputs, forms))
    for many, few in contract.multiples:
        if sizes[many] != sizes[few] * (sizes[many] // max(sizes[few], 1)):
            problem = f"{many}={sizes[many]} must be a multiple of {few}={sizes[few]}"
            raise ShapeError(explain(op, problem, contract.inputs, forms))
    known = {o.name: f.dtype for o, f in zip(contract.inputs, forms, strict=True) if f}
    outputs = tuple(
        None if o.kind == "none" else known.get(o.name[1:], allowed(o.kind, dtype)[0])
        for o in contract.outputs
    )
    return Bound(sizes, dtype, outputs)


def allowed(kind: str, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], ...]:
    """Return the dtypes that an operand of this kind may have in a call of this dtype."""
    if kind == "float":
        return (dtype,) if dtype in FLOATS else FLOATS
    if kind in ("param", "table"):
        return (dtype,) if dtype == FLOAT32 else (dtype, FLOAT32)
    if kind == "stat":
        return (FLOATS[3],) if dtype == FLOATS[3] else (FLOAT32,)
    return KINDS[kind]


def _bind(operand: Operand, shape: tuple[int, ...], sizes: dict[str, Any]) -> str | None:
    """Enter the operand's axes into sizes; return what is wrong with its shape, if anything."""
    axes = operand.axes
    if axes and axes[0].startswith("*") and len(shape) >= len(axes) - 1:
        lead = len(shape) - len(axes) + 1
        pairs: Iterable[tuple[str, Any]] = [(axes[0], shape[:lead])]
        pairs = [*pairs, *zip(axes[1:], shape[lead:], strict=True)]
    else:
        while len(axes) > len(shape) and (skip := _droppable(axes)) is not None:
            axes = axes[:skip] + axes[skip + 1 :]
        if len(axes) != len(shape):
            axes_word = "axis" if len(shape) == 1 else "axes"
            return f"{operand.name} has {len(shape)} {axes_word}, not ({', '.join(operand.axes)})"
        pairs = zip(axes, shape, strict=True)
    for axis, size in pairs:
        if axis.endswith("|1") and size == 1:
            continue
        name, operator, number = _parts(axis)
        if not name.isdigit() and name not in sizes:
            sizes[name] = max(size - int(number), 0) if operator == "+" else size
        want = _size(axis, sizes)
        if size != want:
            return f"{operand.name} has {axis.strip('*?')}={size}; it must be {want}"
    return None


def shape_of(operand: Operand, sizes: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of an operand whose axes are bound; None where one of them is not."""
    shape: tuple[int, ...] = ()
    for axis in operand.axes:
        name = _parts(axis)[0]
        if name.isdigit() or name in sizes:
            size = _size(axis, sizes)
            shape += size if isinstance(size, tuple) else (size,)
        elif not axis.endswith("?"):
            return None
    return shape


def _size(axis: str, sizes: Mapping[str, Any]) -> Any:
    """Return the size of an axis whose name is bound; a tuple for ``*rows``."""
    name, operator, number = _parts(axis)
    if operator == "/":
        return -(-sizes[name] // int(number))
    if operator == "+":
        return sizes[name] + int(number)
    return int(name) if name.isdigit() else sizes[name]


def _parts(axis: str) -> tuple[str, str, str]:
    """Return the name, the operator and the number of an axis."""
    return re.fullmatch(r"\*?(\w+)([+/|?]?)(\d*)", axis).groups()  # type: ignore[union-attr,return-value]


def _droppable(axes: tuple[str, ...]) -> int | None:
    """Return the first axis that may be absent: any ``name?``, or a leading ``name|1``."""
    found = (i for i, a in enumerate(axes) if a.endswith("?") or (i == 0 and a.endswith("|1")))
    return next(found, None)


def explain(
    op: str, problem: str, operands: Sequence[Operand], forms: Sequence[Form | None]
) -> str:
    """Return the problem and, under it, every array of the call beside what was asked."""
    given = [(str(o), f) for o, f in zip(operands, forms, strict=True) if f is not None]
    width = max((len(text) for text, _ in given), default=0)
    lines = [f"  {text:<{width}} = {form.shape} {form.dtype.name}" for text, form in given]
    return "\n".join([f"{op}: {problem}", *lines])
