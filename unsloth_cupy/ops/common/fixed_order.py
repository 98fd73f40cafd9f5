"""Matrix products in a fixed order: the bits of a row do not depend on the other rows.

    y[i, j] = (sum over the first 512 k) + (sum over the next 512) + ...

A BLAS chooses its kernel by the number of rows, so a row alone and the same row in a batch may
differ in their last bits.  Here the BLAS always multiplies 8 rows, padded with zeros, by 64
columns, over 512 terms: one form, small enough for OpenBLAS to use one thread.  Before the first
product of a form, a trial checks that this BLAS keeps the order.  On a GPU a kernel of the library
multiplies, with tiles of one height.
"""

import functools
from typing import Any, NoReturn

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.target import target_of
from ...errors import ConfigError
from . import threads
from .grouped import FORWARD, ROWS, groups_of, multiply

TILE, COLUMNS, DEPTH = 8, 64, 512  # 2**18 multiplications: up to this OpenBLAS uses one thread
WIDENED = 8 * 2**20  # bytes in float32 of the part of a 16-bit matrix that a GPU widens at a time


def fixed_product(a: Any, b: Any, out: Any, add: bool, factor: float) -> None:
    """Write ``factor * (a @ b)`` to out, or add it: see ``gemm``."""
    if out.ndim == 3:
        for i, part in enumerate(out):
            each = a[i] if a.ndim == 3 else a, b[i] if b.ndim == 3 else b
            fixed_product(*each, part, add, factor)
    elif target_of(a) is not None:
        _on_gpu(a, b, out, add, factor)
    elif isinstance(a, np.ndarray):
        _on_host(a, b, out, add, factor)
    else:
        refuse(f"there is no kernel for {a.dtype} of {type(a).__name__}")


def refuse(problem: str) -> NoReturn:
    """Raise the error of a call that has no fixed order."""
    raise ConfigError(f"invariant: {problem}; leave invariant=True out")


# ---- NumPy --------------------------------------------------------------------------------------
def _on_host(a: Array, b: Array, out: Array, add: bool, factor: float) -> None:
    """Write or add a product, some columns at a time."""
    wide = np.promote_types(np.promote_types(a.dtype, b.dtype), FLOAT32)
    (m, k), n = a.shape, b.shape[1]
    tiles = in_tiles(a[None].astype(wide, copy=False), TILE)[0]
    columns_apart = b.strides[0] == b.itemsize  # b is a transposed matrix, as weight.T
    order: Any = "F" if columns_apart else "C"
    for depth in {min(k, DEPTH), k % DEPTH} - {0}:
        check_form(depth, COLUMNS, order, wide)

    def compute(start: int) -> None:
        """Compute COLUMNS columns of the product, from ``start`` on."""
        part = slice(start, min(start + COLUMNS, n))
        width = part.stop - start
        right = np.zeros((k, COLUMNS), wide, order=order)
        right[:, :width] = b[:, part]
        total: Any = None
        for top in range(0, k, DEPTH):
            depth = slice(top, top + DEPTH)
            product = np.matmul(tiles[:, :, depth], right[depth])
            total = product if total is None else np.add(total, product, out=total)
        rows = total.reshape(-1, COLUMNS)[:m, :width]  # (m, width)
        if factor != 1:
            rows = rows * wide.type(factor)
        if add:
            rows = rows + out[:, part]
        with np.errstate(over="ignore"):  # values beyond float16 become infinity, as on a GPU
            out[:, part] = rows

    threads.each(compute, range(0, n, COLUMNS))


def in_tiles(rows: Array, height: int) -> Array:
    """Return (..., rows, columns) as (..., tiles, height, columns), padded with zeros: a copy."""
    *lead, count, columns = rows.shape
    tiles = -(-count // height)
    padded = np.zeros((*lead, tiles * height, columns), rows.dtype)
    padded[..., :count, :] = rows
    return padded.reshape(*lead, tiles, height, columns)  # (..., tiles, height, columns)


@functools.cache
def check_form(depth: int, columns: int, order: Any, dtype: np.dtype[Any]) -> None:
    """Raise a ConfigError unless the bits of a row of such a product depend on that row alone.

    The trial moves rows to other places of a tile, replaces the other rows by zeros, and computes
    half of the columns in another call, as threads of a BLAS may do.
    """
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((TILE, depth)).astype(dtype)
    right = np.asarray(draw.standard_normal((depth, columns)).astype(dtype), order=order)
    expected = np.matmul(rows[None], right)[0]
    moved = np.stack([np.roll(rows, turn, axis=0) for turn in range(TILE)])
    moved = np.matmul(moved, right)
    equal = all(np.array_equal(np.roll(y, -turn, axis=0), expected) for turn, y in enumerate(moved))
    alone = np.zeros((TILE, TILE, depth), dtype)  # tile i has row i alone
    alone[range(TILE), range(TILE)] = rows
    equal &= np.array_equal(np.matmul(alone, right)[range(TILE), range(TILE)], expected)
    half = columns // 2
    if half % 16 == 0:
        equal &= np.array_equal(np.matmul(rows[None], right[:, :half])[0], expected[:, :half])
    if not equal:
        refuse(
            f"the BLAS of this NumPy does not keep the order of sums: a row of {TILE} x {depth} @"
            f" {depth} x {columns} in {dtype} has other bits beside other rows; NumPy of PyPI"
            " (OpenBLAS) keeps it, or"
        )


# ---- GPU ----------------------------------------------------------------------------------------
def _on_gpu(a: Any, b: Any, out: Any, add: bool, factor: float) -> None:
    """Write or add a product by the kernel of grouped products, with one group.

    That kernel writes whole results of one dtype.  Other calls compute in float32, some columns of
    b at a time, so that no whole widened copy of b exists.
    """
    if a.dtype not in KERNEL_DTYPES or b.dtype not in KERNEL_DTYPES:
        refuse(f"no kernel multiplies {a.dtype} by {b.dtype}")
    if a.dtype == b.dtype == out.dtype and not add and factor == 1 and out.flags.c_contiguous:
        _by_kernel(a, b, out)
        return
    wide, (k, n) = a.astype(FLOAT32), b.shape
    step = max(COLUMNS, WIDENED // (k * FLOAT32.itemsize) // COLUMNS * COLUMNS)
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        product = empty((len(a), part.stop - start), FLOAT32, like=a)
        _by_kernel(wide, b[:, part].astype(FLOAT32), product)
        product *= np.float32(factor)
        if add:
            product += out[:, part]
        out[:, part] = product


def _by_kernel(a: Any, b: Any, out: Any) -> None:
    """Write a product to out; all three arrays have one dtype, and out is contiguous."""
    transposed = b.T.flags.c_contiguous
    offsets = np.arange(2, dtype=np.int32, like=a) * np.int32(len(a))
    groups = groups_of(a.dtype, offsets, 1, len(a))
    form, matrix = (FORWARD, b.T) if transposed else (ROWS, contiguous(b))
    multiply(form, contiguous(a), matrix, out, groups)
