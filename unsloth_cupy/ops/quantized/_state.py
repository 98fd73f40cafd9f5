"""Checks of the saved state of a quantized weight, before the weight is created."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import FLOAT32, FLOATS, Array
from ...errors import ConfigError, DTypeError, ShapeError
from ...placement import check_library, to_numpy


def checked_state(call: str, state: Any) -> Mapping[str, Any]:
    """Return a state; raise ConfigError unless it is a mapping of names to arrays."""
    if not isinstance(state, Mapping):
        raise ConfigError(f"{call}: state is {type(state).__name__}; pass arrays by name")
    return state


def check_array(what: str, array: Any, dtype: Any, shape: tuple[int, ...] | None) -> None:
    """Raise unless an array of a weight has this dtype and shape; None stands for any matrix."""
    check_library(what, array)
    if array.dtype != dtype:
        raise DTypeError(f"{what} is {array.dtype}; it must be {np.dtype(dtype)}")
    actual = tuple(array.shape)
    if len(actual) != 2 if shape is None else actual != shape:
        form = "(outputs, inputs)" if shape is None else shape
        raise ShapeError(f"{what} is {actual}; it must be {form}", expected=form, actual=actual)


def weight_shape(call: str, shape: Any, stacks: bool = False) -> tuple[int, ...]:
    """Return the shape of a matrix, or of a stack of matrices, as Python integers.

    Raise ShapeError if it is no such shape.
    """
    listed = isinstance(shape, list | tuple) and len(shape) in (2, 2 + stacks)
    if not listed or not all(is_integer(size) for size in shape):
        form = "(outputs, inputs)" + " or (experts, outputs, inputs)" * stacks
        problem = f"{call}: shape is {reprlib.repr(shape)}; it must be {form}"
        raise ShapeError(problem, expected=form, actual=shape)
    return tuple(map(int, shape))


def matrix_shape(call: str, shape: Any) -> tuple[int, int]:
    """Return the shape of a matrix as two Python integers, or raise ShapeError."""
    rows, columns = weight_shape(call, shape)
    return rows, columns


def array_of(
    call: str, state: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: Any
) -> Array:
    """Return the array ``name``; raise unless it has the shape, the dtype and finite values."""
    array: Any = state.get(name)
    if not hasattr(array, "dtype") or isinstance(array, np.generic):
        names = ", ".join(map(str, state))
        raise ConfigError(f"{call}: {name} is missing among {names}; is the file cut short?")
    check_library(f"{call}: {name}", array)
    actual, expected = (tuple(array.shape), array.dtype), (shape, np.dtype(dtype))
    if actual != expected:
        problem = f"{call}: {name} is {actual[0]} {actual[1]}; it must be {shape} {expected[1]}"
        raise ConfigError(problem, expected=expected, actual=actual)
    if array.dtype in FLOATS and not bool(np.isfinite(array).all()):
        raise ConfigError(f"{call}: {name} holds a number that is not finite")
    return array


def json_of(call: str, state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the JSON object that the first array with one of these names has as bytes."""
    name = next((name for name in names if name in checked_state(call, state)), None)
    if name is None:
        among = ", ".join(map(str, state))
        raise ConfigError(f"{call}: none of {' and '.join(names)} is among {among}")
    check_library(f"{call}: {name}", state[name])
    try:
        facts = json.loads(bytes(to_numpy(state[name])))
    except (UnicodeDecodeError, ValueError, TypeError) as error:
        raise ConfigError(f"{call}: {name} is not JSON in bytes: {error}") from error
    if not isinstance(facts, dict):
        raise ConfigError(f"{call}: {name} holds {facts!r}; it must hold a JSON object")
    return facts


def stored_shape(call: str, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the weight in ``facts``; raise ConfigError if there is none."""
    shape = facts.get("shape")
    listed = isinstance(shape, list | tuple) and len(shape) in (2, 3)
    if not listed or not all(type(size) is int and size >= 0 for size in shape or ()):
        raise ConfigError(f"{call}: shape {shape!r} is not a shape of a matrix or of a stack")
    return tuple(shape or ())


def check_table(call: str, state: Mapping[str, Any], name: str, expected: Array) -> None:
    """Raise unless an array is the expected table of values by code, up to rounding.

    bitsandbytes computes it with torch.linspace, whose rounding depends on the CPU's vector unit.
    """
    table = to_numpy(array_of(call, state, name, expected.shape, FLOAT32))
    # 2^-22: the last two bits of float32
    if not np.allclose(table, expected, rtol=2.0**-22, atol=0):
        cure = "quantize the dense weight again"
        raise ConfigError(f"{call}: {name} differs from the table of bitsandbytes; {cure}")
