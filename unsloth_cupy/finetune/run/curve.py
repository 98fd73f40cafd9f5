"""Draws the loss curve of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...pictures import INK, SOFT, save_picture, write_title

SMOOTHING = 0.02  # half width of the smoothing window, as a fraction of all steps
TITLE_WIDTH = 65  # characters that fit in a line
TRAIN, HELD_OUT, BASELINE = "#3b6fb6", "#d1495b", "#8b95a1"
PANELS = {  # panels below the loss, for methods that measure these numbers
    "reward": (
        "reward",
        *("reward_chosen", "reward_rejected", "reward_desirable", "reward_undesirable"),
        *("reward_mean", "reward_min", "reward_max"),
    ),
    "accuracy": ("accuracy", "f1", "mrr"),
    "error": ("error",),
    "KL (nats)": ("kl",),
    "length (tokens)": ("length",),
    "load of an expert": ("expert_load",),
}


def draw_curve(path: Path, lines: Sequence[dict[str, Any]], title: str) -> None:
    """Draw the curve of a run into a PNG file."""
    save_picture(curve_of(lines, title), path)


def curve_of(lines: Sequence[dict[str, Any]], title: str) -> Any:
    """Return a figure of training loss, evaluation loss and unigram baseline over the steps.

    Panels below the losses show other measures of the method.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    train = np.array([(line["step"], line["loss"]) for line in lines if "loss" in line])
    held = np.array(
        [(line["step"], line["held_out_loss"]) for line in lines if "held_out_loss" in line]
    )
    baseline = next(
        (line["unigram_baseline"] for line in lines if "unigram_baseline" in line), None
    )

    measured = {name for line in lines for name in line if line[name] is not None}
    panels = [label for label, names in PANELS.items() if measured & {*names}]
    size = (8, 4.5 + 2 * len(panels))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    ratios = [2, *(1 for _ in panels)]
    axes, *others = figure.subplots(1 + len(panels), squeeze=False, height_ratios=ratios)[:, 0]
    for label, below in zip(panels, others, strict=True):
        draw_measures(below, lines, label)
    if len(train):
        axes.plot(train[:, 0], train[:, 1], color=TRAIN, alpha=0.25, linewidth=0.8)
        axes.plot(train[:, 0], smooth(train[:, 1]), color=TRAIN, linewidth=1.8, label="training")
    if len(held):
        axes.plot(
            held[:, 0], held[:, 1], "o-", color=HELD_OUT, markersize=4.5, linewidth=1.6,
            label=f"evaluation: {held[-1, 1]:.2f}",
        )  # fmt: skip
    if baseline is not None:
        axes.axhline(
            baseline, color=BASELINE, linestyle=(0, (5, 3)), linewidth=1.4,
            label=f"unigram baseline: {baseline:.2f}",
        )  # fmt: skip
    write_title(axes, title, size=11, width=TITLE_WIDTH)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss" if panels else "loss (nats per token)", color=INK)
    for each in (axes, *others):
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(SOFT)
        each.tick_params(colors=INK, labelsize=9)
        each.grid(axis="y", color=SOFT, alpha=0.25, linewidth=0.7)
        each.margins(x=0.01)
        each.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if each.lines:
            each.legend(frameon=False, fontsize=9, labelcolor=INK)
    return figure


def draw_measures(axes: Any, lines: Sequence[dict[str, Any]], label: str) -> None:
    """Draw the measures of a panel over the steps; measures of evaluations are points."""
    axes.set_ylabel(label, color=INK)
    for name in PANELS[label]:
        pale = name in ("reward_rejected", "reward_undesirable", "reward_min", "reward_max")
        for kind, style, color in (("", "-", TRAIN), ("held_out_", "o", HELD_OUT)):
            known = [(n["step"], n[kind + name]) for n in lines if n.get(kind + name) is not None]
            if known:
                steps, values = np.array(known).T
                axes.plot(
                    steps, values, style, color=color, alpha=0.45 if pale else 1, linewidth=1.6,
                    markersize=4.5, label=("evaluation " * bool(kind) + name).replace("_", " "),
                )  # fmt: skip


def smooth(losses: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Smooth losses with a Hann window: nearer steps have larger weights."""
    reach = int(SMOOTHING * len(losses))
    window = np.hanning(2 * reach + 3)
    total, weight = (
        np.convolve(values, window)[reach + 1 : reach + 1 + len(losses)]
        for values in (losses, np.ones(len(losses)))
    )
    return total / weight
