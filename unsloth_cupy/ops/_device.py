"""What the tables of launches ask of a device."""

import functools
from typing import Any, NamedTuple, cast

import numpy as np

from .._jit import target_of
from .._planned import Planned


class Limits(NamedTuple):
    """Of a device: compute capability, 86 for 8.6, and bytes of shared memory of a block."""

    architecture: int
    shared: int


NUMBERS = {"ClusterLaunch": 120}  # of attributes in cudaDeviceAttr that CuPy has no name for


@functools.cache
def _attribute(name: str, device: int) -> int:
    from cupy.cuda import runtime

    number = NUMBERS.get(name) or getattr(runtime, f"cudaDevAttr{name}")
    return runtime.deviceGetAttribute(number, device)


@functools.cache
def _capability(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).compute_capability)


def processors(like: Any) -> int:
    """Return how many multiprocessors run kernels where ``like`` lives: 1 on the host."""
    if isinstance(like, Planned):
        return int(cast(Any, target_of(like)).processors)
    return 1 if isinstance(like, np.ndarray) else _attribute("MultiProcessorCount", like.device.id)


def shared_memory(like: Any) -> int:
    """Return how many bytes of shared memory a block may ask for where ``like`` lives."""
    if isinstance(like, np.ndarray | Planned):
        return int(cast(Any, target_of(like)).shared_memory)
    return _attribute("MaxSharedMemoryPerBlockOptin", like.device.id)


def limits(like: Any) -> Limits:
    """Return what launch tables are resolved against, where ``like`` lives."""
    if isinstance(like, np.ndarray | Planned):
        return Limits(int(cast(Any, target_of(like)).architecture), shared_memory(like))
    return limits_of(like.device.id)


@functools.cache
def limits_of(device: int) -> Limits:
    """Return the limits of the GPU of this number."""
    return Limits(_capability(device), _attribute("MaxSharedMemoryPerBlockOptin", device))


def clusters(like: Any) -> bool:
    """Say whether blocks can form clusters where ``like`` lives, as most can from sm_90 on."""
    if isinstance(like, np.ndarray | Planned):
        return bool(cast(Any, target_of(like)).clusters)
    return bool(_attribute("ClusterLaunch", like.device.id))
