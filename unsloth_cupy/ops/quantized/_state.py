"""What the state of a quantized weight is checked by, before anything is made of it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, FLOATS, Array
from ...errors import ConfigError
from ...placement import to_numpy


def named(call: str, state: Any) -> Mapping[str, Any]:
    """Return a state; raise unless it is arrays by name."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"{call}: state is {type(state).__name__}; pass arrays by name")
    return state


def array_of(
    call: str, state: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: Any
) -> Array:
    """Return the array of this name; raise unless it has the shape, the dtype and finite values."""
    array: Any = state.get(name)
    if not hasattr(array, "dtype"):
        there = ", ".join(map(str, state))
        raise ConfigError(f"{call}: {name} is missing among {there}; is the file cut short?")
    given, wanted = (tuple(array.shape), array.dtype), (shape, np.dtype(dtype))
    if given != wanted:
        problem = f"{call}: {name} is {given[0]} {given[1]}; it must be {shape} {wanted[1]}"
        raise ConfigError(problem, expected=wanted, actual=given)
    if array.dtype in FLOATS and not bool(np.isfinite(array).all()):
        raise ConfigError(f"{call}: {name} holds a number that is not finite")
    return array


def json_of(call: str, state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the facts that the one array of these names says as JSON in bytes."""
    name = next((name for name in names if name in named(call, state)), None)
    if name is None:
        raise ConfigError(f"{call}: none of {' and '.join(names)} is among {', '.join(state)}")
    try:
        facts = json.loads(bytes(to_numpy(state[name])))
    except (UnicodeDecodeError, ValueError, TypeError) as error:
        raise ConfigError(f"{call}: {name} is not JSON in bytes: {error}") from error
    if not isinstance(facts, dict):
        raise ConfigError(f"{call}: {name} says {facts!r}; it must hold facts by name")
    return facts


def stored_shape(call: str, facts: Mapping[str, Any]) -> tuple[int, int]:
    """Return the shape of a matrix that facts tell; raise where they tell none."""
    shape = facts.get("shape")
    listed = isinstance(shape, list | tuple) and len(shape) == 2
    if not listed or not all(type(size) is int and size >= 0 for size in shape or ()):
        raise ConfigError(f"{call}: shape {shape!r} is not that of a matrix")
    rows, columns = shape or (0, 0)
    return rows, columns


def check_table(call: str, state: Mapping[str, Any], name: str, wanted: Array) -> None:
    """Raise unless an array is the table that codes stand for, to a last place.

    bitsandbytes makes it by torch.linspace, which rounds as the vectors of its CPU do.
    """
    found = to_numpy(array_of(call, state, name, wanted.shape, FLOAT32))
    if not np.allclose(found, wanted, rtol=2.0**-22, atol=0):
        raise ConfigError(f"{call}: {name} is another table than bitsandbytes'; quantize anew")
