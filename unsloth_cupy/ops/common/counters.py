"""Counters with which a block of a kernel detects that it finishes last; launches reuse them.

Such a kernel needs zeros and leaves zeros.  Launches on one stream run one after another, so one
array for each stream of a device is enough.  A graph may run at the same time as the stream from
which it was captured, so each capture gets its own array, which every replay fills with zeros.
"""

import threading
from typing import Any

import numpy as np

from ...core import gpu
from ...core.dtypes import Array
from ...core.stand_in import StandIn
from ...placement import PER_THREAD

UINT32 = np.dtype("uint32")
KEPT = 32  # streams; beyond it the oldest entry goes, and its stream gets new zeros when it returns
LEGACY = 1  # 0 and 1 are handles of the default stream, which is never captured or queried
_kept: dict[tuple[int, int, int], Any] = {}  # by device, stream, and thread (per-thread streams)
_lock = threading.Lock()


def counters(count: int, like: Any) -> Array:
    """Return at least ``count`` uint32 zeros on the device of ``like``, for one launch."""
    form, new = ((count,), UINT32), _on_host if like.__class__ is np.ndarray else _of_stream
    zeros: Array = like.empty(*form, new) if isinstance(like, StandIn) else new(*form)
    return zeros


def _on_host(shape: tuple[int], dtype: Any) -> Any:
    """Return new zeros of NumPy."""
    return np.zeros(shape, dtype)


def _of_stream(shape: tuple[int], dtype: Any) -> Any:
    """Return the zeros of the current stream; new ones while it is being captured."""
    cupy = gpu.cupy()
    runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream().ptr
    if stream > LEGACY and runtime.streamIsCapturing(stream):
        return cupy.zeros(shape, dtype)
    key = runtime.getDevice(), stream, threading.get_ident() if stream == PER_THREAD else 0
    zeros = _kept.get(key)
    if zeros is None or zeros.size < shape[0]:
        try:
            with cupy.cuda.using_allocator(None):  # from a pool it would keep a whole chunk in use
                zeros = cupy.zeros(shape, dtype)
        except RuntimeError:  # CUDA has no memory left, but the pool may have unused memory
            zeros = cupy.zeros(shape, dtype)
        with _lock:
            _kept[key] = zeros
            while len(_kept) > KEPT:
                del _kept[next(iter(_kept))]
    return zeros
