"""The launch of the kernel that quantizes rows to int8."""

from functools import cache
from typing import Any

from ...core.arrays import empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ..common.int8_codes import INT8
from ..common.rows import held_rows
from ..common.strides import row_layout

HELD = 24  # registers of a thread for its part of a row: two blocks of 512 threads fit on an SM


def launch_quantize(
    x: Array, outliers: Array | None = None, threshold: float = 0.0, least: float = 0.0
) -> tuple[Array, Array, Array]:
    """Return codes, scales and absmax of rows, computed by the kernel; see ``quantized``.

    With ``outliers``, absmax ignores values of ``threshold`` or more.  ``least`` is the lower bound
    of absmax.
    """
    columns, rows = x.shape[-1], x.size // x.shape[-1]
    codes = empty(x.shape, INT8, like=x)
    scales, absmax = (empty(x.shape[:-1], FLOAT32, like=x) for _ in "sa")
    (view,), layout = row_layout(x)
    width = lanes(layout.alignment(columns), view)
    chosen = _constants(x.dtype, columns, width, outliers is not None, limits(x).clusters)
    blocks = -(-rows * chosen["ROW_THREADS"] // chosen["THREADS"]) * chosen["CLUSTER"]
    kernel = load("int8_quantize.cu", "int8_quantize", x, chosen)
    kernel[blocks, chosen["THREADS"]](
        view, codes, scales, absmax, outliers, rows, layout.inner, *layout.strides, threshold, least
    )
    return codes, scales, absmax


@cache
def _constants(dtype: Any, columns: int, lanes: int, outliers: bool, clusters: bool) -> Constants:
    """Return the constants of int8_quantize.cu, whose threads hold a row in its own dtype.

    HELD registers hold 48 values of 16 bits, two per register; or 24 values in float32, or of rows
    that are read value by value.  So rows of up to 393,216 columns, or 196,608, are read once;
    before sm_90 up to 49,152, or 24,576.
    """
    most = HELD * lanes // max(1, lanes * dtype.itemsize // 4)
    return Constants(T=dtype, **held_rows(columns, most, lanes, clusters), OUTLIERS=outliers)
