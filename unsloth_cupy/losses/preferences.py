"""Preference losses: functions of the log-probabilities of chosen and rejected completions.

r = sum(log_probs - reference) of a row        R = f(r)        loss = mean over pairs of L(R_w, R_l)

DPO: Rafailov et al., 2023.  The other kinds are as in TRL, whose documentation names the papers.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.dtypes import FLOAT32, Array
from ..core.op import op
from ..errors import ConfigError, ShapeError
from ..ops.common.checks import check_choice
from ._rows import (
    as_mask,
    as_weights,
    check_finite,
    check_pairs,
    check_positive,
    check_share,
    check_some,
    exp,
    lengths,
    log_probabilities,
    log_sigmoid,
    refuse_unused,
    sigmoid,
)

DIVERGENCES = ("reverse_kl", "forward_kl", "js", "alpha")
# kinds of loss: functions of R_w - R_l; of r_w and r_l; of sorted sums
MARGINS = ("sigmoid", "hinge", "ipo", "sigmoid_norm", "simpo", "exo_pair", "robust", "discopop")
RAW = ("nca_pair", "bco_pair", "sppo_hard", "apo_zero", "apo_down")
SORTED = ("aot", "aot_unpaired")
KINDS = (*MARGINS, *RAW, *SORTED, "orpo")
# kinds with label smoothing, and its default
SMOOTHED = {"sigmoid": 0.0, "simpo": 0.0, "exo_pair": 1e-3, "robust": 0.0} | dict.fromkeys(
    SORTED, 0.0
)


def preference(
    log_probs: Array,
    mask: Array,
    reference: Array | None = None,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    smoothing: float | None = None,
    divergence: str | None = None,
    alpha: float | None = None,
    gamma: float | None = None,
    tau: float | None = None,
    ld_alpha: float | None = None,
    weights: Array | None = None,
    count: float | None = None,
) -> Array:
    """Return a preference loss of pairs of completions, averaged over the pairs.

    r is the sum of log_probs - reference over the tokens of a completion (of log_probs without a
    reference), n the number of its tokens, at least 1, and R = f(r); w is the chosen and l the
    rejected completion; D = R_w - R_l; s is the logistic function, and e the smoothing.  The loss
    of a pair is

    =================== ==========================================================================
    sigmoid (DPO, CPO)  -(1 - e) log s(beta D) - e log s(-beta D)
    hinge (SLiC)        max(0, 1 - beta D)
    ipo                 (R_w / n_w - R_l / n_l - 1 / (2 beta))**2
    sigmoid_norm        -log s(beta (R_w / n_w - R_l / n_l))
    simpo               sigmoid of beta (f(r_w / n_w) - f(r_l / n_l)) - gamma
    exo_pair            KL of (s(beta D), s(-beta D)) to (1 - e, e)
    robust              (-(1 - e) log s(beta D) + e log s(-beta D)) / (1 - 2 e)
    discopop            -(1 - m) log s(beta D) + m exp(-beta D), m = s(beta D / tau)
    nca_pair            -log s(beta r_w) - log s(-beta r_w) / 2 - log s(-beta r_l) / 2
    bco_pair            -log s(beta r_w) - log s(-beta r_l)
    sppo_hard           (r_w - 1 / (2 beta))**2 + (r_l + 1 / (2 beta))**2
    apo_zero            1 - s(beta r_w) + s(beta r_l)
    apo_down            s(beta r_w) + 1 - s(beta (r_w - r_l))
    aot                 as sigmoid, with D = sorted(a) - sorted(b) over the batch; a and b are the
                        sums of w minus the sums of l, of log_probs and of reference
    aot_unpaired        as sigmoid, with D = sorted(r_w) - sorted(r_l) over the batch
    orpo                -beta log s(o_w - o_l), o = m - log(1 - exp(m)), m = r / n; no reference
    =================== ==========================================================================

    Parameters
    ----------
    log_probs : (rows, tokens) float
        Log-probabilities of the tokens.  The first half of the rows are the chosen completions, the
        second half the rejected completions, in the same order.
    mask : (rows, tokens) bool, or 0 and 1
        The tokens of the completions; other tokens may hold anything.
    reference : (rows, tokens) float, optional
        Log-probabilities of the reference model, a constant.
    kind : str
        A name in the first column of the table.
    beta : float
        Inverse temperature; above 0.
    smoothing : float, optional
        Label smoothing of sigmoid, simpo, aot and aot_unpaired (default 0), of robust (default 0,
        below 0.5) and of exo_pair (default 0.001, above 0).
    divergence : str, optional
        The function f of kinds with D or R: reverse_kl (default) r; forward_kl 1 - exp(-r);
        js log(2) + log s(r); alpha (exp((alpha - 1) r) - 1) / (alpha - 1).
    alpha : float, optional
        The number of divergence alpha, 0.5 by default; AlphaPO's alpha is 1 - alpha.
    gamma, tau : float, optional
        The margin of simpo, 0.5 by default; the temperature of discopop, 0.05 by default.
    ld_alpha : float, optional
        Weight in r, in [0, 1], of the tokens of a completion beyond the length of the shorter
        completion of its pair.
    weights : (pairs,) float, optional
        Factors of the losses of pairs; aot and aot_unpaired have none.
    count : float, optional
        Divisor of the sum, in place of the number of pairs: for a part of a batch, the number of
        pairs in the whole batch.

    Returns
    -------
    loss : () float32, or float64 for float64 log_probs

    Raises
    ------
    ConfigError
        An option is out of its range, or the kind does not use it; a log-probability that counts
        is not finite, or above 0 by more than rounding (on a GPU the loss is then NaN).
    ShapeError, DTypeError
        The arrays do not fit each other; the number of rows is odd, or 0 without a count.
    """
    call = "preference"
    check_choice(call, "kind", kind, KINDS)
    refuse_unused(
        call, f"kind={kind!r}",
        smoothing=smoothing is not None and kind not in SMOOTHED,
        divergence=divergence is not None and kind not in MARGINS,
        gamma=gamma is not None and kind != "simpo",
        tau=tau is not None and kind != "discopop",
        weights=weights is not None and kind in SORTED,
        reference=reference is not None and kind == "orpo",
    )  # fmt: skip
    refuse_unused(
        call, f"divergence={divergence!r}", alpha=alpha is not None and divergence != "alpha"
    )
    return preference_forward(
        log_probs,
        as_mask("preference", mask),
        reference,
        weights=as_weights(weights),
        kind=kind,
        beta=beta,
        smoothing=SMOOTHED.get(kind, 0.0) if smoothing is None else smoothing,
        divergence="reverse_kl" if divergence is None else divergence,
        alpha=0.5 if alpha is None else alpha,
        gamma=0.5 if gamma is None else gamma,
        tau=0.05 if tau is None else tau,
        ld_alpha=1.0 if ld_alpha is None else ld_alpha,
        count=count,
    )


@dataclass(frozen=True)
class Options:
    """The options of ``preference``."""

    kind: str
    beta: float
    smoothing: float
    divergence: str
    alpha: float
    gamma: float
    tau: float
    ld_alpha: float
    count: float | None


@op(
    "log_probs(rows, tokens), mask(rows, tokens): bool, reference?(rows, tokens): constant,"
    " weights?(pairs): constant -> loss(): stat"
)
def preference_forward(
    log_probs: Array,
    mask: Array,
    reference: Array | None = None,
    *,
    weights: Array | None = None,
    kind: str = "sigmoid",
    beta: float = 0.1,
    smoothing: float = 0.0,
    divergence: str = "reverse_kl",
    alpha: float = 0.5,
    gamma: float = 0.5,
    tau: float = 0.05,
    ld_alpha: float = 1.0,
    count: float | None = None,
) -> Array:
    """Return the loss of ``preference``, with a number for every option."""
    options = Options(kind, beta, smoothing, divergence, alpha, gamma, tau, ld_alpha, count)
    loss, _ = _loss_and_slopes(log_probs, mask, reference, weights, options)
    return loss


@preference_forward.gradient
def preference_backward(
    dloss: Array,
    log_probs: Array,
    mask: Array,
    reference: Array | None,
    weights: Array | None,
    **options: Any,
) -> tuple[Array, None, None]:
    """Return the gradient of log_probs; mask and reference have none."""
    _, slopes = _loss_and_slopes(log_probs, mask, reference, weights, Options(**options))
    return dloss * slopes, None, None


@preference_forward.require
def _check(
    call: str, log_probs: Array, weights: Array | None, kind: str, beta: float, smoothing: float,
    divergence: str, alpha: float, tau: float, ld_alpha: float, count: float | None,
) -> None:  # fmt: skip
    check_choice(call, "kind", kind, KINDS)
    check_choice(call, "divergence", divergence, DIVERGENCES)
    check_positive(call, beta=beta, tau=tau, **({} if count is None else {"count": count}))
    check_share(call, 0.5 if kind == "robust" else 1, smoothing=smoothing)
    if kind == "exo_pair" and not smoothing > 0:
        raise ConfigError(
            f"{call}(smoothing={smoothing}): exo_pair needs one above 0, such as 1e-3"
        )
    if divergence == "alpha" and alpha == 1:
        problem = f"{call}(alpha=1): the divergence would divide by 0"
        raise ConfigError(f"{problem}; divergence='reverse_kl' is its limit")
    if not 0 <= ld_alpha <= 1:
        raise ConfigError(f"{call}(ld_alpha={ld_alpha}): ld_alpha must be in [0, 1]")
    rows = log_probs.shape[0]
    check_pairs(call, rows)
    check_some(call, rows, count)
    if weights is not None and len(weights) != rows // 2:
        problem = f"{call}: weights has {len(weights)} numbers for {rows // 2} pairs"
        raise ShapeError(problem, expected=(rows // 2,), actual=weights.shape)


preference_backward.require(_check)


def _loss_and_slopes(
    log_probs: Array, mask: Array, reference: Array | None, weights: Array | None, options: Options
) -> tuple[Array, Array]:
    """Return the loss, and its derivatives with respect to log_probs."""
    kind, ld_alpha = options.kind, options.ld_alpha
    counted = log_probabilities("preference", log_probs, mask)
    pairs = len(counted) // 2
    n = lengths(mask, counted.dtype)
    share = mask.astype(counted.dtype)  # weight of each token in r
    if ld_alpha != 1:
        length = mask.sum(axis=1)
        shorter = np.minimum(length[:pairs], length[pairs:])
        beyond = mask.cumsum(axis=1) > np.concatenate([shorter, shorter])[:, None]
        share = np.where(beyond, ld_alpha * share, share)
    ours = (share * counted).sum(axis=1)  # (rows,)
    theirs = 0 * ours
    if reference is not None:
        theirs = (share * log_probabilities("preference", reference, mask, "reference")).sum(axis=1)
    if kind == "aot":
        losses, slopes = _sorted(
            ours[:pairs] - ours[pairs:], theirs[:pairs] - theirs[pairs:], options
        )
        slopes = np.concatenate([slopes, -slopes])
    elif kind == "aot_unpaired":
        r = ours - theirs
        losses, won = _sorted(r[:pairs], r[pairs:], options)
        _, lost = _sorted(-r[pairs:], -r[:pairs], options)
        slopes = np.concatenate([won, -lost])
    else:
        losses, slopes = _of_pairs(ours - theirs, n, options)
    count = pairs if options.count is None else options.count
    factors = np.ones_like(n, shape=(pairs,)) / count
    if weights is not None:
        check_finite("preference", weights=weights)
        factors = factors * weights
    slopes = slopes * np.concatenate([factors, factors])
    loss = (losses * factors).sum()
    return np.asarray(loss, like=counted), share * slopes[:, None]


def _of_pairs(r: Array, n: Array, options: Options) -> tuple[Array, Array]:
    """Return the loss of each pair, and its derivative with respect to r of each row."""
    kind, beta = options.kind, options.beta
    half = len(r) // 2
    if kind == "orpo":
        m, largest = r / n, -np.finfo(FLOAT32).eps
        certain = m > largest  # a probability of 1 has infinite odds: use the largest of float32
        m = np.where(certain, largest, m)
        # log(1 - exp(m)), by the formula that loses no digits for this m
        log_rest = np.where(m > -math.log(2), np.log(-np.expm1(m)), np.log1p(-np.exp(m)))
        o = m - log_rest
        z = o[:half] - o[half:]
        by_r = np.where(certain, 0, -1 / np.expm1(m)) / n
        slope = -beta * sigmoid(-z)
        return -beta * log_sigmoid(z), np.concatenate([slope, -slope]) * by_r
    if kind in RAW:
        losses, won, lost = _raw(r[:half], r[half:], kind, beta)
        return losses, np.concatenate([won, lost])
    if kind == "simpo":
        score, by_r = _f(r / n, options)
        by_r = by_r / n
    else:
        score, by_r = _f(r, options)
        if kind in ("ipo", "sigmoid_norm"):
            score, by_r = score / n, by_r / n
    margin = score[:half] - score[half:]
    if kind == "ipo":
        difference = margin - 1 / (2 * beta)
        losses, slope = difference**2, 2 * difference
    else:
        losses, slope = _of_margin(beta * margin, options)
        slope = beta * slope
    return losses, np.concatenate([slope, -slope]) * by_r


def _f(r: Array, options: Options) -> tuple[Array, Array]:
    """Return f(r) of the divergence, and its derivative.

    Where the exponent is above LARGEST, f is constant and its derivative 0.
    """
    match options.divergence:
        case "reverse_kl":
            return r, np.ones_like(r)
        case "forward_kl":
            power = exp(-r)
            return 1 - power, np.where(-r > 80, 0, power)
        case "js":
            return math.log(2) + log_sigmoid(r), sigmoid(-r)
        case _:
            less = options.alpha - 1
            power = exp(less * r)
            return (power - 1) / less, np.where(less * r > 80, 0, power)


def _of_margin(z: Array, options: Options) -> tuple[Array, Array]:
    """Return the loss as a function of z = beta (R_w - R_l), and its derivative."""
    smoothing = options.smoothing
    log_right, log_wrong = log_sigmoid(z), log_sigmoid(-z)
    right, wrong = np.exp(log_right), np.exp(log_wrong)
    match options.kind:
        case "hinge":
            return np.maximum(1 - z, 0), np.where(z < 1, z.dtype.type(-1), z.dtype.type(0))
        case "exo_pair":
            more, less = log_right - math.log1p(-smoothing), log_wrong - math.log(smoothing)
            return right * more + wrong * less, right * wrong * (more - less)
        case "robust":
            losses = -(1 - smoothing) * log_right + smoothing * log_wrong
            slope = -(1 - smoothing) * wrong - smoothing * right
            return losses / (1 - 2 * smoothing), slope / (1 - 2 * smoothing)
        case "discopop":
            tau = options.tau
            m, rest = sigmoid(z / tau), sigmoid(-z / tau)
            power = exp(log_sigmoid(z / tau) - z)  # m exp(-z)
            slope = m * rest / tau * log_right + power * rest / tau - rest * wrong - power
            return -rest * log_right + power, slope
        case "simpo":
            return _of_margin(z - options.gamma, replace(options, kind="sigmoid"))
        case _:
            losses = -(1 - smoothing) * log_right - smoothing * log_wrong
            return losses, -(1 - smoothing) * wrong + smoothing * right


def _raw(won: Array, lost: Array, kind: str, beta: float) -> tuple[Array, Array, Array]:
    """Return the loss as a function of r_w and r_l, and its derivatives with respect to both."""
    a, b = beta * won, beta * lost
    match kind:
        case "nca_pair":
            losses = -log_sigmoid(a) - 0.5 * log_sigmoid(-a) - 0.5 * log_sigmoid(-b)
            return losses, beta * (0.5 * sigmoid(a) - sigmoid(-a)), beta * 0.5 * sigmoid(b)
        case "bco_pair":
            return -log_sigmoid(a) - log_sigmoid(-b), -beta * sigmoid(-a), beta * sigmoid(b)
        case "sppo_hard":
            above, below = won - 1 / (2 * beta), lost + 1 / (2 * beta)
            return above**2 + below**2, 2 * above, 2 * below
        case "apo_zero":
            steep, other = sigmoid(a) * sigmoid(-a), sigmoid(b) * sigmoid(-b)
            return sigmoid(-a) + sigmoid(b), -beta * steep, beta * other
        case _:
            steep, other = sigmoid(a) * sigmoid(-a), sigmoid(a - b) * sigmoid(b - a)
            return sigmoid(a) + sigmoid(b - a), beta * (steep - other), beta * other


def _sorted(ours: Array, theirs: Array, options: Options) -> tuple[Array, Array]:
    """Return the losses of sorted(ours) - sorted(theirs), and their derivatives by ``ours``."""
    order = np.argsort(ours, kind="stable")
    z = options.beta * (ours[order] - np.sort(theirs))
    losses, slope = _of_margin(z, options)
    slopes = np.empty_like(slope)
    slopes[order] = options.beta * slope
    return losses, slopes
