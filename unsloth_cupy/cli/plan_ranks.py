"""What ``unsloth-cupy plan`` says of a grid of ranks: memory, bytes, time, and its schedule."""

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

WIDTH = 96  # characters of a stage's time
MOST = 2**19  # steps that are replayed: fewer data ranks where all have more
SIZE = 1536  # of the product that is measured
FORWARD, BACK, IDLE = "-", "#", " "
FORWARD_COLOR, BACK_COLOR = "#9db8d9", "#3b6fb6"


class Interconnect(click.ParamType):  # type: ignore[type-arg]
    """Two bandwidths in GB/s, as 900,50: inside of a node, and between nodes."""

    name = "gb/s,gb/s"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return both, or fail with what they must be."""
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
    """Return TFLOP/s of products and where they are from."""
    if rate is not None:
        return rate, "as given"
    card = CARDS["h200"]
    stated = card.rate(dtype)
    if device != "cpu" and stated is not None:
        return stated, f"what the maker of an {card.name} states"
    a, seconds = np.ones((SIZE, SIZE), np.float32), list[float]()
    for _ in range(4):
        started = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - started)
    return 2 * SIZE**3 / min(seconds) / 1e12, "measured here, of float32"


def show(
    plan: ScalePlan, name: str, told: str, rate_told: str, tokens: int, picture: Path | None
) -> None:
    """Print a plan, of so many tokens in a microbatch; draw its schedule where that is asked."""
    layout = plan.layout
    sizes = f"{layout.tensor} x {layout.context} x {layout.pipeline} x {layout.data}"
    title = f"{name}: {sizes} ranks (tensor, context, pipeline, data), {told}"
    for part in tables(plan, title, rate_told, tokens):
        console(markup=False).print(part)
    if picture is not None:
        draw_schedule(picture, plan, title)


def tables(plan: ScalePlan, title: str, rate_told: str, tokens: int) -> Iterable[Any]:
    """Yield what is printed of a plan: memory by stage, bytes by link, time, and the schedule."""
    yield memory(plan, title)
    yield exchanges(plan)
    layout = plan.layout
    others = layout.ranks // layout.data
    data = min(layout.data, max(1, MOST // (2 * others * plan.microbatches)))
    seen = plan.replay(data)
    count = data * others
    step = tokens * plan.microbatches * layout.data
    yield (
        f"{layout.ranks} ranks, {step:,} tokens in a step: {plan.seconds:.4g} s at least,"
        f" {step / plan.seconds:,.0f} tokens/s at most"
    )
    yield (
        f"products at {plan.rates[0] / 1e12:.4g} TFLOP/s a rank ({rate_told}); nothing hides"
        " exchanges, and all other work counts for nothing"
    )
    yield (
        f"bubble: {plan.bubble:.1%} of the step, {plan.table.bubble:.1%} of stages that take alike"
    )
    peak, wanted = max(seen.peaks), max(stage.memory.total for stage in plan.stages)
    agrees = "as planned" if peak == wanted else f"and not {format_bytes(wanted)}"
    yield (
        f"replayed: {count} ranks; every message meets its receive, and none waits for ever; the"
        f" peak is {format_bytes(peak)}, {agrees}"
    )
    yield "\n".join(["", f"schedule ({FORWARD} forward, {BACK} back):", *lines(plan, seen)])


def memory(plan: ScalePlan, title: str) -> Any:
    """Return the table of what a rank of each stage holds at its peak."""
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
    """Return the table of the bytes that a rank sends in a step, by kind and link."""
    from rich.table import Table

    layout, count = plan.layout, plan.microbatches
    table = Table(title="sent in a step, by the rank that sends most", title_justify="left")
    for name in ("kind", "call", "link", "bytes", "seconds"):
        table.add_column(name, justify="right" if name in ("bytes", "seconds") else "left")
    group = [layout.rank(each, 0, 0) for each in range(layout.tensor)]
    found: list[tuple[str, str, list[int], int]] = []
    around = [layout.rank(0, 0, 0, each) for each in range(layout.context)]
    column = layout.column(0)
    for kind, ranks in (("tensor", group), ("context", around), ("data", column)):
        every = [stage.sent(kind) for stage in plan.stages]
        for call in sorted({name for calls in every for name in calls}):
            most = max(sum(calls.get(call, (0, 0))) for calls in every)
            found.append((kind, call, ranks, most * count))
    if layout.pipeline > 1:
        pair = [layout.rank(0, 0, 0), layout.rank(0, 1, 0)]
        found.insert(0, ("pipeline", "send", pair, plan.stages[0].passes * plan.messages))
    if layout.alike > 1 and layout.zero < 3:
        most = max(stage.gradients for stage in plan.stages)
        call = "reduce_scatter, all_gather" if layout.zero else "all_reduce"
        found.append(("data", call, column, most))
    for kind, call, ranks, size in found:
        link = "in a node" if layout.joined(ranks) else "between nodes"
        table.add_row(kind, call, link, format_bytes(size), f"{size / plan.bandwidth(ranks):.3g}")
    return table


def lines(plan: ScalePlan, seen: "Replay") -> list[str]:
    """Return a line of text for each stage: when it goes forward, and when back."""
    end, made = max(seen.seconds) or 1.0, []
    for stage in range(plan.layout.pipeline):
        row = [IDLE] * WIDTH
        for name, begin, stop in seen.spans[plan.layout.rank(0, stage, 0)]:
            last = max(int(begin / end * WIDTH) + 1, round(stop / end * WIDTH))
            for at in range(int(begin / end * WIDTH), min(last, WIDTH)):
                row[at] = BACK if name.startswith("B") else FORWARD
        made.append(f"{stage:3} |{''.join(row)}|")
    return made


def draw_schedule(path: Path, plan: ScalePlan, title: str) -> None:
    """Write a picture of the steps of each stage, in the time that they take."""
    from matplotlib.figure import Figure

    seen, count = plan.replay(1), plan.layout.pipeline
    figure = Figure(figsize=(9, 1.4 + 0.4 * count), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for stage in range(count):
        spans = seen.spans[plan.layout.rank(0, stage, 0)]
        for back, color in ((False, FORWARD_COLOR), (True, BACK_COLOR)):
            bars = [(a, b - a) for name, a, b in spans if name.startswith("B") is back]
            axes.broken_barh(bars, (stage - 0.4, 0.8), facecolors=color, edgecolor="white")
    axes.set_yticks(range(count), [f"stage {stage}" for stage in range(count)], color=INK)
    axes.invert_yaxis()
    axes.set_xlabel("seconds: forward light, back dark", color=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines[["bottom"]].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)
    write_title(axes, title, size=10, width=90)
    save_picture(figure, path)
