"""The table and the picture of a run, with figures that others have published beside them.

A run's ``beside.json``, as docs/pictures/beside-peers.json, makes a section of docs/performance.md
and the picture (``python docs/pictures.py beside-peers``).  Without that file there is neither.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ....harness.tracked import ROOT
from .cases import OURS, cases

RESULTS = ROOT / "docs/pictures/beside-peers.json"
PUBLISHED = Path(__file__).with_name("published.json")
HEAD = (
    "| case | contestant | time | tokens/s | fraction of the roofline | times as long as ours |"
    " host | memory |",
    "|---|---|--:|--:|--:|--:|--:|--:|",
)
Line = dict[str, Any]


def published() -> dict[str, Any]:
    """Return figures that others published: card, source, conditions, tokens/s by case."""
    figures: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return figures


def untimed(results: Path = RESULTS) -> list[str]:
    """Return the cases in which this library has no time."""
    lines = json.loads(results.read_text(encoding="utf-8"))["lines"] if results.exists() else []
    timed = {line["case"] for line in lines if line["contestant"] == OURS and "seconds" in line}
    return [case.name for case in cases() if case.name not in timed]


def roofline(line: Line, facts: dict[str, Any]) -> float | None:
    """Return the time of a copy or a product, by the rates of the run, as a share of the time."""
    copy, product = facts.get("copy_gb_per_s"), facts.get("product_tflop_per_s")
    if not copy or not product or not {"moved", "flops"} & line.keys():
        return None
    least = max(line.get("moved", 0) / copy / 1e9, line.get("flops", 0) / product / 1e12)
    return float(least / line["seconds"])


def table(result: dict[str, Any]) -> str:
    """Return the table: every contestant of every case of a run, then published figures."""
    rows = [*HEAD]
    by_case: dict[str, list[Line]] = {}
    for line in result["lines"]:
        by_case.setdefault(line["case"], []).append(line)
    figures = published()
    for name in [case.name for case in cases() if case.name in by_case]:
        lines = sorted(by_case[name], key=lambda line: not line["contestant"].startswith(OURS))
        own = next((x for x in lines if x["contestant"] == OURS and "seconds" in x), None)
        for line in lines:
            if "seconds" not in line:
                rows.append(f"| {name} | {line['contestant']} | {line['note']} | | | | | |")
                continue
            share, tokens = roofline(line, result["facts"]), line.get("tokens_per_second")
            cells = [name, line["contestant"], _time(line["seconds"])]
            cells += [f"{tokens:,.0f}" if tokens else "", "" if share is None else f"{share:.2f}"]
            cells += ["" if own is None else f"{line['seconds'] / own['seconds']:.2f}"]
            cells += [_time(line["host"]) if "host" in line else ""]
            cells += [f"{line['bytes'] / 2**20:,.0f} MiB" if line.get("bytes") else ""]
            rows.append(f"| {' | '.join(cells)} |")
        for who, figure in figures.items():
            if tokens := figure["tokens_per_second"].get(name):
                ratio = "" if own is None else f"{own['tokens_per_second'] / tokens:.2f}"
                where = f"published, {figure['card']}"
                rows.append(f"| {name} | {who} | {where} | {tokens:,.0f} | | {ratio} | | |")
    return "\n".join(rows)


def section(result: dict[str, Any]) -> list[str]:
    """Return a section of docs/performance.md: picture, table, facts, and published figures."""
    facts = result["facts"]
    ceilings = ""
    if "copy_gb_per_s" in facts:
        ceilings = (
            f"; a copy moves {facts['copy_gb_per_s']:.0f} GB/s, a product of 8192^3 runs at"
            f" {facts['product_tflop_per_s']:.0f} TFLOP/s"
        )
    lines = ["", "## Beside other libraries", ""]
    lines += ["![Tokens of a second of this library, of others, and published](pictures/"]
    lines[-1] += f"{RESULTS.stem}.svg)"
    lines += [
        "",
        table(result),
        "",
        f"Measured on {facts['device']}, torch {facts['torch']}{ceilings}.",
    ]
    lines += ["Published figures were measured by others, on the card that the row names:", ""]
    lines += [f"- {who}: {f['how']}; {f['source']}." for who, f in published().items()]
    return lines


def _time(seconds: float) -> str:
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    return f"{seconds * scale:.3g} {unit}"


def draw(path: Path, result: dict[str, Any]) -> None:
    """Plot the tokens of a second of the training cases; hollow bars are published figures."""
    from matplotlib.figure import Figure

    from unsloth_cupy.bench.report import COLOURS
    from unsloth_cupy.pictures import INK, save_picture

    training = {case.name for case in cases() if case.kind == "training"}
    timed = [x for x in result["lines"] if x["case"] in training and "seconds" in x]
    names = [case.name for case in cases() if case.name in {x["case"] for x in timed}]
    figure = Figure(figsize=(8, 0.9 + 0.55 * max(1, len(names))), layout="constrained")
    axes = figure.add_subplot()
    palette = [COLOURS["torch"], COLOURS["torch.compile"], COLOURS["Liger"]]
    for height, name in enumerate(reversed(names)):
        bars = _bars(name, timed)
        wide = 0.8 / len(bars)
        own = next((tokens for who, tokens, _ in bars if who == OURS), math.nan)
        for place, (who, tokens, card) in enumerate(bars):
            y = height + 0.4 - (place + 0.5) * wide
            colour = COLOURS[OURS] if who.startswith(OURS) else palette[place % len(palette)]
            face = "none" if card else colour
            axes.barh(y, tokens, 0.9 * wide, facecolor=face, edgecolor=colour)
            words = f"{who}, published, {card}" if card else who
            beside = "" if who == OURS else f" ({own / tokens:.2f}x)"
            axes.text(tokens, y, f" {words}: {tokens:,.0f}{beside}", va="center", fontsize=6)
    axes.set_yticks(range(len(names)), names[::-1])
    axes.set_xlabel("tokens of a second", color=INK)
    axes.set_xlim(right=1.6 * max((t for n in names for _, t, _ in _bars(n, timed)), default=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
    facts = result["facts"]
    title = f"Steps of training, {facts['device']}, torch {facts['torch']}"
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    save_picture(figure, path)


def _bars(name: str, timed: Sequence[Line]) -> list[tuple[str, float, str]]:
    """Return contestant, tokens of a second, and card if published, of a case."""
    lines = [line for line in timed if line["case"] == name]
    measured = [(line["contestant"], line["tokens_per_second"], "") for line in lines]
    others = [
        (who, figure["tokens_per_second"][name], figure["card"])
        for who, figure in published().items()
        if name in figure["tokens_per_second"]
    ]
    return [*sorted(measured, key=lambda bar: not bar[0].startswith(OURS)), *others]
