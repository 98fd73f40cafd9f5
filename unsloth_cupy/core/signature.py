"""Op signatures: NumPy's gufunc notation, with names.

    x(*rows, hidden), weight(hidden): param, labels?(*rows): int < hidden -> y(*rows, hidden)

An operand is ``name(axes): kind``; ``name?`` may be None.  An axis is

    hidden      a name, bound to one size in the whole call, or a number
    hidden+1    the bound size plus 1
    keys/128    the bound size divided by 128, rounded up; any size while the name is not bound
    *rows       any number of leading axes
    batch?      an optional axis
    keys|1      the bound size or 1; optional together with all axes before it, as NumPy broadcasts

An output may be a sum of inputs, ``h(*rows) = x + residual``; without a residual it is x itself.

A kind names dtypes (``dtypes.KINDS``); operands of kind float share one dtype, *the* dtype of the
call.  ``int < vocab`` bounds the values.  ``where heads % kv_heads`` requires a multiple.  Checks
of calls, error messages, random test inputs and the docs of an op all come from this one string.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from ..errors import DTypeError, ShapeError
from .dtypes import DIFFERENTIABLE, FLOAT32, KINDS, LEADING, Stored, allowed

OPERAND = re.compile(
    r"(\w+)(\??)\s*(?:\(([^)]*)\))?(?:\s*:\s*(\w+)(?:\s*<\s*(\w+))?)?(?:\s*=([\w+ ]+))?"
)
AXES = re.compile(r"[^\s,]+")
AXIS = re.compile(r"\*?(\w+)([+/|?]?)(\d*)")  # name, operator, number
Sizes = dict[str, Any]  # by the names of axes


class Operand(NamedTuple):
    """One array of a signature."""

    name: str
    axes: tuple[str, ...] = ()
    kind: str = "float"
    below: str | None = None  # an axis: the integers are 0 .. its size - 1
    optional: bool = False
    terms: tuple[str, ...] = ()  # inputs that an output sums; with one of them, it is that array

    def __str__(self) -> str:
        """Return the operand as the signature writes it."""
        tail = "" if self.kind == "float" else f": {self.kind}"
        tail += f" < {self.below}" if self.below else ""
        tail += f" = {' + '.join(self.terms)}" if self.terms else ""
        return f"{self.name}{'?' * self.optional}({', '.join(self.axes)}){tail}"


class Contract(NamedTuple):
    """A parsed signature."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    multiples: tuple[tuple[str, str], ...]
    derived: Callable[[Sizes], Sizes] | None = None  # computes sizes of axes from the bound sizes

    def __str__(self) -> str:
        """Return the contract as a signature writes it."""
        inputs, outputs = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        multiples = ", ".join(f"{many} % {few}" for many, few in self.multiples)
        return f"{inputs} -> {outputs}" + f" where {multiples}" * bool(multiples)


class Bound(NamedTuple):
    """The size of every axis and the dtype of every output of a valid call."""

    sizes: Sizes
    dtype: np.dtype[Any]
    outputs: tuple[np.dtype[Any] | None, ...]


def parse(signature: str, derived: Callable[[Sizes], Sizes] | None = None) -> Contract:
    """Split a signature into its inputs, its outputs and the multiples it requires."""
    arrays, _, multiples = signature.partition(" where ")
    inputs, outputs = (
        tuple(
            Operand(
                *(name, tuple(AXES.findall(axes)), kind or "float", below or None, bool(absent)),
                terms=tuple(re.findall(r"\w+", terms)),
            )
            for name, absent, axes, kind, below, terms in OPERAND.findall(side)
        )
        for side in arrays.split("->")
    )
    for operand in inputs + outputs:
        if operand.kind not in KINDS:
            kinds = ", ".join(KINDS)
            raise ValueError(f"{operand.name}: {operand.kind!r} is not a kind; choose from {kinds}")
    return Contract(inputs, outputs, tuple(re.findall(r"(\w+) % (\w+)", multiples)), derived)


def backward_of(contract: Contract, names: Mapping[str, bool], positional: int) -> Contract:
    """Return the contract of a backward op from the names of its parameters.

    A parameter ``x`` is an input or an output of the forward op, ``dx`` the upstream gradient of
    an output ``x``; ``names`` maps each parameter to whether it is optional.  The op returns
    ``dx`` for each positional input ``x`` (of kind none for integers and tables) and for each
    differentiable keyword input.
    """
    inputs, outputs, multiples, derived = contract
    gradients = {f"d{o.name}": o._replace(name=f"d{o.name}", terms=()) for o in outputs}
    # all terms of a sum have the gradient of its first term
    first = {term: f"d{o.terms[0]}" for o in outputs for term in o.terms[1:]}
    known = {o.name: o._replace(terms=()) for o in inputs + outputs} | {
        name: o._replace(optional=o.optional or names.get(name, False))
        for name, o in gradients.items()
    }
    if unknown := names.keys() - known.keys():
        raise TypeError(f"no {', '.join(sorted(unknown))} among {', '.join(known)}")
    returned = tuple(
        Operand(
            *(f"d{o.name}", o.axes, "stat" if o.kind == "stat" else "float"),
            terms=(first[o.name],) if o.name in first else (),
        )
        if o.kind in DIFFERENTIABLE
        else Operand(f"d{o.name}", kind="none")
        for i, o in enumerate(inputs)
        if i < positional or o.kind in DIFFERENTIABLE
    )
    return Contract(tuple(known[name] for name in names), returned, multiples, derived)


def check(op: str, contract: Contract, arrays: Sequence[Any]) -> Bound:
    """Bind every axis name to one size, or raise an error that shows the whole call."""
    try:
        return _bound(op, contract, arrays)
    except ShapeError as error:
        if not _fits_with_heads_first(op, contract, arrays):
            raise
        cure = "swap axes 1 and 2, as in q.transpose(1, 2) of torch"
        hint = f"  with heads before tokens, as in torch's attention, the arrays fit: {cure}"
        raise ShapeError(f"{error}\n{hint}", expected=error.expected, actual=error.actual) from None


def _fits_with_heads_first(op: str, contract: Contract, arrays: Sequence[Any]) -> bool:
    """Return whether the arrays fit once their axes 1 and 2, heads and tokens, are swapped."""
    swapped, has_heads = [*arrays], False
    for i, (operand, array) in enumerate(zip(contract.inputs, arrays, strict=True)):
        if operand.axes[2:3] in (("heads",), ("kv_heads",)) and getattr(array, "ndim", 0) == 4:
            batch, heads, tokens, dim = array.shape
            shape = batch, tokens, heads, dim
            swapped[i], has_heads = SimpleNamespace(shape=shape, dtype=array.dtype), True
    try:
        return has_heads and bool(_bound(op, contract, swapped))
    except (ShapeError, DTypeError):
        return False


def _bound(op: str, contract: Contract, arrays: Sequence[Any]) -> Bound:
    """Do what ``check`` does, without its hint about heads."""
    shown: Any = lambda problem: explain(op, problem, contract.inputs, arrays)  # noqa: E731
    present = [(o, a) for o, a in zip(contract.inputs, arrays, strict=True) if a is not None]
    dtype = next((a.dtype for o, a in present if o.kind in LEADING), FLOAT32)
    sizes: Sizes = {}

    def fit(operand: Operand, array: Any) -> None:
        if misfit := _bind(operand, array.shape, sizes):
            raise ShapeError(shown(misfit), expected=_expected(operand, sizes), actual=array.shape)

    for operand, array in zip(contract.inputs, arrays, strict=True):
        if array is None:
            if not operand.optional:
                raise DTypeError(f"{op}: {operand.name} is missing; pass {operand}")
            continue
        expected = allowed(operand.kind, dtype)
        if isinstance(array, Stored):
            if operand.kind != "weight":
                problem = f"{operand.name} is quantized; pass {operand.name}.dequantize()"
                raise DTypeError(shown(problem), expected=expected, actual=array.dtype)
            expected = (array.dtype,)
        if array.dtype not in expected:
            problem = _swapped(operand, array, present) or _wrong_dtype(operand, array, expected)
            raise DTypeError(shown(problem), expected=expected, actual=array.dtype)
        fit(operand, array)
    for many, few in contract.multiples:
        if sizes[many] != sizes[few] * (sizes[many] // max(sizes[few], 1)):  # only 0 is one of 0
            multiple = f"a multiple of {sizes[few]}"
            problem = shown(f"{many}={sizes[many]} must be a multiple of {few}={sizes[few]}")
            raise ShapeError(problem, expected=multiple, actual=sizes[many])
    if contract.derived is not None:  # it may bind further axes: check those too
        sizes |= contract.derived(sizes)
        for operand, array in present:
            fit(operand, array)
    own = {operand.name: array.dtype for operand, array in present}
    outputs = [  # a sum has the dtype of its first term, dx the dtype of x
        None if o.kind == "none" else own.get((*o.terms, o.name[1:])[0], allowed(o.kind, dtype)[0])
        for o in contract.outputs
    ]
    return Bound(sizes, dtype, tuple(outputs))


def _wrong_dtype(operand: Operand, array: Any, dtypes: Sequence[np.dtype[Any]]) -> str:
    """Return the message for an operand whose dtype is not allowed."""
    name, cure = array.dtype.name, " or ".join(d.name for d in dtypes)
    if not array.dtype.isnative:
        cure = f"{operand.name}.astype({name!r})"
        return f"{operand.name} is {name} with swapped bytes; pass {cure}"
    return f"{operand.name} is {name}; it must be {cure}"


def _swapped(operand: Operand, array: Any, present: Sequence[tuple[Operand, Any]]) -> str | None:
    """Return the message if a float operand got integers and another one floats for integers."""
    integers = [(o, a.dtype) for o, a in present if (o.kind == "int") != (a.dtype.kind in "iu")]
    for other, dtype in integers:
        if (other.kind == "int") != (operand.kind == "int"):
            name = operand.name
            return f"{name} is {array.dtype.name} and {other.name} is {dtype.name}: swap them"
    return None


def _bind(operand: Operand, shape: tuple[int, ...], sizes: dict[str, Any]) -> str | None:
    """Add the axes of an operand to ``sizes``; return what is wrong with its shape, or None."""
    axes: tuple[str, ...] = operand.axes
    actual: list[Any] = [*shape]
    if axes and axes[0].startswith("*") and len(shape) >= len(axes) - 1:
        lead = len(shape) - len(axes) + 1
        actual = [shape[:lead], *shape[lead:]]  # *rows is one entry: the tuple of leading axes
    while len(axes) > len(actual) and (skip := _droppable(axes)) is not None:
        axes = axes[:skip] + axes[skip + 1 :]
    if len(axes) != len(actual):
        plural = "axis" if len(shape) == 1 else "axes"
        return f"{operand.name} has {len(shape)} {plural}, not ({', '.join(operand.axes)})"
    for axis, size in zip(axes, actual, strict=True):
        name, operator, number = parts(axis)
        if (operator == "|" and size == 1) or (operator == "/" and name not in sizes):
            continue
        if not name.isdigit() and name not in sizes:
            # no size is negative: offsets of 0 elements bind 0, and are refused below
            sizes[name] = max(size - int(number), 0) if operator == "+" else size
        if size != (expected := size_of(axis, sizes)):
            return f"{operand.name} has {axis.strip('*?')}={size}; it must be {expected}"
    return None


def _expected(operand: Operand, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the shape that an operand must have; an axis of any size is its name."""
    shape: list[Any] = []
    for axis in operand.axes:
        name = parts(axis)[0]
        size = size_of(axis, sizes) if name.isdigit() or name in sizes else axis
        shape.extend(size if isinstance(size, tuple | list) else [size])
    return tuple(shape)


def shape_of(operand: Operand, sizes: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of an operand, without unbound optional axes; None if others are unbound."""
    shape = tuple(size for size in _expected(operand, sizes) if not str(size).endswith("?"))
    return None if any(isinstance(size, str) for size in shape) else shape


def size_of(axis: str, sizes: Mapping[str, Any]) -> Any:
    """Return the size of an axis whose name is bound; the tuple of sizes for ``*rows``."""
    name, operator, number = parts(axis)
    size = int(name) if name.isdigit() else sizes[name]
    if operator == "/":
        return -(-size // int(number))
    return size + int(number) if operator == "+" else size


def parts(axis: str) -> tuple[str, str, str]:
    """Return the name, the operator and the number of an axis."""
    return AXIS.fullmatch(axis).groups()  # type: ignore[union-attr,return-value]


def _droppable(axes: tuple[str, ...]) -> int | None:
    """Return the first axis that may be absent: any ``name?``, or a leading ``name|1``."""
    indices = (i for i, a in enumerate(axes) if a.endswith("?") or (i == 0 and a.endswith("|1")))
    return next(indices, None)


def explain(op: str, problem: str, operands: Sequence[Operand], arrays: Sequence[Any]) -> str:
    """Return the problem, then a line for every array of the call: operand, shape and dtype."""
    rows = [(str(o), a) for o, a in zip(operands, arrays, strict=True) if hasattr(a, "dtype")]
    width = max((len(text) for text, _ in rows), default=0)
    lines = [f"  {text:<{width}} = {tuple(a.shape)} {a.dtype.name}" for text, a in rows]
    return "\n".join([f"{op}: {problem}", *lines])
