"""Linear layers with the same x and a low-rank adapter each: q, k and v, or gate and up.

low = x [a; a2; a3]^T                                 one product, which reads x once for all layers
y = factor * (x weight^T + scale * low b^T) + bias    for each layer, as in lora_linear

In the backward pass, one product with ``[dlow, dlow2, dlow3]`` gives the gradients of every a, and
another one gives dx.
"""

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.op import op
from ...errors import ConfigError, naming
from ..common.checks import requested_gradients
from ..common.gemm import gemm
from ..elements.cast import concatenate, in_dtype, stacked
from .linear import flat
from .lora import adapted, adapted_gradients
from .lora_group import lora_group
from .lora_merge import FACTOR, factor_of, sum_dtype

TOGETHER = 3  # the most layers of one call of lora_down or lora_group: q, k and v


class LoraLayer(NamedTuple):
    """One layer: the operands and the scale of ``lora_linear``."""

    weight: Array
    a: Array
    b: Array
    scale: float = 1.0
    bias: Array | None = None
    magnitude: Array | None = None


@naming("lora_linears", "lora_down", "lora_up", "lora_group", *FACTOR, factor="magnitude")
def lora_linears(x: Array, layers: Sequence[LoraLayer]) -> list[Array]:
    """Return ``lora_linear`` of x for each layer; the adapters share one pass over x.

    There is no dropout.  With dropout, as in peft, each adapter would have its own mask, and so its
    own x, and one product ``x [a; a2; a3]^T`` could not serve all of them.  cuBLAS cannot apply
    masks, so three masked copies of x would be read, and the masks again for ``da`` and ``dx``.
    ``lora_linear``, layer by layer, reads no more than this.

    Parameters
    ----------
    x : (*rows, inputs) float
        Rows, with any number of leading axes.
    layers : sequence of LoraLayer
        Each is (weight, a, b, scale, bias, magnitude), as in ``lora_linear``.

    Returns
    -------
    ys : list of (*rows, outputs) float
        The output of each layer.

    Raises
    ------
    ConfigError
        layers is not a sequence of LoraLayer.
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
    checked: Any = layers
    tuples = isinstance(checked, tuple | list) and all(isinstance(n, tuple) for n in checked)
    if not tuples or any(not 3 <= len(n) <= len(LoraLayer._fields) for n in checked):
        raise ConfigError("lora_linears: pass a list of LoraLayer(weight, a, b, ...), one for each")
    ys = []
    for first in range(0, len(layers), TOGETHER):
        group = [LoraLayer(*layer) for layer in layers[first : first + TOGETHER]]
        if len(group) > 1 and all(n.bias is None and n.magnitude is None for n in group):
            ys += _together(x, group)
            continue
        lows: Any = lora_down(x, *(layer.a for layer in group))
        for layer, low in zip(group, lows, strict=False):
            weight, a, b, scale, bias, magnitude = layer
            factor = factor_of("lora_linears", weight, a, b, scale, magnitude)
            ys.append(lora_up(x, weight, low, b, bias, factor, scale=scale))
    return ys


def _together(x: Array, group: Sequence[LoraLayer]) -> list[Any]:
    """Return the outputs of two or three layers, by one call of lora_group."""
    absent = [None] * (TOGETHER - len(group))
    arrays = (each for name in ("weight", "a", "b") for each in (*_all(group, name), *absent))
    scales = {f"scale{n or ''}": each.scale for n, each in zip((0, 2, 3), group, strict=False)}
    call: Any = lora_group
    return [*call(x, *arrays, **scales)[: len(group)]]


def _all(group: Sequence[LoraLayer], name: str) -> list[Any]:
    """Return the field ``name`` of each layer."""
    return [getattr(each, name) for each in group]


@op(
    "x(*rows, inputs), a(rank, inputs): param, a2?(rank2, inputs): param,"
    " a3?(rank3, inputs): param -> low(*rows, rank), low2(*rows, rank2), low3(*rows, rank3)",
    widen=False,  # products take 16-bit operands as they are
)
def lora_down(
    x: Array, a: Array, a2: Array | None = None, a3: Array | None = None
) -> tuple[Array | None, ...]:
    """Return ``x @ a.T`` for each a, as parts of one product; None for an absent a."""
    whole = stacked([each for each in (a, a2, a3) if each is not None], x.dtype)
    low = empty((*x.shape[:-1], whole.shape[0]), x.dtype, like=x)  # (*rows, all ranks)
    gemm(flat(x), whole.T, out=flat(low))
    return tuple(None if part is None else low[..., part] for part in _spans([a, a2, a3]))


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
    """Return the gradients of x and of each a; None for a gradient that is not ``wanted``."""
    factors = [a, a2, a3]
    present, spans = [each for each in factors if each is not None], _spans(factors)
    needed = {"x", "a", "a2", "a3"} if wanted is None else wanted
    dlows = [
        np.zeros_like(x, shape=(*x.shape[:-1], factor.shape[0])) if gradient is None else gradient
        for gradient, factor in zip((dlow, dlow2, dlow3), factors, strict=True)
        if factor is not None
    ]
    columns, ranks = dlows[0], sum(each.shape[0] for each in present)
    if len(dlows) > 1:
        columns = empty((*x.shape[:-1], ranks), x.dtype, like=x)
        concatenate(dlows, columns)
    dx: Any = None
    das: list[Any] = [None] * TOGETHER
    if "x" in needed:
        dx = empty(x.shape, x.dtype, like=x)
        gemm(flat(columns), stacked(present, x.dtype), out=flat(dx))
    if needed & {"a", "a2", "a3"}:
        whole = empty((ranks, x.shape[-1]), sum_dtype(x), like=x)
        gemm(flat(columns).T, flat(x), out=whole)
        das = [
            None
            if part is None or each is None or name not in needed
            else in_dtype(whole[part], each.dtype)
            for part, each, name in zip(spans, factors, ("a", "a2", "a3"), strict=True)
        ]
    return dx, *das


@op(
    "x(*rows, inputs), weight(outputs, inputs): weight, low(*rows, rank),"
    " b(outputs, rank): param, bias?(outputs): param, factor?(outputs): param -> y(*rows, outputs)",
    widen=False,
    operations=lambda a: 2 * a["x"].size * a["weight"].shape[0],  # without the low-rank products
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
    """Return y of one layer, as lora_linear, from its low and DoRA's factor."""
    rows = flat(x)
    return adapted(x, rows, rows, weight, flat(low), b, bias, factor, scale)


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
    """Return the gradients of the arrays, in order; None for a gradient that is not ``wanted``."""
    operands = {"x": x, "weight": weight, "low": low, "b": b, "bias": bias, "factor": factor}
    needed = requested_gradients("lora_up_backward", wanted, **operands)
    dproduct, dlow, db, dbias, dfactor = adapted_gradients(
        dy, flat(x), weight, low, b, bias, factor, scale, needed
    )
    dx = empty(x.shape, x.dtype, like=x) if "x" in needed else None
    if dx is not None:
        gemm(dproduct, weight, out=flat(dx))
    dweight = gemm(dproduct.T, flat(x)) if "weight" in needed else None
    return dx, dweight, dlow, db, dbias, dfactor


def _spans(factors: Sequence[Array | None]) -> list[slice | None]:
    """Return the columns of low that belong to each factor; None for an absent factor."""
    spans: list[slice | None] = []
    stop = 0
    for each in factors:
        start, stop = stop, stop + (0 if each is None else each.shape[0])
        spans.append(None if each is None else slice(start, stop))
    return spans


for each in (lora_down, lora_down_backward, lora_up, lora_up_backward):
    each.facts["products"] = True
lora_up_backward.facts["operations"] = lambda a: (  # without the low-rank products
    2 * a["dy"].size * a["weight"].shape[1] * (a.get("dx") is not None)
)
