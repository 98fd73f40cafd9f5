"""The choice of the next token: penalties, restrictions and draws, where the logits are.

On the host a row is drawn after the other, and only the likeliest tokens are sorted.  On a GPU all
rows are drawn at once, and the host gets a token of each instead of its logits.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.dtypes import FLOAT32, Array
from ..placement import to_device_of

FEW = 1024  # tokens among which top_p looks first


def wide(logits: Array) -> Array:
    """Return logits in float64, a new array."""
    if logits.dtype.itemsize < FLOAT32.itemsize:
        logits = logits.astype(FLOAT32)
    return logits.astype(np.float64)


def penalise(logits: Array, past: Array, real: Array, penalty: float) -> None:
    """Make the tokens of each row less likely, in place; padding does not count."""
    for row, tokens, mask in zip(logits, past, real, strict=True):
        used = np.unique(tokens[mask])
        row[used] = np.where(row[used] < 0, row[used] * penalty, row[used] / penalty)


def choose(logits: Any, options: Any, draws: Sequence[np.random.Generator]) -> Array:
    """Return one token per row of (batch, vocab) logits, -1 where they hold NaN.

    ``options`` are those of ``generate``; row i takes its next number from ``draws[i]``.
    """
    if options.temperature == 0:
        chosen = logits.argmax(axis=-1)
    elif isinstance(logits, np.ndarray):
        rows = zip(logits, draws, strict=True)
        chosen = np.array([_draw(row, options, draw.random()) for row, draw in rows], int)
    else:
        uniform = np.array([[draw.random()] for draw in draws])
        chosen = _draw_all(logits, options, to_device_of(uniform, logits))
    return np.where(np.isnan(logits).any(axis=-1), -1, chosen)


def log_probs_of(z: Array, tokens: Array) -> Array:
    """Return the logarithms of the probabilities of a token of each row."""
    z = z - z.max(axis=-1, keepdims=True)
    of_tokens = np.take_along_axis(z, tokens[:, None], axis=-1)[:, 0]
    return of_tokens - np.log(np.exp(z).sum(axis=-1))


def _draw(logits: Array, options: Any, uniform: float) -> int:
    """Return the token at which the cumulative sum of the kept probabilities passes uniform."""
    order = np.arange(logits.size)
    if options.top_k is not None:
        order = _likeliest(logits, options.top_k)
    kept = logits[order]
    with np.errstate(over="ignore"):  # temperatures near 0
        weights = np.exp((kept - kept.max()) / options.temperature)
    if options.top_p is not None:
        share = options.top_p * weights.sum()
        for count in (FEW, order.size):
            first = _likeliest(kept, count)
            cumulative = weights[first].cumsum()
            if cumulative[-1] > share or count >= order.size:
                break
        first = first[: np.searchsorted(cumulative, share) + 1]
        order, weights = order[first], weights[first]
    if options.min_p is not None:
        weights = np.where(weights < options.min_p, 0, weights)
    cumulative = weights.cumsum()
    index = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    last = np.searchsorted(cumulative, cumulative[-1])  # tokens after it have probability 0
    return int(order[min(index, last)])


def _draw_all(logits: Array, options: Any, uniform: Array) -> Array:
    """Return what ``_draw`` returns of each row, for uniform (batch, 1)."""
    order = None
    if options.top_k is not None or options.top_p is not None:
        order = np.argsort(-logits, axis=-1, kind="stable")[:, : options.top_k]
        logits = np.take_along_axis(logits, order, axis=-1)
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / options.temperature)
    if options.top_p is not None:
        cumulative = weights.cumsum(axis=-1)
        enough = cumulative >= options.top_p * cumulative[:, -1:]
        weights[:, 1:] *= ~enough[:, :-1]  # the first that reaches the share is the last
    if options.min_p is not None:
        weights *= weights >= options.min_p
    cumulative = weights.cumsum(axis=-1)
    whole = cumulative[:, -1:]
    index = (cumulative <= uniform * whole).sum(axis=-1, keepdims=True)
    index = np.minimum(index, (cumulative < whole).sum(axis=-1, keepdims=True))
    return (index if order is None else np.take_along_axis(order, index, axis=-1))[:, 0]


def _likeliest(logits: Array, count: int) -> Array:
    """Return the most likely tokens in order, of equal ones the lowest first."""
    tokens = np.arange(logits.size)
    if count < logits.size:  # a vocabulary takes much longer to sort than to divide
        tokens = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return tokens[np.argsort(-logits[tokens], kind="stable")][:count]
