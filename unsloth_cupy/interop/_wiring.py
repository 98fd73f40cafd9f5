"""Properties of an op for torch and JAX, from its signature alone: no arrays, no fixed sizes.

The output ``dx`` of a backward op is the gradient of the operand ``x``.
"""

import sys
import types
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import LEADING, Stored
from ..core.op import OPS, Op
from ..core.signature import Operand, check, parts, shape_of
from ..errors import DTypeError, FrameworkError, GradientError

SEED = "seed"  # this option changes in every step, so a graph has it as an operand


class Form(NamedTuple):
    """The shape and the dtype of an array; sizes may be symbols."""

    shape: tuple[Any, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)


def writes_in_place(op: Op[..., Any]) -> bool:
    """Return whether an op changes its arguments, which a graph cannot record."""
    return op.__name__.endswith("_")


def operators() -> list[Op[..., Any]]:
    """Return the library's ops, forward and backward, that a graph can record."""
    ours = [op for op in OPS.values() if op.__module__.partition(".")[0] == "unsloth_cupy"]
    return [op for op in ours if not writes_in_place(op)]


def public() -> dict[str, Callable[..., Any]]:
    """Return the ops of ``operators``, and the public functions in their modules, by name."""
    functions: dict[str, Callable[..., Any]] = {op.__name__: op for op in operators()}
    for module in dict.fromkeys(op.__module__ for op in operators()):
        for name, value in vars(sys.modules[module]).items():
            own = isinstance(value, types.FunctionType) and value.__module__ == module
            if own and name[0] != "_" and name[-1] != "_" and "\nReturns\n" in _doc_of(value):
                functions[name] = value
    return functions


def module_names(scope: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``__getattr__`` and ``__dir__`` for a module, which add the functions of ``public``.

    ``scope`` holds the globals of the module.
    """

    def __getattr__(name: str) -> Any:  # noqa: N807 -- of a module
        if name in (functions := public()):
            return functions[name]
        raise AttributeError(f"module {scope['__name__']!r} has no attribute {name!r}")

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*scope, *public()})

    return __getattr__, __dir__


def _doc_of(function: Any) -> str:
    """Return a docstring with its lines stripped."""
    return "\n".join(line.strip() for line in (function.__doc__ or "").splitlines())


def may_be_number(operand: Operand) -> bool:
    """Return whether a Python integer may be passed for an array."""
    return operand.kind == "int" and all(axis.endswith("?") for axis in operand.axes)


def is_weight(operand: Operand) -> bool:
    """Return whether an operand may be a quantized weight."""
    return operand.kind == "weight"


def quantized(op: Op[..., Any], operand: Operand) -> DTypeError:
    """Return the error for a quantized weight where an op needs an array."""
    name = operand.name
    return DTypeError(f"{op.called}: {name} is quantized; pass an array of {name}.dequantize()")


def check_places(op: Op[..., Any], arrays: Sequence[Any], place: str) -> None:
    """Raise if a quantized weight is not on ``place``, the device of a call's arrays.

    Places are ``cpu``, ``cuda:0`` and so on.
    """
    for name, array in zip(op.names, arrays, strict=True):
        if isinstance(array, Stored):
            home: Any = array.home
            is_numpy = isinstance(home, np.ndarray)
            weight_place = "cpu" if is_numpy else f"cuda:{home.device.id}"
            if weight_place != place:
                cure = "cupy.asarray" if is_numpy else "cupy.asnumpy"
                raise FrameworkError(
                    f"{op.called}: {name} is stored in {'NumPy' if is_numpy else 'CuPy'} arrays on"
                    f" {weight_place}, and the other arrays are on {place}; move it, for instance"
                    f" by {name}.moved({cure})"
                )


def is_product(op: Op[..., Any]) -> bool:
    """Return whether an op sums over an axis that two operands share, as matrix products do.

    An op that declares a dtype for autocast is no product.
    """
    # a router, for one: its bias shares an axis with the logits
    if op.facts.get("autocast"):
        return False
    inputs = [o for o in op.contract.inputs if o.kind in (*LEADING, "param")]
    output_axes = {axis for o in op.contract.outputs for axis in o.axes}
    shared = [{*one.axes} & {*other.axes} for one in inputs for other in inputs if one is not other]
    return any(not axis.isdigit() for axes in shared for axis in axes - output_axes)


def needed(op: Op[..., Any], output: Operand) -> tuple[str, ...]:
    """Return the optional operands that an output needs: without one of them it is None."""
    optional = {o.name: o for o in op.contract.inputs if o.optional}
    if is_gradient(op, output):
        return (output.name[1:],) if output.name[1:] in optional else ()
    known = {parts(axis)[0] for o in op.contract.inputs if not o.optional for axis in o.axes}
    unknown = {parts(axis)[0] for axis in output.axes} - known
    return tuple(
        name for name, o in optional.items() if unknown & {parts(axis)[0] for axis in o.axes}
    )


def is_gradient(op: Op[..., Any], output: Operand) -> bool:
    """Return whether an output is the gradient of an operand, which ``wanted`` can leave out."""
    return output.name[0] == "d" and (output.name[1:] in op.names or "wanted" in op.options)


def operands_of(op: Op[..., Any], output: Operand) -> list[str]:
    """Return the operands whose gradient is this output, such as x and residual of a norm."""
    sharing = [o.name for o in op.contract.outputs if output.name in o.terms]
    return [name[1:] for name in (output.name, *sharing)]


def shared_outputs(op: Op[..., Any], operands: Container[str]) -> dict[str, str]:
    """Return the outputs that are the array of an operand or of another output, with its name.

    In a call with these operands they are sums with a single term.
    """
    result, outputs = {}, [o.name for o in op.contract.outputs]
    for output in op.contract.outputs:
        present = [term for term in output.terms if term in operands or term in outputs]
        if len(present) == 1:
            result[output.name] = present[0]
    return result


def forms(
    op: Op[..., Any], operands: Mapping[str, Form], options: Mapping[str, Any]
) -> dict[str, Form | None]:
    """Check a call; return the form of each output, or None if it is not a new array."""
    arrays = [operands.get(name) for name in op.names]
    bound = check(op.called, op.contract, arrays)
    if op.options <= options.keys() and all(map(_is_constant, options.values())):
        for each in op.checks:
            each(arrays, dict(options))
    sizes, elsewhere = bound.sizes, shared_outputs(op, operands)
    if "sizes" in op.facts:
        own = {name: value for name, value in options.items() if name in op.options}
        sizes = sizes | op.facts["sizes"](operands[op.names[0]].shape, **own)
    requested, result = options.get("wanted"), {}
    for output, dtype in zip(op.contract.outputs, bound.outputs, strict=True):
        name, of = output.name, output.name[1:]
        # "is None", never "None in (...)": NumPy says that dtype float64 == None
        absent = dtype is None or name in elsewhere
        absent = absent or any(operand not in operands for operand in needed(op, output))
        if requested is not None and is_gradient(op, output):
            absent = absent or requested.isdisjoint(operands_of(op, output))
        like = is_gradient(op, output) and of in operands
        shape: Any = tuple(operands[of].shape) if like else shape_of(output, sizes)
        result[name] = None if absent or shape is None else Form(shape, dtype)
    return result


def _is_constant(value: Any) -> bool:
    """Return whether an option has a known value: no symbol."""
    parts = value if isinstance(value, tuple | list) else (value,)
    return all(isinstance(p, bool | int | float | str | frozenset | None) for p in parts)


def no_gradient(op: Op[..., Any]) -> GradientError:
    """Return the error for an op without a gradient."""
    for forward in OPS.values():
        if forward.backward is op:
            cure = "take its gradient once, without create_graph or a gradient around it"
            return GradientError(f"{forward.called} has no second derivatives; {cure}")
    reason = op.facts.get("no_gradient", f"write its backward op under @{op.__name__}.gradient")
    return GradientError(f"{op.called} has no gradient: {reason}")


def table_gradient(op: Op[..., Any], table: str, cure: str) -> GradientError:
    """Return the error for the gradient of a table."""
    return GradientError(f"{op.called}: {table} is a table and has no gradient; {cure}")


def gradient_names(op: Op[..., Any]) -> Iterator[str]:
    """Yield the outputs whose gradients are operands of the backward op."""
    for output in op.contract.outputs:
        if op.backward is not None and f"d{output.name}" in op.backward.names:
            yield output.name
