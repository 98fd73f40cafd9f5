"""Exact costs of calls, summed over the ops with a kernel: counted, not timed.

``tests/code/costs.toml`` has the numbers of each op.
"""

from collections.abc import Callable

from tests.code import budget, costs, sass
from tests.machines.cuda_on_cpu import missing

NAMES = costs.with_kernels()
NAN = float("nan")  # asv shows no value for it
Counts = dict[str, list[list[float]]]


def uncounted() -> set[str]:
    """Return the benchmarks that are NaN here, as g++, NVRTC or the disassembler is missing."""
    lacking = {"track_sectors", "track_passes"} if missing() is not None else set()
    try:
        sass.nvdisasm()
    except LookupError:
        return lacking | {"track_instructions"}
    return lacking if budget.missing() is None else lacking | {"track_instructions"}


class Costs:
    """Of bfloat16 calls on sm_90; sectors and passes are of smaller arrays, on the emulator."""

    version, unit = "1", "of all ops"
    timeout = 300

    def setup_cache(self) -> Counts:
        """Count once for all benchmarks of the class."""
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

    def track_ops(self, counts: Counts) -> float:
        return len(counts["planned"])

    def track_launches(self, counts: Counts) -> float:
        return sum(numbers[0] for numbers in counts["planned"])

    def track_allocations(self, counts: Counts) -> float:
        return sum(numbers[1] for numbers in counts["planned"])

    def track_bytes(self, counts: Counts) -> float:
        return sum(numbers[2] for numbers in counts["planned"])

    def track_opcodes(self, counts: Counts) -> float:
        return sum(numbers[0] for numbers in counts["opcodes"])

    def track_sectors(self, counts: Counts) -> float:
        return sum(sum(numbers[:2]) for numbers in counts["moved"])

    def track_instructions(self, counts: Counts) -> float:
        """Of the loops that kernels spend their time in."""
        return sum(sum(numbers) for numbers in counts["loops"])

    def track_passes(self, counts: Counts) -> float:
        return sum(sum(numbers[2:]) for numbers in counts["moved"])
