"""Draw the pictures of the gallery and of docs/performance.md with the library's own functions.

    python docs/pictures.py [NAME ...]      all or some of docs/pictures/*.svg

Pictures of measurements are drawn from the JSON files in that folder, which record machine, method
and date (docs/measure.py); the others show what the library computes.  Needs the extra ``cli``.
"""

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.code.programs.beside_peers import report as peers  # noqa: E402
from unsloth_cupy import attention, explain, plan_memory, shape  # noqa: E402
from unsloth_cupy.bench.report import COLOURS as PEERS  # noqa: E402
from unsloth_cupy.bench.report import draw_times  # noqa: E402
from unsloth_cupy.cli.timeline import draw_timeline  # noqa: E402
from unsloth_cupy.finetune.run.curve import draw_curve  # noqa: E402
from unsloth_cupy.memory.planned import Planned  # noqa: E402
from unsloth_cupy.models.parse import parse  # noqa: E402
from unsloth_cupy.models.transformer import Transformer  # noqa: E402
from unsloth_cupy.pictures import INK, SOFT, save_picture  # noqa: E402
from unsloth_cupy.profiling.cards import CARDS  # noqa: E402
from unsloth_cupy.profiling.profile import COLOURS as PHASES  # noqa: E402

FOLDER, PAGE = (Path(__file__).with_name(name) for name in ("pictures", "performance.md"))
OPS = "attention rms_norm layer_norm swiglu geglu softmax linear cross_entropy linear_cross_entropy"
LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
PARTS = {"attention": "#d1495b", "linear layers": "#3b6fb6", "all others": "#9db8d9"}


def measured(name: str) -> Any:
    """Return a measurement with its facts, from its JSON file."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def figure(width: float, height: float) -> Any:
    """Return an empty figure, by its size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain(axes: Any) -> None:
    """Remove the frame of axes at the top and right, and soften the rest."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=INK, labelsize=9)


# ---- computed by the library --------------------------------------------------------------------
def weights(queries: int = 24, **options: Any) -> Any:
    """Return the weight of each key for each query: attention whose values are an identity."""
    rng = np.random.default_rng(3)
    q, k = 0.8 * rng.standard_normal((2, 1, queries, 1, 16)).astype(np.float32)
    v = np.eye(queries, dtype=np.float32)[None, :, None]
    return attention(q, k, v, **options)[0, :, 0]


def draw_attention(path: Path) -> None:
    """Draw the weight of each key for each query under several options of attention."""
    texts = np.repeat([0, 1, 2], [7, 11, 6])
    panels = {
        "causal=True": weights(causal=True),
        "causal=True, window=(6, 0)": weights(causal=True, window=(6, 0)),
        "causal=True, alibi=[0.5]": weights(causal=True, alibi=np.array([0.5], np.float32)),
        "causal=True, sinks=[2]": weights(causal=True, sinks=np.array([2], np.float32)),
        "a mask: three texts in a row": weights(causal=True, mask=texts[:, None] == texts),
        "key_lengths=[15]": weights(key_lengths=np.array([15])),
    }
    picture = figure(9, 6.2)
    grid = picture.subplots(2, 3)
    for axes, (title, values) in zip(grid.flat, panels.items(), strict=True):
        axes.imshow(np.sqrt(values), cmap="Blues", vmin=0, vmax=1, rasterized=True)
        axes.set_title(title, loc="left", fontsize=9, color=INK)
        axes.tick_params(colors=SOFT, labelsize=7)
        axes.spines[:].set_color(SOFT)
    for axes in grid[:, 0]:
        axes.set_ylabel("query", color=INK, fontsize=9)
    for axes in grid[1]:
        axes.set_xlabel("key", color=INK, fontsize=9)
    save_picture(picture, path)


def draw_memory(path: Path) -> None:
    """Draw the memory of a step, op after op."""
    sizes: dict[str, Any] = {"batch": 4, "tokens": 2048, "dtype": "bfloat16"}
    title = "A step of Llama 3.2 1B with 6 of its layers, 4 x 2048 tokens, bfloat16: planned"
    draw_timeline(path, plan_memory(LLAMA_1B | {"num_hidden_layers": 6}, **sizes), title)


DRAWN = ("a100", "a100 40gb", "a10", "rtx 3090", "rtx 4090", "l4", "l40s", "h100", "h200", "b200")
DRAWN += ("rtx 5090",)


def floors(card: str) -> dict[str, float]:
    """Return the least possible milliseconds of a forward and backward pass on a card, by part."""
    config = parse(LLAMA_1B)
    kind = np.dtype("bfloat16")
    parameters: Any = {name: Planned.of(size, kind) for name, size in config.shapes().items()}
    rows = shape((1, 2048), "int64")
    model = Transformer(config, parameters, {})
    explanation = explain(model.loss_and_gradients, rows, rows, device=CARDS[card])
    parts = dict.fromkeys(PARTS, 0.0)
    for step in explanation.steps:
        part = "all others"
        if step.op.startswith("attention"):
            part = "attention"
        elif step.op.startswith("linear"):  # includes the language-model head
            part = "linear layers"
        parts[part] += 1e3 * (step.floor or 0.0)
    return parts


def draw_floors(path: Path) -> None:
    """Draw a lower bound of the time of a forward and backward pass on each card: a prediction."""
    bounds = {CARDS[card].name: floors(card) for card in DRAWN}
    names = sorted(bounds, key=lambda name: -sum(bounds[name].values()))
    picture = figure(8, 4.6)
    axes = picture.add_subplot()
    left = np.zeros(len(names))
    for part, colour in PARTS.items():
        wide = np.array([bounds[name][part] for name in names])
        axes.barh(names, wide, left=left, color=colour, label=part)
        left += wide
    for height, total in enumerate(left):
        axes.annotate(
            f"{total:.0f} ms", (total, height), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set_xlabel("ms at least, predicted from what makers state; no GPU was timed", color=INK)
    axes.set_title(
        "PREDICTED floors: Llama 3.2 1B, 2048 tokens, bfloat16, forward and backward",
        loc="left", fontsize=10, color=INK,
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    plain(axes)
    save_picture(picture, path)


# ---- measured -----------------------------------------------------------------------------------
def draw_cpu(path: Path) -> None:
    """Draw the times of the library's NumPy path and of torch on a CPU, in float32."""
    report = measured("cpu")
    draw_times(path, report | {"rows": [r for r in report["rows"] if r["dtype"] == "float32"]})


def draw_hopper(path: Path) -> None:
    """Draw the rates of attention on an H200, of the table of docs/performance.md."""
    _, _, part = PAGE.read_text(encoding="utf-8").partition("\n## Attention on Hopper\n")
    part = part.partition("\n## ")[0]
    head, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in part.splitlines()
        if line.startswith("|")
    )
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    rows = [row for row in rows if row["head dim"] == "128" and row["mask"] == "causal"]
    *_, (day, commit) = re.findall(r"H200, (\S+), commit (\w+)", part)  # the last: of the table
    colours = {
        "unsloth_cupy": PEERS["unsloth_cupy"],
        "cuDNN": PEERS["torch"],
        "flash": PEERS["torch.compile"],
    }
    picture = figure(8, 3.4)
    for axes, way in zip(picture.subplots(1, 2, sharey=True), ("forward", "backward"), strict=True):
        for name, colour in colours.items():
            rates = [int(row[f"{way} {name}"]) for row in rows]
            label = {"flash": "FlashAttention"}.get(name, name)
            axes.plot([f"{int(row['tokens']) // 1024}k" for row in rows], rates, "o-", color=colour)
            axes.annotate(
                label, (len(rates) - 1, rates[-1]), (6, 0), textcoords="offset points",
                color=colour, fontsize=9, va="center", annotation_clip=False,
            )  # fmt: skip
        axes.set_ylim(bottom=0)
        axes.set_title(way, loc="left", fontsize=10, color=INK)
        axes.set_xlabel("tokens", color=INK)
        axes.grid(axis="y", color=SOFT, alpha=0.25, linewidth=0.7)
        plain(axes)
    picture.axes[0].set_ylabel("TFLOP/s", color=INK)
    picture.suptitle(
        f"Attention on an NVIDIA H200, causal, head dim 128, {day}, commit {commit}",
        x=0.01, ha="left", fontsize=10, color=INK,
    )  # fmt: skip
    save_picture(picture, path)


def draw_beside(path: Path) -> None:
    """Draw the memory of a step of the library and of transformers."""
    result = measured("beside-transformers")
    colours = {
        "unsloth_cupy": PEERS["unsloth_cupy"],
        "transformers": PEERS["torch"],
        "transformers, eager": PEERS["torch.compile"],
    }
    picture = figure(7, 4)
    axes = picture.add_subplot()
    for side, colour in colours.items():
        rows = [row for row in result["rows"] if row["side"] == side]
        tokens, mebibytes = [r["tokens"] for r in rows], [r["bytes"] / 2**20 for r in rows]
        axes.plot(tokens, mebibytes, "o-", color=colour, label=side)
    axes.set_xticks(tokens)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the row", color=INK)
    axes.set_ylabel("MiB at the peak, beyond the model", color=INK)
    axes.set_title(
        f"Loss and gradients of a Llama, float32, CPU, {result['date'][:10]}",
        loc="left", fontsize=10, color=INK,
    )  # fmt: skip
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    axes.grid(axis="y", color=SOFT, alpha=0.25, linewidth=0.7)
    plain(axes)
    save_picture(picture, path)


def draw_peers(path: Path) -> None:
    """Draw steps of training beside other libraries, of tests/code/programs/beside_peers."""
    peers.draw(path, measured("beside-peers"))


def draw_loss(path: Path) -> None:
    """Draw the loss curve of a run of ``unsloth-cupy finetune``, as the run itself draws it."""
    draw_curve(path, measured("loss")["lines"], "A small Llama learns the Python documentation")


def draw_trace(path: Path) -> None:
    """Draw the calls of a step over time, as Perfetto shows the same file."""
    profiled = measured("trace")
    events = sorted(profiled["traceEvents"], key=lambda event: event["ts"])
    first = events[0]["ts"]
    totals: dict[str, float] = {}
    for event in events:
        totals[event["name"]] = totals.get(event["name"], 0.0) + event["dur"]
    names = sorted(totals, key=lambda name: -totals[name])[:12]
    picture = figure(9, 3.6)
    axes = picture.add_subplot()
    for height, name in enumerate(reversed(names)):
        own = [event for event in events if event["name"] == name]
        bars = [((event["ts"] - first) / 1e3, event["dur"] / 1e3) for event in own]
        axes.broken_barh(bars, (height - 0.4, 0.8), facecolors=PHASES[own[0]["cat"]])
    axes.set_yticks(range(len(names)), names[::-1])
    axes.set_xlabel("ms since the step began", color=INK)
    axes.set_title(
        f"A step of training, profiled, {profiled['date'][:10]}", loc="left", fontsize=10
    )
    plain(axes)
    save_picture(picture, path)


def facts_of(result: Any, command: str) -> list[str]:
    """Return a measurement's facts as lines of a page: method, machine, versions, date, command."""
    versions = [f"{name} {v}" for name, v in result["versions"].items() if v and name != "python"]
    machine = result["machine"]
    if not isinstance(machine, str):
        machine = f"{machine['cores']} cores, {machine['processor']}, {machine['blas']}"
    date = result["date"][:10]
    where = f"{machine}, shared with other jobs; one thread; {', '.join(versions)}; {date}."
    lines = textwrap.wrap(f"Measured: {result['method']}. {where}", 110, break_on_hyphens=False)
    return [*lines, "", "```sh", command, "```"]


def blocks() -> dict[str, list[str]]:
    """Return the lines of docs/performance.md about measurements, by the name of their markers."""
    result = measured("beside-transformers")
    sides = list(dict.fromkeys(row["side"] for row in result["rows"]))
    held = {(row["tokens"], row["side"]): row["bytes"] / 2**20 for row in result["rows"]}
    table = [f"| tokens | {' | '.join(f'{side}, MiB' for side in sides)} |", "|---" * 4 + "|"]
    for tokens in dict.fromkeys(tokens for tokens, _ in held):
        cells = " | ".join(f"{held[tokens, side]:.0f}" for side in sides)
        table.append(f"| {tokens} | {cells} |")
    again = "OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1"
    command = f"{again} python docs/measure.py beside-transformers"
    timed = f"{again} unsloth-cupy bench {OPS} --peers --json docs/pictures/cpu.json"
    return {
        "beside": [*table, "", *facts_of(result, command)],
        "cpu": facts_of(measured("cpu"), timed),
        "peers": peers.section(measured("beside-peers")) if peers.RESULTS.exists() else [],
    }


def page() -> str:
    """Return docs/performance.md with the current ``blocks`` between its markers."""
    text = PAGE.read_text()
    for name, lines in blocks().items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, tail = text[: text.index(begin)], text[text.index(end) :]
        text = "\n".join([head + begin, *lines, tail])
    return text


def shorten(path: Path) -> None:
    """Remove invisible parts of an SVG file: the date, and digits beyond a hundredth."""
    text = re.sub(r"<metadata>.*?</metadata>\n?", "", path.read_text(), flags=re.S)
    path.write_text(re.sub(r"\b([1-9]\d*\.\d\d)\d+", r"\1", text))


PICTURES: dict[str, Callable[[Path], None]] = {
    "attention": draw_attention,
    "attention-h200": draw_hopper,
    "beside-transformers": draw_beside,
    "cpu": draw_cpu,
    "floors-of-cards": draw_floors,
    "loss": draw_loss,
    "memory": draw_memory,
    "trace": draw_trace,
}
if peers.RESULTS.exists():  # of a GPU
    PICTURES["beside-peers"] = draw_peers

if __name__ == "__main__":
    if unknown := {*sys.argv[1:]} - PICTURES.keys():
        sys.exit(f"there is no picture {unknown}; choose from {[*PICTURES]}")
    import matplotlib as mpl

    mpl.rcParams["svg.fonttype"] = "none"  # keep text as text, not as paths
    mpl.rcParams["svg.hashsalt"] = "unsloth_cupy"  # so that equal pictures are equal files
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name](FOLDER / f"{name}.svg")
        shorten(FOLDER / f"{name}.svg")
    PAGE.write_text(page())
