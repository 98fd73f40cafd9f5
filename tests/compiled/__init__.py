"""What is emitted: PTX, executed and read, and SASS."""

import functools
from collections.abc import Callable

from ..cuda_on_cpu import Emulator
from ..ptx_on_cpu import PtxEmulator

ARCHITECTURES = (80, 90, 100, 120)


def on(architecture: int) -> Callable[..., Emulator]:
    """Return what makes an emulator of PTX for an architecture."""
    return functools.partial(PtxEmulator, architecture=architecture, clusters=architecture >= 90)
