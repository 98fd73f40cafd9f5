"""``bench attention``: times attention shapes and lengths against torch and an unfused chain."""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import BFLOAT16, FLOAT32
from ..core.gpu import cupy
from ..machine import format_bytes
from ..memory.pool import memory_pool
from ..ops.activations.softmax import softmax, softmax_backward
from ..ops.attention.attention import attention_backward, attention_forward
from ..ops.linear.matmul import matmul, matmul_backward
from ..pictures import INK, SOFT, save_picture
from .report import OURS, TIME, headline, ratio, ratio_title, timed

Row = dict[str, Any]
Calls = dict[str, Callable[[], Any]]
UNFUSED = "unfused"
LESS = f"less memory than {UNFUSED}"


class Shape(NamedTuple):
    """Sizes of queries, keys and values of a call, with equal numbers of heads."""

    name: str
    batch: int
    heads: int
    tokens: int
    dim: int

    def operations(self, causal: bool, backward: bool) -> float:
        """Return the operations of 2 matrix products forward, 5 backward; half if causal."""
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
MEMORY_LINE = "memory: peak of a forward pass; in backward rows, peak of both passes together"
GRID_LINE = "lengths: 512 to 2048 tokens for NumPy definitions, 512 to 32k tokens on a GPU"


def shape_rows(clock: Any, on_gpu: bool, peers: bool) -> Iterator[Row]:
    """Time every shape, causal and full, forward and backward.

    ``bytes`` is the peak memory of a forward pass, or of both passes including saved arrays.  The
    pool of CuPy (or tracemalloc) counts fused and unfused computations in the same way.
    """
    dtype = BFLOAT16 if on_gpu else FLOAT32
    for shape in (*SHAPES, *(DEVICE_GRID if on_gpu else HOST_GRID)):
        rng = (cupy() if on_gpu else np).random.default_rng(0)
        size = (shape.batch, shape.tokens, shape.heads, shape.dim)
        *qkv, dout = (rng.standard_normal(size, np.float32).astype(dtype) for _ in range(4))
        for causal, backward in itertools.product((True, False), (False, True)):
            calls, held_bytes = own_calls(tuple(qkv), dout, causal, backward)
            if peers:
                calls |= torch_calls(tuple(qkv), dout, causal, backward, on_gpu)
            seconds, runs = clock([*calls.values()])
            operations = shape.operations(causal, backward)
            yield shape._asdict() | {
                "dtype": dtype.name,
                "causal": causal,
                "direction": "backward" if backward else "forward",
                "runs": runs,
                "microseconds": dict(zip(calls, (s * 1e6 for s in seconds), strict=True)),
                "percentiles": dict(zip(calls, (s.percentiles for s in seconds), strict=True)),
                "tflop_per_s": operations / seconds[0] / 1e12,
                "bytes": held_bytes,
            }


def own_calls(
    arrays: tuple[Any, ...], dout: Any, causal: bool, backward: bool
) -> tuple[Calls, dict[str, int]]:
    """Return the fused and the unfused calls of the library by name, and their peak bytes.

    The unfused call is missing if its score matrices do not fit into memory.
    """
    calls: Calls = {}
    sizes: dict[str, int] = {}
    for name, (forward, gradients) in CHAINS.items():
        first = partial(forward, *arrays, causal=causal)

        def both(first: Any = first, gradients: Any = gradients) -> Any:
            return gradients(dout, *arrays, *first(), causal=causal)

        try:
            first()
            sizes[name] = held(both if backward else first)
            rest = (dout, *arrays, *first()) if backward else arrays
        except MemoryError:
            if name == OURS:
                raise
            continue
        calls[name] = partial(gradients if backward else forward, *rest, causal=causal)
    return calls, sizes


def unfused(q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Any, Any]:
    """Compute attention as a chain of ops; return (out, attention weights)."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = matmul(q, k.swapaxes(2, 3))
    if causal:
        scores += _hidden(scores.shape[2], scores.dtype, type(q) is not np.ndarray)
    weights = softmax(scores, scale=q.shape[3] ** -0.5)
    return matmul(weights, v).transpose(0, 2, 1, 3), weights


def unfused_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, weights: Any, *, causal: bool
) -> tuple[Any, ...]:
    """Return the gradients of q, k and v; masked pairs have weight 0, so no gradient."""
    dout, q, k, v = (x.transpose(0, 2, 1, 3) for x in (dout, q, k, v))
    dweights, dv = matmul_backward(dout, weights, v)
    dscores = softmax_backward(dweights, weights, scale=q.shape[3] ** -0.5)
    dq, dk = matmul_backward(dscores, q, k.swapaxes(2, 3))
    return tuple(x.transpose(0, 2, 1, 3) for x in (dq, dk.swapaxes(2, 3), dv))


CHAINS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    OURS: (attention_forward, attention_backward),
    UNFUSED: (unfused, unfused_backward),
}


@lru_cache(maxsize=1)
def _hidden(tokens: int, dtype: Any, on_gpu: bool) -> Any:
    """Return the causal mask of 0 and -inf, (tokens, tokens)."""
    mask = np.where(np.tri(tokens, dtype=bool), 0, -np.inf).astype(dtype)
    return cupy().asarray(mask) if on_gpu else mask


def torch_calls(
    arrays: tuple[Any, ...],
    dout: Any,
    causal: bool,
    backward: bool,
    on_gpu: bool,
) -> Calls:
    """Return the torch implementations of the call by name that run on this machine."""
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
        methods |= {"torch unfused": unfused_chain}

    def tried(method: Callable[[], Any]) -> Callable[[], Any] | None:
        try:
            result = method()
            gradient = partial(torch.autograd.grad, result, leaves, seed, retain_graph=True)
            call = gradient if backward else method
            call()
        except (RuntimeError, torch.OutOfMemoryError):  # the backend is missing or out of memory
            return None
        return call

    calls = {name: call for name, method in methods.items() if (call := tried(method)) is not None}
    if on_gpu:
        torch.cuda.empty_cache()  # free memory of failed calls for CuPy
    return calls


def held(call: Callable[[], Any]) -> int:
    """Return the peak memory of a call in bytes, including its results."""
    with memory_pool() as pool:
        before = pool.allocated
        pool.reset_peak()
        kept = call()
        del kept
        return pool.peak - before


def shape_table(rows: list[Row], on_gpu: bool) -> Any:
    """Return a table for a terminal, with the speedup of unsloth_cupy over each peer."""
    from rich.table import Table

    peers = [n for n in dict.fromkeys(n for row in rows for n in row["microseconds"]) if n != OURS]
    result = Table(title_justify="left", title="attention, batch x heads x tokens x dim")
    ratios_of = [ratio_title(peer) for peer in peers]
    folding = ("shape", TIME, LESS, *ratios_of)  # columns to wrap in a narrow terminal
    for title in ("shape", "", "", TIME, "TFLOP/s", "memory", LESS, *ratios_of):
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
        whole = row["bytes"].get(UNFUSED)
        less = f"{1 - row['bytes'][OURS] / whole:.0%}" if whole else "-"
        ratios = [ratio(times[p], times[OURS]) if p in times else "-" for p in peers]
        result.add_row(
            f"{row['name']} {sizes}" if row["name"] != before else "",
            "causal" if row["causal"] else "full",
            row["direction"],
            timed(times[OURS], row["percentiles"][OURS]),
            f"{row['tflop_per_s']:.3g}",
            memory,
            less,
            *ratios,
        )
        before = row["name"]
    result.caption = MEMORY_LINE if on_gpu else f"{MEMORY_LINE}\n{GRID_LINE}"
    result.caption_justify = "left"
    return result


def draw_shapes(path: Path, report: dict[str, Any]) -> None:
    """Plot TFLOP/s over tokens, with panels for forward, backward, causal and full."""
    from matplotlib.figure import Figure

    names = {shape.name for shape in SHAPES}
    grid = [row for row in report["attention"] if row["name"] not in names]
    everyone = dict.fromkeys(name for row in grid for name in row["microseconds"])
    colours = {name: f"C{number}" for number, name in enumerate(everyone)}  # the same in all panels
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
