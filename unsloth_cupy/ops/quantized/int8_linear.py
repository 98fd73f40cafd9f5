"""A linear layer in integers of eight bits: rows of x are rounded as the weight is.

y = x_codes codes^T * scales * absmax / 127        exact sums of integers

with a threshold     + x[:, c] codes[:, c]^T * absmax / 127 over the columns c of outliers, as
                     floats; x_codes are 0 there, and outliers do not count for the scales

Dettmers and others, LLM.int8(), 2022.
"""

import math
from typing import Any, cast

import numpy as np

from ...core.arrays import empty, native, packed
from ...core.call import checked
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import Traced, op
from ...errors import ConfigError, DTypeError, ShapeError
from ..common.codes import quantized
from ..common.gemm import gemm
from ..linear.linear import linear
from ._int8_rows import launch_quantize
from ._int8_tiles import launch_product, outlier_constants
from .int8 import Int8
from .int8_product import scales_of

EXACT = 1024  # products of two codes whose sum a float32 holds exactly
PART = 4096  # rows of the weight that are floats at a time
MOST_INPUTS = (2**31 - 1) // 127**2  # whose sum 32 bits hold


def int8_linear(x: Array, weight: Int8, *, threshold: float | None = None) -> Array:
    """Multiply each row by a weight of eight bits, in eight bits: LLM.int8().

    Each row of x is rounded to integers -127 .. 127 times a scale, sums of products of integers
    are exact, and y is rounded once.  The gradient of x takes this rounding for none:
    ``dx = dy @ weight.dequantize()``.  ``linear(x, weight)`` takes x as it is.

    Parameters
    ----------
    x : (*rows, inputs) float
    weight : Int8
        As ``int8_weight`` makes it.
    threshold : float, optional
        Columns of x in which some size is this or more are not rounded: they meet the weight in
        float32.  6.0 in LLM.int8(); none are where absent.

    Returns
    -------
    y : (*rows, outputs) float
        NaN in a row of x that holds NaN, or infinity below the threshold.

    Raises
    ------
    ConfigError
        threshold is not above 0.
    ShapeError, DTypeError
        weight is not an Int8, or x does not fit it; or has more than 133,144 inputs, of which 32
        bits do not hold every sum.
    """
    codes: Any = weight
    if not isinstance(codes, Int8):
        given = f"weight is {type(weight).__name__}, not an Int8"
        raise DTypeError(f"int8_linear: {given}; pass int8_weight(weight), or call linear")
    if native([x]) or isinstance(x, Traced):
        return int8_linear_forward(x, codes.codes, codes.absmax, threshold=threshold)
    return linear(x, cast(Any, Rounding(codes, threshold)))


@op(
    "x(*rows, inputs), codes(outputs, inputs): code, absmax(outputs): table -> y(*rows, outputs)",
    operations=lambda a: 2 * a["x"].size * a["codes"].shape[0],
)
def int8_linear_forward(
    x: Array, codes: Array, absmax: Array, *, threshold: float | None = None
) -> Array:
    """Return y as int8_linear does, of what an Int8 holds."""
    outputs, inputs = codes.shape
    rows = x.reshape(math.prod(x.shape[:-1]), inputs)
    size: Any = np.abs(rows)
    outliers: Any = None
    if threshold is not None:
        beyond = size >= threshold
        outliers = beyond.any(axis=0)
        size = np.where(beyond, x.dtype.type(0), size)
    x_codes, scales, _ = quantized(rows, size, outliers)
    y = _exact(x_codes, codes, x.dtype) * scales[:, None]
    if threshold is not None:
        given: Any = x
        kept: Any = np.flatnonzero(outliers) if isinstance(given, np.ndarray) else slice(None)
        y += gemm(np.where(outliers, rows, 0)[:, kept], codes[:, kept].astype(x.dtype).T)
    y *= scales_of(absmax, x.dtype)
    return y.reshape(*x.shape[:-1], outputs)


@checked
class Rounding(Int8):
    """A weight by which products are those of ``int8_linear``, also in its relatives."""

    CALL = "int8_linear"

    def __init__(self, weight: Int8, threshold: float | None = None) -> None:
        super().__init__(weight.codes, weight.absmax, dtype=weight.dtype)
        self.threshold = threshold
        _check_threshold(threshold)

    def product_transposed(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W.T`` to out, or add it; a is rounded."""
        y = int8_linear_forward(a, self.codes, self.absmax, threshold=self.threshold)
        out[...] = out + y if add else y


def _exact(a: Array, b: Array, dtype: Any) -> Array:
    """Return ``a @ b.T`` of codes, summed exactly, by parts in float32; rounded once."""
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
    _check_threshold(threshold)
    if x.shape[-1] > MOST_INPUTS:
        problem = f"int8_linear: x has {x.shape[-1]} inputs, and 32 bits hold sums of {MOST_INPUTS}"
        raise ShapeError(f"{problem}; call linear", expected=MOST_INPUTS, actual=tuple(x.shape))


def _check_threshold(threshold: Any) -> None:
    if threshold is not None and not threshold > 0:
        cure = "pass a size above 0, such as 6.0, or None for no outliers"
        raise ConfigError(f"int8_linear(threshold={threshold}): {cure}")


@int8_linear_forward.kernel
def _launch(x: Array, codes: Array, absmax: Array, threshold: float | None) -> Array:
    outputs, inputs = codes.shape
    rows = x.size // inputs
    outliers, listed, count = None, None, None
    if threshold is not None:
        outliers, listed, count = _outliers(x, rows, inputs, threshold)
    x_codes, scales, _ = launch_quantize(x, outliers, threshold or 0.0)
    y = empty((*x.shape[:-1], outputs), x.dtype, like=x)
    of_outliers = None if outliers is None else (x, listed, count)
    launch_product(y, x_codes, scales, codes, absmax, outliers=of_outliers)
    return y


def _outliers(x: Array, rows: int, inputs: int, threshold: float) -> tuple[Array, Array, Array]:
    """Return which columns hold outliers, a list of these, and how many there are."""
    outliers = empty((inputs,), np.dtype(bool), like=x)
    listed, count = (empty((n,), np.dtype("int32"), like=x) for n in (inputs, 1))
    chosen = outlier_constants(x.dtype)
    kernel = load("int8_outliers.cu", "int8_outliers", x, chosen)
    kernel[-(-inputs // 32), 32 * min(32, -(-rows // 2))](x, outliers, rows, inputs, threshold)
    kernel = load("int8_outliers.cu", "int8_outlier_list", x, chosen)
    kernel[1, 1024](outliers, listed, count, inputs)
    return outliers, listed, count


@int8_linear_forward.gradient(widen=False)
def int8_linear_backward(dy: Array, x: Array, codes: Array, absmax: Array) -> tuple[Any, ...]:
    """Return the gradient of x, ``dy @ weight``, by chunks of the weight; codes are frozen."""
    rows = packed(dy).reshape(math.prod(dy.shape[:-1]), dy.shape[-1])
    weight: Any = Int8(codes, absmax, dtype=x.dtype)
    return gemm(rows, weight).reshape(x.shape), None, None


int8_linear_backward.facts["operations"] = lambda a: 2 * a["x"].size * a["codes"].shape[0]
