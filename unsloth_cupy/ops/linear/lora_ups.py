"""The layers of lora_linears without bias and magnitude: q, k and v, or gate and up.

[y, y2, y3] = x [weight; weight2; weight3]^T         as linears; then for each layer

y += scale * low b^T

In the backward pass dx is one array, to which each layer adds, or one product.
"""

import math
from collections.abc import Sequence, Set
from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.op import op
from ...errors import ConfigError
from ..common.checks import requested_gradients
from ..common.gemm import gemm
from ..elements.cast import in_dtype
from ._lora_gradients import rank_gradients
from .linear import flat
from .linears import WEIGHTS, columns_of_one, present, rows_of_one, spans

LOWS, UPS = ("low", "low2", "low3"), ("b", "b2", "b3")


@op(
    "x(*rows, inputs), weight(outputs, inputs): weight, weight2(outputs2, inputs): weight,"
    " weight3?(outputs3, inputs): weight, low(*rows, rank), low2(*rows, rank2),"
    " low3?(*rows, rank3), b(outputs, rank): param, b2(outputs2, rank2): param,"
    " b3?(outputs3, rank3): param"
    " -> y(*rows, outputs), y2(*rows, outputs2), y3(*rows, outputs3)",
    widen=False,  # products take 16-bit operands as they are
    products=True,
    operations=lambda a: (  # without those of the low rank
        2 * a["x"].size * sum(a[n].shape[0] for n in WEIGHTS if a.get(n) is not None)
    ),
)
def lora_ups(
    x: Array,
    weight: Array,
    weight2: Array,
    weight3: Array | None,
    low: Array,
    low2: Array,
    low3: Array | None,
    b: Array,
    b2: Array,
    b3: Array | None = None,
    *,
    scale: float = 1.0,
    scale2: float = 1.0,
    scale3: float = 1.0,
) -> tuple[Array | None, ...]:
    """Return y of each layer of lora_linears from its low; None for an absent one."""
    weights = present([weight, weight2, weight3])
    whole = rows_of_one(weights)
    matrices = weights if whole is None else [whole]
    ys = [empty((*x.shape[:-1], each.shape[0]), x.dtype, like=x) for each in matrices]
    for y, each in zip(ys, matrices, strict=True):
        gemm(flat(x), each.T, out=flat(y))
    rows = [flat(y) for y in ys]
    if whole is not None:
        parts, (y,), (row,) = spans(weights), ys, rows
        ys, rows = [y[..., part] for part in parts], [row[..., part] for part in parts]
    lows, ups = present([low, low2, low3]), present([b, b2, b3])
    for row, each, up, factor in zip(rows, lows, ups, (scale, scale2, scale3), strict=False):
        gemm(flat(each), in_dtype(up, x.dtype).T, out=row, add=True, factor=factor)
    return *ys, *[None] * (len(WEIGHTS) - len(ys))


@lora_ups.gradient(widen=False)
def lora_ups_backward(
    dy: Array | None,
    dy2: Array | None,
    dy3: Array | None,
    x: Array,
    weight: Array,
    weight2: Array,
    weight3: Array | None,
    low: Array,
    low2: Array,
    low3: Array | None,
    b: Array,
    b2: Array,
    b3: Array | None = None,
    *,
    scale: float = 1.0,
    scale2: float = 1.0,
    scale3: float = 1.0,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, ...]:
    """Return the gradients of the arrays, in order; None for those that are not ``wanted``."""
    by_name: dict[str, Any] = dict(zip(WEIGHTS, (weight, weight2, weight3), strict=True))
    by_name |= dict(zip((*LOWS, *UPS), (low, low2, low3, b, b2, b3), strict=True))
    needed = requested_gradients("lora_ups_backward", wanted, x=x, **by_name)
    weights = present([weight, weight2, weight3])
    dys = [
        np.zeros_like(x, shape=(*x.shape[:-1], each.shape[0])) if given is None else given
        for given, each in zip((dy, dy2, dy3), weights, strict=False)
    ]
    grads: dict[str, Any] = dict.fromkeys(("x", *by_name))
    layers = zip(WEIGHTS, LOWS, UPS, dys, (scale, scale2, scale3), strict=False)
    for of_weight, of_low, of_up, each, factor in layers:
        up, kind = by_name[of_up], by_name[of_up].dtype if of_up in needed else None
        if {of_low, of_up} & needed:
            grads[of_low], grads[of_up] = rank_gradients(each, up, by_name[of_low], kind, factor)
        if of_weight in needed:
            grads[of_weight] = gemm(flat(each).T, flat(x))
    if "x" in needed:
        matrix, joined = rows_of_one(weights), columns_of_one(dys)
        one = matrix is not None and joined is not None
        grads["x"] = empty(x.shape, x.dtype, like=x)
        pairs = [(joined, matrix)] if one else zip(dys, weights, strict=True)
        for number, (each, of_each) in enumerate(pairs):
            gemm(flat(each), of_each, out=flat(grads["x"]), add=number > 0)
    return tuple(grads.values())


def _lie_apart(weights: Sequence[Any], dys: Sequence[Any] = ()) -> tuple[bool, ...]:
    """Return what a replay must know of the places of arrays."""
    together = present(dys)
    return (
        rows_of_one(present(weights)) is None,
        not together or columns_of_one(together) is None,
    )


def _check_third(call: str, weight3: Any, low3: Any, b3: Any) -> None:
    """Raise a ConfigError for a part of a third layer."""
    given = {"weight3": weight3, "low3": low3, "b3": b3}
    missing = [name for name, array in given.items() if array is None]
    if 0 < len(missing) < len(given):
        problem = f"a third layer lacks {' and '.join(missing)}"
        raise ConfigError(f"{call}: {problem}; pass weight3, low3 and b3, or none of them")


lora_ups.require(_check_third)
lora_ups_backward.require(_check_third)
lora_ups.facts["lying"] = lambda arrays: _lie_apart(arrays[1:4])
lora_ups_backward.facts["lying"] = lambda arrays: _lie_apart(arrays[4:7], arrays[:3])
lora_ups_backward.facts["products"] = True
lora_ups_backward.facts["operations"] = lambda a: (  # without those of the low rank
    2
    * math.prod(a["x"].shape)
    * sum(
        a[name].shape[0] * (a.get("dx") is not None) for name in WEIGHTS if a.get(name) is not None
    )
)
