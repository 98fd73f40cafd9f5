"""Streams of libraries that do not say which one they work on: they wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..core.frameworks import cupy


@contextmanager
def stream(array: Any) -> Iterator[None]:
    """Wait for the GPU where an array lies on one, before its library goes on."""
    yield
    kind, number = array.__dlpack_device__()
    if int(kind) == 2:
        cupy().cuda.Device(number).synchronize()
