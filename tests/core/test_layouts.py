"""Arrays of any layout give the results of contiguous ones, also after a call of contiguous ones.

Each operand of each op, forward and backward, is in turn a slice of a wider array, a transposed
one, one that begins behind the start of its memory, and a broadcast one with strides of 0.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.bench.cases import Call, Scale
from unsloth_cupy.core import kernel
from unsloth_cupy.core.dtypes import FLOAT32

from ..harness.parity import emulator, outputs_of, within_rule
from ..harness.sampling import Sample
from ..machines.stand_in import gpu
from . import test_launches
from .test_launches import LAUNCHED, call_of

EMULATED, MOVED = 2, 3  # ops whose kernels a run judges, and layouts of each: some take seconds


def apart(array: Any) -> Any:
    """Return the same values in every second column of a wider array."""
    room = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    room[..., ::2] = array
    return room[..., ::2]


def turned(array: Any) -> Any:
    """Return the same values in an array whose first axis is the innermost of its memory."""
    return np.asarray(array, order="F")


def behind(array: Any) -> Any:
    """Return the same values in an array that begins one element behind the start of its memory."""
    room = np.zeros(array.size + 1, array.dtype)
    room[1:] = array.ravel()
    return room[1:].reshape(array.shape)


def broadcast(array: Any) -> Any:
    """Return the first value as a whole array, whose strides are 0, as ``.sum().backward()``."""
    return np.broadcast_to(array[(0,) * array.ndim], array.shape)


def moved(call: Call) -> Iterator[tuple[str, Call]]:
    """Yield the call with one array in another layout, for each array and layout, and what it is.

    Integers are not broadcast, as equal offsets or tokens are another call; nor is what an op
    writes.
    """
    for name, array in call.arrays.items():
        if not getattr(array, "ndim", 0):
            continue
        for view in (apart, turned, behind, broadcast):
            fixed = array.dtype.kind != "f" or call.op.__name__.endswith("_")
            if not (view is broadcast and fixed):
                yield (
                    f"{name} {view.__name__}",
                    call._replace(arrays=call.arrays | {name: view(array)}),
                )


def fresh(call: Call) -> None:
    """Forget how calls of an op were run, and its kernels."""
    call.op.routes.clear()
    kernel._kernel.cache_clear()


def placed(machine: Any) -> Callable[[Any], Any]:
    """Return a function that returns an array of the stand-in with the layout of NumPy's."""

    def place(array: Any) -> Any:
        there = machine.array(array.shape, array.dtype)
        there.values = array
        return there

    return place


@pytest.mark.parametrize("name", Sample.one_in(3, LAUNCHED))
def test_a_replay_starts_what_a_first_call_starts(name: str) -> None:
    """A contiguous call of the same shape lies between: three, the last of which is replayed."""
    call = call_of(name, np.asarray, FLOAT32, optional=True)
    with gpu() as machine:
        machine.strict = False  # a definition may run, where no kernel takes the layout

        def started(call: Call) -> list[Any]:
            machine.launches.clear()
            call.mapped(placed(machine))()
            return [*machine.launches]

        for what, other in moved(call):
            fresh(call)
            expected = started(other)
            fresh(call)
            for _ in range(3):
                started(call)
            assert [started(other) for _ in range(3)] == [expected] * 3, what


def turn() -> list[str]:
    """Return the ops whose kernels this run judges; they take turns."""
    first = Sample.day * EMULATED % len(LAUNCHED)
    return LAUNCHED if Sample.all else [*LAUNCHED, *LAUNCHED][first : first + EMULATED]


@pytest.mark.parametrize("every", [False, True], ids=["required", "every-operand"])
@pytest.mark.parametrize("name", turn())
def test_kernels_read_any_layout(name: str, every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of a layout, and one after three calls of contiguous arrays."""
    small = Scale(tokens=32, hidden=64, inner=48, vocab=40, heads=2, kv_heads=1, dim=32)
    monkeypatch.setattr(test_launches, "SMALL", small)
    call = call_of(name, np.asarray, FLOAT32, optional=every)
    layouts = [*moved(call)]
    draw = random.Random(f"{name} {Sample.day}")
    for what, other in layouts if Sample.all else draw.sample(layouts, min(MOVED, len(layouts))):
        dense = other.mapped(lambda array: array.copy())
        plain, exact = outputs_of(dense), outputs_of(dense.cast(np.float64))
        with emulator():
            fresh(call)
            first = outputs_of(other)
            fresh(call)
            for _ in range(3):
                outputs_of(call)
            for actual in (first, outputs_of(other)):
                try:
                    within_rule(plain, exact, actual)
                except AssertionError as error:
                    raise AssertionError(what) from error
