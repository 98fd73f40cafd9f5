"""A linear layer with a low-rank adapter.

y = factor * (x weight^T + scale * low b^T) + bias        low = dropout(x) a^T
factor = magnitude / norm of each row of (weight + scale * b a)        DoRA; 1 without magnitude

Hu et al., LoRA, 2021; Kalajdzievski, rsLoRA, 2023 (a choice of scale); Liu et al., DoRA, 2024.
As in section 4.3 of the DoRA paper, the norm is a constant in the backward pass.
"""

from collections.abc import Set
from typing import Any

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.op import op
from ...errors import naming
from ..common import philox
from ..common.checks import refuse_number, requested_gradients
from ..common.columns import row_sum
from ..common.gemm import gemm
from ..elements.cast import in_dtype
from ._lora_expand import add_low_rank_rows, add_low_ranks
from ._lora_gradients import rank_gradients
from .dropout import dropped_rows
from .linear import flat
from .lora_merge import FACTOR, factor_of, sum_dtype, times


@naming("lora_linear", "lora_linear", *FACTOR, factor="magnitude")
def lora_linear(
    x: Array,
    weight: Array,
    a: Array,
    b: Array,
    *,
    scale: float = 1.0,
    bias: Array | None = None,
    magnitude: Array | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    key: Array | None = None,
    numbers: Array | None = None,
) -> Array:
    """Multiply rows by a weight and its low-rank update, whose product is never formed.

    ``y = x @ weight.T + scale * (dropout(x) @ a.T) @ b.T + bias``.  With a magnitude (DoRA) the
    rows of ``weight + scale * b @ a`` are scaled to that norm:
    ``y = magnitude / norm * (x @ weight.T + scale * (x @ a.T) @ b.T) + bias``.

    Parameters
    ----------
    x : (*rows, inputs) float
        Rows, with any number of leading axes.
    weight : (outputs, inputs) float, or a quantized weight
        The base weight, in the layout of checkpoints.  If it is not on the tape, it is frozen: it
        has no gradient.
    a : (rank, inputs) dtype of x or float32
        The projection down to the low rank.
    b : (outputs, rank) dtype of x or float32
        The projection up from the low rank.
    scale : float
        ``alpha / rank``, or ``alpha / sqrt(rank)`` for rsLoRA.
    bias : (outputs,) dtype of x or float32, optional
        Added to each row.
    magnitude : (outputs,) dtype of x or float32, optional
        DoRA's norm of each row.  With dropout, as in peft, the base term ``x @ weight.T`` uses x
        itself, and its change by the magnitude, ``(factor - 1) * dropout(x) @ weight.T``, uses x
        after dropout.
    dropout : float
        Probability that dropout zeroes an element of the adapter's x; the other elements are
        multiplied by ``1 / (1 - dropout)``.
    seed : int
        The seed of dropout, in 0 .. 2**64 - 1; Philox draws by (seed, row, column).
    key : () int64, optional
        A seed in an array, in place of ``seed``.  The kernel reads it on the device, so a CUDA
        graph uses what key holds at each launch.
    numbers : (*rows) int, optional
        The number of each row for dropout, modulo 2**32; 0, 1, 2 and so on by default.  A part of a
        batch drops the same elements as the whole batch, if its rows have the same numbers.

    Returns
    -------
    y : (*rows, outputs) float

    Raises
    ------
    ConfigError
        dropout is not in [0, 1), or has no seed.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import linear, lora_linear, lora_linear_backward
    >>> from unsloth_cupy import lora_linear_forward, lora_merge
    >>> x, weight = np.random.default_rng(0).standard_normal((2, 16, 16), np.float32)
    >>> a, b = weight[:4], weight[:, :4]  # of rank 4
    >>> merged = lora_merge(weight, a, b, scale=0.5)
    >>> y, low = lora_linear_forward(x, weight, a, b, scale=0.5)
    >>> np.testing.assert_array_equal(y, lora_linear(x, weight, a, b, scale=0.5))
    >>> np.testing.assert_allclose(y, linear(x, merged), rtol=1e-4, atol=1e-4)
    >>> back = lora_linear_backward(y, None, x, weight, a, b, None, None, low, scale=0.5)
    """
    factor = factor_of("lora_linear", weight, a, b, scale, magnitude)
    return lora_linear_forward(
        x,
        weight,
        a,
        b,
        bias,
        factor,
        key=key,
        numbers=numbers,
        scale=scale,
        dropout=dropout,
        seed=seed,
    )[0]


def _check_draw(call: str, key: Any, numbers: Any, dropout: float, seed: int | None) -> None:
    """Raise ConfigError unless dropout is below 1 and, if not 0, has a seed or a key."""
    refuse_number(call, "numbers", numbers)
    philox.check(call, dropout, seed if key is None else 0)


@op(
    "x(*rows, inputs), weight(outputs, inputs): weight, a(rank, inputs): param,"
    " b(outputs, rank): param, bias?(outputs): param, factor?(outputs): param, key?: int,"
    " numbers?(*rows): int -> y(*rows, outputs), low(*rows, rank)",
    widen=False,  # products take 16-bit operands as they are
    operations=lambda a: (
        2 * a["x"].size // a["x"].shape[-1] * (a["weight"].size + a["a"].size + a["b"].size)
    ),
)
def lora_linear_forward(
    x: Array,
    weight: Array,
    a: Array,
    b: Array,
    bias: Array | None = None,
    factor: Array | None = None,
    *,
    key: Array | None = None,
    numbers: Array | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Array]:
    """Return y of lora_linear, with DoRA's factor as an input, and ``low`` for the backward op.

    ``key`` is a seed in an array, in place of ``seed``.
    """
    rows = flat(x)
    dropped = dropped_rows(rows, dropout, seed, key, numbers=numbers)
    low = empty((*x.shape[:-1], a.shape[0]), x.dtype, like=x)
    gemm(dropped, in_dtype(a, x.dtype).T, out=flat(low))
    return adapted(x, rows, dropped, weight, flat(low), b, bias, factor, scale), low


lora_linear_forward.require(_check_draw)


@lora_linear_forward.gradient(widen=False)
def lora_linear_backward(
    dy: Array,
    dlow: Array | None,
    x: Array,
    weight: Array,
    a: Array,
    b: Array,
    bias: Array | None,
    factor: Array | None,
    low: Array,
    *,
    key: Array | None = None,
    numbers: Array | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    seed: int | None = None,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, ...]:
    """Return the gradients of the arrays, in order; None for a gradient that is not ``wanted``."""
    rows, dy_rows = flat(x), flat(dy)
    dropped = dropped_rows(rows, dropout, seed, key, numbers=numbers)
    operands = {"x": x, "weight": weight, "a": a, "b": b, "bias": bias, "factor": factor}
    needed = requested_gradients("lora_linear_backward", wanted, **operands)
    dproduct, dlows, db, dbias, dfactor = adapted_gradients(
        dy, dropped, weight, low, b, bias, factor, scale, needed
    )
    up = flat(dlows)
    if dlow is not None:
        up += flat(dlow)
    whole = factor is None or dropped is rows  # weight multiplies rows without dropout only
    dx = dweight = da = None
    if "x" in needed:
        dx = empty(x.shape, x.dtype, like=x)
        to = flat(dx)
        if dropout:
            gemm(up, in_dtype(a, x.dtype), out=to)
            if not whole:
                gemm(dproduct - dy_rows, weight, out=to, add=True)
            dropped_rows(to, dropout, seed, key, out=to, numbers=numbers)
        gemm(dproduct if whole else dy_rows, weight, out=to, add=dropout > 0)
        if not dropout:
            add_low_rank_rows(to, up, a)
    if "weight" in needed:
        dweight = gemm(dproduct.T, rows if whole else dropped)
        if not whole:
            gemm(dy_rows.T, rows - dropped, out=dweight, add=True)
    if "a" in needed:
        da = gemm(up.T, dropped, dtype=a.dtype)
    return dx, dweight, da, db, dbias, dfactor


def adapted(
    x: Array,
    rows: Array,
    dropped: Array,
    weight: Array,
    low: Array,
    b: Array,
    bias: Array | None,
    factor: Array | None,
    scale: float,
) -> Array:
    """Return y from ``rows`` of x, from ``dropped``, the rows after dropout, and from low.

    ``low = dropped @ a.T``.
    """
    y = empty((*x.shape[:-1], weight.shape[0]), x.dtype, like=x)
    to, first = flat(y), bias is not None and factor is None
    if first:
        y[...] = bias  # the products are added to it, in float32
    gemm(rows if factor is None else dropped, weight.T, out=to, add=first)
    add_low_ranks([to], [low], [b], [scale])
    if factor is not None:
        to[...] = times(to, factor)
        if dropped is not rows:
            gemm(rows - dropped, weight.T, out=to, add=True)
        if bias is not None:
            y[...] = y + bias.astype(sum_dtype(y))
    return y


def adapted_gradients(
    dy: Array,
    dropped: Array,
    weight: Array,
    low: Array,
    b: Array,
    bias: Array | None,
    factor: Array | None,
    scale: float,
    needed: Set[str],
) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    """Return the gradients of the product that factor scales, and of low, b, bias and factor.

    The first one is a matrix (rows, outputs); the gradient of low has the leading axes of dy.
    """
    dy_rows = flat(dy)
    dbias = dfactor = None
    if factor is not None:
        dy = times(dy, factor)
    up, (db,) = rank_gradients([dy], [b], [low], [scale], ["b" in needed])
    if bias is not None and "bias" in needed:
        dbias = row_sum(dy_rows, bias.dtype)
    if factor is not None and "factor" in needed:
        y = gemm(dropped, weight.T, dtype=sum_dtype(dropped))
        gemm(flat(low), in_dtype(b, dropped.dtype).T, out=y, add=True, factor=scale)
        y *= dy_rows
        dfactor = row_sum(y, factor.dtype)
    return flat(dy), up, db, dbias, dfactor


lora_linear_backward.require(_check_draw)
lora_linear_forward.facts["products"] = lora_linear_backward.facts["products"] = True
lora_linear_backward.facts["operations"] = lambda a: (  # without the low-rank products
    2 * a["dy"].size * a["weight"].shape[1] * (a.get("dx") is not None)
)
