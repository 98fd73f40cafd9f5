"""The loss of KTO: completions that are desirable or undesirable, without pairs.

r = sum(log_probs - reference) of a row        s(x) = 1 / (1 + exp(-x))
loss = mean over rows of 1 - s(beta (r - k)) if desirable, else 1 - s(beta (k - r))

Ethayarajh et al., KTO: Model Alignment as Prospect Theoretic Optimization, 2024.
"""

import reprlib
from math import isfinite
from numbers import Real
from typing import Any

import numpy as np

from ..core.call import is_number
from ..core.dtypes import Array
from ..core.op import op
from ..errors import ConfigError
from ..ops.common.checks import check_choice
from ._rows import (
    as_mask,
    as_weights,
    check_finite,
    check_positive,
    check_some,
    log_probabilities,
    refuse_unused,
    sigmoid,
)

KINDS = ("kto", "apo_zero_unpaired")


def kto(
    log_probs: Array,
    mask: Array,
    reference: Array,
    desirable: Array,
    *,
    kind: str = "kto",
    beta: float = 0.1,
    k: Any = None,
    weights: Array | None = None,
    count: float | None = None,
) -> Array:
    """Return the loss of KTO, averaged over the completions.

    r is the sum of log_probs - reference over the tokens of a completion, s the logistic function:

    ================= ===================================================================
    kto               1 - s(beta (r - k)) if desirable, else 1 - s(beta (k - r))
    apo_zero_unpaired 1 - s(beta r) if desirable, else s(beta r)
    ================= ===================================================================

    Parameters
    ----------
    log_probs : (rows, tokens) float
        Log-probabilities of the tokens.
    mask : (rows, tokens) bool, or 0 and 1
        The tokens of the completions; other tokens may hold anything.
    reference : (rows, tokens) float
        Log-probabilities of the reference model, a constant.
    desirable : (rows,) bool
        Whether each completion is desirable.
    kind : str
        "kto" or "apo_zero_unpaired".
    beta : float
        Inverse temperature; above 0.
    k : float or () float, optional
        An estimate of the divergence from the reference: the mean of ``implicit_rewards(...,
        beta=1)`` of completions with prompts of other rows.  A negative k counts as 0, the default.
    weights : (rows,) float, optional
        Factors of the losses of completions.
    count : float, optional
        Divisor of the sum, in place of the number of rows.

    Returns
    -------
    loss : () float32, or float64 for float64 log_probs

    Raises
    ------
    ConfigError
        An option is out of its range, or the kind does not use it; a log-probability that counts
        is not finite, or above 0 by more than rounding (on a GPU the loss is then NaN).
    ShapeError, DTypeError
        The arrays do not fit each other; there are no rows, and no count.
    """
    check_choice("kto", "kind", kind, KINDS)
    refuse_unused("kto", f"kind={kind!r}", k=k is not None and kind != "kto")
    if isinstance(k, Real) and not (is_number(k) and isfinite(k)):
        shown = reprlib.repr(k)
        raise ConfigError(f"kto(k={shown}): k must be a finite number; a negative k counts as 0")
    shift, array = (float(k), None) if isinstance(k, Real) else (0.0, k)
    return kto_forward(
        log_probs,
        as_mask("kto", mask),
        reference,
        desirable,
        k=array,
        weights=as_weights(weights),
        kind=kind,
        beta=beta,
        shift=shift,
        count=count,
    )


@op(
    "log_probs(rows, tokens), mask(rows, tokens): bool, reference(rows, tokens): constant,"
    " desirable(rows): bool, k?(): constant, weights?(rows): constant -> loss(): stat"
)
def kto_forward(
    log_probs: Array,
    mask: Array,
    reference: Array,
    desirable: Array,
    *,
    k: Array | None = None,
    weights: Array | None = None,
    kind: str = "kto",
    beta: float = 0.1,
    shift: float = 0.0,
    count: float | None = None,
) -> Array:
    """Return the loss of ``kto``; ``shift`` is k if k is a number, not an array."""
    arrays = log_probs, mask, reference, desirable, k, weights
    return _loss_and_slopes(*arrays, kind, beta, shift, count)[0]


@kto_forward.gradient
def kto_backward(
    dloss: Array,
    log_probs: Array,
    mask: Array,
    reference: Array,
    desirable: Array,
    k: Array | None,
    weights: Array | None,
    *,
    kind: str = "kto",
    beta: float = 0.1,
    shift: float = 0.0,
    count: float | None = None,
) -> tuple[Array, None, None, None]:
    """Return the gradient of log_probs; the other inputs have none."""
    arrays = log_probs, mask, reference, desirable, k, weights
    return dloss * _loss_and_slopes(*arrays, kind, beta, shift, count)[1], None, None, None


@kto_forward.require
def _check(call: str, log_probs: Array, kind: str, beta: float, count: float | None) -> None:
    check_choice(call, "kind", kind, KINDS)
    check_some(call, len(log_probs), count)
    check_positive(call, beta=beta, **({} if count is None else {"count": count}))


kto_backward.require(_check)


def _loss_and_slopes(
    log_probs: Array,
    mask: Array,
    reference: Array,
    desirable: Array,
    k: Array | None,
    weights: Array | None,
    kind: str,
    beta: float,
    shift: float,
    count: float | None,
) -> tuple[Array, Array]:
    """Return the loss, and its derivatives with respect to log_probs."""
    counted = log_probabilities("kto", log_probs, mask)
    r = (counted - log_probabilities("kto", reference, mask, "reference")).sum(axis=1)
    check_finite("kto", k=k, weights=weights)
    if kind == "kto":
        r = r - np.maximum(shift if k is None else k, 0).astype(r.dtype)
    z = np.where(desirable, beta * r, -beta * r)
    losses, slopes = sigmoid(-z), -sigmoid(z) * sigmoid(-z)
    slopes = np.where(desirable, beta * slopes, -beta * slopes)
    factors = np.ones_like(r) / (len(r) if count is None else count)
    if weights is not None:
        factors = factors * weights
    loss = np.asarray((losses * factors).sum(), like=counted)
    return loss, np.where(mask, (slopes * factors)[:, None], r.dtype.type(0))
