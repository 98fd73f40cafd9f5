"""Each axis of each operand is compared before a launch: a kernel reads what the others say."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy.bench.cases import Call, forward_ops
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.signature import parts
from unsloth_cupy.errors import ShapeError, UnslothCupyError

from ..machines.stand_in import gpu
from .test_launches import OWNERS, call_of

NAMES = [o.__name__ for f in forward_ops() for o in (OPS[f], OPS[f].backward) if o is not None]
# The gradient of a result with more or fewer copies of x is as valid.
COPIES = ("broadcast_to_backward", "dy", 0)


def resized(array: Any, axis: int, by: int) -> Any:
    """Return an array with one axis longer or shorter by one."""
    places = np.arange(array.shape[axis] + by)
    return array.take(np.minimum(places, array.shape[axis] - 1), axis)


def axes_of(call: Call) -> dict[str, list[tuple[int, str]]]:
    """Return the places and the names of the axes of each array of a call, but for numbers."""
    axes: dict[str, list[tuple[int, str]]] = {}
    for operand in call.op.contract.inputs:
        array = call.arrays[operand.name]
        if not isinstance(array, np.ndarray):
            continue
        names = operand.axes
        if names[:1] and names[0].startswith("*"):
            names = (names[0],) * (array.ndim - len(names) + 1) + names[1:]
        names = names[len(names) - array.ndim :]
        axes[operand.name] = [(at, name) for at, name in enumerate(names) if not name.isdigit()]
    return axes


def judge(call: Call, what: str, free: bool) -> None:
    """Raise unless a call ends in a ShapeError before a launch; a free one may run, too."""
    with gpu() as machine:
        machine.strict = False
        actual: Any = None
        try:
            call.mapped(machine.place).run()
        except UnslothCupyError as error:
            actual = type(error)
        assert free or (actual, machine.launches) == (ShapeError, []), what


@pytest.mark.parametrize(
    ("name", "optional"),
    [
        pytest.param(name, optional, id=name + "-every-operand" * optional)
        for name in NAMES
        for optional in (False, True)[name not in OWNERS :]
    ],
)
def test_an_axis_that_differs_is_named(name: str, optional: bool) -> None:
    """An axis is free if it is one of a forward call and no other array of the call has it."""
    call = call_of(name, np.asarray, np.dtype("float32"), optional)
    forward = {
        parts(axis)[0] for o in OWNERS.get(name, OPS[name]).contract.inputs for axis in o.axes
    }
    axes = axes_of(call)
    for operand, own in axes.items():
        array = call.arrays[operand]
        others = {
            parts(axis)[0]
            for other in axes.keys() - {operand}
            for at, axis in axes[other]
            if not (axis.endswith("|1") and call.arrays[other].shape[at] == 1)
        }
        for at, axis in own:
            alone = parts(axis)[0] in forward - others
            for by in (1, -1) if array.shape[at] else (1,):
                shared = axis.endswith("|1") and array.shape[at] + by == 1
                free = alone or shared or (name, operand, at) == COPIES
                wrong = call._replace(arrays=call.arrays | {operand: resized(array, at, by)})
                judge(wrong, f"{operand} with {axis}={array.shape[at] + by}", free)


@pytest.mark.parametrize("name", [name for name in NAMES if name in OWNERS])
def test_an_axis_of_results_alone_is_compared_with_the_call(name: str) -> None:
    """Such as the states after each text: all arrays that have it are as wrong."""
    call, owner = call_of(name, np.asarray, np.dtype("float32"), True), OWNERS[name]
    forward = {parts(axis)[0] for o in owner.contract.inputs for axis in o.axes}
    axes = axes_of(call)
    for axis in {axis for own in axes.values() for _, axis in own if parts(axis)[0] not in forward}:
        arrays = dict(call.arrays)
        for operand, own in axes.items():
            for at in [at for at, each in own if each == axis][-1:]:
                arrays[operand] = resized(arrays[operand], at, 1)
        judge(call._replace(arrays=arrays), f"{axis} of all arrays", free=False)
