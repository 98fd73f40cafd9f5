"""Calls of this room on a tape: a forward that exchanges, and what takes gradients back."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import GradientError
from ..training.tape import Gradients, add_up
from ..training.variable import Var

Back = Callable[..., Mapping[str, Any]]  # (dy, wanted): gradients by the names of arguments


class Exchanged(NamedTuple):
    """A call on a tape; its backward is called in every rank, or in none."""

    back: Back
    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the gradients of inputs to grads."""
        found = self.back(take["y"], frozenset(inputs))
        for name, index in inputs.items():
            grads[index] = add_up(grads.get(index), found[name])


def value_of(array: Any) -> Any:
    """Return the array of a Var, or an array as it is."""
    return array.value if type(array) is Var else array


def taped(call: str, y: Any, back: Back, **arguments: Any) -> Any:
    """Return y, on the tape of the arguments that are Vars: ``back`` takes its gradient to them."""
    found = {name: each for name, each in arguments.items() if type(each) is Var}
    if not found:
        return y
    tape = next(iter(found.values())).tape
    if any(var.tape is not tape for var in found.values()):
        raise GradientError(f"{call}: arguments are on two tapes; watch them on one")
    result = Var(y, tape)
    values = {name: var.value for name, var in found.items()} | {"y": y}
    inputs = {name: var.index for name, var in found.items()}
    tape.note(Exchanged(back, values, inputs, {"y": result.index}))
    return result
