"""The result of ``explain``: calls of ops with their launches, and their tables."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.op import OPS
from ..machine import format_bytes
from .binary import Resources, occupancy, resources
from .cards import EFFICIENCY, FRACTIONS, MEASURED, OTHER_OPS, Card


class Launch(NamedTuple):
    """One launch of a kernel.

    ``shared`` is the dynamic shared memory per block in bytes, ``source`` the translation unit,
    ``architecture`` its compute capability, such as 86 for sm_86.
    """

    kernel: str
    file: str
    constants: Mapping[str, str]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    source: str = ""
    architecture: int = 0

    @property
    def resources(self) -> Resources | None:
        """The resources of the compiled kernel; None without NVRTC.  Compiles for about 1 s."""
        return resources(self.source, self.kernel, self.architecture) if self.source else None

    @property
    def occupancy(self) -> int | None:
        """The occupancy in percent; None without NVRTC."""
        own = self.resources
        if own is None:
            return None
        shared, threads = own.shared + self.shared, math.prod(self.block)
        return occupancy(self.architecture, own.registers, shared, threads)

    @property
    def tiles(self) -> str:
        """The tiles of a grouped product, as text; empty for other kernels."""
        if not self.file.startswith("grouped"):
            return ""
        tile, blocks = f"{self.constants['ROWS']} x {self.constants['COLUMNS']}", self.grid[0]
        if self.constants["FORM"] == "2":
            return f"tiles of {tile} for the gradients of all experts: {blocks:,}, one per block"
        return f"tiles of {tile}, one per block: at most {blocks:,}, the last of an expert partial"

    def __str__(self) -> str:
        """Return the launch as a line of text."""
        grid, block = (" x ".join(map(str, sizes)) for sizes in (self.grid, self.block))
        shared = f", {format_bytes(self.shared)} of shared memory" if self.shared else ""
        return f"{self.kernel} of {self.file}: grid {grid}, block {block}{shared}"


class Step(NamedTuple):
    """One call of an op.

    ``arrays`` and ``allocated_bytes`` count the allocated arrays, including results; ``moved`` is
    the minimum number of bytes to move, ``operations`` the number of operations in matrix products.
    ``floor`` is the roofline time in seconds, None if a rate is unknown, and ``bound`` is its
    bound: "memory" or "products".
    """

    op: str
    arguments: str
    kernel: bool
    why: str
    launches: tuple[Launch, ...]
    arrays: int
    allocated_bytes: int
    moved: int
    operations: int
    floor: float | None
    bound: str

    @property
    def efficiency(self) -> float:
        """The fraction of the roofline that such a call reaches; 1 for products of cuBLAS."""
        is_cublas = self.bound == "products" and not self.kernel
        return 1.0 if is_cublas else EFFICIENCY.get(self.op, OTHER_OPS)

    @property
    def ran_as(self) -> str:
        """Either "kernel" or "definition"."""
        return "kernel" if self.kernel else "definition"

    def __str__(self) -> str:
        """Return the call as lines of text."""
        rows = [("call", self.arguments), ("runs as", f"{self.ran_as}: {self.why}")]
        for launch in self.launches:
            rows.append(("launch", str(launch)))
            if launch.constants:
                constants = ", ".join(f"{name}={value}" for name, value in launch.constants.items())
                rows.append(("", constants))
            if tiles := launch.tiles:
                rows.append(("", tiles))
            if (own := launch.resources) is not None:
                spilled = f", {own.spilled} bytes spilled" if own.spilled else ""
                registers = f"{own.registers} registers per thread{spilled}"
                static = f", {format_bytes(own.shared)} of static shared memory" * bool(own.shared)
                rows.append(("", f"{registers}{static}, occupancy {launch.occupancy} %"))
        arrays = f"{self.arrays} array{'s' * (self.arrays != 1)}"
        rows.append(("allocates", f"{arrays}, {format_bytes(self.allocated_bytes)}"))
        rows.append(("bytes moved", f"at least {format_bytes(self.moved)}"))
        rows.append(("operations", f"{self.operations:.4g} in matrix products"))
        if self.floor is not None:
            rows.append(("least time", f"{time(self.floor)}, bound by {self.bound}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join([self.op, *(f"  {name:<{width}}  {text}" for name, text in rows)])


@dataclass(frozen=True)
class Explanation:
    """The explanation of a call; ``print`` shows it as a table.

    Attributes
    ----------
    card : Card or None
        The GPU; None for NumPy arrays.
    steps : tuple of Step
        One step per call of an op, in order.
    outside : tuple of Launch
        Launches outside ops, such as an optimizer step.
    graph : str
        For a call with ``graph=True``: whether it becomes a CUDA graph, or why not.
    copies : tuple of (int, int)
        Copies of ``offload`` to the host: the number of steps before the copy, and its bytes.
    """

    card: Card | None
    steps: tuple[Step, ...]
    outside: tuple[Launch, ...] = ()
    graph: str = ""
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def link_seconds(self) -> float:
        """The predicted time of the copy stream: all copies to the host and back, in seconds."""
        if self.card is None:
            return 0.0
        return 2 * sum(size for _, size in self.copies) / self.card.link / 1e9

    @property
    def part_seconds(self) -> tuple[float, float] | None:
        """The mean times of a copied part of the forward pass: of its copy, and of its ops.

        Offload hides if the first is at most the second: backward computes each part again, and
        more, while the inputs of the part before it come back.  None without two copied parts or a
        floor.
        """
        places = sorted({place for place, _ in self.copies})
        if self.card is None or self.floor is None or len(places) < 2:
            return None
        first, last, count = places[0], places[-1], len(places) - 1
        size = sum(size for place, size in self.copies if place < last)
        ops = self._seconds(self.steps[first:last]) / count
        return size / self.card.link / 1e9 / count, ops

    @property
    def floor(self) -> float | None:
        """The sum of all floors in seconds; None if a floor is unknown."""
        floors = [step.floor for step in self.steps]
        return sum(each for each in floors if each is not None) if None not in floors else None

    @property
    def seconds(self) -> float | None:
        """The predicted time in seconds: the sum of floor / efficiency; None without a floor."""
        if self.card is None or self.floor is None:
            return None
        return self._seconds(self.steps)

    def _seconds(self, steps: Sequence[Step]) -> float:
        """Return the predicted time of some steps in seconds."""
        fractions = {} if self.card is None or self.card.name in MEASURED else FRACTIONS
        return sum(
            step.floor / fractions.get(step.bound, 1.0) / step.efficiency
            for step in steps
            if step.floor
        )

    @property
    def ops(self) -> Mapping[str, Sequence[Step]]:
        """The steps by op; the op with the longest floor comes first."""
        by_op: dict[str, list[Step]] = {}
        for step in self.steps:
            by_op.setdefault(step.op, []).append(step)
        key = lambda pair: -sum(step.floor or step.moved for step in pair[1])  # noqa: E731
        return dict(sorted(by_op.items(), key=key))

    @property
    def parts(self) -> Mapping[str, float]:
        """The floors in seconds by family of ops, such as attention or norms; longest first."""
        floors: dict[str, float] = {}
        for step in self.steps:
            op = OPS.get(step.op)
            family = "optimizers" if op is None else op.__module__.split(".")[2]
            if step.floor:
                floors[family] = floors.get(family, 0.0) + step.floor
        return dict(sorted(floors.items(), key=lambda pair: -pair[1]))

    def __str__(self) -> str:
        """Return one call in full, or a table of several calls by op."""
        lines = [self._head(), *[self.graph] * bool(self.graph)]
        if len(self.steps) == 1:
            return "\n".join([*lines, str(self.steps[0])])
        whole, rows = self.floor, []
        for op, steps in self.ops.items():
            floor = sum(step.floor or 0.0 for step in steps)
            row = [op, len(steps), "/".join(sorted({step.ran_as for step in steps}))]
            row += [sum(len(step.launches) for step in steps)]
            row += [format_bytes(sum(step.moved for step in steps))]
            row += [f"{sum(step.operations for step in steps):.3g}"]
            if whole is not None:
                share = f"{floor / whole:.0%}" if whole else "-"
                row += [time(floor), share, "/".join(sorted({step.bound for step in steps}))]
            rows.append(row)
        titles = ["op", "calls", "runs as", "launches", "bytes moved", "operations"]
        titles += ["least time", "share", "bound by"] if whole is not None else []
        lines += aligned([titles, *rows])
        reasons: dict[str, dict[str, None]] = {}
        for step in self.steps:
            if not step.kernel:
                reasons.setdefault(step.why, {})[step.op] = None
        lines += [
            f"runs as definition, because {why}: {', '.join(ops)}" for why, ops in reasons.items()
        ]
        if whole is not None:
            lines.append(
                f"sum of least times: {time(whole)}, assuming that every op reads its arrays from"
                " memory"
            )
            lines.append(
                f"predicted time: {time(self.seconds or 0.0)}, from the fractions of the roofline"
                " that such calls reached on an H200"
            )
            lines += [self._copying()] * bool(self.copies and self.card)
            name = "the card" if self.card is None else self.card.name
            parts = self.parts
            shares = [
                f"{part} {time(floor)} ({floor / whole:.0%})" for part, floor in parts.items()
            ]
            if whole and len(parts) > 1:
                lines.append(f"least times on {name} by family of ops:")
                lines.append(f"  {', '.join(shares)}")
        return "\n".join(lines)

    def _copying(self) -> str:
        """Return a line about the copy stream."""
        link = 0.0 if self.card is None else self.card.link
        size = format_bytes(sum(size for _, size in self.copies))
        line = f"copy stream: {size} to the host and back in {time(self.link_seconds)}, at"
        line += f" {link:g} GB/s"
        if (part := self.part_seconds) is None:
            return line
        copy, ops = part
        each = f"the inputs of a part of the blocks take {time(copy)}, its forward pass {time(ops)}"
        verdict = "offload hides" if copy <= ops else "offload does not hide: use longer rows"
        return f"{line}; {each}: {verdict}"

    def _head(self) -> str:
        """Return the first line: the GPU and its rates."""
        if self.card is None:
            return "on the CPU"
        card = self.card
        rates = "unknown rates: no least times"
        if card.bandwidth is not None:
            rates = f"memory {card.bandwidth:g} GB/s"
            rates += f", matrix products {card.products:g} TFLOP/s" if card.products else ""
            rates += f", {card.products32:g} TFLOP/s in float32" if card.products32 else ""
            rates += f"; rates {card.source}"
            if self.floor is None:
                missing = [n for n in ("products", "products32") if getattr(card, n) is None]
                rates += f"; least times need {' and '.join(missing)}: pass the rate in TFLOP/s"
        architecture = f"sm_{card.architecture}"
        name = "" if card.name == architecture else f"{card.name}: "
        return f"{name}{architecture}, {card.processors} SMs, {rates}"


def time(seconds: float) -> str:
    """Return a time as text with its unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.2f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def aligned(rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return a table as lines; text is left-aligned, and numbers are right-aligned."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    number = [all(row[i][:1].isdigit() or row[i] == "-" for row in cells[1:]) for i in
              range(len(widths))]  # fmt: skip
    return [
        "  ".join(
            f"{c:>{w}}" if n else f"{c:<{w}}" for c, w, n in zip(row, widths, number, strict=True)
        ).rstrip()
        for row in cells
    ]
