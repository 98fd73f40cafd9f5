"""What ``bench`` found: as a table, as a picture, as the table of docs/performance.md."""

from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .curve import INK, SOFT
from .run_folder import written_beside

Report = dict[str, Any]

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
OURS = "unsloth_cupy"
COLOURS = {OURS: "#3b6fb6", "torch": "#d1495b", "torch.compile": "#e8a33d", "Liger": "#5a9a68"}


def table(report: Report) -> Any:
    """Return the rows for a terminal; a peer's ratio above 1 says that it takes longer."""
    from rich.table import Table

    peers = _peers(report)
    on_gpu = report["copy_gb_per_s"] is not None
    made = Table(title_justify="left")
    for title in ("op", "dtype", "size", *(["ran as"] if on_gpu else [])):
        made.add_column(title, no_wrap=True)
    for title in ("time", "GB/s", *(["of copy"] if on_gpu else []), *peers):
        made.add_column(title, justify="right")
    before = None
    for row in report["rows"]:
        if before not in (None, row["op"]):
            made.add_section()
        cells = [row["op"] if before != row["op"] else "", row["dtype"], _size(row)]
        cells += [row["ran_as"].partition(" ")[0]] if on_gpu else []
        cells += [_time(row["microseconds"]), _number(row["gb_per_s"])]
        cells += [_share(row["of_copy"])] if on_gpu else []
        for peer in peers:
            time = row["peers"].get(peer)
            cells.append(f"{_time(time)} {time / row['microseconds']:.2f}x" if time else "-")
        made.add_row(*cells)
        before = row["op"]
    if on_gpu:
        made.caption = f"copy on this GPU, in this run: {report['copy_gb_per_s']:.0f} GB/s"
        made.caption_justify = "left"
    return made


def _peers(report: Report) -> list[str]:
    found = {peer for row in report["rows"] for peer in row["peers"]}
    return [peer for peer in COLOURS if peer in found]


def _size(row: dict[str, Any]) -> str:
    return " x ".join(map(str, row["size"]))


def _time(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1e3:.2f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw_times(path: Path, report: Report) -> None:
    """Draw a PNG file: a panel for each dtype, a line for each op at the largest size it ran.

    Dots are GB/s beside the copy bandwidth on a GPU, times on a CPU.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    copy = report["copy_gb_per_s"]
    largest = {(row["dtype"], row["op"]): row for row in report["rows"]}  # sizes ascend
    if copy is not None:
        largest = {key: row for key, row in largest.items() if row["gb_per_s"]}
    dtypes = list(dict.fromkeys(dtype for dtype, _ in largest))
    ops = list(dict.fromkeys(op for _, op in largest))[::-1]
    contestants = [OURS, *_peers(report)]

    figure = Figure(figsize=(2.6 + 3.4 * len(dtypes), 1.5 + 0.26 * len(ops)), dpi=150)
    figure.set_layout_engine("constrained")
    grid = figure.subplots(1, max(len(dtypes), 1), sharey=True, squeeze=False)[0]
    for axes, dtype in zip(grid, dtypes, strict=False):
        for height, op in enumerate(ops):
            row = largest.get((dtype, op))
            if row is None:
                continue
            times = {OURS: row["microseconds"], **row["peers"]}
            for name, time in reversed(times.items()):
                value = row["bytes"] / time / 1e3 if copy is not None else time / 1e3
                ours = name == OURS
                face = COLOURS[name] if ours else "white"
                axes.plot(
                    value, height, "o", color=COLOURS[name], markerfacecolor=face,
                    markersize=7 if ours else 6, markeredgewidth=1.5,
                )  # fmt: skip
        if copy is not None:
            axes.axvline(copy, color=SOFT, linestyle=(0, (5, 3)), linewidth=1.4)
            axes.set_xlim(0, 1.08 * max(copy, *(row["gb_per_s"] for row in largest.values())))
            axes.set_xlabel("GB/s; dashed: a copy", color=INK)
        else:
            axes.set_xscale("log")
            axes.set_xlabel("milliseconds", color=INK)
        axes.set_title(dtype, loc="left", fontsize=10, color=INK)
        axes.set_yticks(range(len(ops)), ops)
        axes.set_ylim(-0.7, len(ops) - 0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(SOFT)
        axes.tick_params(colors=INK, labelsize=8)
        axes.grid(color=SOFT, alpha=0.25, linewidth=0.7)
    where = report["machine"]["gpu"] or "NumPy definitions on a CPU"
    figure.suptitle(f"{where}, {report['date'][:10]}", x=0.01, ha="left", fontsize=11, color=INK)
    marks = [
        Line2D(
            [], [], color=COLOURS[name], marker="o", linestyle="",
            markerfacecolor=COLOURS[name] if name == OURS else "white",
        )
        for name in contestants
    ]  # fmt: skip
    figure.legend(
        marks, contestants, loc="outside lower left", ncols=4, frameon=False, fontsize=8,
        labelcolor=INK,
    )  # fmt: skip
    with written_beside(path) as partial:
        figure.savefig(partial, format="png")


def check_markers(page: Path) -> None:
    """Raise unless a page has the two markers, once each and in order."""
    text = page.read_text(encoding="utf-8")
    if [text.count(BEGIN), text.count(END)] != [1, 1] or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"{page} must hold {BEGIN} and, further down, {END}, once each")


def write_block(page: Path, report: Report) -> None:
    """Write the rows of kernels between the two markers of a page; leave the rest as it is."""
    check_markers(page)
    text = page.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    with written_beside(page) as partial:
        partial.write_text(f"{head}{BEGIN}\n{_block(report)}\n{tail}", encoding="utf-8")


def _block(report: Report) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in report["versions"].items() if v)
    lines = [
        f"Measured on one {report['machine']['gpu']} on {report['date'][:10]}, commit"
        f" {report['commit'] or 'unknown'}, with {versions}. A copy on the device moved"
        f" {report['copy_gb_per_s']:.0f} GB/s in the same run. Times are {report['method']}.",
        "",
        "| kernel | dtype | size | time | GB/s | fraction of the copy | ratio to the best peer |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        if not row["ran_as"].startswith("kernel"):
            continue
        ratio = "-"
        if row["peers"]:
            best = min(row["peers"], key=row["peers"].get)
            ratio = f"{row['peers'][best] / row['microseconds']:.2f} ({best})"
        lines.append(
            f"| `{row['op']}` | {row['dtype']} | {_size(row)} | {_time(row['microseconds'])} |"
            f" {_number(row['gb_per_s'])} | {_share(row['of_copy'])} | {ratio} |"
        )
    lines += ["", "A ratio above 1: the peer takes longer.", *report["notes"]]
    return "\n".join(lines)
