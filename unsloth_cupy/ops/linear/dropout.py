"""Dropout of the rows that an adapter reads: by the kernel, or as ``philox`` defines it."""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import target_of
from ..common import philox
from .lora_merge import times

THREADS = 256  # of a block


def dropped_rows(
    rows: Array, dropout: float, seed: int | None, key: Any = None, out: Array | None = None
) -> Array:
    """Return the rows after dropout, written to out; the same array if dropout is 0.

    ``key`` () int is the seed where a device holds it.  A kernel that reads it there can be part
    of a CUDA graph, which draws by another seed in each launch.
    """
    if not dropout:
        return rows
    if rows.size and rows.dtype in KERNEL_DTYPES and target_of(rows) is not None:
        return _launch(contiguous(rows), dropout, seed, key, out)
    number = np.arange(len(rows), like=rows)
    bits: Any = int(seed or 0) if key is None else np.asarray(key).astype(np.uint64)
    kept = philox.keep_mask(bits, dropout, (0 * number, 0 * number, number), 0, rows.shape[1])
    dropped = times(rows * kept, 1 / (1 - dropout))
    if out is None:
        return dropped
    out[...] = dropped
    return out


def _launch(rows: Any, dropout: float, seed: int | None, key: Any, out: Any) -> Any:
    """Launch the kernel."""
    result = empty(rows.shape, rows.dtype, like=rows) if out is None else out
    columns = rows.shape[1]
    width = lanes(columns, rows, result)
    tiles = -(-columns // (THREADS * width))
    bits = int(seed or 0)
    chosen = _constants(rows.dtype, np.dtype("int64") if key is None else key.dtype, width)
    kernel = load("dropout.cu", "dropout", rows, chosen)
    kernel[rows.shape[0] * tiles, THREADS](
        *(rows, result, key, columns, tiles, bits & philox.WORD, bits >> 32 & philox.WORD),
        *(round(dropout * 2**32), 1 / (1 - dropout)),
    )
    return result


@cache
def _constants(dtype: Any, key: Any, width: int) -> Constants:
    """Return the constants of dropout.cu."""
    return Constants(T=dtype, K=key, LANES=width, THREADS=THREADS)
