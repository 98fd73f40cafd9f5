"""What calls cost, exactly, summed over the ops with a kernel: no clock and no load changes it.

``tests/costs.toml`` has the numbers of each op.
"""

from collections.abc import Callable

from tests import budget, costs, sass
from tests.cuda_on_cpu import missing

NAMES = costs.with_kernels()
NAN = float("nan")  # asv shows nothing then
Found = dict[str, list[list[float]]]


def uncounted() -> set[str]:
    """Return what is NaN here, for lack of g++, of NVRTC or of a disassembler."""
    lacking = {"track_sectors", "track_passes"} if missing() is not None else set()
    try:
        sass.nvdisasm()
    except LookupError:
        return lacking | {"track_instructions"}
    return lacking if budget.missing() is None else lacking | {"track_instructions"}


class Costs:
    """Of bfloat16, on sm_90; sectors and passes are those of the emulator, of smaller arrays."""

    version, unit = "1", "of all ops"
    timeout = 300

    def setup_cache(self) -> Found:
        """Count once, for all that is tracked."""
        moved: Callable[[str], list[float]] = costs.moved
        loops: Callable[[str, str], list[float]] = costs.loops
        if "track_sectors" in uncounted():
            moved = lambda name: [NAN] * 4  # noqa: E731
        if "track_instructions" in uncounted():
            loops = lambda name, arch: [NAN]  # noqa: E731
        return {
            "loops": [loops(name, "90") for name in NAMES],
            "planned": [costs.planned(name, "90") for name in NAMES],
            "opcodes": [[costs.opcodes(name)] for name in NAMES],
            "moved": [moved(name) for name in NAMES],
        }

    def track_ops(self, found: Found) -> float:
        return len(found["planned"])

    def track_launches(self, found: Found) -> float:
        return sum(numbers[0] for numbers in found["planned"])

    def track_allocations(self, found: Found) -> float:
        return sum(numbers[1] for numbers in found["planned"])

    def track_bytes(self, found: Found) -> float:
        return sum(numbers[2] for numbers in found["planned"])

    def track_opcodes(self, found: Found) -> float:
        return sum(numbers[0] for numbers in found["opcodes"])

    def track_sectors(self, found: Found) -> float:
        return sum(sum(numbers[:2]) for numbers in found["moved"])

    def track_instructions(self, found: Found) -> float:
        """Of the loops that kernels spend their time in."""
        return sum(sum(numbers) for numbers in found["loops"])

    def track_passes(self, found: Found) -> float:
        return sum(sum(numbers[2:]) for numbers in found["moved"])
