"""Pictures of the command line: nothing is cut off, and labels can be read."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from unsloth_cupy import plan_memory
from unsloth_cupy.bench.attention_shapes import draw_shapes
from unsloth_cupy.bench.report import draw_times
from unsloth_cupy.cli.timeline import draw_timeline
from unsloth_cupy.finetune.run.curve import draw_curve

CONFIG = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
CPU = {"machine": {"gpu": None, "cores": 2, "processor": "x86_64"}, "date": "2026-11-21T10:00:00"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved: as empty files, since ``assert_legible`` draws them."""
    figures: list[Figure] = []

    def kept(figure: Figure, path: Path, **_: Any) -> None:
        figures.append(figure)
        path.touch()

    monkeypatch.setattr(Figure, "savefig", kept)
    return figures


def assert_legible(figure: Figure) -> None:
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        assert_on_the_page(axes, figure.bbox)


def assert_on_the_page(axes: Axes, page: Any) -> None:
    title = axes.get_title(loc="left")
    shown = [text for text in [*axes.texts, axes.xaxis.label, axes.yaxis.label] if text.get_text()]
    boxes = [text.get_window_extent() for text in shown]
    left = next(text for text in axes.get_children() if getattr(text, "_text", "") == title)
    boxes.append(left.get_window_extent())
    for box in boxes:
        assert (page.min <= box.min).all(), title
        assert (box.max <= page.max).all(), title
    low, high = axes.get_xlim()
    labels = [
        tick.label1.get_window_extent()
        for tick in axes.xaxis.get_major_ticks()
        if low <= tick.get_loc() <= high and tick.label1.get_text()
    ]
    assert labels
    assert all(one.x1 < next_.x0 for one, next_ in pairwise(labels))


EVALUATED = [{"step": step, "held_out_loss": 4.0, "unigram_baseline": 4.5} for step in (0, 4)]
STEPS = [{"step": step, "loss": 5.0 - step} for step in range(1, 5)]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (STEPS, ["training"]),
        (EVALUATED[:1], ["evaluation: 4.00", "unigram baseline: 4.50"]),  # stopped before a step
        (EVALUATED + STEPS, ["training", "evaluation: 4.00", "unigram baseline: 4.50"]),
    ],
    ids=["steps", "evaluated", "both"],
)
def test_a_curve_shows_its_losses_over_whole_steps(
    lines: list[dict[str, Any]], shown: list[str], tmp_path: Path, drawn: list[Figure]
) -> None:
    draw_curve(tmp_path / "curve.png", lines, "a run")
    (axes,) = drawn[0].axes
    assert axes.get_legend_handles_labels()[1] == shown
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert_legible(drawn[0])


@pytest.mark.slow
def test_a_timeline_has_room_for_its_title(tmp_path: Path, drawn: list[Figure]) -> None:
    title = "models/of/a/folder/whose/name/is/long/config.json: 1 x 16 tokens" + ", lora 4" * 12
    plan = plan_memory(CONFIG, batch=1, tokens=16, dtype="float32")
    draw_timeline(tmp_path / "plan.png", plan, title)
    assert_legible(drawn[0])


def read(title: str) -> str:
    """Return a title with its characters in place of their escapes."""
    return re.sub(r"\\(?:u\w{4}|U\w{8})", lambda match: chr(int(match[0][2:], 16)), title)


NAMES = {
    "漢字, सीखना on Grüße 👩‍👧": "漢字, सीखना on Grüße 👩‍👧",
    "$x^{2 and $\\frac$": "$x^{2 and $\\frac$",
    "bell\x07, \udcff and\nline": "bell\\x07, \\udcff and line",
    "x" * 200: "x" * 200,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.filterwarnings("error")
def test_titles_of_any_name(tmp_path: Path, drawn: list[Figure], name: str) -> None:
    """No warning and no formula; what no font here has is escaped."""
    draw_curve(tmp_path / "curve.png", [{"step": 1, "loss": 1.0}], name)
    plan = plan_memory(CONFIG, batch=1, tokens=16, dtype="float32")
    draw_timeline(tmp_path / "plan.png", plan, name)
    for figure in drawn:
        shown = figure.axes[0].get_title(loc="left").replace("\n", "" if " " not in name else " ")
        assert read(shown) == read(NAMES[name])
        assert_legible(figure)


@pytest.mark.slow
@pytest.mark.parametrize("times", [(7400.0, 8200.0), (31.0, 3100.0)])
def test_times_can_be_read_off(
    tmp_path: Path, drawn: list[Figure], times: tuple[float, float]
) -> None:
    rows = [
        {
            "op": f"op {n}", "dtype": dtype, "size": [2, 3], "microseconds": time, "peers": {},
            "gb_per_s": 1.0, "bytes": 1,
        }
        for n, time in enumerate(times)
        for dtype in ("float16", "bfloat16", "float32")
    ]  # fmt: skip
    draw_times(tmp_path / "times.png", CPU | {"copy_gb_per_s": None, "rows": rows})
    assert drawn[0].get_suptitle() == "NumPy definitions on 2 cores, x86_64, 2026-11-21"
    assert_legible(drawn[0])
    for axes in drawn[0].axes:
        low, high = np.log10(axes.get_xlim())
        assert high - low >= 1, "two ticks at least say what the scale is"
        assert not any(tick.label1.get_text() for tick in axes.xaxis.get_minor_ticks())


@pytest.mark.slow
def test_lengths_of_attention_name_their_machine(tmp_path: Path, drawn: list[Figure]) -> None:
    forward = {"unsloth_cupy": 500.0, "unfused": 2000.0, "torch": 900.0}
    backward = {"unsloth_cupy": 500.0, "torch": 900.0}
    rows = [
        {
            "name": str(tokens), "tokens": tokens, "causal": causal, "direction": direction,
            "microseconds": times, "tflop_per_s": tokens / 512,
        }
        for tokens in (512 * 2**n for n in range(7))
        for causal in (True, False)
        for direction, times in (("forward", forward), ("backward", backward))
    ]  # fmt: skip
    gpu = {"machine": {"gpu": "NVIDIA H200"}, "date": "2026-11-21T10:00:00"}
    draw_shapes(tmp_path / "attention.png", gpu | {"attention": rows})
    assert drawn[0].get_suptitle() == "NVIDIA H200, 2026-11-21"
    colours: dict[Any, set[Any]] = {}
    assert_legible(drawn[0])
    for axes in drawn[0].axes:
        assert [label.get_text() for label in axes.get_xticklabels()] == [
            "512", "1k", "2k", "4k", "8k", "16k", "32k"
        ]  # fmt: skip
        for line in axes.lines:
            colours.setdefault(line.get_label(), set()).add(line.get_color())
    assert [*map(len, colours.values())] == [1, 1, 1], "a name has one colour in every panel"
    assert len(set.union(*colours.values())) == 3
