"""Draws the memory timeline of a training step: bytes per category, op by op."""

from pathlib import Path

import numpy as np

from ..machine import format_bytes
from ..memory.ledger import MemoryPlan
from ..pictures import INK, SOFT, save_picture, write_title

COLOURS = {  # from bottom to top: persistent memory below temporary memory
    "weights": "#3b6fb6",
    "master": "#6d93c7",
    "optimizer": "#9db8d9",
    "gradients": "#e8a33d",
    "activations": "#5a9a68",
    "logits": "#d1495b",
    "workspace": "#8b95a1",
}
TITLE_WIDTH = 90  # characters of a title line
SIZES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def draw_timeline(path: Path, plan: MemoryPlan, title: str) -> None:
    """Draw the memory per category during each op, and mark the peak of the step."""
    from matplotlib.figure import Figure

    unit = next((name for name, size in SIZES.items() if plan.total >= size), "KiB")
    held = np.array([[m.held[part] for m in plan.moments] for part in COLOURS]) / SIZES[unit]
    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps = np.arange(1, held.shape[1] + 1)
    parts = [part for part, sizes in zip(COLOURS, held, strict=True) if sizes.any()]
    axes.stackplot(
        steps, held[held.any(axis=1)], labels=parts, colors=[COLOURS[part] for part in parts],
        step="mid", linewidth=0,
    )  # fmt: skip
    peak, top = plan.peak + 1, plan.total / SIZES[unit]
    axes.plot([peak], [top], "o", color=INK, markersize=5)
    left = peak > len(steps) / 2
    axes.annotate(
        f"{format_bytes(plan.total)}: {plan.moments[plan.peak]}", (peak, top), color=INK,
        xytext=(-8 if left else 8, 6), textcoords="offset points", ha="right" if left else "left",
        fontsize=9,
    )  # fmt: skip
    write_title(axes, title, size=10, width=TITLE_WIDTH)
    axes.set_xlabel("op of the step: forward, backward, optimizer", color=INK)
    axes.set_ylabel(unit, color=INK)
    axes.set_xlim(0.5, len(steps) + 0.5)
    axes.set_ylim(0, 1.12 * top)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9,
        labelcolor=INK,
    )  # fmt: skip
    save_picture(figure, path)
