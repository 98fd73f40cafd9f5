"""Dequantization of a part of a ternary weight.

w[r, c] = codes[row + r, column + c] * scale
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ShapeError
from ..common.int8_codes import INT8
from ..common.no_kernel import no_kernel
from ._planes import WORD, dense, row_bytes
from .weight import on_gpu

THREADS = 256
EIGHT = 8  # columns of a byte
CHUNK = 16  # columns of 16 bytes of codes


def dense_part(
    planes: Any, scale: Any, group: int, rows: slice, columns: slice, dtype: np.dtype[Any]
) -> Array:
    """Return a part of the dense weight as a new array, by the kernel if it can run."""
    has_kernel = on_gpu(planes) and columns.start % EIGHT == 0 and dtype in KERNEL_DTYPES
    if not has_kernel:
        return dense(planes, scale, group, rows, columns, dtype)
    shape = rows.stop - rows.start, columns.stop - columns.start
    w = empty(shape, dtype, like=planes)
    return ternary_dense_(w, planes, scale, row=rows.start, column=columns.start, group=group)


@op(
    "w(rows, columns), planes(outputs, signs, bytes): byte, scale(outputs|1, groups): table"
    " -> dense(rows, columns)",
    widen=False,
    no_gradient="it changes an array, and the weight is frozen",
    traffic=lambda a: a["w"].nbytes + a["w"].size // 4,
)
def ternary_dense_(
    w: Array, planes: Array, scale: Array, *, row: int = 0, column: int = 0, group: int = WORD
) -> Array:
    """Write the part of a ternary weight from ``row`` and ``column`` on to w."""
    rows, columns = slice(row, row + len(w)), slice(column, column + w.shape[1])
    w[...] = dense(planes, scale, group, rows, columns, w.dtype)
    return w


NOT_PACKED = "w, planes or scale are not contiguous"


@ternary_dense_.require
def _check(
    call: str, w: Array, planes: Array, scale: Array, row: int, column: int, group: int
) -> None:
    """Raise ShapeError unless planes and scale contain the part of the weight."""
    (rows, columns), (outputs, signs, plane_bytes) = w.shape, planes.shape
    groups = scale.shape[-1]
    scaled = plane_bytes * EIGHT if groups == 1 else groups * group
    if signs != 2 or row + rows > outputs or column + columns > min(plane_bytes * EIGHT, scaled):
        problem = f"{call}: planes {planes.shape} and scale {scale.shape} do not hold"
        problem += f" {rows} rows from {row} and {columns} columns from {column} on"
        expected = (row + rows, 2, row_bytes(column + columns))
        raise ShapeError(
            f"{problem}; pass the arrays of a whole weight", expected=expected, actual=planes.shape
        )


@ternary_dense_.kernel
def _launch(w: Array, planes: Array, scale: Array, row: int, column: int, group: int) -> Any:
    """Write the part of the weight to w by the kernel, and return w."""
    columns, plane_bytes, groups = w.shape[1], planes.shape[2], scale.shape[-1]
    packed = w.flags.c_contiguous and planes.flags.c_contiguous and scale.flags.c_contiguous
    if not packed or column % EIGHT or row_bytes(column + columns) > plane_bytes:
        part = f"{columns} columns from {column} on"
        return no_kernel(f"{part} are not whole bytes of the planes" if packed else NOT_PACKED)
    # a thread writes the 8 values of a byte, in accesses of 16 bytes; or value by value
    whole = columns % EIGHT == 0 and lanes(columns, w) * w.dtype.itemsize == 16
    chosen = _constants(w.dtype, scale.dtype, EIGHT if whole else 1, groups > 1)
    eighths = w.shape[0] * -(-columns // EIGHT)
    kernel = load("ternary_dense.cu", "ternary_dense_", w, chosen)
    kernel[-(-eighths // THREADS), THREADS](
        *(w, planes, scale, eighths, columns, row, column, plane_bytes, group, groups),
        int(scale.size > groups),
    )
    return w


def launch_codes(planes: Array, columns: int) -> Array:
    """Return the codes of a weight, (outputs, columns) int8; columns are a multiple of CHUNK."""
    outputs, _, plane_bytes = planes.shape
    codes = empty((outputs, columns), INT8, like=planes)
    kernel = load(
        "ternary_dense.cu", "ternary_codes", planes, _constants(FLOAT32, FLOAT32, 1, False)
    )
    chunks = columns // CHUNK
    blocks = -(-chunks // THREADS)
    kernel[outputs * blocks, THREADS](planes, codes, chunks, blocks, plane_bytes)
    return codes


@cache
def _constants(dtype: Any, scale: Any, lanes: int, grouped: bool) -> Constants:
    """Return the constants of ternary_dense.cu."""
    return Constants(T=dtype, S=scale, LANES=lanes, GROUPED=grouped)
