"""A linear layer with a low-rank adapter.

y = factor * (x weight^T + scale * low b^T) + bias        low = dropout(x) a^T
factor = magnitude / norm of each row of (weight + scale * b a)        DoRA; 1 without magnitude

Hu et al., LoRA, 2021; Kalajdzievski, rsLoRA, 2023 (a choice of scale); Liu et al., DoRA, 2024,
whose section 4.3 takes the norm for a constant in the backward pass, as is done here.
"""

from collections.abc import Set

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ..common import philox
from ..common.columns import row_sum
from ..common.frozen import asked_of
from ..common.gemm import gemm
from ._lora_gradients import rank_gradients
from .linear import flat
from .lora_merge import factor_of, times, wide_of


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
) -> Array:
    """Multiply rows by a weight and by a low-rank addition to it, which is never formed.

    ``y = x @ weight.T + scale * (dropout(x) @ a.T) @ b.T + bias``.  With a magnitude (DoRA) the
    rows of ``weight + scale * b @ a`` have that norm:
    ``y = magnitude / norm * (x @ weight.T + scale * (x @ a.T) @ b.T) + bias``.

    Parameters
    ----------
    x : (*rows, inputs) float
        Rows; any number of leading axes.
    weight : (outputs, inputs) float, or a quantized weight
        The base, as checkpoints store it; off a tape it is frozen, and costs no gradient.
    a : (rank, inputs) dtype of x or float32
        Into the low rank.
    b : (outputs, rank) dtype of x or float32
        Out of it.
    scale : float
        ``alpha / rank``, or ``alpha / sqrt(rank)`` for rsLoRA.
    bias : (outputs,) dtype of x or float32, optional
        Added to each row.
    magnitude : (outputs,) dtype of x or float32, optional
        DoRA's norm of each row.  With dropout, the weight meets x whole once, and the share that
        the magnitude adds to it meets the x that was dropped, as in peft.
    dropout : float
        Share of the elements of x that the adapter does not see; the others grow by
        ``1 / (1 - dropout)``.
    seed : int
        Of dropout, in 0 .. 2**64 - 1: Philox of (seed, row, column).

    Returns
    -------
    y : (*rows, outputs) float

    Raises
    ------
    ConfigError
        dropout is not a share, or comes without a seed.
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
        x, weight, a, b, bias, factor, scale=scale, dropout=dropout, seed=seed
    )[0]


@op(
    "x(*rows, inputs), weight(outputs, inputs): weight, a(rank, inputs): param,"
    " b(outputs, rank): param, bias?(outputs): param,"
    " factor?(outputs): param -> y(*rows, outputs), low(*rows, rank)",
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
    scale: float = 1.0,
    dropout: float = 0.0,
    seed: int | None = None,
) -> tuple[Array, Array]:
    """Return y as lora_linear does, given DoRA's factor; and ``low``, for the backward op."""
    rows = flat(x)
    seen = _dropped(rows, dropout, seed)
    low = gemm(seen, a.astype(x.dtype, copy=False).T)
    y = raised(rows, seen, weight, low, b, bias, factor, scale)
    return y.reshape(*x.shape[:-1], len(weight)), low.reshape(*x.shape[:-1], len(a))


lora_linear_forward.require(philox.check)


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
    scale: float = 1.0,
    dropout: float = 0.0,
    seed: int | None = None,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, ...]:
    """Return the gradients of the arrays, in order; None for those that are not ``wanted``."""
    rows, down = flat(x), flat(dy)
    seen = _dropped(rows, dropout, seed)
    asked = asked_of(wanted, x=x, weight=weight, a=a, b=b, bias=bias, factor=factor)
    made, up, db, dbias, dfactor = raised_gradients(
        down, seen, weight, flat(low), b, bias, factor, scale, asked
    )
    if dlow is not None:
        up += flat(dlow)
    whole = factor is None or seen is rows  # all of weight meets rows as they are
    dx = dweight = da = None
    if "x" in asked:
        dx = gemm(up, a.astype(x.dtype, copy=False))
        if not whole:
            gemm(made - down, weight, out=dx, add=True)
        dx = _dropped(dx, dropout, seed)
        gemm(made if whole else down, weight, out=dx, add=True)
        dx = dx.reshape(x.shape)
    if "weight" in asked:
        dweight = gemm(made.T, rows if whole else seen)
        if not whole:
            gemm(down.T, rows - seen, out=dweight, add=True)
    if "a" in asked:
        da = gemm(up.T, seen, dtype=a.dtype)
    return dx, dweight, da, db, dbias, dfactor


def raised(
    rows: Array,
    seen: Array,
    weight: Array,
    low: Array,
    b: Array,
    bias: Array | None,
    factor: Array | None,
    scale: float,
) -> Array:
    """Return y of rows, of which the adapter saw ``seen`` and made ``low``."""
    y = gemm(rows if factor is None else seen, weight.T)
    gemm(low, times(b, scale, rows.dtype).T, out=y, add=True)
    if factor is not None:
        y = times(y, factor)
        if seen is not rows:
            gemm(rows - seen, weight.T, out=y, add=True)
    if bias is not None:
        y = (y + bias.astype(wide_of(y))).astype(y.dtype, copy=False)
    return y


def raised_gradients(
    down: Array,
    seen: Array,
    weight: Array,
    low: Array,
    b: Array,
    bias: Array | None,
    factor: Array | None,
    scale: float,
    asked: Set[str],
) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    """Return gradients, from that of y: of what factor scales, low, b, bias and factor."""
    made = down if factor is None else times(down, factor)
    dbias = dfactor = None
    up, db = rank_gradients(
        made, times(b, scale, seen.dtype), low, b.dtype if "b" in asked else None
    )
    if db is not None:
        db = times(db, scale)
    if bias is not None and "bias" in asked:
        dbias = row_sum(down, bias.dtype)
    if factor is not None and "factor" in asked:
        y = gemm(seen, weight.T, dtype=wide_of(seen))
        gemm(low, times(b, scale, seen.dtype).T, out=y, add=True)
        y *= down
        dfactor = row_sum(y, factor.dtype)
    return made, up, db, dbias, dfactor


def _dropped(rows: Array, dropout: float, seed: int | None) -> Array:
    """Return rows without the elements that dropout takes; rows themselves where it takes none."""
    if not dropout:
        return rows
    number = np.arange(len(rows), like=rows)
    kept = philox.kept(int(seed or 0), dropout, (0 * number, 0 * number, number), 0, rows.shape[1])
    return times(rows * kept, 1 / (1 - dropout))


lora_linear_backward.facts["operations"] = lambda a: (  # less those of the rank
    2 * a["dy"].size * a["weight"].shape[1] * (a.get("dx") is not None)
)
