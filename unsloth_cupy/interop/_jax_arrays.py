"""Arrays of JAX over the memory of NumPy and CuPy, and back.

XLA, on a CPU, takes only memory at multiples of 64 bytes, which NumPy's seldom is: such results
are copied.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from ..core.frameworks import cupy
from ..errors import FrameworkError


def run(op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op on the memory of arrays that have values."""
    place = None
    for array in arrays:
        if array is not None:
            here = array.sharding
            place = place or here
            if here is not place and here != place:
                break
    else:
        if place.__class__ is SingleDeviceSharding and _lead(arrays).platform() == "cpu":
            return _on_host(op, arrays, options)
    return op.plan(arrays)(list(arrays), options)


def _lead(arrays: Sequence[Any]) -> Any:
    return next(array for array in arrays if array is not None)


def _on_host(op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    given = [None if array is None else np.asarray(array) for array in arrays]
    found, lead = op.call(given, options), _lead(arrays)
    if found.__class__ is tuple:
        return tuple(None if array is None else give_back(array, lead) for array in found)
    return give_back(found, lead)


def adopt(array: Any) -> Any:
    """Return NumPy's or CuPy's view of an array of JAX."""
    if isinstance(array, jax.core.Tracer):
        raise FrameworkError("is traced by JAX, which this call does not take")
    if len(array.devices()) > 1:
        raise FrameworkError("lies on several devices; pass .addressable_shards[i].data")
    return np.asarray(array) if array.platform() == "cpu" else cupy().from_dlpack(array)


def give_back(array: Any, operand: Any) -> Any:
    """Return JAX's view of a result, where an operand is."""
    if not isinstance(array, np.ndarray):
        return jax.dlpack.from_dlpack(array)
    if array.base is None and not operand.committed:  # new memory of NumPy's: copied
        return jax.numpy.asarray(array)
    return jax.device_put(array, operand.sharding if operand.committed else None)


@contextmanager
def stream(array: Any) -> Iterator[None]:
    """Wait, on a GPU: XLA may use an operand's memory again once it is let go."""
    yield
    if array.platform() != "cpu":
        cupy().cuda.Device(array.device.local_hardware_id).synchronize()
