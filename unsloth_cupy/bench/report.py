"""Shows the results of ``bench`` as a table, a picture, and the table of docs/performance.md."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..core.op import OPS
from ..core.source import code_digest
from ..errors import ConfigError
from ..files import atomic_path
from ..pictures import INK, SOFT, save_picture

Report = dict[str, Any]

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
OURS = "unsloth_cupy"
CHANGED = ", changed since"
TIME, QUARTILES = "time (quartiles)", ("p25", "p75")
COLOURS = {OURS: "#3b6fb6", "torch": "#d1495b", "torch.compile": "#e8a33d", "Liger": "#5a9a68"}


def table(report: Report) -> Any:
    """Return a table for a terminal, with the speedup of unsloth_cupy over each peer."""
    from rich.table import Table

    peers = _peers(report)
    on_gpu = report["copy_gb_per_s"] is not None
    result = Table(title_justify="left")
    for title in ("op", "dtype", "size", *(["ran as"] if on_gpu else [])):
        result.add_column(title, no_wrap=True)
    for title in (TIME, "GB/s", *(["of copy", "of roofline"] if on_gpu else [])):
        result.add_column(title, justify="right")
    for peer in peers:
        result.add_column(f"time of {peer}", justify="right")
        result.add_column(ratio_title(peer), justify="right")
    before = None
    for row in report["rows"]:
        if before not in (None, row["op"]):
            result.add_section()
        cells = [row["op"] if before != row["op"] else "", row["dtype"], _size(row)]
        cells += [row["ran_as"].partition(" ")[0]] if on_gpu else []
        cells += [timed(row["microseconds"], row["percentiles"][OURS]), _number(row["gb_per_s"])]
        cells += [_share(row["of_copy"]), _share(row["of_roofline"])] if on_gpu else []
        for peer in peers:
            time = row["peers"].get(peer)
            cells += (
                [timed(time, row["percentiles"][peer]), ratio(time, row["microseconds"])]
                if time
                else ["-", "-"]
            )
        result.add_row(*cells)
        before = row["op"]
    if on_gpu:
        result.caption = f"on this GPU, in this run: {_ceilings(report)}"
        result.caption_justify = "left"
    return result


def ratio_title(peer: str) -> str:
    """Return the title of a column of speedups over a peer."""
    return f"times as fast as {peer}"


def ratio(peer: float, ours: float) -> str:
    """Return the speedup from two times: above 1, unsloth_cupy is faster."""
    return f"{peer / ours:.2f}x"


def _ceilings(report: Report) -> str:
    """Return the measured rates of copies and matrix products, which define the roofline."""
    products = [
        f"products of {dtype} {rate:.0f} TFLOP/s"
        for dtype, rate in report["product_tflop_per_s"].items()
    ]
    if rate := report.get("int8_top_per_s"):
        products.append(f"products of int8 {rate:.0f} TOP/s by the datasheet")
    return ", ".join([f"a copy moves {report['copy_gb_per_s']:.0f} GB/s", *products])


def _peers(report: Report) -> list[str]:
    peers = {peer for row in report["rows"] for peer in row["peers"]}
    return [peer for peer in COLOURS if peer in peers]


def _size(row: dict[str, Any]) -> str:
    return row.get("case") or " x ".join(map(str, row["size"]))


def _time(microseconds: float) -> str:
    if microseconds < 1e3:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1e3:.2f} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.2f} s"


def timed(microseconds: float, percentiles: dict[str, float]) -> str:
    """Return a median with its quartiles in parentheses."""
    unit = 1.0 if microseconds < 1e3 else 1e3 if microseconds < 1e6 else 1e6
    low, high = (f"{percentiles[name] / unit:.{1 if unit == 1 else 2}f}" for name in QUARTILES)
    return f"{_time(microseconds)} ({low}-{high})"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def headline(report: Report) -> str:
    """Return the title of a picture: machine and date."""
    here = report["machine"]
    where = here["gpu"] or f"NumPy definitions on {here['cores']} cores, {here['processor']}"
    return f"{where}, {report['date'][:10]}"


def draw_times(path: Path, report: Report) -> None:
    """Plot a PNG file with a panel per dtype and a row per op, at the largest measured size.

    Dots are GB/s on a GPU, with a line at the bandwidth of a copy; on a CPU, dots are times.
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
            low, high = np.log10(axes.get_xlim())  # whole decades have readable ticks
            axes.set_xlim(10 ** np.floor(low), 10 ** np.ceil(high))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
            axes.set_xlabel("milliseconds", color=INK)
        axes.set_title(dtype, loc="left", fontsize=10, color=INK)
        axes.set_yticks(range(len(ops)), ops)
        axes.set_ylim(-0.7, len(ops) - 0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(SOFT)
        axes.tick_params(colors=INK, labelsize=8)
        axes.grid(color=SOFT, alpha=0.25, linewidth=0.7)
    figure.suptitle(headline(report), x=0.01, ha="left", fontsize=11, color=INK)
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
    save_picture(figure, path)


def check_markers(page: Path) -> None:
    """Raise a ConfigError unless a page has both markers, once each and in order."""
    text = page.read_text(encoding="utf-8")
    if [text.count(BEGIN), text.count(END)] != [1, 1] or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"{page} must hold {BEGIN} and, further down, {END}, once each")


def write_block(page: Path, report: Report) -> None:
    """Save results of kernels to the JSON file next to a page, and update the table of the page."""
    check_markers(page)
    excluded = ("ops", "rows", "attention")
    facts = {name: value for name, value in report.items() if name not in excluded}
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in report["rows"]:
        if row["ran_as"].startswith("kernel"):
            rows_of.setdefault(row["op"], []).append(row)
    kept = confirmed(page) | {op: {"facts": facts, "rows": rows} for op, rows in rows_of.items()}
    with atomic_path(page.with_suffix(".json")) as partial:
        partial.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    renew(page)


def renew(page: Path) -> None:
    """Update the table of a page from the JSON file next to it; preserve the rest."""
    text = page.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    with atomic_path(page) as partial:
        table = block(confirmed(page))
        partial.write_text(f"{head}{BEGIN}\n{table}\n{tail}", encoding="utf-8")


def confirmed(page: Path) -> dict[str, Any]:
    """Return the facts and rows by op from the JSON file next to a page."""
    results = page.with_suffix(".json")
    return json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}


def block(confirmed: dict[str, Any]) -> str:
    """Return the table: the latest results of each op with a kernel, at the largest size."""
    lines = [
        "| kernel | size | dtype | time | GB/s | fraction of the roofline |"
        " times as fast as the best peer | run |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    runs: dict[str, int] = {}
    for op in sorted(name for name, op in OPS.items() if op.launch is not None):
        if op not in confirmed:
            lines.append(f"| `{op}` | not yet timed on a GPU | - | - | - | - | - | - |")
            continue
        facts = confirmed[op]["facts"]
        run = runs.setdefault(f"{_where(facts)}: {_about(facts)}", len(runs) + 1)
        largest = {(r.get("case", ""), r["dtype"]): r for r in confirmed[op]["rows"]}  # they ascend
        common = {key: row for key, row in largest.items() if key[1] != "float16"}
        ordered = sorted((common or largest).items(), key=lambda item: item[0][0] != "")
        for (_, dtype), row in ordered:  # rows of models follow
            faster = "-"
            if row["peers"]:
                best = min(row["peers"], key=row["peers"].get)
                faster = f"{ratio(row['peers'][best], row['microseconds'])} ({best})"
            lines.append(
                f"| `{op}` | {_size(row)} | {dtype} | {_time(row['microseconds'])} |"
                f" {_number(row['gb_per_s'])} | {_share(row['of_roofline'])} | {faster} |"
                f" {run}{CHANGED if changed(row.get('sources')) else ''} |"
            )
    if not confirmed:
        return "\n".join(
            [*lines, "", "No kernel has run on a GPU yet: nothing is claimed about speed."]
        )
    lines += ["", "The roofline time is the maximum of two times, measured on the device in the"]
    lines += ["same run: a copy of the same number of bytes, and a matrix product with the same"]
    lines += ["number of operations; for products of 8-bit codes it is the rate of the datasheet."]
    lines += ["2.00x: the peer takes twice as long.", ""]
    lines += ["Changed since: the code of the kernel, or of a header that it includes, has changed"]
    lines += ["after the run, so the current time may differ."]
    return "\n".join([*lines, *(f"\nRun {number}: {about}" for about, number in runs.items())])


def changed(sources: dict[str, str] | None) -> bool:
    """Return whether kernels have changed since the run, by the hashes of ``timing.sources``."""
    return sources is None or any(code_digest(f) != digest for f, digest in sources.items())


def _where(facts: dict[str, Any]) -> str:
    commit = facts["commit"] or "unknown"
    return f"{facts['machine']['gpu']}, {facts['date'][:10]}, commit {commit}"


def _about(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in facts["versions"].items() if v)
    text = f"{_ceilings(facts)}; {versions}. Times are {facts['method']}."
    return " ".join([text, *facts["notes"]])
