"""Constants of losses: advantages, sampler ratios, implicit rewards, weights.

The formulas are as in TRL, whose documentation names the papers.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.call import is_number
from ..core.dtypes import Array
from ..core.op import op
from ..errors import ConfigError, ShapeError
from ..ops.common.checks import check_choice
from ..placement import array_like
from ._rows import (
    as_mask,
    as_weights,
    check_finite,
    check_pairs,
    lengths,
    log_probabilities,
    masked,
    refuse_unused,
)

KINDS = ("grpo", "gdpo", "rloo")
# the scales of each kind, the default first
SCALES = {"grpo": ("group", "batch", "none"), "gdpo": (), "rloo": ("none", "batch")}
LEAST = 1e-4  # added to standard deviations, as in TRL, so that equal rewards do not divide by 0
RATIOS = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")


def advantages(
    rewards: Array,
    group: int,
    *,
    kind: str = "grpo",
    scale: str | None = None,
    weights: Array | Sequence[float] | None = None,
) -> Array:
    """Return the advantage of each completion over the other completions of its prompt.

    r is the weighted sum of the rewards of a completion; m and std are the mean and the standard
    deviation (with divisor n - 1) in its group:

    ==== =========================================================================================
    grpo (r - m) / (std + 1e-4); with scale="batch" the std of the whole batch, with "none" r - m
    gdpo rewards of each function are normalised in groups, their weighted sum over the batch
    rloo r - mean of the others in the group; with scale="batch" normalised over the batch
    ==== =========================================================================================

    Parameters
    ----------
    rewards : (rows,) or (rows, functions) float
        NaN if a function gave no reward; such entries do not count in any mean.
    group : int
        Number of completions of a prompt, in consecutive rows; 2 or more.
    kind : str
        "grpo", "gdpo" or "rloo".
    scale : str, optional
        For grpo: group (default), batch or none; for rloo: none (default) or batch.
    weights : (functions,) float, or a list of numbers, optional
        Weights of the functions, 1 each by default.

    Returns
    -------
    advantages : (rows,) float32, or float64 for float64 rewards
        Constants; 0 for a row without any reward.

    Raises
    ------
    ConfigError
        An option is out of its range; a reward is infinite.
    ShapeError, DTypeError
        The arrays do not fit each other; rows are not whole groups.
    """
    check_choice("advantages", "kind", kind, KINDS)
    refuse_unused("advantages", f"kind={kind!r}", scale=scale is not None and kind == "gdpo")
    known = SCALES[kind]
    if scale is not None:
        check_choice("advantages", "scale", scale, known)
    chosen = scale if scale is not None or not known else known[0]
    if isinstance(weights, list | tuple):
        if not all(map(is_number, weights)):
            raise ConfigError(f"advantages(weights={weights!s:.80}): pass a number per function")
        weights = array_like(weights, rewards)
    return advantages_forward(
        rewards, weights=as_weights(weights), group=group, kind=kind, scale=chosen or "none"
    )


@op(
    "rewards(rows, functions?), weights?(functions): constant -> advantages(rows): stat",
    constant=True,
    no_gradient="advantages are constants of a loss",
)
def advantages_forward(
    rewards: Array,
    *,
    weights: Array | None = None,
    group: int = 2,
    kind: str = "grpo",
    scale: str = "group",
) -> Array:
    """Return the advantages, with a value for every option."""
    table: Any = rewards[:, None] if rewards.ndim == 1 else rewards
    if type(table) is np.ndarray and np.isinf(table).any():
        row = int(np.argwhere(np.isinf(table))[0, 0])
        problem = f"advantages: rewards holds an infinity in row {row}"
        raise ConfigError(f"{problem}; pass NaN for a missing reward")
    check_finite("advantages", weights=weights)
    if not table.size:
        return np.zeros_like(table, shape=(len(table),))
    factors = np.ones_like(table, shape=(table.shape[1],))
    if weights is not None:
        factors = weights.astype(table.dtype)
    unknown = np.isnan(table)
    scored = ~unknown.all(axis=1)
    if kind == "gdpo":
        parts = [_normalised(table[:, i], ~unknown[:, i], group) for i in range(table.shape[1])]
        total = (np.stack(parts, axis=1) * factors).sum(axis=1)
        return np.where(scored, _normalised(total, scored, max(len(total), 1)), 0)
    total = np.where(unknown, 0, table * factors).sum(axis=1)
    if kind == "rloo":
        counts, sums = (
            _of_groups(array, group) for array in (scored.astype(total.dtype), scored * total)
        )
        others = np.maximum(counts - 1, 1)
        result = np.where(counts > 1, total - (sums - total) / others, 0 * total)
        if scale == "batch":
            result = _normalised(result, scored, max(len(result), 1))
        return np.where(scored, result, 0)
    whole = group if scale != "batch" else max(len(total), 1)
    mean, _ = _statistics(total, scored, group)
    result = total - mean
    if scale != "none":
        result = result / (_statistics(total, scored, whole)[1] + LEAST)
    return np.where(scored, result, 0)


@advantages_forward.require
def _check(
    call: str, rewards: Array, weights: Array | None, group: int, kind: str, scale: str
) -> None:
    check_choice(call, "kind", kind, KINDS)
    if group < 2:
        cure = "it must be 2 or more: the advantage of a single completion is 0 for any reward"
        raise ConfigError(f"{call}(group={group}): {cure}")
    rows = rewards.shape[0]
    if rows % group:
        problem = f"{call}: {rows} rows are not whole groups of {group}"
        raise ShapeError(problem, expected=f"a multiple of {group}", actual=rows)
    functions = 1 if rewards.ndim == 1 else rewards.shape[1]
    if weights is not None and len(weights) != functions:
        problem = f"{call}: weights has {len(weights)} numbers for {functions} functions"
        raise ShapeError(problem, expected=(functions,), actual=weights.shape)


def _of_groups(values: Array, group: int) -> Array:
    """Return the sum of each group, repeated for its rows."""
    return np.repeat(values.reshape(-1, group).sum(axis=1), group)  # (groups, group) to (rows,)


def _statistics(values: Array, scored: Array, group: int) -> tuple[Array, Array]:
    """Return the mean and standard deviation of scored rows in the group of each row."""
    values = np.where(scored, values, 0)
    counts = _of_groups(scored.astype(values.dtype), group)
    mean = _of_groups(values, group) / np.maximum(counts, 1)
    squares = _of_groups(np.where(scored, values - mean, 0) ** 2, group)
    return mean, np.sqrt(squares / np.maximum(counts - 1, 1))


def _normalised(values: Array, scored: Array, group: int) -> Array:
    """Return values with mean 0 and standard deviation 1 in each group; 0 for unscored rows."""
    mean, deviation = _statistics(values, scored, group)
    return np.where(scored, (np.where(scored, values, 0) - mean) / (deviation + LEAST), 0)


def sampler_ratio(
    old: Array,
    sampler: Array,
    mask: Array,
    *,
    kind: str = "sequence_mask",
    limits: Any = (None, 3.0),
) -> Array:
    """Return ``exp(old - sampler)``, the importance ratio of the trained model to the sampler.

    Parameters
    ----------
    old, sampler : (rows, tokens) float
        Log-probabilities of the trained model, and of the engine that sampled; the ratio of a token
        is 1 if its sampler log-probability is NaN.
    mask : (rows, tokens) bool, or 0 and 1
        The tokens of the completions.
    kind : str
        sequence_mask and sequence_truncate have a ratio for each row, exp(sum over the row);
        token_mask and token_truncate one for each token.  Outside of the limits, a mask gives 0,
        truncation the nearest limit.
    limits : (float or None, float or None)
        The smallest and the largest ratio; None for no limit.

    Returns
    -------
    ratio : (rows, 1) or (rows, tokens)
        Constants, for the ``weights`` of ``policy``.

    Raises
    ------
    ConfigError
        An option is out of its range; a log-probability that counts is above 0 by more than
        rounding (on a GPU the ratio is then NaN).
    NotFiniteError
        A log-probability that counts is infinite, or NaN in ``old``.
    ShapeError, DTypeError
        The arrays do not fit each other.
    """
    check_choice("sampler_ratio", "kind", kind, RATIOS)
    if not isinstance(limits, tuple | list) or len(limits) != 2:
        raise ConfigError(
            f"sampler_ratio: limits={limits!r} must be (least, most), None for no limit"
        )
    least, most = limits
    if least is not None and most is not None and least > most:
        raise ConfigError(f"sampler_ratio: limits={limits!r} leave no ratio between them")
    return sampler_ratio_forward(
        old, sampler, as_mask("sampler_ratio", mask), kind=kind, least=least, most=most
    )


def _tokens(own: Any, *, kind: str, **_: Any) -> dict[str, Any]:
    return {"width": 1 if kind.startswith("sequence") else own[1]}


@op(
    "old(rows, tokens), sampler(rows, tokens): constant, mask(rows, tokens): bool"
    " -> ratio(rows, width): stat",
    constant=True,
    no_gradient="ratios are constants of a loss",
    sizes=_tokens,
)
def sampler_ratio_forward(
    old: Array,
    sampler: Array,
    mask: Array,
    *,
    kind: str = "sequence_mask",
    least: float | None = None,
    most: float | None = 3.0,
) -> Array:
    """Return the ratio of ``sampler_ratio``, with the limits as two options."""
    known = log_probabilities("sampler_ratio", old, mask, "old")
    log_probs = np.where(np.isnan(sampler), known, sampler.astype(old.dtype))
    difference = known - log_probabilities("sampler_ratio", log_probs, mask, "sampler")
    if kind.startswith("sequence"):
        difference = difference.sum(axis=1, keepdims=True)
    with np.errstate(over="ignore"):
        ratio = np.exp(difference)
    if kind.endswith("truncate"):
        return np.clip(ratio, -np.inf if least is None else least, np.inf if most is None else most)
    if least is not None:
        ratio = np.where(ratio < least, 0, ratio)
    return ratio if most is None else np.where(ratio > most, 0, ratio)


def high_entropy(entropy: Array, mask: Array, share: float) -> Array:
    """Return the tokens of highest entropy: a ``share`` of the tokens that count.

    Their entropy reaches the quantile ``1 - share`` of all tokens that count (Wang et al., Beyond
    the 80/20 Rule, 2025).

    Parameters
    ----------
    entropy : (rows, tokens) float
    mask : (rows, tokens) bool, or 0 and 1
        The tokens that count.
    share : float
        In [0, 1].

    Returns
    -------
    chosen : (rows, tokens) bool
        A constant: pass it as ``weights`` of ``policy``, or multiply other weights by it.

    Raises
    ------
    ConfigError
        share is outside of [0, 1].
    ShapeError, DTypeError
        The arrays do not fit each other.
    """
    return high_entropy_forward(entropy, as_mask("high_entropy", mask), share=share)


@op(
    "entropy(rows, tokens), mask(rows, tokens): bool -> chosen(rows, tokens): bool",
    constant=True,
    no_gradient="its result is a choice of tokens",
)
def high_entropy_forward(entropy: Array, mask: Array, *, share: float = 0.2) -> Array:
    """Return the tokens that ``high_entropy`` chooses."""
    counted = masked("high_entropy", entropy, mask, "entropy")[mask]
    if not counted.size:
        return np.zeros_like(mask)
    return mask & (entropy >= np.quantile(counted.astype(np.float64), 1 - share))


@high_entropy_forward.require
def _check_share(call: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise ConfigError(f"{call}(share={share}): share must be in [0, 1]")


def implicit_rewards(
    log_probs: Array, mask: Array, reference: Array | None = None, *, beta: float = 0.1
) -> Array:
    """Return the implicit reward of each row: ``beta * sum(log_probs - reference)``.

    Parameters
    ----------
    log_probs : (rows, tokens) float
    mask : (rows, tokens) bool, or 0 and 1
        The tokens of the completions; other tokens may hold anything.
    reference : (rows, tokens) float, optional
        Log-probabilities of the reference model.
    beta : float
        Factor of the rewards.

    Returns
    -------
    rewards : (rows,) float32, or float64 for float64 log_probs

    Raises
    ------
    ConfigError
        A log-probability that counts is not finite, or above 0 by more than rounding (on a GPU
        the reward is then NaN).
    ShapeError, DTypeError
        The arrays do not fit each other.
    """
    return implicit_rewards_forward(
        log_probs, as_mask("implicit_rewards", mask), reference, beta=beta
    )


@op(
    "log_probs(rows, tokens), mask(rows, tokens): bool, reference?(rows, tokens): constant"
    " -> rewards(rows): stat"
)
def implicit_rewards_forward(
    log_probs: Array, mask: Array, reference: Array | None = None, *, beta: float = 0.1
) -> Array:
    """Return the rewards of ``implicit_rewards``."""
    counted = log_probabilities("implicit_rewards", log_probs, mask)
    if reference is not None:
        counted = counted - log_probabilities("implicit_rewards", reference, mask, "reference")
    return (beta * counted.sum(axis=1)).astype(counted.dtype)


@implicit_rewards_forward.gradient
def implicit_rewards_backward(
    drewards: Array, log_probs: Array, mask: Array, reference: Array | None, *, beta: float = 0.1
) -> tuple[Array, None, None]:
    """Return the gradient of log_probs."""
    return np.where(mask, beta * drewards[:, None], 0).astype(log_probs.dtype), None, None


def wpo_weights(log_probs: Array, log_sum_squares: Array, mask: Array) -> Array:
    """Return the weights of pairs in WPO: how likely the policy is to sample both completions.

    The weight is the product of ``exp(mean of log_probs - log_sum_squares)`` of both completions of
    a pair (Zhou et al., WPO: Weighted Preference Optimization, 2024).

    Parameters
    ----------
    log_probs, log_sum_squares : (rows, tokens) float
        As ``linear_log_probs`` returns them; the first half of the rows are the chosen completions.
    mask : (rows, tokens) bool, or 0 and 1
        The tokens of the completions.

    Returns
    -------
    weights : (pairs,)
        Constants, for the ``weights`` of ``preference``.

    Raises
    ------
    ConfigError
        A log-probability or logarithm that counts is not finite, or above 0 by more than rounding
        (on a GPU the weight is then NaN).
    ShapeError, DTypeError
        The arrays do not fit each other; the number of rows is odd.
    """
    return wpo_weights_forward(log_probs, log_sum_squares, as_mask("wpo_weights", mask))


def _pairs(own: Any) -> dict[str, Any]:
    return {"pairs": own[0] // 2}


@op(
    "log_probs(rows, tokens), log_sum_squares(rows, tokens), mask(rows, tokens): bool"
    " -> weights(pairs): stat",
    constant=True,
    no_gradient="weights are constants of a loss",
    sizes=_pairs,
)
def wpo_weights_forward(log_probs: Array, log_sum_squares: Array, mask: Array) -> Array:
    """Return the weights of ``wpo_weights``."""
    squares = log_probabilities("wpo_weights", log_sum_squares, mask, "log_sum_squares")
    sums = (log_probabilities("wpo_weights", log_probs, mask) - squares).sum(axis=1)
    means = sums / lengths(mask, sums.dtype)
    half = len(means) // 2
    return np.exp(means[:half] + means[half:])


@wpo_weights_forward.require
def _check_pairs(call: str, log_probs: Array) -> None:
    check_pairs(call, log_probs.shape[0])
