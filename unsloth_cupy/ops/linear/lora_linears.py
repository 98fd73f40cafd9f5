"""Linear layers of the same x, each with a low-rank adapter: q, k and v, or gate and up.

low = x [a; a2; a3]^T                                 one product reads x for all of them
y = factor * (x weight^T + scale * low b^T) + bias    of each, as in lora_linear

On the way back one product of ``[dlow, dlow2, dlow3]`` gives all gradients of a, another dx.
"""

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...core.op import op
from ...errors import ConfigError
from ..common.frozen import asked_of
from ..common.gemm import gemm
from .linear import flat
from .lora import raised, raised_gradients
from .lora_merge import factor_of, wide_of

TOGETHER = 3  # layers whose adapters lora_down takes


class LoraLayer(NamedTuple):
    """One of the layers: operands and scale of ``lora_linear``."""

    weight: Array
    a: Array
    b: Array
    scale: float = 1.0
    bias: Array | None = None
    magnitude: Array | None = None


def lora_linears(x: Array, layers: Sequence[LoraLayer]) -> list[Array]:
    """Return ``lora_linear`` of x by each layer; their adapters share the pass over x.

    There is no dropout.  With it each adapter has a mask of its own, as in peft, and so an x of its
    own: the three are not columns of one product ``x [a; a2; a3]^T``.  A product of cuBLAS reads x
    as it lies and draws no masks, so it would read three masked copies, and on the way back ``da``
    and ``dx`` would meet the masks again: ``lora_linear`` layer by layer reads no more than that.

    Parameters
    ----------
    x : (*rows, inputs) float
        Rows; any number of leading axes.
    layers : sequence of LoraLayer
        Of (weight, a, b, scale, bias, magnitude), as ``lora_linear`` takes them.

    Returns
    -------
    ys : list of (*rows, outputs) float

    Raises
    ------
    ConfigError
        layers is not a sequence of such.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import LoraLayer, lora_linear, lora_linears
    >>> x, weight = np.random.default_rng(0).standard_normal((2, 16, 16), np.float32)
    >>> a, b = weight[:4], weight[:, :4]  # of rank 4
    >>> layer = LoraLayer(weight, a, b, scale=0.5)
    >>> first, second = lora_linears(x, [layer, layer])  # layers of one input
    >>> alone = lora_linear(x, weight, a, b, scale=0.5)
    >>> np.testing.assert_allclose(first, alone, rtol=1e-5, atol=1e-5)
    """
    given: Any = layers
    each_is_one = isinstance(given, tuple | list) and all(isinstance(n, tuple) for n in given)
    if not each_is_one or any(not 3 <= len(n) <= len(LoraLayer._fields) for n in given):
        raise ConfigError("lora_linears: pass LoraLayer(weight, a, b, ...) of each, in a list")
    ys = []
    for first in range(0, len(layers), TOGETHER):
        some = [LoraLayer(*layer) for layer in layers[first : first + TOGETHER]]
        lows: Any = lora_down(x, *(layer.a for layer in some))
        for layer, low in zip(some, lows, strict=False):
            weight, a, b, scale, bias, magnitude = layer
            factor = factor_of("lora_linears", weight, a, b, scale, magnitude)
            ys.append(lora_up(x, weight, low, b, bias, factor, scale=scale))
    return ys


@op(
    "x(*rows, inputs), a(rank, inputs): param, a2?(rank2, inputs): param,"
    " a3?(rank3, inputs): param -> low(*rows, rank), low2(*rows, rank2), low3(*rows, rank3)",
    widen=False,  # products take 16-bit operands as they are
)
def lora_down(
    x: Array, a: Array, a2: Array | None = None, a3: Array | None = None
) -> tuple[Array | None, ...]:
    """Return ``x @ a.T`` for each a: parts of one product; None for an a that is absent."""
    low = gemm(flat(x), _stacked([a, a2, a3], x.dtype).T)
    parts = _split(low.reshape(*x.shape[:-1], low.shape[1]), [a, a2, a3])
    return tuple(parts)


@lora_down.gradient(widen=False)
def lora_down_backward(
    dlow: Array | None,
    dlow2: Array | None,
    dlow3: Array | None,
    x: Array,
    a: Array,
    a2: Array | None = None,
    a3: Array | None = None,
    *,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, ...]:
    """Return the gradients of x and of each a; None for those that are not ``wanted``."""
    rows, factors = flat(x), [a, a2, a3]
    asked = {"x", "a", "a2", "a3"} if wanted is None else wanted
    ups = [
        np.zeros_like(x, shape=(len(rows), len(each))) if up is None else flat(up)
        for up, each in zip((dlow, dlow2, dlow3), factors, strict=True)
        if each is not None
    ]
    up = ups[0] if len(ups) == 1 else np.concatenate(ups, axis=1)
    dx, das = None, [None] * TOGETHER
    if "x" in asked:
        dx = gemm(up, _stacked(factors, x.dtype)).reshape(x.shape)
    if asked & {"a", "a2", "a3"}:
        parts = _split(gemm(up.T, rows, dtype=wide_of(x)).T, factors)
        das = [
            None if each is None or name not in asked else part.T.astype(each.dtype, copy=False)
            for part, each, name in zip(parts, factors, ("a", "a2", "a3"), strict=True)
        ]
    return dx, *das


@op(
    "x(*rows, inputs), weight(outputs, inputs): weight, low(*rows, rank),"
    " b(outputs, rank): param, bias?(outputs): param, factor?(outputs): param -> y(*rows, outputs)",
    widen=False,
    operations=lambda a: 2 * a["x"].size * a["weight"].shape[0],  # less those of the rank
)
def lora_up(
    x: Array,
    weight: Array,
    low: Array,
    b: Array,
    bias: Array | None = None,
    factor: Array | None = None,
    *,
    scale: float = 1.0,
) -> Array:
    """Return y of one layer, as lora_linear does, given its low and DoRA's factor."""
    rows = flat(x)
    y = raised(rows, rows, weight, flat(low), b, bias, factor, scale)
    return y.reshape(*x.shape[:-1], len(weight))


@lora_up.gradient(widen=False)
def lora_up_backward(
    dy: Array,
    x: Array,
    weight: Array,
    low: Array,
    b: Array,
    bias: Array | None,
    factor: Array | None,
    *,
    scale: float = 1.0,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, ...]:
    """Return the gradients of the arrays, in order; None for those that are not ``wanted``."""
    asked = asked_of(wanted, x=x, weight=weight, low=low, b=b, bias=bias, factor=factor)
    rows, down = flat(x), flat(dy)
    made, up, db, dbias, dfactor = raised_gradients(
        down, rows, weight, flat(low), b, bias, factor, scale, asked
    )
    dx = gemm(made, weight).reshape(x.shape) if "x" in asked else None
    dweight = gemm(made.T, rows) if "weight" in asked else None
    return dx, dweight, up.reshape(low.shape), db, dbias, dfactor


def _stacked(factors: Sequence[Array | None], dtype: Any) -> Array:
    """Return the rows of all that are there as one matrix."""
    given = [each.astype(dtype, copy=False) for each in factors if each is not None]
    return given[0] if len(given) == 1 else np.concatenate(given)


def _split(columns: Array, factors: Sequence[Array | None]) -> list[Any]:
    """Return views of the columns that belong to each; None for one that is absent."""
    parts: list[Any] = []
    start = 0
    for each in factors:
        stop = start + (0 if each is None else len(each))
        parts.append(None if each is None else columns[..., start:stop])
        start = stop
    return parts


lora_up_backward.facts["operations"] = lambda a: (  # less those of the rank
    2 * a["dy"].size * a["weight"].shape[1] * (a.get("dx") is not None)
)
