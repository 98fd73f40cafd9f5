"""Synchronisation with libraries that do not expose their GPU stream: wait for the whole GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core.frameworks import cupy


@contextmanager
def stream(array: Any) -> Iterator[None]:
    """After the block, wait for the GPU that holds an array, before its library continues."""
    yield
    kind, number = array.__dlpack_device__()
    if int(kind) == 2:
        cupy().cuda.Device(number).synchronize()
