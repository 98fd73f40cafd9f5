"""Tape entries of calls that are not ops, such as exchanges among ranks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..core.arrays import framework_of
from ..errors import GradientError
from ..training.tape import Gradients, add_up
from ..training.variable import Var

# (*dys, wanted) -> gradients by argument; ``wanted`` are the arguments that need a gradient
Back = Callable[..., Mapping[str, Any]]


class Exchanged(NamedTuple):
    """A tape entry of a call; if it exchanges arrays, all ranks run its backward or none."""

    back: Back
    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Compute the gradients of inputs and add them to grads."""
        gradients = self.back(*take.values(), frozenset(inputs))
        for name, index in inputs.items():
            grads[index] = add_up(grads.get(index), gradients[name])


def value_of(array: Any) -> Any:
    """Return the array of a Var; an array is returned unchanged."""
    return array.value if type(array) is Var else array


def values_of(call: str, **arrays: Any) -> list[Any]:
    """Return arrays, and the arrays of Vars; raise for an argument that is neither."""
    values = [value_of(array) for array in arrays.values()]
    for name, value in zip(arrays, values, strict=True):
        framework_of(value, f"{call}: {name}")
    return values


def taped(call: str, y: Any, back: Back, **arguments: Any) -> Any:
    """Return y as a Var if any argument is a Var; ``back`` computes the arguments' gradients.

    If y is a tuple of results, ``back`` receives their gradients in order, None for a result that
    is not used.
    """
    variables = {name: each for name, each in arguments.items() if type(each) is Var}
    if not variables:
        return y
    tape = next(iter(variables.values())).tape
    if any(var.tape is not tape for var in variables.values()):
        raise GradientError(f"{call}: arguments are on two tapes; watch them on one")
    ys = {f"y{i}": each for i, each in enumerate(y)} if type(y) is tuple else {"y": y}
    results = {name: Var(each, tape) for name, each in ys.items()}
    values = {name: var.value for name, var in variables.items()} | ys
    inputs = {name: var.index for name, var in variables.items()}
    outputs = {name: var.index for name, var in results.items()}
    tape.note(Exchanged(back, values, inputs, outputs))
    return tuple(results.values()) if type(y) is tuple else results["y"]
