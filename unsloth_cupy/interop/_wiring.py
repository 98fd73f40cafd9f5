"""What a framework is told of an op, by its signature alone: no array, sizes may be symbols."""

import sys
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import LEADING, Stored
from ..core.op import OPS, Op
from ..core.signature import Operand, check, parts, shape_of
from ..errors import DTypeError, FrameworkError, GradientError

SEED = "seed"  # an option that is drawn anew at every step: to a graph it is an operand


class Form(NamedTuple):
    """All that a signature asks of an array; sizes may be symbols."""

    shape: tuple[Any, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """Return how many axes there are."""
        return len(self.shape)


def changes(op: Op[..., Any]) -> bool:
    """Say whether an op changes its arguments, which a graph of calls cannot record."""
    return op.__name__.endswith("_")


def operators() -> list[Op[..., Any]]:
    """Return the library's ops that a graph of calls can record, backward ops among them."""
    ours = [op for op in OPS.values() if op.__module__.partition(".")[0] == "unsloth_cupy"]
    return [op for op in ours if not changes(op)]


def public() -> dict[str, Callable[..., Any]]:
    """Return these ops and the library's functions that call them, by name."""
    found: dict[str, Callable[..., Any]] = {op.__name__: op for op in operators()}
    for module in dict.fromkeys(op.__module__ for op in operators()):
        for name, value in vars(sys.modules[module]).items():
            own = isinstance(value, types.FunctionType) and value.__module__ == module
            if own and name[0] != "_" and name[-1] != "_" and "\nReturns\n" in _told(value):
                found[name] = value
    return found


def module_names(scope: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``__getattr__`` and ``__dir__`` of a module with these globals, which has them too."""

    def __getattr__(name: str) -> Any:  # noqa: N807 -- of a module
        if name in (found := public()):
            return found[name]
        raise AttributeError(f"module {scope['__name__']!r} has no attribute {name!r}")

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*scope, *public()})

    return __getattr__, __dir__


def _told(function: Any) -> str:
    return "\n".join(line.strip() for line in (function.__doc__ or "").splitlines())


def may_be_number(operand: Operand) -> bool:
    """Say whether a Python integer may be passed for an array."""
    return operand.kind == "int" and all(axis.endswith("?") for axis in operand.axes)


def is_weight(operand: Operand) -> bool:
    """Say whether an operand may be a quantized weight."""
    return operand.kind == "weight"


def quantized(op: Op[..., Any], operand: Operand) -> DTypeError:
    """Return the error of a quantized weight where an op asks for an array."""
    name = operand.name
    return DTypeError(f"{op.called}: {name} is quantized; pass an array of {name}.dequantize()")


def check_places(op: Op[..., Any], arrays: Sequence[Any], place: str) -> None:
    """Raise where a quantized weight is kept elsewhere than the arrays of a call, which are here.

    Places are ``cpu``, and ``cuda:0`` and so on.
    """
    for name, array in zip(op.names, arrays, strict=True):
        if isinstance(array, Stored):
            home: Any = array.home
            numpys = isinstance(home, np.ndarray)
            kept = "cpu" if numpys else f"cuda:{home.device.id}"
            if kept != place:
                cure = "cupy.asarray" if numpys else "cupy.asnumpy"
                raise FrameworkError(
                    f"{op.called}: {name} is kept in arrays of {'NumPy' if numpys else 'CuPy'} on"
                    f" {kept}, and the others are on {place}; bring them together, as by"
                    f" {name}.moved({cure})"
                )


def is_product(op: Op[..., Any]) -> bool:
    """Say whether an op sums over an axis that two operands share, as products of matrices do."""
    inputs = [o for o in op.contract.inputs if o.kind in (*LEADING, "param")]
    kept = {axis for o in op.contract.outputs for axis in o.axes}
    shared = [{*one.axes} & {*other.axes} for one in inputs for other in inputs if one is not other]
    return any(axes - kept for axes in shared)


def needed(op: Op[..., Any], output: Operand) -> tuple[str, ...]:
    """Return the operands without any of which an output is None."""
    optional = {o.name: o for o in op.contract.inputs if o.optional}
    if is_gradient(op, output):
        return (output.name[1:],) if output.name[1:] in optional else ()
    known = {parts(axis)[0] for o in op.contract.inputs if not o.optional for axis in o.axes}
    asked = {parts(axis)[0] for axis in output.axes} - known
    return tuple(
        name for name, o in optional.items() if asked & {parts(axis)[0] for axis in o.axes}
    )


def is_gradient(op: Op[..., Any], output: Operand) -> bool:
    """Say whether an output is the gradient of an operand, which a call may not ask for."""
    return output.name[0] == "d" and (output.name[1:] in op.names or "wanted" in op.options)


def same(op: Op[..., Any], given: Container[str]) -> dict[str, str]:
    """Return, of a call with these operands, the outputs that are another array, and which."""
    found, outputs = {}, [o.name for o in op.contract.outputs]
    for output in op.contract.outputs:
        there = [term for term in output.terms if term in given or term in outputs]
        if len(there) == 1:
            found[output.name] = there[0]
    return found


def forms(
    op: Op[..., Any], given: Mapping[str, Form], options: Mapping[str, Any]
) -> dict[str, Form | None]:
    """Check a call; return the form of each output, None where there is no new array."""
    arrays = [given.get(name) for name in op.names]
    bound = check(op.called, op.contract, arrays)
    if op.options <= options.keys() and all(map(_is_constant, options.values())):
        for each in op.checks:
            each(arrays, dict(options))
    sizes, elsewhere = bound.sizes, same(op, given)
    if "sizes" in op.facts:
        own = {name: value for name, value in options.items() if name in op.options}
        sizes = sizes | op.facts["sizes"](given[op.names[0]].shape, **own)
    wanted, found = options.get("wanted"), {}
    for output, dtype in zip(op.contract.outputs, bound.outputs, strict=True):
        name, of = output.name, output.name[1:]
        absent = dtype is None or name in elsewhere  # never None in (...): float64 == None
        absent = absent or any(operand not in given for operand in needed(op, output))
        absent = absent or (wanted is not None and is_gradient(op, output) and of not in wanted)
        like = is_gradient(op, output) and of in given
        shape: Any = tuple(given[of].shape) if like else shape_of(output, sizes)
        found[name] = None if absent or shape is None else Form(shape, dtype)
    return found


def _is_constant(value: Any) -> bool:
    """Say whether an option holds no symbol."""
    parts = value if isinstance(value, tuple | list) else (value,)
    return all(isinstance(p, bool | int | float | str | frozenset | None) for p in parts)


def no_gradient(op: Op[..., Any]) -> GradientError:
    """Return the error of a gradient that an op does not have."""
    for forward in OPS.values():
        if forward.backward is op:
            cure = "take its gradient once, without create_graph or a gradient around it"
            return GradientError(f"{forward.called} has no second derivatives; {cure}")
    reason = op.facts.get("no_gradient", f"write its backward op under @{op.__name__}.gradient")
    return GradientError(f"{op.called} has no gradient: {reason}")


def table_gradient(op: Op[..., Any], table: str, cure: str) -> GradientError:
    """Return the error of a gradient that is asked for a table."""
    return GradientError(f"{op.called}: {table} is a table and has no gradient; {cure}")


def gradient_names(op: Op[..., Any]) -> Iterator[str]:
    """Yield the outputs whose gradients the backward op takes."""
    for output in op.contract.outputs:
        if op.backward is not None and f"d{output.name}" in op.backward.names:
            yield output.name
