"""Sampling of the next token.

p = softmax(logits / temperature), restricted in this order to

    top_k     the top_k most likely tokens
    top_p     the fewest tokens whose probabilities reach top_p
    min_p     tokens with at least min_p times the probability of the most likely token

The next token is the one where the cumulative sum of p passes a uniform random number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.dtypes import FLOAT32, Array
from ..core.gpu import device_of
from ..placement import to_device_of, to_numpy

# Number of tokens that top_p sorts first; it sorts the vocabulary only if they do not reach top_p.
FEW = 1024


def wide(logits: Array) -> Array:
    """Return a copy of logits in float64."""
    if logits.dtype.itemsize < FLOAT32.itemsize:
        logits = logits.astype(FLOAT32)
    return logits.astype(np.float64)


def penalise(logits: Array, past: Array, real: Array, penalty: float) -> None:
    """Apply the repetition penalty in place: tokens in a row become less likely, except padding."""
    for row, tokens, mask in zip(logits, past, real, strict=True):
        used = np.unique(tokens[mask])
        row[used] = np.where(row[used] < 0, row[used] * penalty, row[used] / penalty)


def choose(logits: Any, rows: Sequence[Any], ends: Sequence[Array]) -> Array:
    """Return one token per row of (rows, vocab) logits on the host, -1 where there is none.

    There is none where logits hold NaN, or a constraint allows no token.  A row has its
    ``options``, its ``tokens``, ``draws`` with its next random number, and a number of new tokens
    ``count``; ``allowed`` is a mask of tokens, or None.  On the host only the likeliest tokens are
    sorted.  A GPU draws all rows of the same options at once.
    """
    masks = [row.allowed() for row in rows]
    changed = [
        row.options.repetition_penalty is not None
        or row.count < row.options.min_new_tokens
        or mask is not None
        for row, mask in zip(rows, masks, strict=True)
    ]
    if any(changed):
        logits = wide(to_numpy(logits))
    for place in np.flatnonzero(changed).tolist():
        row, own, mask = rows[place], logits[place : place + 1], masks[place]
        if row.options.repetition_penalty is not None:
            past = np.asarray(row.tokens)[None]
            penalise(own, past, past >= 0, row.options.repetition_penalty)
        if row.count < row.options.min_new_tokens:
            own[:, ends[place]] = -np.inf
        if mask is not None:
            own[:, ~mask[: own.shape[1]]] = -np.inf
    groups: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        options = row.options
        form = options.temperature, options.top_k, options.top_p, options.min_p
        groups.setdefault((0.0,) if options.temperature == 0 else form, []).append(place)
    chosen = np.empty(len(rows), np.int64)
    for places in groups.values():
        part = logits if len(groups) == 1 else logits[to_device_of(np.array(places), logits)]
        with device_of(part):
            chosen[places] = to_numpy(_chosen(part, [rows[place] for place in places]))
    return chosen


def _chosen(logits: Any, rows: Sequence[Any]) -> Any:
    """Return one token per row, -1 for logits without a largest number; rows have equal options."""
    options = rows[0].options
    if options.temperature == 0 and logits.dtype.itemsize >= FLOAT32.itemsize:
        # The maximum is NaN if any logit is.
        return np.where(np.isfinite(logits.max(axis=-1)), logits.argmax(axis=-1), -1)
    logits = wide(logits)
    top = logits.max(axis=-1)
    if options.temperature == 0:
        chosen = logits.argmax(axis=-1)
    elif isinstance(logits, np.ndarray):
        each = zip(logits, np.isfinite(top), rows, strict=True)
        drawn = [draw(own, options, row.draws.random()) if ok else -1 for own, ok, row in each]
        chosen = np.array(drawn, np.int64)
    else:
        uniform = np.array([[row.draws.random()] for row in rows])
        chosen = draw_all(logits, options, to_device_of(uniform, logits))
    return np.where(np.isfinite(top), chosen, -1)


def draw(logits: Array, options: Any, uniform: float) -> int:
    """Return the token at which the cumulative sum of the allowed probabilities passes uniform."""
    order = np.arange(logits.size)
    if options.top_k is not None:
        order = likeliest(logits, options.top_k)
    candidates = logits[order]
    with np.errstate(over="ignore"):  # the quotient overflows to -inf at temperatures near 0
        weights = np.exp((candidates - candidates.max()) / options.temperature)
    if options.top_p is not None:
        share = options.top_p * weights.sum()
        for count in (FEW, order.size):
            first = likeliest(candidates, count)
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


def draw_all(logits: Array, options: Any, uniform: Array) -> Array:
    """Return the tokens that ``draw`` returns, for all rows of a GPU in one pass.

    logits are (batch, vocab), uniform random numbers (batch, 1).
    """
    order = None
    if options.top_k is not None or options.top_p is not None:
        order = np.argsort(-logits, axis=-1, kind="stable")[:, : options.top_k]
        logits = np.take_along_axis(logits, order, axis=-1)
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / options.temperature)
    if options.top_p is not None:
        cumulative = weights.cumsum(axis=-1)
        enough = cumulative >= options.top_p * cumulative[:, -1:]
        weights[:, 1:] *= ~enough[:, :-1]  # the first token that reaches the share is included
    if options.min_p is not None:
        weights *= weights >= options.min_p
    cumulative = weights.cumsum(axis=-1)
    whole = cumulative[:, -1:]
    index = (cumulative <= uniform * whole).sum(axis=-1, keepdims=True)
    index = np.minimum(index, (cumulative < whole).sum(axis=-1, keepdims=True))
    return (index if order is None else np.take_along_axis(order, index, axis=-1))[:, 0]


def likeliest(logits: Array, count: int) -> Array:
    """Return the ``count`` most likely tokens in order; of equal logits, the lower token first."""
    tokens = np.arange(logits.size)
    # Of 151,936 tokens, a draw takes 4 to 8 ms with a partition, 30 to 34 ms with a whole sort.
    if count < logits.size:
        tokens = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return tokens[np.argsort(-logits[tokens], kind="stable")][:count]
