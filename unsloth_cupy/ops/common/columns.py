"""Sums of the rows of a matrix (column sums), in float32 and in a fixed order."""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import target_of


def row_sum(rows: Array, dtype: Any) -> Array:
    """Return the sum of all rows of a matrix, rounded once to ``dtype``."""
    # no kernel: float64, an array without a target, or an empty one
    if rows.dtype not in KERNEL_DTYPES or target_of(rows) is None or not rows.size:
        wide = np.promote_types(rows.dtype, FLOAT32)
        return rows.sum(axis=0, dtype=wide).astype(dtype, copy=False)
    total = empty(rows.shape[1:], dtype, like=rows)
    column_sums(contiguous(rows)[None], total, None)
    return total


def sum_in_order(rows: Array) -> Array:
    """Return ((rows[0] + rows[1]) + rows[2]) + ..., by a kernel, rounded once to their dtype."""
    total = empty(rows.shape[1:], rows.dtype, like=rows)
    column_sums(rows.reshape(1, len(rows), -1), total, None, warps=1)  # (1, rows, columns)
    return total


def column_sums(rows: Array, first: Array, second: Array | None, warps: int | None = None) -> None:
    """Write column sums of rows[0] to ``first``, and of rows[1] to ``second`` unless it is None.

    rows are (matrices, rows, columns).  The rows are divided among warps; with one warp they are
    added in their order.
    """
    matrices, count, columns = rows.shape
    chosen = _constants(rows.dtype, first.dtype, (first if second is None else second).dtype)
    kernel = load("column_sum.cu", "column_sum", rows, chosen)
    warps = warps or min(32, -(-count // 2))  # 32: a block of 1024 threads; 2 rows per warp or more
    kernel[(-(-columns // 32), matrices), 32 * warps](rows, first, second, count, columns)


@cache
def _constants(rows: Any, first: Any, second: Any) -> Constants:
    """Return the constants of column_sum.cu for the dtypes of its arrays."""
    return Constants(T=rows, W=first, B=second)
