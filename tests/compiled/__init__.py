"""What is emitted: PTX, executed and read, and SASS."""

from collections.abc import Callable
from typing import Any

from ..cuda_on_cpu import Emulator
from ..ptx_on_cpu import PtxEmulator
from ..stand_in import LIMITS

ARCHITECTURES = (80, 90, 100, 120)


def on(
    architecture: int, kind: Callable[..., Emulator] = PtxEmulator, **more: Any
) -> Callable[..., Emulator]:
    """Return what makes an emulator of an architecture, with its limits or lower ones."""

    def made(**machine: Any) -> Emulator:
        clusters = architecture >= 90 and machine.pop("clusters", True)
        most = min(LIMITS[str(architecture)][3], machine.pop("shared_memory", 1 << 20))
        how = {"architecture": architecture, "clusters": clusters, "shared_memory": most}
        return kind(**(how | more | machine))

    return made
