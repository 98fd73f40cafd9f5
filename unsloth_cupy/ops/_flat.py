"""How kernels that go element by element are launched."""

from functools import cache
from typing import Any

from .._arrays import lanes
from .._jit import load
from .._source import Constants


@cache
def constants(dtype: Any, lanes: int, **more: Any) -> Constants:
    """Return the constants of such a kernel.

    256 threads with one access of every array: 32 KB of each array are in flight on an SM, where
    13 KB in all keep an H200's memory busy.
    """
    return Constants(T=dtype, LANES=lanes, THREADS=256, **more)


def launch_flat(
    file: str, name: str, arrays: tuple[Any, ...], *scalars: float, **more: Any
) -> None:
    """Run a kernel whose parameters are arrays of one dtype and shape, their size, scalars."""
    lead = arrays[0]
    chosen = constants(lead.dtype, lanes(16 // lead.dtype.itemsize, *arrays), **more)
    kernel = load(file, name, lead, chosen)
    threads = chosen["THREADS"]
    kernel[-(-lead.size // (threads * chosen["LANES"])), threads](*arrays, lead.size, *scalars)
