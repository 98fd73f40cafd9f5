"""The report of ``patch``: which modules it replaced, and why it left others."""

from collections import Counter
from typing import NamedTuple


class Row(NamedTuple):
    """Modules of a part and class that were all replaced ("taken"), or left for one reason."""

    part: str
    module: str  # the class
    modules: int  # their number
    reason: str  # empty if they were replaced


class Report:
    """The result of ``patch``; ``print`` shows it as a table.

    Attributes
    ----------
    model : str
        The class of the model.
    rows : list of Row
        ``(part, module, modules, reason)``, one for each part, class of modules and reason; the
        reason is empty if the modules were replaced.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def add(self, part: str, module: str, reason: str = "") -> None:
        """Count a module that was replaced or, with a reason, left as it is."""
        self._counts[part, module, reason] += 1

    @property
    def rows(self) -> list[Row]:
        """The modules that were replaced or left, in the order of the parts."""
        return [Row(part, name, n, why) for (part, name, why), n in self._counts.items()]

    @property
    def taken(self) -> dict[str, int]:
        """Number of replaced modules, by part."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[row.part] += row.modules * (not row.reason)
        return {part: count for part, count in counts.items() if count}

    @property
    def left(self) -> dict[str, str]:
        """The first reason why modules of a part were left, by part."""
        rows = [row for row in self.rows if row.reason]
        return {row.part: row.reason for row in reversed(rows)}

    def __str__(self) -> str:
        head = [("part", "module", "modules", "")]
        lines = [(r.part, r.module, str(r.modules), r.reason or "taken") for r in self.rows]
        table = head + [(a, b, c, d if d == "taken" else f"left: {d}") for a, b, c, d in lines]
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        text = [
            f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip()
            for a, b, c, d in table
        ]
        return "\n".join([self.model, *text])

    def __repr__(self) -> str:
        return f"Report({self.model}, taken={self.taken}, left={sorted(self.left)})"
