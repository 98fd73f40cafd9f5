"""``bench attention``: times shapes and a grid of lengths, with torch and the unfused chain."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import BFLOAT16, FLOAT32
from ..core.gpu import cupy
from ..machine import format_bytes
from ..memory.pool import memory_pool
from ..ops.attention.attention import attention_backward, attention_forward
from ..pictures import INK, SOFT, save_picture
from .report import OURS, headline, ratio, ratio_title

Row = dict[str, Any]
Calls = dict[str, Callable[[], Any]]
UNFUSED = "unfused"


class Shape(NamedTuple):
    """Sizes of the queries, keys and values of one call, with equal numbers of heads."""

    name: str
    batch: int
    heads: int
    tokens: int
    dim: int

    def operations(self, causal: bool, backward: bool) -> float:
        """Return the operations of the products: two forward, five backward; half if causal."""
        pairs = self.batch * self.heads * self.tokens**2 / (1 + causal)
        return (10 if backward else 4) * pairs * self.dim


SHAPES = (
    Shape("tiny", 2, 4, 8, 64),
    Shape("small", 2, 4, 64, 64),
    Shape("medium", 2, 8, 128, 64),
    Shape("llama_small", 1, 12, 256, 64),
    Shape("llama_med", 1, 32, 512, 128),
)
HOST_GRID = tuple(Shape(f"{tokens}", 1, 8, tokens, 64) for tokens in (512, 1024, 2048))
DEVICE_GRID = tuple(
    Shape(f"{tokens >> 10}k" if tokens >= 1024 else f"{tokens}", max(1, 16384 // tokens), *rest)
    for tokens in (512, 1024, 2048, 4096, 8192, 16384, 32768)
    for rest in ((16, tokens, 128),)
)
GRID_LINE = "grid: 512 to 2048 tokens, as these are NumPy definitions; a GPU goes on to 32k"


def shape_rows(clock: Any, on_gpu: bool, peers: bool) -> Iterator[Row]:
    """Time every shape, causal and full, forward and backward."""
    dtype = BFLOAT16 if on_gpu else FLOAT32
    for shape in (*SHAPES, *(DEVICE_GRID if on_gpu else HOST_GRID)):
        rng = (cupy() if on_gpu else np).random.default_rng(0)
        size = (shape.batch, shape.tokens, shape.heads, shape.dim)
        q, k, v, dout = (rng.standard_normal(size, np.float32).astype(dtype) for _ in range(4))
        for causal in (True, False):
            out, lse = attention_forward(q, k, v, causal=causal)
            ours = (
                partial(attention_forward, q, k, v, causal=causal),
                partial(attention_backward, dout, q, k, v, out, lse, causal=causal),
            )
            for backward, call in enumerate(ours):
                calls: Calls = {OURS: call}
                if not (on_gpu or backward):
                    calls[UNFUSED] = partial(unfused, q, k, v, causal)
                if peers:
                    calls |= torch_calls((q, k, v), dout, causal, bool(backward), on_gpu)
                seconds, runs = clock([*calls.values()])
                operations = shape.operations(causal, bool(backward))
                yield shape._asdict() | {
                    "dtype": dtype.name,
                    "causal": causal,
                    "direction": "backward" if backward else "forward",
                    "runs": runs,
                    "microseconds": dict(zip(calls, (s * 1e6 for s in seconds), strict=True)),
                    "tflop_per_s": operations / seconds[0] / 1e12,
                    "bytes": {name: held(calls[name]) for name in (OURS, UNFUSED) if name in calls},
                }


def unfused(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Return attention computed with whole matrices of scores, unfused: as three calls of NumPy."""
    scores = q.transpose(0, 2, 1, 3) @ k.transpose(0, 2, 3, 1) / math.sqrt(q.shape[3])
    if causal:
        scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)


def torch_calls(
    arrays: tuple[Any, ...],
    dout: Any,
    causal: bool,
    backward: bool,
    on_gpu: bool,
    chain: bool = True,
) -> Calls:
    """Return torch's methods for the same computation by name: those that run on this machine.

    Without ``chain``, only the fused ones.
    """
    import torch
    from torch.nn import attention as torch_attention
    from torch.nn.functional import scaled_dot_product_attention

    from .peers import tensor

    q, k, v = leaves = [tensor(a).transpose(1, 2).requires_grad_(backward) for a in arrays]
    seed = tensor(dout).transpose(1, 2)
    tokens = seed.shape[2]

    def fused(backend: Any) -> Any:
        with nullcontext() if backend is None else torch_attention.sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    def unfused_chain() -> Any:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=seed.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf) if causal else scores
        return scores.softmax(-1) @ v

    methods: Calls = {"torch": lambda: fused(None)}
    if on_gpu:
        backends = torch_attention.SDPBackend
        flash, cudnn = backends.FLASH_ATTENTION, backends.CUDNN_ATTENTION
        methods = {"torch flash": lambda: fused(flash), "torch cuDNN": lambda: fused(cudnn)}
        methods |= {UNFUSED: unfused_chain} if chain else {}

    def tried(method: Callable[[], Any]) -> Callable[[], Any] | None:
        try:
            result = method()
            gradient = partial(torch.autograd.grad, result, leaves, seed, retain_graph=True)
            call = gradient if backward else method
            call()
        except (RuntimeError, torch.OutOfMemoryError):  # no such backend, or not enough memory
            return None
        return call

    calls = {name: call for name, method in methods.items() if (call := tried(method)) is not None}
    if on_gpu:
        torch.cuda.empty_cache()  # free the memory of failed calls: CuPy needs it too
    return calls


def held(call: Callable[[], Any]) -> int:
    """Return the peak bytes of a call, including its results."""
    with memory_pool() as pool:
        before = pool.allocated
        pool.reset_peak()
        kept = call()
        del kept
        return pool.peak - before


def shape_table(rows: list[Row], on_gpu: bool) -> Any:
    """Return a table for a terminal, with how many times as fast as each peer unsloth_cupy is."""
    from rich.table import Table

    peers = [n for n in dict.fromkeys(n for row in rows for n in row["microseconds"]) if n != OURS]
    result = Table(title_justify="left", title="attention, batch x heads x tokens x dim")
    ratios_of = [ratio_title(peer) for peer in peers]
    folding = ("shape", "memory", *ratios_of)  # wrapped if the terminal is narrow
    for title in ("shape", "", "", "time", "TFLOP/s", "memory", *ratios_of):
        result.add_column(
            title,
            justify="left" if title in ("shape", "") else "right",
            no_wrap=title not in folding,
        )
    before = None
    for row in rows:
        sizes = " x ".join(str(row[name]) for name in ("batch", "heads", "tokens", "dim"))
        times = row["microseconds"]
        memory = format_bytes(row["bytes"][OURS])
        if UNFUSED in row["bytes"] and row["bytes"][UNFUSED]:
            memory += f" ({row['bytes'][OURS] / row['bytes'][UNFUSED]:.0%} of unfused)"
        ratios = [ratio(times[p], times[OURS]) if p in times else "-" for p in peers]
        result.add_row(
            f"{row['name']} {sizes}" if row["name"] != before else "",
            "causal" if row["causal"] else "full",
            row["direction"],
            f"{times[OURS] / 1e3:.3f} ms",
            f"{row['tflop_per_s']:.3g}",
            memory,
            *ratios,
        )
        before = row["name"]
    result.caption = None if on_gpu else GRID_LINE
    result.caption_justify = "left"
    return result


def draw_shapes(path: Path, report: dict[str, Any]) -> None:
    """Draw TFLOP/s over tokens, a panel for each of forward and backward, causal and full."""
    from matplotlib.figure import Figure

    names = {shape.name for shape in SHAPES}
    grid = [row for row in report["attention"] if row["name"] not in names]
    everyone = dict.fromkeys(name for row in grid for name in row["microseconds"])
    colours = {name: f"C{number}" for number, name in enumerate(everyone)}  # same in all panels
    lengths = sorted({row["tokens"] for row in grid})
    figure = Figure(figsize=(10, 6), dpi=150, layout="constrained")
    kinds = [(d, c) for d in ("forward", "backward") for c in (True, False)]
    for axes, (direction, causal) in zip(figure.subplots(2, 2).flat, kinds, strict=True):
        selected = [r for r in grid if (r["direction"], r["causal"]) == (direction, causal)]
        for name, colour in colours.items():
            points = [
                (r["tokens"], r["tflop_per_s"] * r["microseconds"][OURS] / r["microseconds"][name])
                for r in selected
                if name in r["microseconds"]
            ]
            if points:
                look = {"color": colour, "linewidth": 2.2 if name == OURS else 1.2}
                axes.plot(*zip(*points, strict=True), "o-", label=name, markersize=4, **look)
        title = f"{direction}, {'causal' if causal else 'full'}"
        axes.set_title(title, loc="left", fontsize=10, color=INK)
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axes.set_xlabel("tokens", color=INK)
        axes.set_ylabel("TFLOP/s", color=INK)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color=SOFT, alpha=0.25, linewidth=0.7)
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)
    figure.suptitle(headline(report), x=0.01, ha="left", fontsize=11, color=INK)
    save_picture(figure, path)
