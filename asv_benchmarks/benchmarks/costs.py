"""What calls cost, exactly, summed over the ops with a kernel: no clock and no load changes it.

``tests/op_costs.toml`` has the numbers of each op.
"""

from collections.abc import Callable

from tests import budget, costs, sass
from tests.cuda_on_cpu import missing

NAMES = costs.with_kernels()
Found = dict[str, list[list[int]]]


def found_nothing() -> bool:
    """Say whether there is no compiler here, or no disassembler."""
    try:
        sass.nvdisasm()
    except LookupError:
        return True
    return budget.missing() is not None


class Costs:
    """Of bfloat16, on sm_90; sectors and passes are those of the emulator, of smaller arrays."""

    version, unit = "1", "of all ops"
    timeout = 300

    def setup_cache(self) -> Found:
        """Count once, for all that is tracked."""
        moved: Callable[[str], list[int]] = costs.moved if missing() is None else lambda _: [0] * 4
        loops: Callable[[str, str], list[int]] = costs.loops
        if found_nothing():
            loops = lambda name, arch: [0]  # noqa: E731
        return {
            "loops": [loops(name, "90") for name in NAMES],
            "planned": [costs.planned(name, "90") for name in NAMES],
            "opcodes": [[costs.opcodes(name)] for name in NAMES],
            "moved": [moved(name) for name in NAMES],
        }

    def track_ops(self, found: Found) -> int:
        return len(found["planned"])

    def track_launches(self, found: Found) -> int:
        return sum(numbers[0] for numbers in found["planned"])

    def track_allocations(self, found: Found) -> int:
        return sum(numbers[1] for numbers in found["planned"])

    def track_bytes(self, found: Found) -> int:
        return sum(numbers[2] for numbers in found["planned"])

    def track_opcodes(self, found: Found) -> int:
        return sum(numbers[0] for numbers in found["opcodes"])

    def track_sectors(self, found: Found) -> int:
        return sum(sum(numbers[:2]) for numbers in found["moved"])

    def track_instructions(self, found: Found) -> int:
        """Of the loops that kernels spend their time in."""
        return sum(sum(numbers) for numbers in found["loops"])

    def track_passes(self, found: Found) -> int:
        return sum(sum(numbers[2:]) for numbers in found["moved"])
