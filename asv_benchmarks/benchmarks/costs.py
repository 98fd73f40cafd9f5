"""Exact costs of a call of each op with a kernel: counted, not timed.

The numbers are those of ``tests/code/programs/costs.toml`` at the commit, which its tests compare
with new counts: bfloat16 calls on sm_90; sectors and passes are of smaller arrays, on the emulator.
"""

import functools
import sys
import tomllib
from pathlib import Path
from typing import Any

TABLE = Path("tests", "code", "programs", "costs.toml")
BEFORE = Path("tests", "code", "costs.toml")  # where earlier commits have it
HERE = Path(__file__).parents[2]


@functools.cache
def table() -> dict[str, Any]:
    """Return the costs by op at the commit that asv has checked out beside its environment."""
    project = Path(sys.prefix, "project")
    places = (project / TABLE, project / BEFORE, HERE / TABLE)
    path = next(place for place in places if place.exists())
    lines: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["calls"]["ops"]
    return lines


class Costs:
    """One value per op, because a sum over ops would change with their number."""

    version, unit = "2", "of a call"
    params = (sorted(tomllib.loads((HERE / TABLE).read_text(encoding="utf-8"))["calls"]["ops"]),)
    param_names = ("op",)

    def setup(self, op: str) -> None:
        """Read the line of the op, which older commits may lack."""
        if op not in table():
            raise NotImplementedError(f"{op} is not an op of this commit")
        self.line = table()[op]

    def on_sm90(self, loops: bool = False) -> list[int]:
        """Return launches, allocations and bytes on sm_90, or the instructions of loops."""
        keys = {key: key.split() for key in self.line if ("loops" in key) == loops}
        (numbers,) = (self.line[key] for key, words in keys.items() if "90" in words)
        return list(numbers)

    def track_launches(self, op: str) -> int:
        return self.on_sm90()[0]

    def track_allocations(self, op: str) -> int:
        return self.on_sm90()[1]

    def track_bytes(self, op: str) -> int:
        return self.on_sm90()[2]

    def track_opcodes(self, op: str) -> int:
        opcodes: int = self.line["opcodes"]
        return opcodes

    def track_sectors(self, op: str) -> int:
        return sum(self.line["moved"][:2])

    def track_passes(self, op: str) -> int:
        return sum(self.line["moved"][2:])

    def track_instructions(self, op: str) -> int:
        """Return the instructions of the loops in which kernels spend their time."""
        return sum(self.on_sm90(loops=True))
