"""What products ask of a weight of eight bits: parts of it as floats, and few rows by it.

w = codes * absmax / 127        y = x w^T, or y + x w^T
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import lanes, packed
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ..common.gemm import gemm
from ..common.no_kernel import no_kernel
from ..common.strides import row_layout

MOST_ROWS = 16  # that int8_few_rows_ takes
THREADS = 256  # of a block that dequantizes


def scales_of(absmax: Array, dtype: Any) -> Array:
    """Return the scale of each row, at least in float32."""
    kind = np.promote_types(dtype, FLOAT32).type
    return absmax.astype(kind) / kind(127)


@op(
    "w(rows, inputs), codes(rows, inputs): code, absmax(rows): table -> dense(rows, inputs)",
    widen=False,
    no_gradient="a quantized weight is frozen",
    traffic=lambda a: a["w"].nbytes + a["codes"].nbytes,
)
def int8_dequantize_(w: Array, codes: Array, absmax: Array) -> Array:
    """Write ``codes * absmax / 127`` to w, each value rounded once, and return it."""
    dense = codes * scales_of(absmax, w.dtype)[:, None]
    with np.errstate(over="ignore"):  # what float16 cannot hold is infinite, as on a GPU
        w[...] = dense
    return w


@int8_dequantize_.kernel
def launch_dequantize(w: Array, codes: Array, absmax: Array) -> Any:
    """Write ``codes * absmax / 127`` to w by the kernel, and return it."""
    if not w.flags.c_contiguous:
        return no_kernel("w is not packed")
    rows, inputs = w.shape
    (own_codes, own), layout = row_layout(codes, w)
    if not own.flags.c_contiguous:
        return no_kernel("absmax is not packed")
    width = lanes(layout.alignment(inputs), own_codes, own)
    chosen = _dequantize_constants(w.dtype, absmax.dtype, width)
    tiles = -(-inputs // (THREADS * width))
    walk = {"layouts": layout.struct(), "columns": inputs, "tiles": tiles}
    kernel = load("int8_dequantize.cu", "int8_dequantize_", w, chosen)
    kernel[rows * tiles, THREADS](own_codes, packed(absmax), own, walk)
    return w


@cache
def _dequantize_constants(dtype: Any, absmax: Any, lanes: int) -> Constants:
    return Constants(T=dtype, A=absmax, LANES=lanes, THREADS=THREADS)


@op(
    "x(few, inputs), codes(outputs, inputs): code, absmax(outputs): table,"
    " y(few, outputs): param -> product(few, outputs): param = y",
    widen=False,
    no_gradient="linear, whose product it is, has one",
    traffic=lambda a: a["codes"].nbytes + a["x"].nbytes + a["y"].nbytes,
    operations=lambda a: 2 * a["x"].size * a["codes"].shape[0],
)
def int8_few_rows_(x: Array, codes: Array, absmax: Array, y: Array, *, add: bool = False) -> Array:
    """Write the product of x, of few rows, and the weight to y, or add it in float32; return y."""
    wide = np.promote_types(x.dtype, FLOAT32)
    product = gemm(x.astype(wide), codes.astype(wide).T) * scales_of(absmax, wide)
    with np.errstate(over="ignore"):
        y[...] = y + product if add else product
    return y


@int8_few_rows_.kernel
def _launch_few_rows(x: Array, codes: Array, absmax: Array, y: Array, add: bool) -> Any:
    (rows, inputs), outputs = x.shape, codes.shape[0]
    if rows > MOST_ROWS or not (y.flags.c_contiguous and codes.flags.c_contiguous):
        many = f"{rows} rows are more than {MOST_ROWS}"
        return no_kernel(many if rows > MOST_ROWS else "y or codes are not packed")
    x, absmax = packed(x), packed(absmax)
    width, of_x = min(lanes(inputs, codes), 16 if rows <= 4 else 8), lanes(inputs, x)
    part = min(width, 8 if of_x * x.dtype.itemsize == 16 else of_x)
    dtypes = x.dtype, y.dtype, absmax.dtype
    chosen = _few_rows_constants(dtypes, 1 << (rows - 1).bit_length(), width, part, add)
    kernel = load("int8_few_rows.cu", "int8_few_rows_", x, chosen)
    blocks = -(-outputs // chosen["OUTPUTS"])
    kernel[blocks, 128](x, codes, absmax, y, rows, outputs, inputs)
    return y


@cache
def _few_rows_constants(
    dtypes: tuple[Any, ...], rows: int, lanes: int, part: int, add: bool
) -> Constants:
    """Return the constants of int8_few_rows.cu.

    A thread has OUTPUTS accesses under way, twice.  Outputs share a load of x: four of up to four
    rows, 16 codes of each at a time; sums of more rows fill the registers sooner: two, and 8 codes.
    """
    x, y, absmax = dtypes
    outputs, sizes = 4 if rows <= 4 else 2, {"LANES": lanes, "PART": part}
    return Constants(T=x, U=y, A=absmax, ROWS=rows, OUTPUTS=outputs, **sizes, ADD=add)
