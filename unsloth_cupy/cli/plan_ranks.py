"""Output of ``unsloth-cupy plan`` for a grid of ranks: memory, bytes, time and schedule."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ..machine import console, format_bytes
from ..memory.ledger import ALL
from ..pictures import INK, SOFT, save_picture, write_title
from ..profiling.cards import CARDS
from ..profiling.scale import ScalePlan

if TYPE_CHECKING:
    from ..parallel.simulation import Replay

WIDTH = 96  # characters of a stage's time line
MOST = 2**19  # passes to simulate at most: with more, only some of the data ranks are simulated
SIZE = 1536  # rows and columns of the matrices whose product is timed
FORWARD, BACK, IDLE = "-", "#", " "
FORWARD_COLOR, BACK_COLOR = "#9db8d9", "#3b6fb6"


class Interconnect(click.ParamType):  # type: ignore[type-arg]
    """Two bandwidths in GB/s, as 900,50: within a node, and between nodes."""

    name = "gb/s,gb/s"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return both bandwidths, or fail with an example."""
        if isinstance(value, tuple):
            return value
        try:
            inside, between = map(float, value.split(","))
        except ValueError:
            inside = between = 0.0
        if not (0 < inside < float("inf") and 0 < between < float("inf")):
            self.fail(f"{value!r} is not two bandwidths; write them as 900,50.", param, ctx)
        return inside, between


def rate_of(rate: float | None, device: str, dtype: str) -> tuple[float, str]:
    """Return the TFLOP/s of matrix products, and the source of that rate in words."""
    if rate is not None:
        return rate, "from --rate"
    card = CARDS["h200"]
    datasheet_rate = card.rate(dtype)
    if device != "cpu" and datasheet_rate is not None:
        return datasheet_rate, f"datasheet of an {card.name}"
    a, seconds = np.ones((SIZE, SIZE), np.float32), list[float]()
    for _ in range(4):
        started = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - started)
    return 2 * SIZE**3 / min(seconds) / 1e12, "measured here, in float32"


def show(
    plan: ScalePlan, name: str, settings: str, rate_source: str, tokens: int, picture: Path | None
) -> None:
    """Print a plan with ``tokens`` in a row; draw its schedule if a picture is named."""
    layout = plan.layout
    axes = ["tensor", *["expert"] * (layout.expert > 1), "context", "pipeline", "data"]
    sizes = " x ".join(str(getattr(layout, axis)) for axis in axes)
    title = f"{name}: {sizes} ranks ({', '.join(axes)}), {settings}"
    for part in tables(plan, title, rate_source, plan.rows * tokens):
        console(markup=False).print(part)
    if picture is not None:
        draw_schedule(picture, plan, title)


def tables(plan: ScalePlan, title: str, rate_source: str, tokens: int) -> Iterable[Any]:
    """Yield the printed parts of a plan: memory by stage, bytes by link, time and schedule."""
    yield memory(plan, title)
    yield exchanges(plan)
    layout = plan.layout
    others = layout.ranks // layout.data
    data = min(layout.data, max(1, MOST // (2 * others * plan.microbatches)))
    replay = plan.replay(data)
    count = data * others
    step = tokens * plan.microbatches * layout.data * layout.expert
    yield (
        f"{layout.ranks} ranks, {step:,} tokens in a step: {plan.seconds:.4g} s at least,"
        f" {step / plan.seconds:,.0f} tokens/s at most"
    )
    yield (
        f"products at {plan.rates[0] / 1e12:.4g} TFLOP/s per rank ({rate_source}); exchanges do"
        " not overlap with compute, and all other work takes no time"
    )
    yield (
        f"bubble: {plan.bubble:.1%} of the step, {plan.table.bubble:.1%} if stages took equal time"
    )
    peak, planned = max(replay.peaks), max(stage.memory.total for stage in plan.stages)
    agrees = "as planned" if peak == planned else f"but {format_bytes(planned)} were planned"
    yield (
        f"replayed: {count} ranks; every message meets its receive, and none waits forever; the"
        f" peak is {format_bytes(peak)}, {agrees}"
    )
    yield "\n".join(["", f"schedule ({FORWARD} forward, {BACK} backward):", *lines(plan, replay)])


def memory(plan: ScalePlan, title: str) -> Any:
    """Return the table of the memory that a rank of each stage holds at its peak."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    table.add_column("at the peak", style="bold")
    for stage in range(plan.layout.pipeline):
        table.add_column(f"stage {stage}", justify="right")
    for name in ALL:
        held = [stage.memory.at_peak[name] for stage in plan.stages]
        table.add_row(name, *map(format_bytes, held))
    table.add_section()
    totals = [stage.memory.total for stage in plan.stages]
    table.add_row("total of a rank", *map(format_bytes, totals))
    return table


def exchanges(plan: ScalePlan) -> Any:
    """Return the table of bytes that a rank sends per step, by kind of parallelism and link."""
    from rich.table import Table

    layout, count = plan.layout, plan.microbatches
    table = Table(title="sent in a step, by the rank that sends most", title_justify="left")
    for name in ("kind", "call", "link", "bytes", "seconds"):
        table.add_column(name, justify="right" if name in ("bytes", "seconds") else "left")
    tensor_ranks = [layout.rank(each, 0, 0) for each in range(layout.tensor)]
    rows: list[tuple[str, str, list[int], int]] = []
    context_ranks = [layout.rank(0, 0, 0, each) for each in range(layout.context)]
    column = layout.column(0)
    expert_ranks = [layout.rank(0, 0, 0, 0, each) for each in range(layout.expert)]
    kinds = {"tensor": tensor_ranks, "expert": expert_ranks, "context": context_ranks}
    for kind, ranks in (kinds | {"data": column}).items():
        every = [stage.sent(kind) for stage in plan.stages]
        for call in sorted({name for calls in every for name in calls}):
            most = max(sum(calls.get(call, (0, 0))) for calls in every)
            rows.append((kind, call, ranks, most * count))
    if layout.pipeline > 1:
        pair = [layout.rank(0, 0, 0), layout.rank(0, 1, 0)]
        rows.insert(0, ("pipeline", "send", pair, plan.stages[0].passes * plan.messages))
    if layout.alike > 1 and layout.zero < 3:
        most = max(stage.gradients for stage in plan.stages)
        call = "reduce_scatter, all_gather" if layout.zero else "all_reduce"
        rows.append(("data", call, column, most))
    for kind, call, ranks, size in rows:
        link = "in a node" if layout.joined(ranks) else "between nodes"
        table.add_row(kind, call, link, format_bytes(size), f"{size / plan.bandwidth(ranks):.3g}")
    return table


def lines(plan: ScalePlan, replay: "Replay") -> list[str]:
    """Return a line of text for each stage: when it runs forward passes, and when backward."""
    end, result = max(replay.seconds) or 1.0, []
    for stage in range(plan.layout.pipeline):
        row = [IDLE] * WIDTH
        for name, begin, stop in replay.spans[plan.layout.rank(0, stage, 0)]:
            last = max(int(begin / end * WIDTH) + 1, round(stop / end * WIDTH))
            for at in range(int(begin / end * WIDTH), min(last, WIDTH)):
                row[at] = BACK if name.startswith("B") else FORWARD
        result.append(f"{stage:3} |{''.join(row)}|")
    return result


def draw_schedule(path: Path, plan: ScalePlan, title: str) -> None:
    """Draw the forward and backward passes of each stage over time into a picture file."""
    from matplotlib.figure import Figure

    replay, count = plan.replay(1), plan.layout.pipeline
    figure = Figure(figsize=(9, 1.4 + 0.4 * count), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for stage in range(count):
        spans = replay.spans[plan.layout.rank(0, stage, 0)]
        for back, color in ((False, FORWARD_COLOR), (True, BACK_COLOR)):
            bars = [(a, b - a) for name, a, b in spans if name.startswith("B") is back]
            axes.broken_barh(bars, (stage - 0.4, 0.8), facecolors=color, edgecolor="white")
    axes.set_yticks(range(count), [f"stage {stage}" for stage in range(count)], color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("seconds: forward light, backward dark", color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines[["bottom"]].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)
    write_title(axes, title, size=10, width=90)
    save_picture(figure, path)
