"""Policy losses: GRPO and its relatives, from the log-probabilities of sampled completions.

d = log_probs - old        ratio = exp(d)        loss = sum of the tokens' terms / count

Shao et al., DeepSeekMath, 2024 (grpo).  TRL's documentation names the papers of the other kinds.
"""

import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.call import is_number
from ..core.dtypes import Array
from ..core.op import op
from ..errors import ConfigError, ShapeError
from ..ops.common.checks import check_choice
from ._rows import (
    as_mask,
    as_weights,
    check_finite,
    check_positive,
    check_some,
    exp,
    lengths,
    log_probabilities,
    masked,
    refuse_unused,
    sigmoid,
)

CLIPPED = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo")  # kinds that clip the ratio of a token
ROWS = ("gmpo", "rloo")  # kinds with one term for each row, not for each token
KINDS = (*CLIPPED, "cispo", "sapo", "vespo", *ROWS)
MEANS = ("grpo", "sapo")  # kinds that average the terms of a row
LEVELS = ("token", "sequence")


def policy(
    log_probs: Array,
    mask: Array,
    advantages: Array,
    *,
    old: Array | None = None,
    reference: Array | None = None,
    kind: str = "dapo",
    level: str | None = None,
    clip: tuple[float, float] | None = None,
    cap: float | None = None,
    tau: tuple[float, float] | None = None,
    vespo: tuple[tuple[float, float], tuple[float, float]] | None = None,
    beta: float = 0.0,
    weighted_kl: bool | None = None,
    weights: Array | None = None,
    count: float | None = None,
) -> Array:
    """Return the policy loss of sampled completions.

    With d = log_probs - old, the ratio p = exp(d), A the advantage and s the logistic function, the
    columns have the term of a token, how the terms of a row are reduced, and the divisor (count):

    ============== =================================================== ================ ============
    grpo           -min(min(p, cap) A, clip(p, 1 - low, 1 + high) A)   mean of the row  rows
    bnpo, dapo     the same                                            sum              tokens
    dr_grpo        the same                                            sum              mask.size
    luspo          the same                                            sum              rows
    cispo          -min(p, cap) A log_probs, the ratio a constant      sum              tokens
    sapo           -4 / tau s(tau (p - 1)) A                           mean of the row  rows
    vespo          -phi A log_probs, phi a constant                    sum              tokens
    gmpo           one term a row: -exp(mean of c) A, where c is
                   min(d, high) if A > 0, else max(d, -low)                             rows
    rloo           one term a row: as grpo, with p = exp(sum of d)                      rows
    ============== =================================================== ================ ============

    tau is tau[0] for A > 0, else tau[1].  phi = exp(t) w**k exp(-t w), where w = exp(sum of d of
    the row) and (k, t) = vespo[0] for A >= 0, else vespo[1].  Each term is multiplied by
    ``weights``; then beta (exp(q) - q - 1), q = reference - log_probs, is added, multiplied by p if
    ``weighted_kl``.

    Parameters
    ----------
    log_probs : (rows, tokens) float
        Log-probabilities of the tokens.
    mask : (rows, tokens) bool, or 0 and 1
        The tokens of the completions; other tokens may hold anything.
    advantages : (rows,) or (rows, tokens) float
        Constants; (rows,) for gmpo and rloo.
    old : (rows, tokens) float, optional
        Log-probabilities when the completions were sampled.  By default log_probs, as a constant.
    reference : (rows, tokens) float, optional
        Log-probabilities of the reference model; required if beta is not 0.
    kind : str
        A name in the first column of the table.
    level : str, optional
        token (default), or sequence: all tokens of a row have the ratio exp(mean of d), as in GSPO.
        vespo, gmpo and rloo do not use it.
    clip : (low, high), optional
        (0.2, 0.2) by default; for the first five kinds, gmpo and rloo.
    cap : float, optional
        Upper limit of the ratio itself, for the first five kinds; required for cispo.
    tau : (float, float), optional
        The temperatures of sapo, (1.0, 1.05) by default.
    vespo : ((k, t), (k, t)), optional
        The shapes of vespo, ((2, 3), (3, 2)) by default.
    beta : float
        Weight of the divergence from the reference; rloo does not use it.
    weighted_kl : bool, optional
        Whether the divergence is multiplied by the ratio, True by default.  gmpo adds its mean over
        the row.
    weights : (rows, tokens) or (rows, 1) float or bool, optional
        Factors of the terms, such as ``sampler_ratio`` or ``high_entropy``; (rows, 1) for gmpo and
        rloo.
    count : float, optional
        Divisor of the sum; for a part of a batch, the count of the whole batch.

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
    call, choice = "policy", f"kind={kind!r}"
    check_choice(call, "kind", kind, KINDS)
    if not is_number(beta):
        raise ConfigError(f"{call}(beta={reprlib.repr(beta)}): beta must be a finite number")
    has_level = kind not in ("vespo", *ROWS)
    refuse_unused(
        call, choice,
        level=level is not None and not has_level,
        clip=clip is not None and kind not in (*CLIPPED, *ROWS),
        cap=cap is not None and kind not in (*CLIPPED, "cispo"),
        tau=tau is not None and kind != "sapo",
        vespo=vespo is not None and kind != "vespo",
        beta=kind == "rloo" and beta != 0,
        reference=kind == "rloo" and reference is not None,
        weighted_kl=weighted_kl is not None and kind in ROWS,
    )  # fmt: skip
    refuse_unused(call, "beta=0", reference=reference is not None and beta == 0)
    refuse_unused(call, "beta=0", weighted_kl=weighted_kl is not None and beta == 0)
    if cap is None and kind == "cispo":
        raise ConfigError(f"{call}: kind='cispo' needs cap, the largest ratio, for example 5.0")
    if reference is None and beta != 0:
        raise ConfigError(
            f"{call}(beta={beta}): pass reference, the log-probabilities of the reference model"
        )
    low, high = _pair(call, "clip", (0.2, 0.2) if clip is None else clip)
    above, below = _pair(call, "tau", (1.0, 1.05) if tau is None else tau)
    shapes = ((2.0, 3.0), (3.0, 2.0)) if vespo is None else vespo
    shape_above, shape_below = _pair(call, "vespo", shapes, "two pairs of numbers")
    power_above, decay_above = _pair(call, "vespo[0]", shape_above)
    power_below, decay_below = _pair(call, "vespo[1]", shape_below)
    return policy_forward(
        log_probs,
        as_mask("policy", mask),
        advantages,
        old=old,
        reference=reference,
        weights=as_weights(weights),
        kind=kind,
        level="token" if level is None else level,
        low=low,
        high=high,
        cap=cap,
        tau_above=above,
        tau_below=below,
        power_above=power_above,
        decay_above=decay_above,
        power_below=power_below,
        decay_below=decay_below,
        beta=beta,
        weighted_kl=weighted_kl is not False and kind not in ROWS,
        count=count,
    )


def _pair(call: str, name: str, value: Any, what: str = "two numbers") -> Any:
    """Return a value if it is a tuple of two; raise ConfigError if not."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{call}: {name}={value!r} must be {what}")
    return value


@dataclass(frozen=True)
class Options:
    """The options of ``policy``, all of them numbers or names."""

    kind: str
    level: str
    low: float
    high: float
    cap: float | None
    tau_above: float
    tau_below: float
    power_above: float
    decay_above: float
    power_below: float
    decay_below: float
    beta: float
    weighted_kl: bool
    count: float | None


@op(
    "log_probs(rows, tokens), mask(rows, tokens): bool, advantages(rows, tokens?): constant,"
    " old?(rows, tokens): constant, reference?(rows, tokens): constant,"
    " weights?(rows, tokens|1): constant -> loss(): stat"
)
def policy_forward(
    log_probs: Array,
    mask: Array,
    advantages: Array,
    *,
    old: Array | None = None,
    reference: Array | None = None,
    weights: Array | None = None,
    kind: str = "dapo",
    level: str = "token",
    low: float = 0.2,
    high: float = 0.2,
    cap: float | None = None,
    tau_above: float = 1.0,
    tau_below: float = 1.05,
    power_above: float = 2.0,
    decay_above: float = 3.0,
    power_below: float = 3.0,
    decay_below: float = 2.0,
    beta: float = 0.0,
    weighted_kl: bool = False,
    count: float | None = None,
) -> Array:
    """Return the loss of ``policy``, with a value for every option."""
    options = Options(
        kind, level, low, high, cap, tau_above, tau_below, power_above, decay_above, power_below,
        decay_below, beta, weighted_kl, count,
    )  # fmt: skip
    return _loss_and_slopes(log_probs, mask, advantages, old, reference, weights, options)[0]


@policy_forward.gradient
def policy_backward(
    dloss: Array,
    log_probs: Array,
    mask: Array,
    advantages: Array,
    old: Array | None,
    reference: Array | None,
    weights: Array | None,
    **options: Any,
) -> tuple[Array, None, None]:
    """Return the gradient of log_probs; mask and advantages have none."""
    arrays = log_probs, mask, advantages, old, reference, weights
    return dloss * _loss_and_slopes(*arrays, Options(**options))[1], None, None


@policy_forward.require
def _check(
    call: str, advantages: Array, weights: Array | None, kind: str, level: str, low: float,
    high: float, cap: float | None, tau_above: float, tau_below: float, beta: float,
    count: float | None,
) -> None:  # fmt: skip
    check_choice(call, "kind", kind, KINDS)
    check_choice(call, "level", level, LEVELS)
    check_some(call, len(advantages), count)
    for name, value in (("clip[0]", low), ("clip[1]", high), ("beta", beta)):
        if value < 0:
            raise ConfigError(f"{call}({name}={value}): {name} must be 0 or more")
    positive = {"tau[0]": tau_above, "tau[1]": tau_below, "cap": cap, "count": count}
    check_positive(call, **{name: value for name, value in positive.items() if value is not None})
    if kind in ROWS:
        for name, array, axes in (("advantages", advantages, 1), ("weights", weights, 2)):
            if (
                array is not None
                and array.ndim + (name == "weights" and array.shape[1] != 1) != axes
            ):
                form = "(rows,)" if axes == 1 else "(rows, 1)"
                problem = f"{call}: {name} of kind={kind!r} must be {form}, one for each row"
                raise ShapeError(problem, expected=form, actual=array.shape)


policy_backward.require(_check)


def _loss_and_slopes(
    log_probs: Array,
    mask: Array,
    advantages: Array,
    old: Array | None,
    reference: Array | None,
    weights: Array | None,
    options: Options,
) -> tuple[Array, Array]:
    """Return the loss, and its derivatives with respect to log_probs."""
    counted = log_probabilities("policy", log_probs, mask)
    gain = advantages.astype(counted.dtype)
    if gain.ndim == 1:
        check_finite("policy", advantages=gain)
    gain = gain[:, None] if gain.ndim == 1 else masked("policy", gain, mask, "advantages")
    d = counted - (counted if old is None else log_probabilities("policy", old, mask, "old"))
    kl = by_kl = np.zeros_like(counted)  # beta times the divergence, and its derivative
    if reference is not None:
        q = log_probabilities("policy", reference, mask, "reference") - counted
        kl, by_kl = options.beta * (exp(q) - q - 1), options.beta * (1 - exp(q))
    factors: Any = 1
    if weights is not None and weights.shape == mask.shape:
        factors = masked("policy", weights, mask, "weights")
    elif weights is not None:
        check_finite("policy", weights=weights)
        factors = weights
    terms = _of_rows if options.kind in ROWS else _of_tokens
    total, slopes, counts = terms(counted, d, mask, gain, factors, kl, by_kl, options)
    divisor: Any = np.maximum(counts, 1) if options.count is None else options.count
    loss = np.asarray((total / divisor).astype(counted.dtype), like=counted)
    return loss, np.where(mask, slopes / divisor, 0).astype(counted.dtype)


def _of_tokens(
    log_probs: Array,
    d: Array,
    mask: Array,
    gain: Array,
    factors: Any,
    kl: Array,
    by_kl: Array,
    options: Options,
) -> tuple[Array, Array, Any]:
    """Return the sum of the terms of tokens, its derivatives by log_probs, and its count."""
    kind, by_row = options.kind, options.level == "sequence"
    n = lengths(mask, d.dtype)[:, None]  # (rows, 1)
    # by row, all tokens share the mean of d: each token has a derivative in the terms of all others
    ratio = exp(d.sum(axis=1, keepdims=True) / n if by_row else d)
    terms, by_ratio, slopes = (
        factors * part for part in _terms(ratio, d, log_probs, gain, options)
    )
    if options.weighted_kl:
        by_ratio, terms, slopes = by_ratio + kl, terms + kl * ratio, slopes + by_kl * ratio
    else:
        terms, slopes = terms + kl, slopes + by_kl
    share = mask / n if kind in MEANS else mask.astype(d.dtype)
    by_d = by_ratio * ratio * share
    if by_row:
        by_d = by_d.sum(axis=1, keepdims=True) / n
    rows, width = mask.shape
    counts = {"luspo": rows, "dr_grpo": rows * width} | dict.fromkeys(MEANS, rows)
    return (terms * share).sum(), by_d + slopes * share, counts.get(kind, mask.sum())


def _terms(
    ratio: Array, d: Array, log_probs: Array, gain: Array, options: Options
) -> tuple[Array, Array, Array]:
    """Return the terms of tokens, and their derivatives by the ratio and by log_probs."""
    none = np.zeros_like(log_probs)  # also gives results the shape (rows, tokens)
    match options.kind:
        case "cispo":
            factor = -np.minimum(ratio, options.cap or np.inf) * gain
            return factor * log_probs, none, factor + none
        case "vespo":
            total, above = d.sum(axis=1, keepdims=True), gain >= 0
            power = np.where(above, options.power_above, options.power_below)
            decay = np.where(above, options.decay_above, options.decay_below)
            factor = -np.exp(decay + power * total - decay * exp(total)) * gain
            factor = factor.astype(log_probs.dtype)
            return factor * log_probs, none, factor + none
        case "sapo":
            tau = np.where(gain > 0, options.tau_above, options.tau_below).astype(log_probs.dtype)
            high = sigmoid(tau * (ratio - 1))
            return -4 / tau * high * gain + none, -4 * high * (1 - high) * gain + none, none
        case _:
            terms, by_ratio = _clipped(ratio, gain, options)
            return terms + none, by_ratio + none, none


def _of_rows(
    log_probs: Array,
    d: Array,
    mask: Array,
    gain: Array,
    factors: Any,
    kl: Array,
    by_kl: Array,
    options: Options,
) -> tuple[Array, Array, Any]:
    """Return the sum of the terms of rows, its derivatives by log_probs, and its count."""
    n = lengths(mask, d.dtype)[:, None]  # (rows, 1)
    if options.kind == "gmpo":
        clipped = np.where(gain > 0, np.minimum(d, options.high), np.maximum(d, -options.low))
        terms = -exp(clipped.sum(axis=1, keepdims=True) / n) * gain
        slopes = np.where(clipped == d, terms / n, 0)
    else:
        ratio = exp(d.sum(axis=1, keepdims=True))
        terms, by_ratio = _clipped(ratio, gain, options)
        slopes = by_ratio * ratio
    total = (factors * terms).sum() + (kl / n).sum()
    return total, factors * slopes + by_kl / n, len(mask)


def _clipped(ratio: Array, gain: Array, options: Options) -> tuple[Array, Array]:
    """Return the terms of grpo, and their derivatives with respect to the ratio."""
    least, most = 1 - options.low, 1 + options.high
    capped = ratio if options.cap is None else np.minimum(ratio, options.cap)
    inside = (ratio >= least) & (ratio <= most)
    free, bound = capped * gain, np.clip(ratio, least, most) * gain
    moves = np.where(free <= bound, capped == ratio, inside)
    return -np.minimum(free, bound), np.where(moves, -gain, gain.dtype.type(0))
