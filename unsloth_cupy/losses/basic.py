"""Losses with formulas of one line: likelihood, reward pairs, in-batch contrast.

nll = -sum(log_probs) / tokens
reward = mean of -log s(r_w - r_l - margin) + center (r_w + r_l)**2
contrastive = mean cross entropy of scale queries documents^T, document i for query i
"""

from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..core.op import op
from ..errors import ConfigError, ShapeError
from ._rows import (
    as_mask,
    as_weights,
    check_finite,
    check_pairs,
    check_positive,
    check_some,
    log_probabilities,
    log_sigmoid,
    sigmoid,
)


def nll(log_probs: Array, mask: Array, *, count: float | None = None) -> Array:
    """Return the mean negative log-likelihood of the tokens: ``-sum(log_probs) / tokens``.

    Parameters
    ----------
    log_probs : (rows, tokens) float
        Log-probabilities of the tokens.
    mask : (rows, tokens) bool, or 0 and 1
        The tokens that count; other tokens may hold anything.
    count : float, optional
        Divisor of the sum, in place of the number of tokens that count.

    Returns
    -------
    loss : () float32, or float64 for float64 log_probs

    Raises
    ------
    ConfigError
        count is not above 0; a log-probability that counts is not finite, or above 0 by more than
        rounding (on a GPU the loss is then NaN).
    ShapeError, DTypeError
        The arrays do not fit each other; there are no rows, and no count.
    """
    return nll_forward(log_probs, as_mask("nll", mask), count=count)


@op("log_probs(rows, tokens), mask(rows, tokens): bool -> loss(): stat")
def nll_forward(log_probs: Array, mask: Array, *, count: float | None = None) -> Array:
    """Return the loss of ``nll``."""
    counted = log_probabilities("nll", log_probs, mask)
    divisor = np.maximum(mask.sum(), 1) if count is None else count
    return np.asarray((-counted.sum() / divisor).astype(counted.dtype), like=counted)


@nll_forward.gradient
def nll_backward(
    dloss: Array, log_probs: Array, mask: Array, *, count: float | None = None
) -> tuple[Array, None]:
    """Return the gradient of log_probs; mask has none."""
    divisor = np.maximum(mask.sum(), 1) if count is None else count
    return np.where(mask, -dloss / divisor, 0).astype(log_probs.dtype), None


@nll_forward.require
def _check_nll(call: str, log_probs: Array, count: float | None) -> None:
    _check_count(call, len(log_probs), count)


nll_backward.require(_check_nll)


def _check_count(call: str, rows: int, count: float | None) -> None:
    check_some(call, rows, count)
    if count is not None:
        check_positive(call, count=count)


def reward(
    rewards: Array,
    *,
    margin: Array | None = None,
    weights: Array | None = None,
    center: float = 0.0,
    count: float | None = None,
) -> Array:
    """Return the loss of a reward model on preference pairs, averaged over the pairs.

    ``-log s(r_w - r_l - margin) + center (r_w + r_l)**2``, where s is the logistic function, w the
    chosen and l the rejected completion (Bradley and Terry, 1952; center keeps rewards near 0).

    Parameters
    ----------
    rewards : (rows,) float
        The first half of the rows are the chosen completions, the second half the rejected
        completions, in the same order.
    margin : (pairs,) float, optional
        The difference by which the reward of a chosen completion should be larger.
    weights : (pairs,) float, optional
        Factors of the losses of pairs.
    center : float
        Weight of the term that centres rewards; 0 or more.
    count : float, optional
        Divisor of the sum, in place of the number of pairs.

    Returns
    -------
    loss : () float32, or float64 for float64 rewards

    Raises
    ------
    ConfigError
        An option is out of its range.
    ShapeError, DTypeError
        The arrays do not fit each other; the number of rows is odd, or 0 without a count.
    """
    weights = as_weights(weights)
    return reward_forward(rewards, margin=margin, weights=weights, center=center, count=count)


@op("rewards(rows), margin?(pairs): constant, weights?(pairs): constant -> loss(): stat")
def reward_forward(
    rewards: Array,
    *,
    margin: Array | None = None,
    weights: Array | None = None,
    center: float = 0.0,
    count: float | None = None,
) -> Array:
    """Return the loss of ``reward``."""
    return _reward(rewards, margin, weights, center, count)[0]


@reward_forward.gradient
def reward_backward(
    dloss: Array,
    rewards: Array,
    margin: Array | None,
    weights: Array | None,
    *,
    center: float = 0.0,
    count: float | None = None,
) -> Array:
    """Return the gradient of the rewards."""
    return dloss * _reward(rewards, margin, weights, center, count)[1]


@reward_forward.require
def _check_reward(
    call: str, rewards: Array, margin: Array | None, weights: Array | None, center: float,
    count: float | None,
) -> None:  # fmt: skip
    check_pairs(call, len(rewards))
    _check_count(call, len(rewards), count)
    if center < 0:
        raise ConfigError(f"{call}(center={center}): center must be 0 or more")
    for name, each in (("margin", margin), ("weights", weights)):
        if each is not None and len(each) != len(rewards) // 2:
            problem = f"{call}: {name} has {len(each)} numbers for {len(rewards) // 2} pairs"
            raise ShapeError(problem, expected=(len(rewards) // 2,), actual=each.shape)


reward_backward.require(_check_reward)


def _reward(
    rewards: Array,
    margin: Array | None,
    weights: Array | None,
    center: float,
    count: float | None,
) -> tuple[Array, Array]:
    """Return the loss, and its derivatives with respect to rewards."""
    check_finite("reward", rewards=rewards, margin=margin, weights=weights)
    half = len(rewards) // 2
    won, lost = rewards[:half], rewards[half:]
    z = won - lost if margin is None else won - lost - margin.astype(rewards.dtype)
    divisor: Any = half if count is None else count
    losses, total = center * (won + lost) ** 2 - log_sigmoid(z), 2 * center * (won + lost)
    slopes = np.concatenate([total - sigmoid(-z), total + sigmoid(-z)])
    if weights is not None:
        losses, slopes = losses * weights, slopes * np.concatenate([weights, weights])
    return np.asarray(losses.sum() / divisor, like=rewards), slopes / divisor


def contrastive(
    queries: Array, documents: Array, *, scale: float = 20.0, count: float | None = None
) -> Array:
    """Return the in-batch contrastive loss: document i is relevant to query i, all others are not.

    The mean over queries of ``-log softmax(scale queries documents^T)[i]`` (Henderson et al.,
    Efficient Natural Language Response Suggestion, 2017).

    Parameters
    ----------
    queries : (rows, dim) float
        Vectors of length 1, if scores are to be cosines.
    documents : (rows or more, dim) float
        The first ones belong to the queries, in order; further ones are relevant to no query.
    scale : float
        Inverse temperature, above 0.
    count : float, optional
        Divisor of the sum, in place of the number of queries.

    Returns
    -------
    loss : () float32, or float64 for float64 arrays

    Raises
    ------
    ConfigError
        An option is out of its range.
    ShapeError, DTypeError
        The arrays do not fit each other; there are fewer documents than queries, or no queries
        and no count.
    """
    return contrastive_forward(queries, documents, scale=scale, count=count)


@op("queries(rows, dim), documents(candidates, dim) -> loss(): stat")
def contrastive_forward(
    queries: Array, documents: Array, *, scale: float = 20.0, count: float | None = None
) -> Array:
    """Return the loss of ``contrastive``."""
    log_p, divisor = _log_softmax(queries, documents, scale, count)
    right = np.arange(len(queries), like=log_p)
    return np.asarray(-log_p[right, right].sum() / divisor, like=queries)


@contrastive_forward.gradient
def contrastive_backward(
    dloss: Array,
    queries: Array,
    documents: Array,
    *,
    scale: float = 20.0,
    count: float | None = None,
) -> tuple[Array, Array]:
    """Return the gradients of queries and documents."""
    log_p, divisor = _log_softmax(queries, documents, scale, count)
    slopes, right = np.exp(log_p), np.arange(len(queries), like=log_p)
    slopes[right, right] -= 1
    slopes *= dloss * (scale / divisor)
    return slopes @ documents, slopes.T @ queries


@contrastive_forward.require
def _check_contrastive(
    call: str, queries: Array, documents: Array, scale: float, count: float | None
) -> None:
    check_positive(call, scale=scale)
    _check_count(call, len(queries), count)
    if len(documents) < len(queries):
        problem = (
            f"{call}: {len(documents)} documents for {len(queries)} queries; pass at least as many"
        )
        raise ShapeError(problem, expected=len(queries), actual=len(documents))


contrastive_backward.require(_check_contrastive)


def _log_softmax(
    queries: Array, documents: Array, scale: float, count: float | None
) -> tuple[Array, float]:
    """Return the log-probabilities of documents, and the divisor of the loss."""
    check_finite("contrastive", queries=queries, documents=documents)
    z = queries @ documents.T  # (rows, candidates)
    z *= z.dtype.type(scale)
    if z.size:
        z -= z.max(axis=1, keepdims=True)
        z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
    return z, len(queries) if count is None else count
