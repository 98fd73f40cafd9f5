"""The router of a mixture of experts: it chooses the experts of each row, and their weights.

experts = the k largest of s(logits) + bias        weights = scale * s(logits)[experts] / their sum

Shazeer et al., Outrageously Large Neural Networks, 2017.  Dai et al., DeepSeekMoE, 2024.
"""

from collections.abc import Set
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty, rounded
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ConfigError, ShapeError
from ..activations.softmax import finite
from ..activations.swiglu import sigmoid
from ..common.checks import check_choice
from ..common.columns import row_sum
from ..common.no_kernel import no_kernel

SCORES = ("softmax", "softmax_of_k", "sigmoid", "sqrt_softplus")  # numbered as in route.cu
LEAST = 1e-20  # added to the sum of weights, as in DeepSeek's router
MOST_EXPERTS, MOST_CHOSEN = 1024, 32  # of the kernel: each of 32 threads holds 32 scores
THREADS = 128  # of a block


class Routes(NamedTuple):
    """The choice of a router, as ``route`` returns it.

    Attributes
    ----------
    experts : (*rows, k) int32
        The experts of each row, in the order of their scores, the largest first.
    weights : (*rows, k) float
        The factors of the experts' results; they have a gradient.
    """

    experts: Any
    weights: Any


def route(
    logits: Array,
    *,
    k: int,
    scores: str = "softmax",
    bias: Array | None = None,
    normalize: bool = True,
    groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> Routes:
    """Return the k experts of each row with the largest scores, and their weights.

    ``experts`` are the k largest of ``s + bias``; of equal ones, the lowest index comes first.
    ``weights = scale * s[experts]``, divided by ``sum(s[experts])`` if ``normalize``.  s is

    - "softmax": the softmax of all logits
    - "softmax_of_k": ``logits + bias``; the weights are the softmax of the k largest
    - "sigmoid": ``1 / (1 + exp(-logits))``
    - "sqrt_softplus": ``sqrt(log(1 + exp(logits)))``

    Scores and weights are computed in float32 (float64 for float64 arrays).  The logits have a
    gradient through the weights and their normalization, but not through the choice.  An expert
    whose ``s + bias`` is NaN is chosen last, and all weights of its row are NaN, whether it is
    chosen or not.

    Parameters
    ----------
    logits : (*rows, experts) float
    k : int
        Number of experts for each row.
    scores : str
        "softmax", "softmax_of_k", "sigmoid" or "sqrt_softplus".
    bias : (experts,) dtype of logits or float32, optional
        Added to the scores for the choice only.  With "softmax_of_k" it is a part of the weights,
        too, and has a gradient; with other scores its gradient is 0.
    normalize : bool
        Whether the weights of a row sum to ``scale``; with "softmax_of_k" they always do.
    groups, top_groups : int, optional
        The experts are divided into ``groups`` of neighbours, and only experts of the
        ``top_groups`` best groups are chosen.  The score of a group is the sum of its two largest
        ``s + bias`` (DeepSeek-V3) or, with "softmax", its largest one (DeepSeek-V2).
    scale : float
        Factor of all weights.

    Returns
    -------
    routes : Routes
        experts (*rows, k) int32, in the order of their scores, and weights (*rows, k) in the dtype
        of logits.

    Raises
    ------
    ConfigError
        There are fewer than k experts to choose from, the groups do not divide the experts evenly,
        or an option is unknown.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import Routes, route, route_backward, route_forward
    >>> logits = np.log(np.array([[1, 4, 3, 2]], np.float32))
    >>> routes = route(logits, k=2)
    >>> assert isinstance(routes, Routes) and routes.experts.tolist() == [[1, 2]]
    >>> np.testing.assert_allclose(routes.weights, [[4 / 7, 3 / 7]], rtol=1e-6)
    >>> weights, experts = route_forward(logits, k=2, normalize=False)
    >>> np.testing.assert_allclose(weights, [[0.4, 0.3]], rtol=1e-6)
    >>> dlogits, _ = route_backward(np.ones_like(weights), logits, None, experts, k=2)
    >>> np.testing.assert_allclose(dlogits, 0, atol=1e-6)  # the sum of weights is always 1
    """
    results: Any = route_forward(
        logits,
        bias,
        k=k,
        scores=scores,
        normalize=normalize,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
    )
    return Routes(results[1], results[0])


@op(
    "logits(*rows, experts), bias?(experts): param"
    " -> weights(*rows, k), experts(*rows, k): int < experts",
    sizes=lambda shape, k, **_: {"k": k},
    autocast="float32",
)
def route_forward(
    logits: Array,
    bias: Array | None = None,
    *,
    k: int,
    scores: str = "softmax",
    normalize: bool = True,
    groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> tuple[Array, Array]:
    """Return the weights and experts of ``route``: results with a gradient come first."""
    # without bias and groups: scores have the order of the logits, but rounding may make some equal
    choice = logits
    grouped = groups is not None and groups > 1
    if scores != "softmax_of_k" and (bias is not None or grouped):
        choice = _softmax(logits) if scores == "softmax" else _score(logits, scores)
    choice = choice if bias is None else choice + bias
    unknown = np.isnan(choice)
    choice = np.where(unknown, -np.inf, choice)
    if grouped:
        choice = _of_best_groups(choice, groups, top_groups, 1 if scores == "softmax" else 2)
    order = np.argsort(-choice, axis=-1, kind="stable")[..., :k]
    weights, total = _weights(logits, bias, order, scores, normalize)
    weights = _broken(unknown, weights * (scale / total))
    return weights, order.astype(np.int32)


@route_forward.kernel
def _launch(
    logits: Array,
    bias: Array | None,
    k: int,
    scores: str,
    normalize: bool,
    groups: int | None,
    top_groups: int | None,
    scale: float,
) -> Any:
    """Return weights and experts from the kernel."""
    count = logits.shape[-1]
    if count > MOST_EXPERTS or k > MOST_CHOSEN:
        return no_kernel(f"{k} of {count} experts: the kernel supports up to 32 of 1024")
    chosen = _constants(
        logits.dtype,
        None if bias is None else bias.dtype,
        *(count, k, scores, normalize, groups or 1, (top_groups or 1) if groups else 1),
    )
    shape = *logits.shape[:-1], k
    experts, weights = (empty(shape, dtype, like=logits) for dtype in (np.int32, logits.dtype))
    rows = logits.size // count
    kernel = load("route.cu", "route_forward", logits, chosen)
    blocks = -(-rows * chosen["ROW_THREADS"] // THREADS)
    kernel[blocks, THREADS](logits, bias, experts, weights, rows, scale)
    return weights, experts


@route_forward.gradient
def route_backward(
    dweights: Array,
    logits: Array,
    bias: Array | None,
    experts: Array,
    *,
    k: int,
    scores: str = "softmax",
    normalize: bool = True,
    groups: int | None = None,
    top_groups: int | None = None,
    scale: float = 1.0,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, Array | None]:
    """Return the gradients of logits and bias, which is 0 except with "softmax_of_k"."""
    weights, total = _weights(logits, bias, experts, scores, normalize)
    weights = weights / total
    d = dweights * dweights.dtype.type(scale)
    inner = (d * weights).sum(axis=-1, keepdims=True)
    dlogits = np.zeros_like(logits)
    if _is_local(scores, normalize):
        d = weights * (d - inner)
    elif scores == "softmax":
        d = weights * (d - inner)
        dlogits -= inner * _softmax(logits)
    else:
        chosen = np.take_along_axis(logits, experts, axis=-1)
        d = _slope(chosen, scores) * ((d - inner if normalize else d) / total)
    np.put_along_axis(dlogits, experts, d, axis=-1)
    return dlogits, _bias_gradient(dlogits, bias, scores, wanted)


@route_backward.kernel
def _launch_backward(
    dweights: Array,
    logits: Array,
    bias: Array | None,
    experts: Array,
    k: int,
    scores: str,
    normalize: bool,
    groups: int | None,
    top_groups: int | None,
    scale: float,
    wanted: Set[str] | None,
) -> Any:
    count = logits.shape[-1]
    if count > MOST_EXPERTS or k > MOST_CHOSEN:
        return no_kernel(f"{k} of {count} experts: the kernel supports up to 32 of 1024")
    added = bias if scores == "softmax_of_k" else None
    chosen = _constants(
        logits.dtype, None if added is None else added.dtype, count, k, scores, normalize, 1, 1
    )
    summed = added is not None and (wanted is None or "bias" in wanted)
    dlogits = whole = empty(logits.shape, logits.dtype, like=logits)
    if summed and logits.dtype != FLOAT32:  # the gradient of bias adds unrounded numbers
        whole = empty(logits.shape, FLOAT32, like=logits)
    rows = logits.size // count
    # the kernel reads int32, which route returns
    experts = experts if experts.dtype == np.int32 else experts.astype(np.int32)
    kernel = load("route.cu", "route_backward", logits, chosen)
    blocks = -(-rows * chosen["ROW_THREADS"] // THREADS)
    kernel[blocks, THREADS](
        *(dweights, logits, added, experts, dlogits, None if whole is dlogits else whole),
        *(rows, scale),
    )
    return dlogits, _bias_gradient(whole, bias, scores, wanted)


@cache
def _constants(
    dtype: Any,
    bias: Any,
    experts: int,
    k: int,
    scores: str,
    normalize: bool,
    groups: int,
    top_groups: int,
) -> Constants:
    """Return the constants of route.cu: a row has a thread for each expert, up to a warp."""
    return Constants(
        T=dtype,
        B=bias or dtype,
        EXPERTS=experts,
        TOP=k,
        SCORES=SCORES.index(scores),
        NORMALIZE=normalize,
        BIAS=bias is not None,
        GROUPS=groups,
        GROUPS_KEPT=top_groups,
        ROW_THREADS=min(32, 1 << (experts - 1).bit_length()),
        THREADS=THREADS,
    )


def _check(
    call: str,
    logits: Any,
    k: int,
    scores: str,
    groups: int | None,
    top_groups: int | None,
) -> None:
    """Raise ConfigError for options that do not fit the experts."""
    experts = logits.shape[-1]
    check_choice(call, "scores", scores, SCORES)
    if (groups is None) != (top_groups is None):
        raise ConfigError(f"{call}(groups={groups}, top_groups={top_groups}): pass both, or none")
    if groups is not None and top_groups is not None:
        if groups < 1 or experts % groups:
            raise ConfigError(f"{call}(groups={groups}): groups must divide the {experts} experts")
        if not 1 <= top_groups <= groups:
            problem = f"top_groups must be in 1 .. {groups}, the number of groups"
            raise ConfigError(f"{call}(top_groups={top_groups}): {problem}")
        experts = experts // groups * top_groups
    if not 1 <= k <= experts:
        whose = "experts" if groups is None else f"experts of {top_groups} groups"
        raise ConfigError(f"{call}(k={k}): k must be in 1 .. {experts}, the number of {whose}")


route_forward.require(_check)
route_backward.require(_check)


@route_backward.require
def _check_chosen(call: str, experts: Any, k: int) -> None:
    """Raise ShapeError unless each row has k experts: the kernel reads k of them."""
    if experts.shape[-1] != k:
        problem = f"{call}: experts has {experts.shape[-1]} columns; there must be k={k}"
        raise ShapeError(problem, expected=k, actual=experts.shape[-1])


def weights_of(
    logits: Array,
    bias: Array | None,
    experts: Array,
    *,
    scores: str,
    normalize: bool,
    scale: float,
    **_: Any,
) -> Array:
    """Return the weights of ``route`` for experts that were chosen before: (*rows, k)."""
    wide = logits.astype(np.promote_types(logits.dtype, FLOAT32), copy=False)
    weights, total = _weights(wide, bias, experts, scores, normalize)
    return rounded(_broken(np.isnan(wide), weights * (scale / total)), logits.dtype)


# ---- scores -------------------------------------------------------------------------------------
def _softmax(x: Array) -> Array:
    """Return the softmax of each row; 0 if all logits of a row are -inf."""
    y = np.exp(x - finite(x.max(axis=-1, keepdims=True)))
    return y / np.maximum(y.sum(axis=-1, keepdims=True), np.finfo(y.dtype).tiny)


def _score(x: Array, scores: str) -> Array:
    """Return the scores "sigmoid" or "sqrt_softplus" in a new array."""
    if scores == "sigmoid":
        return sigmoid(x)
    with np.errstate(invalid="ignore"):  # logits may be NaN
        return np.sqrt(np.logaddexp(x.dtype.type(0), x))


def _slope(x: Array, scores: str) -> Array:
    """Return the derivative of ``_score``."""
    sigma = sigmoid(x)
    if scores == "sigmoid":
        return sigma * (1 - sigma)
    score = 2 * _score(x, scores)
    return np.divide(sigma, score, where=score != 0, out=np.zeros_like(x))


def _is_local(scores: str, normalize: bool) -> bool:
    """Return whether the weights are a softmax of only the chosen logits."""
    return scores == "softmax_of_k" or (scores == "softmax" and normalize)


def _of_best_groups(choice: Array, groups: Any, top_groups: Any, counted: int) -> Array:
    """Return the choice with -inf outside of the best groups.

    The score of a group is the sum of its ``counted`` largest elements.
    """
    parts = choice.reshape(*choice.shape[:-1], groups, -1)  # (*rows, groups, experts of a group)
    sums = np.sort(parts, axis=-1)[..., -counted:].sum(axis=-1)
    best = np.argsort(-sums, axis=-1, kind="stable")[..., :top_groups]
    kept = np.zeros_like(sums, bool)
    np.put_along_axis(kept, best, True, axis=-1)
    return np.where(kept[..., None], parts, -np.inf).reshape(choice.shape)


def _broken(unknown: Array, weights: Array) -> Array:
    """Return the weights, with NaN in rows that have an ``unknown`` element, chosen or not."""
    return np.where(unknown.any(axis=-1, keepdims=True), weights.dtype.type(np.nan), weights)


def _weights(
    logits: Array, bias: Array | None, experts: Array, scores: str, normalize: bool
) -> tuple[Array, Any]:
    """Return the scores of the chosen experts, and their divisor."""
    chosen = np.take_along_axis(logits, experts, axis=-1)
    if _is_local(scores, normalize):
        if scores == "softmax_of_k" and bias is not None:
            chosen = chosen + bias[experts]
        return _softmax(chosen), chosen.dtype.type(1)
    if scores == "softmax":
        return np.take_along_axis(_softmax(logits), experts, axis=-1), chosen.dtype.type(1)
    weights = _score(chosen, scores)
    total = weights.sum(axis=-1, keepdims=True) + weights.dtype.type(LEAST)
    return weights, total if normalize else weights.dtype.type(1)


def _bias_gradient(
    dlogits: Array, bias: Array | None, scores: str, wanted: Set[str] | None
) -> Array | None:
    """Return the gradient of bias; None if it is not ``wanted``."""
    if bias is None or (wanted is not None and "bias" not in wanted):
        return None
    if scores != "softmax_of_k":
        return np.zeros_like(bias)
    return row_sum(dlogits.reshape(-1, len(bias)), bias.dtype)
