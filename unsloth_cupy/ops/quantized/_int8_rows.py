"""How rows are rounded to integers of eight bits by a kernel."""

from functools import cache
from typing import Any

from ...core.arrays import empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ..common.codes import INT8
from ..common.rows import held_rows
from ..common.strides import row_layout

HELD = 24  # registers of a thread that a row may fill: two blocks of 512 threads fit on an SM


def launch_quantize(
    x: Array, outliers: Array | None = None, threshold: float = 0.0, least: float = 0.0
) -> tuple[Array, Array, Array]:
    """Return codes, scales and absmax by the kernel; beyond a threshold, as ``quantized``.

    absmax counts as ``least`` where it is less.
    """
    columns, rows = x.shape[-1], x.size // x.shape[-1]
    codes = empty(x.shape, INT8, like=x)
    scales, absmax = (empty(x.shape[:-1], FLOAT32, like=x) for _ in "sa")
    (own,), layout = row_layout(x)
    width = lanes(layout.alignment(columns), own)
    chosen = _constants(x.dtype, columns, width, outliers is not None, limits(x).clusters)
    blocks = -(-rows * chosen["ROW_THREADS"] // chosen["THREADS"]) * chosen["CLUSTER"]
    kernel = load("int8_quantize.cu", "int8_quantize", x, chosen)
    kernel[blocks, chosen["THREADS"]](
        own, codes, scales, absmax, outliers, rows, layout.inner, *layout.strides, threshold, least
    )
    return codes, scales, absmax


@cache
def _constants(dtype: Any, columns: int, lanes: int, outliers: bool, clusters: bool) -> Constants:
    """Return the constants of int8_quantize.cu, whose threads hold a row as it lies in memory.

    HELD registers hold 48 values of 16 bits, of which two share one, or 24 of float32, or of rows
    read one by one: rows are read once up to 393,216 columns, or 196,608; before sm_90 up to
    49,152, or 24,576.
    """
    most = HELD * lanes // max(1, lanes * dtype.itemsize // 4)
    return Constants(T=dtype, **held_rows(columns, most, lanes, clusters), OUTLIERS=outliers)
