"""Layers of lora_linears without bias and magnitude: q, k and v, or gate and up.

low = x [a; a2; a3]^T                                one product, which reads x once for all layers
[y, y2, y3] = x [weight; weight2; weight3]^T         as in linears
y += scale * low b^T                                 each layer has its own columns of low; a launch

In the backward pass dlow is one array, too: one product with it gives the gradients of every a, and
another one is added to dx.
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
from ..elements.cast import in_dtype, stacked
from ._lora_expand import add_low_rank_rows, add_low_ranks
from ._lora_gradients import rank_gradients
from .linear import flat
from .linears import (
    WEIGHTS,
    columns_of_one,
    input_gradient,
    present,
    rows_of_one,
    side_by_side,
    spans,
)
from .lora_merge import sum_dtype

DOWNS, UPS = ("a", "a2", "a3"), ("b", "b2", "b3")


@op(
    "x(*rows, inputs), weight(outputs, inputs): weight, weight2(outputs2, inputs): weight,"
    " weight3?(outputs3, inputs): weight, a(rank, inputs): param, a2(rank2, inputs): param,"
    " a3?(rank3, inputs): param, b(outputs, rank): param, b2(outputs2, rank2): param,"
    " b3?(outputs3, rank3): param"
    " -> y(*rows, outputs), y2(*rows, outputs2), y3(*rows, outputs3), low(*rows, ranks)",
    widen=False,  # products take 16-bit operands as they are
    products=True,
    bound=lambda sizes: {"ranks": sizes["rank"] + sizes["rank2"] + sizes.get("rank3", 0)},
    operations=lambda a: (  # without the low-rank products
        2 * a["x"].size * sum(a[n].shape[0] for n in WEIGHTS if a.get(n) is not None)
    ),
)
def lora_group(
    x: Array,
    weight: Array,
    weight2: Array,
    weight3: Array | None,
    a: Array,
    a2: Array,
    a3: Array | None,
    b: Array,
    b2: Array,
    b3: Array | None = None,
    *,
    scale: float = 1.0,
    scale2: float = 1.0,
    scale3: float = 1.0,
) -> tuple[Array | None, ...]:
    """Return y of each layer, None for an absent layer; and the low of all layers."""
    weights, downs, ups = map(present, ((weight, weight2, weight3), (a, a2, a3), (b, b2, b3)))
    down = _down(downs, x.dtype)
    low = empty((*x.shape[:-1], down.shape[0]), x.dtype, like=x)  # (*rows, ranks)
    gemm(flat(x), down.T, out=flat(low))
    lows = [low[..., part] for part in spans(downs)]
    whole = rows_of_one(weights)
    matrices = weights if whole is None else [whole]
    ys = [empty((*x.shape[:-1], each.shape[0]), x.dtype, like=x) for each in matrices]
    for y, each in zip(ys, matrices, strict=True):
        gemm(flat(x), each.T, out=flat(y))
    if whole is not None:
        ys = [ys[0][..., part] for part in spans(weights)]
    add_low_ranks(ys, lows, ups, (scale, scale2, scale3)[: len(ys)])
    return *ys, *[None] * (len(WEIGHTS) - len(ys)), low


@lora_group.gradient(widen=False)
def lora_group_backward(
    dy: Array | None,
    dy2: Array | None,
    dy3: Array | None,
    dlow: Array | None,
    x: Array,
    weight: Array,
    weight2: Array,
    weight3: Array | None,
    a: Array,
    a2: Array,
    a3: Array | None,
    b: Array,
    b2: Array,
    b3: Array | None,
    low: Array,
    *,
    scale: float = 1.0,
    scale2: float = 1.0,
    scale3: float = 1.0,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, ...]:
    """Return the gradients of the arrays, in order; None for a gradient that is not ``wanted``."""
    by_name: dict[str, Any] = dict(zip(WEIGHTS, (weight, weight2, weight3), strict=True))
    by_name |= dict(zip((*DOWNS, *UPS), (a, a2, a3, b, b2, b3), strict=True))
    needed = requested_gradients("lora_group_backward", wanted, x=x, **by_name)
    weights, downs, ups = (present([by_name[n] for n in names]) for names in (WEIGHTS, DOWNS, UPS))
    dys = [
        np.zeros_like(x, shape=(*x.shape[:-1], each.shape[0])) if gradient is None else gradient
        for gradient, each in zip((dy, dy2, dy3), weights, strict=False)
    ]
    grads: dict[str, Any] = dict.fromkeys(("x", *by_name))
    if needed & {"x", *DOWNS, *UPS}:
        scales = (scale, scale2, scale3)[: len(ups)]
        needs_db = [name in needed for name in UPS[: len(ups)]]
        lows = [low[..., part] for part in spans(downs)]
        dlows, dbs = rank_gradients(dys, ups, lows, scales, needs_db)
        grads |= dict(zip(UPS, dbs, strict=False))
        if dlow is not None:
            dlows += dlow
    if needed & {*DOWNS}:
        das = empty((dlows.shape[-1], x.shape[-1]), sum_dtype(x), like=x)
        gemm(flat(dlows).T, flat(x), out=das)
        for name, part, each in zip(DOWNS, spans(downs), downs, strict=False):
            grads[name] = in_dtype(das[part], each.dtype) if name in needed else None
    for name, each in zip(WEIGHTS, dys, strict=False):
        if name in needed:
            grads[name] = gemm(flat(each).T, flat(x))
    if "x" in needed:
        joined = side_by_side(dys, weights, x, 2)  # dx is read and written for each further dy
        dx = grads["x"] = input_gradient(dys, joined, weights, x)
        whole = rows_of_one(downs)  # in the dtype of a: the kernel rounds it
        add_low_rank_rows(dx, dlows, stacked(downs, x.dtype) if whole is None else whole)
    return tuple(grads.values())


def _down(downs: Sequence[Any], dtype: Any) -> Array:
    """Return the rows of all a as one matrix in a dtype, without a copy if they are its parts."""
    whole = rows_of_one(downs)
    return stacked(downs, dtype) if whole is None else in_dtype(whole, dtype)


def _lie_apart(
    weights: Sequence[Any], downs: Sequence[Any], dys: Sequence[Any] = ()
) -> tuple[bool, ...]:
    """Return whether weights, downs and dys are separate arrays: a part of the key of a replay."""
    gradients = present(dys)
    return (
        rows_of_one(present(weights)) is None,
        rows_of_one(present(downs)) is None,
        not gradients or columns_of_one(gradients) is None,
    )


def _check_third(call: str, weight3: Any, a3: Any, b3: Any) -> None:
    """Raise ConfigError if the third layer has only some of its arrays."""
    arrays = {"weight3": weight3, "a3": a3, "b3": b3}
    missing = [name for name, array in arrays.items() if array is None]
    if 0 < len(missing) < len(arrays):
        problem = f"a third layer lacks {' and '.join(missing)}"
        raise ConfigError(f"{call}: {problem}; pass weight3, a3 and b3, or none of them")


lora_group.require(_check_third)
lora_group_backward.require(_check_third)
lora_group.facts["lying"] = lambda arrays: _lie_apart(arrays[1:4], arrays[4:7])
lora_group_backward.facts["lying"] = lambda arrays: _lie_apart(
    arrays[5:8], arrays[8:11], arrays[:3]
)
lora_group_backward.facts["products"] = True
lora_group_backward.facts["operations"] = lambda a: (  # without the low-rank products
    2
    * math.prod(a["x"].shape)
    * sum(
        a[name].shape[0] * (a.get("dx") is not None) for name in WEIGHTS if a.get(name) is not None
    )
)
