"""Rows as integers of eight bits, and a scale a row.

absmax = max |x|        codes = round(x * (127 / absmax))        scales = absmax / 127

Dettmers and others, LLM.int8(), 2022; codes and absmax are those of bitsandbytes, to the bit.
"""

from functools import cache
from typing import Any

from ...core.arrays import empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...core.target import limits
from ..common.codes import INT8, quantized
from ..common.rows import spread
from ..common.strides import row_layout

HELD = 24  # registers of a thread that a row may fill: two blocks of 512 threads fit on an SM


def int8_quantize(x: Array) -> tuple[Array, Array]:
    """Round each row to integers -127 .. 127 times a scale: x is about ``codes * scales[:, None]``.

    Parameters
    ----------
    x : (*rows, columns) float

    Returns
    -------
    codes : (*rows, columns) int8
        x / scale, rounded to the nearest integer, ties to even.
    scales : (*rows,) float32
        The greatest size of a row, by 127; 0 for a row below 1.5e-36, whose codes are 0.  NaN for
        a row that holds NaN or infinity, and whose codes are 0: nothing hides it.

    Raises
    ------
    ShapeError, DTypeError
        x is not a float array with an axis.
    """
    codes, scales, _ = int8_quantize_forward(x)
    return codes, scales


@op(
    "x(*rows, columns) -> codes(*rows, columns): code, scales(*rows): stat, absmax(*rows): stat",
    no_gradient="its results are integers; int8_linear has a gradient",
)
def int8_quantize_forward(x: Array) -> tuple[Array, Array, Array]:
    """Return codes and scales as int8_quantize does, and the greatest size of each row."""
    return quantized(x)


@int8_quantize_forward.kernel(strided=("x",))
def _launch(x: Array) -> tuple[Array, Array, Array]:
    return launch_quantize(x)


def launch_quantize(
    x: Array, outliers: Array | None = None, threshold: float = 0.0
) -> tuple[Array, Array, Array]:
    """Return codes, scales and absmax by the kernel; beyond a threshold, as ``quantized``."""
    columns, rows = x.shape[-1], x.size // x.shape[-1]
    codes = empty(x.shape, INT8, like=x)
    scales, absmax = (empty(x.shape[:-1], FLOAT32, like=x) for _ in "sa")
    (own,), layout = row_layout(x)
    width = lanes(layout.alignment(columns), own)
    chosen = _constants(x.dtype, columns, width, outliers is not None, limits(x).clusters)
    blocks = -(-rows * chosen["ROW_THREADS"] // chosen["THREADS"]) * chosen["CLUSTER"]
    kernel = load("int8_quantize.cu", "int8_quantize", x, chosen)
    kernel[blocks, chosen["THREADS"]](
        own, codes, scales, absmax, outliers, rows, layout.inner, *layout.strides, threshold
    )
    return codes, scales, absmax


@cache
def _constants(dtype: Any, columns: int, lanes: int, outliers: bool, clusters: bool) -> Constants:
    """Return the constants of int8_quantize.cu, whose threads hold a row as it lies in memory.

    A thread takes 16 values of a row: two 16-byte accesses of 16-bit dtypes in flight, four of
    float32.  Where a block of 512 threads does not do, they take what HELD registers hold: 48
    values of 16 bits, of which two share one, or 24 of float32, or of rows read one by one.

        columns <= 512     a power of two of threads a row, several rows a block: no barrier
        columns <= 8192    the block takes a row; 512 threads take up to 24,576, or 12,288
        beyond, sm_90      2, 4 or 8 such blocks in a cluster; then 8 of 1024 threads, which take
                           393,216, or 196,608
        beyond, before     1024 threads: 49,152, or 24,576
        else               rows are read twice
    """
    held = HELD * lanes // max(1, lanes * dtype.itemsize // 4)
    wanted = max(min(512, -(-columns // 16)), -(-columns // held))
    row_threads, cluster = spread(wanted, clusters)
    threads = row_threads if row_threads > 32 else 128
    values = -(-columns // (cluster * row_threads * lanes)) * lanes
    return Constants(
        T=dtype,
        COLUMNS=columns,
        LANES=lanes,
        ROW_THREADS=row_threads,
        THREADS=threads,
        CLUSTER=cluster,
        RESIDENT=max(1, 1024 // threads),
        KEEP=values <= held,
        OUTLIERS=outliers,
    )
