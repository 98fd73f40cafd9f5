"""Counters by which blocks of a kernel tell who of them is last, kept from launch to launch.

Such a kernel finds zeros and leaves zeros.  What is launched on one stream runs in turn, so that a
stream of a device needs one array.  A graph may run beside the stream that it was captured from: it
makes zeros of its own, each time.
"""

import threading
from typing import Any

import numpy as np

from ...core import gpu
from ...core.dtypes import Array
from ...core.stand_in import StandIn
from ...placement import PER_THREAD

UINT32 = np.dtype("uint32")
KEPT = 32  # streams; the oldest is forgotten, and makes new zeros should it come back
LEGACY = 1  # address of the default stream, as 0 is: it is never captured, and may not be asked
_kept: dict[tuple[int, int, int], Any] = {}  # by device, stream and, where each has one, thread
_lock = threading.Lock()


def counters(count: int, like: Any) -> Array:
    """Return ``count`` zeros, or more, of uint32 where ``like`` lives, for one launch."""
    form, new = ((count,), UINT32), _on_host if like.__class__ is np.ndarray else _of_stream
    made: Array = like.empty(*form, new) if isinstance(like, StandIn) else new(*form)
    return made


def _on_host(shape: tuple[int], dtype: Any) -> Any:
    return np.zeros(shape, dtype)


def _of_stream(shape: tuple[int], dtype: Any) -> Any:
    cupy = gpu.cupy()
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream().ptr
    if stream > LEGACY and runtime.streamIsCapturing(stream):
        return cupy.zeros(shape, dtype)
    place = runtime.getDevice(), stream, threading.get_ident() if stream == PER_THREAD else 0
    found = _kept.get(place)
    if found is None or found.size < shape[0]:
        try:
            with cupy.cuda.using_allocator(None):  # a pool could not give back what lies around it
                found = cupy.zeros(shape, dtype)
        except RuntimeError:  # of CUDA: the pool holds all memory, and may have some to spare
            found = cupy.zeros(shape, dtype)
        with _lock:
            _kept[place] = found
            while len(_kept) > KEPT:
                del _kept[next(iter(_kept))]
    return found
