"""Tests of the code that NVRTC emits: PTX, executed and parsed, and SASS."""

from collections.abc import Callable
from typing import Any

from ...machines.cuda_on_cpu import Emulator
from ...machines.ptx_on_cpu import PtxEmulator
from ...machines.stand_in import LIMITS

ARCHITECTURES = (80, 90, 100, 120)


def on(
    architecture: int, kind: Callable[..., Emulator] = PtxEmulator, **more: Any
) -> Callable[..., Emulator]:
    """Return a function that creates emulators of an architecture, with at most its limits."""

    def create(**machine: Any) -> Emulator:
        clusters = architecture >= 90 and machine.pop("clusters", True)
        most = min(LIMITS[str(architecture)][3], machine.pop("shared_memory", 1 << 20))
        limits = {"architecture": architecture, "clusters": clusters, "shared_memory": most}
        return kind(**(limits | more | machine))

    return create
