"""The linear layer of BitNet b1.58 for training, which quantizes x and w in each forward pass.

y = scale_x w_scale * (round(x / scale_x) round(w / w_scale)^T) + bias

scale_x = max(|x|) / 127 of each row, at least 1e-5 / 127        w_scale = mean(|w|), at least 1e-5
round gives integers, for w clipped to -1, 0 and 1        the gradient of both roundings is 1

Ma et al., The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits, 2024.
"""

from collections.abc import Set
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.stand_in import representative_steps
from ..common.checks import requested_gradients
from ..common.columns import row_sum
from ..common.counters import counters
from ..common.elementwise import THREADS, Walk, constants, walk
from ..common.gemm import gemm
from ..common.int8_codes import INT8
from ..common.no_kernel import no_kernel
from ..linear.linear import flat
from ._int8_rows import launch_quantize
from ._int8_tiles import launch_product
from .int8_product import launch_dequantize

LEAST = 1e-5  # lower bound of max(|x|) and mean(|w|), as in BitNet
LARGEST = 127
CHUNK = 2**22  # values of a weight whose codes are in memory at a time
MOST_INPUTS = (2**31 - 1) // LARGEST  # a sum of more products may overflow 32 bits
SUMS = 1024  # blocks that sum |w|: about as many as an H200 runs at once; each writes one sum


def bit_linear(x: Array, weight: Array, *, bias: Array | None = None) -> Array:
    """Multiply rows, rounded to int8, by a weight, rounded to -1, 0 and 1.

    Parameters
    ----------
    x : (*rows, inputs) float
        Each row is rounded to integers -127 .. 127 times a scale.
    weight : (outputs, inputs) float
        The trained weight; it is rounded to -1, 0 and 1 times the mean of its absolute values.
    bias : (outputs,) dtype of x or float32, optional
        Added to each row.

    Returns
    -------
    y : (*rows, outputs) float
        Exact products of integers, times the scales.  Gradients treat both roundings as the
        identity (straight-through): ``dx = dy @ w`` and ``dweight = dy.T @ x``, with the rounded
        w and x.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Notes
    -----
    On a GPU the weight is read twice, for its mean and for its codes of one byte; y is one integer
    product on tensor cores.  For dx, chunks of the weight are rounded to codes in the dtype of dy,
    and cuBLAS multiplies dy by them.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import bit_linear, bit_linear_backward, bit_linear_forward
    >>> x, weight = np.random.default_rng(0).standard_normal((2, 32, 64), np.float32)
    >>> y = bit_linear(x, weight)  # rounds x and weight at every call
    >>> y, scale = bit_linear_forward(x, weight)
    >>> dx, dweight, _ = bit_linear_backward(y, x, weight, None, scale)
    >>> assert dweight.shape == weight.shape
    """
    y, _ = bit_linear_forward(x, weight, bias)
    return y


@op(
    "x(*rows, inputs), weight(outputs, inputs), bias?(outputs): param"
    " -> y(*rows, outputs), w_scale(1): stat",
    widen=False,
    operations=lambda a: 2 * a["x"].size * a["weight"].shape[0],
    integers=True,  # products of codes
)
def bit_linear_forward(x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, Array]:
    """Return y of bit_linear, and the scale of the weight."""
    outputs, wide = len(weight), np.promote_types(x.dtype, FLOAT32)
    codes, scales = _rows(flat(x))
    w_scale = _weight_scale(weight)
    y = empty((len(codes), outputs), x.dtype, like=x)
    factor = scales * w_scale
    for part in _chunks(weight, outputs, weight.shape[1]):
        sums = gemm(codes, weight_codes(weight[part], w_scale).T, dtype=wide)
        sums *= factor
        if bias is not None:
            sums += bias[part]
        y[:, part] = sums
    return y.reshape(*x.shape[:-1], outputs), w_scale  # (*rows, outputs)


@bit_linear_forward.kernel
def _launch(x: Array, weight: Array, bias: Array | None) -> Any:
    """Return y and the scale of the weight from the kernels."""
    outputs, inputs = weight.shape
    if inputs > MOST_INPUTS:
        return no_kernel(f"sums of {inputs} products may overflow 32 bits; at most {MOST_INPUTS}")
    w_scale = _launch_scale(weight)
    codes = empty(weight.shape, INT8, like=x)
    _launch_codes(weight, codes, w_scale)
    x_codes, scales, _ = launch_quantize(x, least=LEAST)
    y = empty((*x.shape[:-1], outputs), x.dtype, like=x)
    launch_product(y, x_codes, scales, codes, w_scale, one_scale=True, bias=contiguous(bias))
    return y, w_scale


def _launch_scale(weight: Array) -> Array:
    """Return the scale of the weight, computed by the kernel."""
    plan = walk(weight)
    blocks = min(SUMS, plan.tiles)
    sums, w_scale = (empty((n,), FLOAT32, like=weight) for n in (blocks, 1))
    kernel = _kernel("bit_scale", plan, weight, weight.dtype)
    arrived = counters(1, weight)
    kernel[blocks, THREADS](
        *plan.arrays, sums, arrived, w_scale, plan.rows, plan.tiles, weight.size
    )
    return w_scale


def _launch_codes(weight: Any, codes: Array, w_scale: Array) -> None:
    """Write the codes of a weight, or of a part of a weight, to ``codes``, in its dtype."""
    plan = walk(weight, codes)
    kernel = _kernel("bit_codes", plan, weight, codes.dtype)
    kernel[plan.tiles, THREADS](*plan.arrays, plan.rows, w_scale)


def _kernel(name: str, plan: Walk, like: Array, codes: Any) -> Any:
    """Return a kernel of bit_linear.cu for the arrays of a plan."""
    chosen = constants(like.dtype, plan.lanes, U=codes, STRIDED=plan.strided)
    return load("bit_linear.cu", name, like, chosen)


@bit_linear_forward.gradient(widen=False)
def bit_linear_backward(
    dy: Array,
    x: Array,
    weight: Array,
    bias: Array | None,
    w_scale: Array,
    *,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, Array | None, Array | None]:
    """Return the gradients of x, weight and bias; None for gradients that are not ``wanted``."""
    rows, wide = flat(dy), np.promote_types(x.dtype, FLOAT32)
    dx = dweight = dbias = None
    if wanted is None or "x" in wanted:
        dx_rows = empty((len(rows), x.shape[-1]), x.dtype, like=x)
        for part in _chunks(weight, x.shape[-1], len(weight)):
            sums = gemm(rows, weight_codes(weight[:, part], w_scale), dtype=wide)
            sums *= w_scale
            dx_rows[:, part] = sums
        dx = dx_rows.reshape(x.shape)
    if wanted is None or "weight" in wanted:
        codes, scales = _rows(flat(x))
        dweight = gemm(rows.T, (codes.astype(wide) * scales).astype(x.dtype, copy=False))
    if bias is not None and (wanted is None or "bias" in wanted):
        dbias = row_sum(rows, bias.dtype)
    return dx, dweight, dbias


bit_linear_backward.facts["operations"] = lambda a: (
    2 * a["x"].size * a["weight"].shape[0] * sum(a.get(n) is not None for n in ("dx", "dweight"))
)


@bit_linear_backward.kernel
def _launch_backward(
    dy: Array,
    x: Array,
    weight: Array,
    bias: Array | None,
    w_scale: Array,
    wanted: Set[str] | None,
) -> Any:
    """Return the gradients of x, weight and bias, from codes that kernels compute."""
    needed = requested_gradients("bit_linear_backward", wanted, x=x, weight=weight, bias=bias)
    rows = flat(dy)
    dx = _launch_dx(rows, x, weight, w_scale) if "x" in needed else None
    dweight = gemm(rows.T, _launch_rounded(x)) if "weight" in needed else None
    dbias = row_sum(rows, bias.dtype) if bias is not None and "bias" in needed else None
    return dx, dweight, dbias


def _launch_dx(rows: Array, x: Array, weight: Any, w_scale: Array) -> Array:
    """Return the gradient of x, computed in chunks of columns of the weight."""
    outputs, inputs = weight.shape
    dx: Any = empty((len(rows), inputs), x.dtype, like=x)
    for part in _chunks(weight, inputs, outputs):
        codes = empty((outputs, part.stop - part.start), weight.dtype, like=x)
        _launch_codes(weight[:, part], codes, w_scale)
        plan = walk(gemm(rows, codes, dtype=FLOAT32), dx[:, part])
        kernel = _kernel("bit_gradient", plan, x, x.dtype)
        kernel[plan.tiles, THREADS](*plan.arrays, plan.rows, w_scale)
        del codes, plan  # frees the arrays before the next chunk is allocated
    return dx.reshape(x.shape)


def _launch_rounded(x: Array) -> Array:
    """Return the rows of x after rounding: codes times scales."""
    codes, _, tops = launch_quantize(x, least=LEAST)
    rounded = empty(flat(codes).shape, x.dtype, like=x)
    launch_dequantize(rounded, flat(codes), tops.reshape(len(rounded)), 0)
    return rounded


def _chunks(weight: Any, length: int, other: int) -> Any:
    """Yield slices of an axis of ``length``, each of about CHUNK values with the ``other`` axis."""
    step = max(1, CHUNK // max(1, other))
    starts = representative_steps(weight, range(0, length, step))
    return (slice(start, min(start + step, length)) for start in starts)


def _rows(rows: Any) -> tuple[Array, Array]:
    """Return rows rounded to integers -127 .. 127, and their scales."""
    return row_codes(rows, row_absmax(rows))


def row_absmax(rows: Any) -> Array:
    """Return the largest absolute value of each row, (rows, 1)."""
    x = rows.astype(np.promote_types(rows.dtype, FLOAT32), copy=False)
    return np.abs(x).max(axis=1, keepdims=True) if x.shape[1] else x.sum(axis=1, keepdims=True)


def row_codes(rows: Any, tops: Array) -> tuple[Array, Array]:
    """Return rows rounded to integers -127 .. 127, in the dtype of rows, and their scales."""
    wide: Any = tops.dtype
    top = np.maximum(tops, wide.type(LEAST))
    codes = np.rint(rows.astype(wide, copy=False) * (wide.type(LARGEST) / top))
    return codes.astype(rows.dtype, copy=False), top / wide.type(LARGEST)


def _weight_scale(weight: Any) -> Array:
    """Return the mean of |w|, an array with one element."""
    return mean_abs(sum_of_abs(weight), weight.size)


def sum_of_abs(weight: Any) -> Array:
    """Return the sum of |w|, an array with one element."""
    wide: Any = np.promote_types(weight.dtype, FLOAT32)
    total = np.zeros_like(weight, dtype=wide, shape=1)
    for part in _chunks(weight, len(weight), weight.shape[1]):
        total += np.abs(weight[part]).sum(dtype=wide)
    return total


def mean_abs(total: Any, count: int) -> Array:
    """Return the scale of a weight of ``count`` values, from the sum of their absolute values."""
    wide: Any = total.dtype
    scale: Array = np.maximum(total / wide.type(max(1, count)), wide.type(LEAST))
    return scale


def weight_codes(weight: Any, w_scale: Any) -> Array:
    """Return the codes -1, 0 and 1 of a weight, in its dtype."""
    codes = np.rint(weight.astype(w_scale.dtype, copy=False) * (1 / w_scale))
    return np.clip(codes, -1, 1).astype(weight.dtype, copy=False)
