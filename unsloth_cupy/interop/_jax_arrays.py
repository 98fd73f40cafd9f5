"""Arrays of JAX over the memory of NumPy and CuPy, and back.

XLA, on a CPU, takes only memory at multiples of 64 bytes, which NumPy's seldom is: such results
are copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..core.frameworks import cupy
from ..errors import FrameworkError


def adopt(array: Any) -> Any:
    """Return NumPy's or CuPy's view of an array of JAX."""
    import jax

    if isinstance(array, jax.core.Tracer):
        raise FrameworkError(
            "is traced by jax.jit, grad or vmap, which do not see this call: call outside of"
            " them, or through jax.pure_callback"
        )
    if len(array.devices()) > 1:
        raise FrameworkError("lies on several devices; pass .addressable_shards[i].data")
    return np.asarray(array) if array.platform() == "cpu" else cupy().from_dlpack(array)


def give_back(array: Any, operand: Any) -> Any:
    """Return JAX's view of a result, where an operand is."""
    import jax

    if isinstance(array, np.ndarray):
        return jax.device_put(array, operand.device)
    return jax.dlpack.from_dlpack(array)


@contextmanager
def stream(array: Any) -> Iterator[None]:
    """Wait, on a GPU: XLA may use an operand's memory again once it is let go."""
    yield
    if array.platform() != "cpu":
        cupy().cuda.Device(array.device.local_hardware_id).synchronize()
