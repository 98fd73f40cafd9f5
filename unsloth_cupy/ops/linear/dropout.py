"""Dropout of the rows that an adapter reads, and uniform noise, both drawn by ``philox``."""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import target_of
from ..common import philox
from .lora_merge import times

THREADS = 256  # of a block
DRAWN = 2**13  # random words that NumPy draws at a time


def dropped_rows(
    rows: Array,
    dropout: float,
    seed: int | None,
    key: Any = None,
    out: Array | None = None,
    numbers: Any = None,
) -> Array:
    """Return the rows after dropout, written to out; the same array if dropout is 0.

    ``key`` () int is a seed on the device, in place of ``seed``.  A kernel that reads it there can
    be part of a CUDA graph, which then has another seed in each launch.  ``numbers``, an array of
    integers, has the number by which each row draws; 0, 1, 2 and so on by default.
    """
    if not dropout:
        return rows
    if rows.size and rows.dtype in KERNEL_DTYPES and target_of(rows) is not None:
        return _launch(contiguous(rows), dropout, seed, key, out, contiguous(numbers))
    number = _numbers(numbers, 0, len(rows), rows)
    bits: Any = int(seed or 0) if key is None else np.asarray(key).astype(np.uint64)
    kept = philox.keep_mask(bits, dropout, (0 * number, 0 * number, number), 0, rows.shape[1])
    dropped = times(rows * kept, 1 / (1 - dropout))
    if out is None:
        return dropped
    out[...] = dropped
    return out


def _launch(rows: Any, dropout: float, seed: int | None, key: Any, out: Any, numbers: Any) -> Any:
    """Launch the kernel of dropout, and return its result."""
    result = empty(rows.shape, rows.dtype, like=rows) if out is None else out
    columns = rows.shape[1]
    width = lanes(columns, rows, result)
    tiles = -(-columns // (THREADS * width))
    bits = int(seed or 0)
    chosen = _constants(rows.dtype, _dtype(key), _dtype(numbers), width)
    kernel = load("dropout.cu", "dropout", rows, chosen)
    kernel[rows.shape[0] * tiles, THREADS](
        *(rows, result, key, numbers, columns, tiles, bits & philox.WORD),
        *(bits >> 32 & philox.WORD, round(dropout * 2**32), 1 / (1 - dropout)),
    )
    return result


def noise(x: Any, size: float, key: Any, sizes: Any = None, numbers: Any = None) -> Any:
    """Return noise of the shape (batch, tokens, columns) and dtype of x, uniform in -size .. size.

    ``key`` () int64 is the seed, and ``numbers`` has the numbers of the tokens: see
    ``dropped_rows``.  ``sizes`` (tokens,) float32 has a size for each token of a row, in place of
    ``size``.
    """
    _, tokens, columns = x.shape
    result = empty(x.shape, x.dtype, like=x)
    rows = result.reshape(-1, columns)  # (batch * tokens, columns), a view
    if x.size and x.dtype in KERNEL_DTYPES and target_of(x) is not None:
        width = lanes(columns, result)
        tiles = -(-columns // (THREADS * width))
        chosen = _constants(x.dtype, key.dtype, _dtype(numbers), width)
        kernel = load("dropout.cu", "noise", result, chosen)
        kernel[len(rows) * tiles, THREADS](
            *(result, key, contiguous(numbers), sizes, columns, tiles, tokens, size)
        )
        return result
    bits: Any = np.asarray(key).astype(np.uint64)
    step = max(1, DRAWN // columns)
    for top in range(0, len(rows), step):
        stop = min(top + step, len(rows))
        number = _numbers(numbers, top, stop, x)
        drawn = philox.row_words(bits, (0 * number, 0 * number, number), 0, columns)
        values = drawn.astype(FLOAT32) * FLOAT32.type(2**-31) - FLOAT32.type(1)  # in -1 .. 1
        token = np.arange(top, stop, like=x) % tokens
        values *= FLOAT32.type(size) if sizes is None else sizes[token, None]
        rows[top:stop] = values
    return result


def _numbers(numbers: Any, start: int, stop: int, like: Any) -> Any:
    """Return the numbers of the rows start .. stop - 1; philox uses 32 bits of them."""
    if numbers is None:
        return np.arange(start, stop, like=like)
    return numbers.reshape(-1)[start:stop].astype(np.uint32)


def _dtype(integers: Any) -> Any:
    """Return the dtype of an array of integers; int64 if there is no array."""
    return np.dtype("int64") if integers is None else integers.dtype


@cache
def _constants(dtype: Any, key: Any, number: Any, width: int) -> Constants:
    """Return the constants of dropout.cu."""
    return Constants(T=dtype, K=key, I=number, LANES=width, THREADS=THREADS)
