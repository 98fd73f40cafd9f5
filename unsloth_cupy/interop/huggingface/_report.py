"""What a patch took over, and what it left."""

from collections import Counter
from typing import NamedTuple


class Row(NamedTuple):
    """A kind of module: how many of it were taken, or were left for a reason."""

    part: str
    module: str
    modules: int
    reason: str  # empty where it was taken


class Report:
    """What ``patch`` did, as a table.

    Attributes
    ----------
    model : str
        The class of the model.
    rows : list of Row
        ``(part, module, modules, reason)``, one for each kind of module; the reason is empty where
        modules were taken over.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._found: Counter[tuple[str, str, str]] = Counter()

    def add(self, part: str, module: str, reason: str = "") -> None:
        """Count a module that was taken or, with a reason, left."""
        self._found[part, module, reason] += 1

    @property
    def rows(self) -> list[Row]:
        """What was taken and left, in the order of the parts."""
        return [Row(part, name, n, why) for (part, name, why), n in self._found.items()]

    @property
    def taken(self) -> dict[str, int]:
        """Number of modules taken over, by part."""
        found: Counter[str] = Counter()
        for row in self.rows:
            found[row.part] += row.modules * (not row.reason)
        return {part: count for part, count in found.items() if count}

    @property
    def left(self) -> dict[str, str]:
        """Why modules were left, by part: the first reason of each."""
        rows = [row for row in self.rows if row.reason]
        return {row.part: row.reason for row in reversed(rows)}

    def __str__(self) -> str:
        head = [("part", "module", "modules", "")]
        lines = [(r.part, r.module, str(r.modules), r.reason or "taken") for r in self.rows]
        table = head + [(a, b, c, d if d == "taken" else f"left: {d}") for a, b, c, d in lines]
        wide = [max(len(line[i]) for line in table) for i in range(3)]
        text = [
            f"{a:{wide[0]}}  {b:{wide[1]}}  {c:>{wide[2]}}  {d}".rstrip() for a, b, c, d in table
        ]
        return "\n".join([self.model, *text])

    def __repr__(self) -> str:
        return f"Report({self.model}, taken={self.taken}, left={sorted(self.left)})"
