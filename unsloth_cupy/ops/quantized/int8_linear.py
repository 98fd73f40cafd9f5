"""A linear layer in int8: rows of x are quantized, as rows of the weight are.

y = x_codes codes^T * scales * absmax / 127        exact sums of integers

with a threshold     + x[:, c] codes[:, c]^T * absmax / 127 over the outlier columns c, in floats;
                     x_codes are 0 there, and outliers do not count for the scales

Dettmers and others, LLM.int8(), 2022.
"""

import math
from typing import Any, cast

import numpy as np

from ...core.arrays import contiguous, empty, native
from ...core.call import check_options
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import Traced, op
from ...errors import ConfigError, DTypeError, ShapeError, naming
from ..common.gemm import gemm
from ..common.int8_codes import quantized
from ..linear.linear import linear
from ._int8_rows import launch_quantize
from ._int8_tiles import launch_product, outlier_constants
from .int8 import Int8
from .int8_product import scales_of

EXACT = 1024  # products of two codes with an exact sum in float32: 1024 * 127^2 < 2^24
PART = 4096  # rows of the weight that are converted to floats at a time
MOST_INPUTS = (2**31 - 1) // 127**2  # a sum of more products may overflow 32 bits


@naming("int8_linear", "linear")
def int8_linear(x: Array, weight: Int8, *, threshold: float | None = None) -> Array:
    """Multiply each row by an 8-bit weight, in 8-bit integers: LLM.int8().

    Each row of x is rounded to integers -127 .. 127 times a scale, sums of products of integers
    are exact, and y is rounded once.  The gradient of x ignores the rounding of x:
    ``dx = dy @ weight.dequantize()``.  ``linear(x, weight)`` does not round x.

    Parameters
    ----------
    x : (*rows, inputs) float
        Rows; any number of leading axes.
    weight : Int8
        The result of ``int8_weight``.
    threshold : float, optional
        Columns of x with an absolute value of threshold or more are not rounded; they are
        multiplied by the weight in float32.  LLM.int8() uses 6.0; by default all columns are
        rounded.

    Returns
    -------
    y : (*rows, outputs) float
        NaN in rows where x has NaN or, without a threshold, infinity.

    Raises
    ------
    ConfigError
        threshold is not above 0.
    ShapeError, DTypeError
        weight is not an Int8, or x does not fit it, or has more than 133,144 inputs: their sum may
        overflow 32 bits.

    Notes
    -----
    The formula is bitsandbytes', which rounds x to float16 before it quantizes x: for x in float32
    its results differ by about 0.2 % of the largest result, as other integers are chosen for x.
    """
    codes: Any = weight
    if not isinstance(codes, Int8):
        problem = f"weight is {type(weight).__name__}, not an Int8"
        raise DTypeError(f"int8_linear: {problem}; pass int8_weight(weight), or call linear")
    if native([x]) or isinstance(x, Traced):
        return int8_linear_forward(x, codes.codes, codes.absmax, threshold=threshold)
    return linear(x, cast(Any, Rounding(codes, threshold)))


@op(
    "x(*rows, inputs), codes(outputs, inputs): code, absmax(outputs): table -> y(*rows, outputs)",
    operations=lambda a: 2 * a["x"].size * a["codes"].shape[0],
    integers=True,  # products of codes
)
def int8_linear_forward(
    x: Array, codes: Array, absmax: Array, *, threshold: float | None = None
) -> Array:
    """Return y of int8_linear, from the arrays of an Int8."""
    outputs, inputs = codes.shape
    rows = x.reshape(math.prod(x.shape[:-1]), inputs)  # (all rows, inputs)
    size: Any = np.abs(rows)
    outliers: Any = None
    if threshold is not None:
        beyond = size >= threshold
        outliers = beyond.any(axis=0)
        size = np.where(beyond, x.dtype.type(0), size)
    x_codes, scales, _ = quantized(rows, size, outliers)
    y = _exact(x_codes, codes, x.dtype) * scales[:, None]
    if threshold is not None:
        array: Any = x
        # on a GPU all columns, most of them 0: the host does not wait for the list of outliers
        columns: Any = np.flatnonzero(outliers) if isinstance(array, np.ndarray) else slice(None)
        y += gemm(np.where(outliers, rows, 0)[:, columns], codes[:, columns].astype(x.dtype).T)
    y *= scales_of(absmax, x.dtype)
    return y.reshape(*x.shape[:-1], outputs)


@check_options
class Rounding(Int8):
    """An Int8 whose products round x as ``int8_linear`` does, in all ops that accept a weight."""

    CALL = "int8_linear"

    def __init__(self, weight: Int8, threshold: float | None = None) -> None:
        super().__init__(weight.codes, weight.absmax, dtype=weight.dtype)
        self.threshold = threshold
        _check_threshold(threshold)

    def product_transposed(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W.T`` to out, or add it; a is rounded to int8."""
        y = int8_linear_forward(a, self.codes, self.absmax, threshold=self.threshold)
        out[...] = out + y if add else y


def _exact(a: Array, b: Array, dtype: Any) -> Array:
    """Return ``a @ b.T`` of codes: exact int32 sums of parts in float32, rounded once."""
    total = empty((len(a), len(b)), np.dtype("int32"), like=a)
    for top in range(0, len(b), PART):
        rows = slice(top, top + PART)
        total[:, rows] = 0
        for left in range(0, a.shape[1], EXACT):
            part = slice(left, left + EXACT)
            total[:, rows] += gemm(
                a[:, part].astype(FLOAT32), b[rows, part].astype(FLOAT32).T
            ).astype(np.int32)
    return total.astype(dtype)


@int8_linear_forward.require
def _check(x: Array, threshold: Any) -> None:
    """Raise unless the threshold is valid and 32-bit sums cannot overflow."""
    _check_threshold(threshold)
    if x.shape[-1] > MOST_INPUTS:
        problem = f"int8_linear: x has {x.shape[-1]} inputs; 32-bit sums allow {MOST_INPUTS}"
        raise ShapeError(f"{problem}; call linear", expected=MOST_INPUTS, actual=tuple(x.shape))


def _check_threshold(threshold: Any) -> None:
    """Raise ConfigError unless threshold is None or above 0."""
    if threshold is not None and not threshold > 0:
        cure = "pass a number above 0, such as 6.0, or None for no outliers"
        raise ConfigError(f"int8_linear(threshold={threshold}): {cure}")


@int8_linear_forward.kernel
def _launch(x: Array, codes: Array, absmax: Array, threshold: float | None) -> Array:
    """Return y from the kernels: outlier columns, codes of x, and the product."""
    outputs, inputs = codes.shape
    rows = x.size // inputs
    outliers, listed, count = None, None, None
    if threshold is not None:
        outliers, listed, count = _outliers(x, rows, inputs, threshold)
    x_codes, scales, _ = launch_quantize(x, outliers, threshold or 0.0)
    y = empty((*x.shape[:-1], outputs), x.dtype, like=x)
    outlier_arguments = None if outliers is None else (x, listed, count)
    launch_product(y, x_codes, scales, codes, absmax, outliers=outlier_arguments)
    return y


def _outliers(x: Array, rows: int, inputs: int, threshold: float) -> tuple[Array, Array, Array]:
    """Return a mask of the columns with outliers, the list of these columns, and its length.

    All three stay on the device, so the host does not wait for them.
    """
    outliers = empty((inputs,), np.dtype(bool), like=x)
    listed, count = (empty((n,), np.dtype("int32"), like=x) for n in (inputs, 1))
    chosen = outlier_constants(x.dtype)
    kernel = load("int8_outliers.cu", "int8_outliers", x, chosen)
    # 32 columns per block; its warps share the rows, 2 or more each
    kernel[-(-inputs // 32), 32 * min(32, -(-rows // 2))](x, outliers, rows, inputs, threshold)
    kernel = load("int8_outliers.cu", "int8_outlier_list", x, chosen)
    kernel[1, 1024](outliers, listed, count, inputs)
    return outliers, listed, count


@int8_linear_forward.gradient(widen=False)
def int8_linear_backward(dy: Array, x: Array, codes: Array, absmax: Array) -> tuple[Any, ...]:
    """Return dx, ``dy @ weight``, computed in chunks of the weight, which is frozen; and None."""
    rows = contiguous(dy).reshape(math.prod(dy.shape[:-1]), dy.shape[-1])  # (all rows, outputs)
    weight: Any = Int8(codes, absmax.astype(np.float32), dtype=x.dtype)
    return gemm(rows, weight).reshape(x.shape), None, None


int8_linear_backward.facts["operations"] = lambda a: 2 * a["x"].size * a["codes"].shape[0]
