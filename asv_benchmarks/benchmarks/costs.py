"""What a call of every op costs, exactly: no clock and no load of a machine changes it."""

from tests import costs
from tests.cuda_on_cpu import missing


class Costs:
    """Launches, allocations, bytes and opcodes of a replayed call, sectors that kernels move."""

    version = "1"
    params = costs.with_kernels()
    param_names = ("op",)
    timeout = 300

    def setup(self, op: str) -> None:
        """Work out what the call allocates and starts on sm_90."""
        self.launches, self.arrays, self.bytes = costs.planned(op, "90")

    def track_launches(self, op: str) -> int:
        return self.launches

    def track_allocations(self, op: str) -> int:
        return self.arrays

    def track_bytes(self, op: str) -> int:
        return self.bytes

    def track_opcodes(self, op: str) -> int:
        return costs.opcodes(op)


class Traffic:
    """Sectors of global memory and passes over shared memory, counted by the emulator."""

    version = "1"
    params = costs.with_kernels()
    param_names = ("op",)
    timeout = 300

    def setup(self, op: str) -> None:
        """Run the kernels once."""
        if (reason := missing()) is not None:
            raise NotImplementedError(reason)
        self.moved = costs.moved(op)

    def track_sectors(self, op: str) -> int:
        return sum(self.moved[:2])

    def track_passes(self, op: str) -> int:
        return sum(self.moved[2:])
