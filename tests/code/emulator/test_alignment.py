"""Each array alone off 16 bytes: a launch asks all of them before a kernel reads 16 bytes at once.

Shifted together, one array that is asked hides another that is not.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from unsloth_cupy.bench.cases import Call, Scale, draw
from unsloth_cupy.core.dtypes import KERNEL_DTYPES
from unsloth_cupy.core.op import OPS

from ...core.test_launches import LAUNCHED, OWNERS
from ...harness.parity import emulator, outputs_of, within_rule

SMALL = Scale(tokens=32, hidden=64, inner=32, vocab=48, heads=4, kv_heads=2, dim=16)
Place = Callable[[np.ndarray], np.ndarray]


def shifted(array: np.ndarray) -> np.ndarray:
    """Return a copy that starts one element after a multiple of 16 bytes."""
    room = np.empty(array.size + 1, array.dtype)
    room[1:] = array.ravel()
    return room[1:].reshape(array.shape)


def apart(array: np.ndarray) -> np.ndarray:
    """Return a copy whose rows lie one element apart."""
    room = np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)
    room[..., :-1] = array
    return room[..., :-1]


def placed_alone(call: Call) -> Iterator[tuple[str, Call]]:
    """Yield the call with one array elsewhere, array by array, and what was done."""
    for name, array in call.arrays.items():
        places: list[Place] = [shifted]
        if array is not None and array.ndim > 1:
            places.append(apart)
        for place in places if array is not None else ():
            moved = call.arrays | {name: place(array)}
            yield f"{name} {place.__name__}", call._replace(arrays=moved)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHED)
def test_each_array_alone(name: str) -> None:
    owner, dtype = OWNERS.get(name, OPS[name]), KERNEL_DTYPES[0]
    call = draw(owner, SMALL, optional=True).cast(dtype)
    if owner is not OPS[name]:
        outputs = outputs_of(call)
        call = call.backward(outputs, call.seeds(outputs, every=True))
    plain, exact = outputs_of(call), outputs_of(call.cast(np.float64))
    for how, moved in placed_alone(call):
        with emulator():
            try:
                within_rule(plain, exact, outputs_of(moved))
            except AssertionError as error:
                raise AssertionError(f"{how}: {error}") from None
