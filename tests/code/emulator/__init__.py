"""Tests of the CUDA emulator: primitives against arithmetic, planted bugs, deleted statements."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ...machines.cuda_on_cpu import Emulator, TensorMap
from ..hardware.primitives import PRIMITIVES, Tile, launch

KERNELS = Path(__file__).parent / "kernels"
RNG = np.random.default_rng(0)


def kernel(
    file: str,
    name: str,
    *,
    bugs: Sequence[str] = (),
    folder: Path = KERNELS,
    check: bool = True,
    seed: int = 0,
    kind: Callable[..., Emulator] = Emulator,
) -> Any:
    """Return a kernel of this folder as launch(grid, block, args, shared)."""
    lines = [f"#define BUG_{bug}" for bug in bugs]
    source = "\n".join([*lines, '#include "common/device.cuh"', f'#include "{file}"', ""])
    return kind(check=check, seed=seed, folders=(folder,)).compile(name, source)


def bfloat16(shape: tuple[int, ...]) -> np.ndarray:
    return RNG.standard_normal(shape).astype(ml_dtypes.bfloat16)


def flash(tokens: int = 128, **how: Any) -> float:
    """Run flash.cu; return its largest error."""
    batch, heads, dim = 1, 2, 64
    q, k, v = (bfloat16((batch, heads, tokens, dim)) for _ in range(3))
    out, lse = np.zeros_like(q), np.zeros((batch, heads, tokens), np.float32)
    scale = dim**-0.5
    args = (q, k, v, out, lse, np.int32(tokens), np.float32(scale * np.log2(np.e)))
    grid = (-(-tokens // 64), heads, batch)
    kernel("flash.cu", "flash_forward", **how)(grid, (128,), args, 5 * 64 * 64 * 2)
    q64, k64, v64 = (a.astype(np.float64) for a in (q, k, v))
    scores = q64 @ k64.swapaxes(-1, -2) * scale
    scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    errors = out.astype(np.float64) - weights / total @ v64, lse - (top + np.log(total))[..., 0]
    return max(float(np.abs(error).max()) for error in errors)


def gemm(
    rows: int = 128, columns: int = 256, inner: int = 320, nn: bool = False, **how: Any
) -> float:
    """Run gemm.cu; return its largest error over its largest value."""
    a, b = bfloat16((rows, inner)), bfloat16((inner, columns) if nn else (columns, inner))
    c = np.zeros((rows, columns), ml_dtypes.bfloat16)
    maps = (
        TensorMap(a, (64, 64)),
        TensorMap(b, (64, 64) if nn else (64, 128)),
        TensorMap(c, (64, 64)),
    )
    grid = (-(-columns // 128), -(-rows // 64))
    launch = kernel("gemm.cu", "gemm_nn" if nn else "gemm_tn", **how)
    launch(grid, (256,), (*maps, np.int32(inner)), 3 * 24576 + 16384)
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    exact = a64 @ (b64 if nn else b64.T)
    return float(np.abs(c.astype(np.float64) - exact).max() / np.abs(exact).max())


def split_k(rows: int = 16, columns: int = 3000, last: bool = False, **how: Any) -> float:
    """Run split_k.cu; return its largest error."""
    a = RNG.standard_normal((rows, columns)).astype(np.float32)
    x = RNG.standard_normal(columns).astype(np.float32)
    y, parts = np.zeros(rows, np.float32), 8
    work = (np.zeros((rows, parts), np.float32), np.zeros(rows, np.uint32)) if last else ()
    launch = kernel("split_k.cu", "split_k_last_block" if last else "split_k_atomic", **how)
    args = (a, x, y, *work, np.int32(rows), np.int32(columns))
    launch((rows, parts), (128,), args, 512 if last else 0)
    return float(np.abs(y - a.astype(np.float64) @ x).max())


def emulated(arg: Any) -> Any:
    """Return an argument of a primitive's launch as the emulator takes it."""
    if not isinstance(arg, Tile):
        return arg
    number = ml_dtypes.bfloat16 if arg.number == "bfloat16" else arg.array.dtype
    return TensorMap(arg.array.view(number), arg.box, arg.swizzle)


def primitive(name: str, **how: Any) -> int:
    """Run a primitive; return how many of its words are wrong."""
    case = launch(name)
    args = [emulated(arg) for arg in case.args]
    kernel(case.file, case.kernel, **how)((case.grid,), (case.block,), args, case.shared)
    wrong = 0
    for position, expected in case.expected.items():
        actual = getattr(args[position], "array", args[position]).view(expected.dtype)
        bits = np.dtype(f"u{expected.itemsize}")
        wrong += int((actual.view(bits) != expected.view(bits)).sum())
    return wrong


def primitives(file: str = "cluster.cu", **how: Any) -> float:
    """Run every primitive of a file; return how many words are wrong."""
    return sum(primitive(name, **how) for name in PRIMITIVES if launch(name).file == file)


# The largest errors: half a step of bfloat16; sums of float32; less than one wrong word
LIMITS = {flash: 2e-2, gemm: 1e-2, split_k: 1e-3, primitives: 0.5}
