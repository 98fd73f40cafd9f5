"""Ops for products with an 8-bit weight: dequantize a part, and multiply a few rows.

w = codes * absmax / 127        y = x w^T, or y + x w^T

With ``block``, each block of that many values of a row has a scale, and w = codes * absmax.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...core.target import limits
from ...errors import ShapeError
from ..common.gemm import gemm
from ..common.no_kernel import no_kernel
from ..common.strides import row_layout

MOST_ROWS = 16  # rows of x in int8_few_rows_; of more, cuBLAS multiplies dequantized chunks
RESIDENT = 2  # blocks of an SM in int8_few_rows_ on tensor cores; they compute all outputs
THREADS = 256  # threads of a block of the dequantizing kernel


def scales_of(absmax: Array, dtype: Any) -> Array:
    """Return the scale of each row, ``absmax / 127``, in float32 or a wider dtype."""
    kind = np.promote_types(dtype, FLOAT32).type
    return absmax.astype(kind) / kind(127)


def _dense(codes: Array, absmax: Array, dtype: Any, block: int) -> Array:
    """Return the weight in float32 or a wider dtype."""
    if not block:
        return codes * scales_of(absmax, dtype)[:, None]
    scales = absmax.astype(np.promote_types(dtype, FLOAT32))
    return (codes.reshape(-1, block) * scales[:, None]).reshape(codes.shape)  # (rows, inputs)


def _check(call: str, codes: Array, absmax: Array, block: int) -> None:
    """Raise ShapeError unless each row, or each block of a row, has a scale."""
    rows, inputs = codes.shape
    expected = (rows * (inputs // block) if block else rows,)
    if block < 0 or block % 16 or (block and inputs % block) or absmax.shape != expected:
        problem = f"{call}: {absmax.size} scales of {rows} rows of {inputs}, blocks of {block}"
        cure = "a row has one, or one for each block of a multiple of 16 values"
        raise ShapeError(f"{problem}; {cure}", expected=expected, actual=tuple(absmax.shape))


@op(
    "w(rows, inputs), codes(rows, inputs): code, absmax(scales): scale -> dense(rows, inputs)",
    widen=False,
    no_gradient="a quantized weight is frozen",
    traffic=lambda a: a["w"].nbytes + a["codes"].nbytes,
)
def int8_dequantize_(w: Array, codes: Array, absmax: Array, *, block: int = 0) -> Array:
    """Write ``codes * absmax / 127`` to w, each value rounded once, and return w."""
    dense = _dense(codes, absmax, w.dtype, block)
    with np.errstate(over="ignore"):  # values beyond float16 become infinity, as on a GPU
        w[...] = dense
    return w


@int8_dequantize_.require
def _check_dequantize(call: str, w: Array, codes: Array, absmax: Array, block: int) -> None:
    """Raise ShapeError unless each row, or each block of a row, has a scale."""
    _check(call, codes, absmax, block)


@int8_dequantize_.kernel
def launch_dequantize(w: Array, codes: Array, absmax: Array, block: int) -> Any:
    """Write ``codes * absmax / 127`` to w by the kernel, and return w."""
    if not w.flags.c_contiguous:
        return no_kernel("w is not contiguous")
    rows, inputs = w.shape
    (code_view, w_view), layout = row_layout(codes, w)  # may copy codes; w is contiguous
    width = lanes(layout.alignment(inputs), code_view, w_view)
    chosen = _dequantize_constants(w.dtype, absmax.dtype, width, block)
    tiles = -(-inputs // (THREADS * width))
    walk = {"layouts": layout.struct(), "columns": inputs, "tiles": tiles}
    kernel = load("int8_dequantize.cu", "int8_dequantize_", w, chosen)
    kernel[rows * tiles, THREADS](code_view, contiguous(absmax), w_view, walk)
    return w


@cache
def _dequantize_constants(dtype: Any, absmax: Any, lanes: int, block: int) -> Constants:
    """Return the constants of int8_dequantize.cu."""
    return Constants(T=dtype, A=absmax, LANES=lanes, BLOCK=block, THREADS=THREADS)


@op(
    "x(few, inputs), codes(outputs, inputs): code, absmax(scales): scale,"
    " y(few, outputs): param -> product(few, outputs): param = y",
    widen=False,
    no_gradient="linear, which calls it, has one",
    traffic=lambda a: a["codes"].nbytes + a["x"].nbytes + a["y"].nbytes,
    operations=lambda a: 2 * a["x"].size * a["codes"].shape[0],
)
def int8_few_rows_(
    x: Array, codes: Array, absmax: Array, y: Array, *, block: int = 0, add: bool = False
) -> Array:
    """Write the product of a few rows x and the weight to y, or add it in float32; return y."""
    wide = np.promote_types(x.dtype, FLOAT32)
    if block:
        product = gemm(x.astype(wide), _dense(codes, absmax, wide, block).T)
    else:
        product = gemm(x.astype(wide), codes.astype(wide).T) * scales_of(absmax, wide)
    with np.errstate(over="ignore"):
        y[...] = y + product if add else product
    return y


@int8_few_rows_.require
def _check_few_rows(
    call: str, x: Array, codes: Array, absmax: Array, y: Array, block: int, add: bool
) -> None:
    """Raise ShapeError unless each row, or each block of a row, has a scale."""
    _check(call, codes, absmax, block)


@int8_few_rows_.kernel
def _launch_few_rows(x: Array, codes: Array, absmax: Array, y: Array, block: int, add: bool) -> Any:
    """Write or add the product to y by the kernel, and return y."""
    (rows, inputs), outputs = x.shape, codes.shape[0]
    if rows > MOST_ROWS or not (y.flags.c_contiguous and codes.flags.c_contiguous):
        many = f"{rows} rows are more than {MOST_ROWS}"
        return no_kernel(many if rows > MOST_ROWS else "y or codes are not contiguous")
    x, absmax = contiguous(x), contiguous(absmax)
    width, x_bytes = lanes(inputs, codes), lanes(inputs, x) * x.dtype.itemsize
    dtypes = x.dtype, y.dtype, absmax.dtype
    chosen = _few_rows_constants(dtypes, rows, width, x_bytes, block, add)
    kernel = load("int8_few_rows.cu", "int8_few_rows_", x, chosen)
    blocks, threads = -(-outputs // chosen["OUTPUTS"]), 128
    if chosen["TENSOR"]:
        blocks, threads = min(blocks, limits(x).processors * RESIDENT), 256
    kernel[blocks, threads](x, codes, absmax, y, rows, outputs, inputs)
    return y


@cache
def _few_rows_constants(
    dtypes: tuple[Any, ...], rows: int, width: int, x_bytes: int, block: int, add: bool
) -> Constants:
    """Return the constants of int8_few_rows.cu.

    ``width`` are the codes, ``x_bytes`` the bytes of x in one access.  Tensor cores multiply 16
    outputs by 8 or 16 rows.  Without them, a thread has twice OUTPUTS accesses in flight, and
    outputs share a load of x.  Up to four rows of x: four outputs, with 16 codes each at a time, or
    8 where blocks have scales.  More rows need more registers for their sums: two outputs, and 8
    codes.
    """
    x, y, absmax = dtypes
    # tensor cores: x of 16 bits, and accesses of 16 bytes
    if x.itemsize == 2 and width >= 16 and x_bytes == 16:
        sizes = {"ROWS": 8 if rows <= 8 else 16, "OUTPUTS": 16, "LANES": 16, "PART": 16}
        return Constants(T=x, U=y, A=absmax, TENSOR=True, **sizes, BLOCK=block, ADD=add)
    width = min(width, 16 if rows <= 4 and not block else 8)
    part = min(width, 8 if x_bytes == 16 else x_bytes // x.itemsize)
    power, outputs = 1 << (rows - 1).bit_length(), 4 if rows <= 4 else 2
    sizes = {"ROWS": power, "OUTPUTS": outputs, "LANES": width, "PART": part}
    return Constants(T=x, U=y, A=absmax, TENSOR=False, **sizes, BLOCK=block, ADD=add)
