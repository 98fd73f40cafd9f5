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
from .requests import BLOCK

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


def choose(logits: Any, rows: Sequence[Any], ends: Sequence[Array], numbers: "Uniform") -> Any:
    """Return one token per row of (rows, vocab) logits, -1 where there is none.

    There is none where logits hold NaN, or a constraint allows no token.  A row has its
    ``options``, its ``tokens``, and ``uniform`` with its next random numbers; ``allowed`` is a mask
    of tokens, or None.  On the host only the likeliest tokens are sorted.  A GPU draws all rows of
    the same options at once, and the result is there unless a row is ``on_host``.
    """
    changed = [row.on_host for row in rows]
    if any(changed):
        logits = wide(to_numpy(logits))
    for place in np.flatnonzero(changed).tolist():
        row, own, mask = rows[place], logits[place : place + 1], rows[place].allowed()
        if row.options.repetition_penalty is not None:
            past = np.asarray(row.tokens)[None]
            penalise(own, past, past >= 0, row.options.repetition_penalty)
        if row.drawn < row.options.min_new_tokens:
            own[:, ends[place]] = -np.inf
        if mask is not None:
            own[:, ~mask[: own.shape[1]]] = -np.inf
    groups: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        options = row.options
        form = options.temperature, options.top_k, options.top_p, options.min_p
        groups.setdefault((0.0,) if options.temperature == 0 else form, []).append(place)
    with device_of(logits):
        uniform = None
        if not isinstance(logits, np.ndarray) and groups.keys() != {(0.0,)}:
            uniform = numbers(rows, logits)
        if len(groups) == 1:
            return _chosen(logits, rows, uniform)
        chosen = np.empty_like(logits, np.int64, shape=len(rows))
        for places in groups.values():
            index = to_device_of(np.array(places), logits)
            own = None if uniform is None else uniform[index]
            chosen[index] = _chosen(logits[index], [rows[place] for place in places], own)
    return chosen


class Uniform:
    """The random numbers of rows, sent to a GPU in blocks."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.starts: list[int] = []  # by row, the number of its first token of the block
        self.block: Any = None  # (BLOCK, rows)

    def __call__(self, rows: Sequence[Any], like: Any) -> Any:
        """Return the next random number of each row, (rows, 1) on the device of ``like``."""
        place = rows[0].drawn - self.starts[0] if self.rows == rows else BLOCK
        if place >= BLOCK or any(
            row.drawn != start + place for row, start in zip(rows, self.starts, strict=True)
        ):
            block = np.stack([row.uniform(BLOCK) for row in rows], axis=1)
            self.rows, self.starts = [*rows], [row.drawn for row in rows]
            self.block, place = to_device_of(block, like), 0
        return self.block[place][:, None]


def _chosen(logits: Any, rows: Sequence[Any], uniform: Any) -> Any:
    """Return one token per row, -1 for logits without a largest number; rows have equal options."""
    options = rows[0].options
    if options.temperature == 0:
        return likeliest_of(logits)
    logits = wide(logits)
    top = logits.max(axis=-1)
    if isinstance(logits, np.ndarray):
        each = zip(logits, np.isfinite(top), rows, strict=True)
        drawn = [draw(own, options, float(row.uniform()[0])) if ok else -1 for own, ok, row in each]
        chosen: Any = np.array(drawn, np.int64)
    else:
        chosen = draw_all(logits, options, uniform)
    return np.where(np.isfinite(top), chosen, -1)


def likeliest_of(logits: Any) -> Any:
    """Return the most likely token of each row, -1 for logits without a largest number."""
    if logits.dtype.itemsize < FLOAT32.itemsize:
        logits = logits.astype(FLOAT32)
    # The maximum is NaN if any logit is.
    return np.where(np.isfinite(logits.max(axis=-1)), logits.argmax(axis=-1), -1)


def draw(logits: Array, options: Any, uniform: float) -> int:
    """Return the token at which the cumulative sum of the allowed probabilities passes uniform."""
    order: Any = None  # the tokens of candidates; None: all
    candidates = logits
    if options.top_k is not None:
        order = likeliest(logits, options.top_k)
        candidates = logits[order]
    with np.errstate(over="ignore"):  # the quotient overflows to -inf at temperatures near 0
        weights = np.exp((candidates - candidates.max()) / options.temperature)
    if options.top_p is not None:
        share = options.top_p * weights.sum()
        for count in (FEW, candidates.size):
            first = likeliest(candidates, count)
            cumulative = weights[first].cumsum()
            if cumulative[-1] > share or count >= candidates.size:
                break
        first = first[: np.searchsorted(cumulative, share) + 1]
        order, weights = first if order is None else order[first], weights[first]
    if options.min_p is not None:
        weights = np.where(weights < options.min_p, 0, weights)
    cumulative = weights.cumsum()
    index = np.searchsorted(cumulative, uniform * cumulative[-1], side="right")
    last = np.searchsorted(cumulative, cumulative[-1])  # tokens after it have probability 0
    place = min(index, last)
    return int(place if order is None else order[place])


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


def top_log_probs(
    logits: Any, labels: Array, log_probs: Array, count: int, temperature: float
) -> tuple[Array, Array]:
    """Return the most likely tokens of each row, and their log-probabilities: (rows, count) each.

    ``log_probs`` are those of ``labels``; the others differ from them as the logits do.
    """
    if isinstance(logits, np.ndarray):
        every = np.arange(count)  # of a row with NaN, which ends with an error
        rows = (every if np.isnan(row).any() else likeliest(row, count) for row in logits)
        order = np.stack([*rows])
    else:
        order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    index = np.concatenate([labels[:, None], order], axis=1)
    own = np.take_along_axis(logits, index, axis=1).astype(np.float64)
    with np.errstate(invalid="ignore"):  # NaN: the row ends with an error
        values = log_probs[:, None] + (own[:, 1:] - own[:, :1]) / temperature
    return order, np.where(order == labels[:, None], log_probs[:, None], np.minimum(values, 0))


def likeliest(logits: Array, count: int) -> Array:
    """Return the ``count`` most likely tokens in order; of equal logits, the lower token first."""
    tokens = np.arange(logits.size)
    # Of 151,936 tokens, a draw takes 4 to 8 ms with a partition, 30 to 34 ms with a whole sort.
    if count < logits.size:
        tokens = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return tokens[np.argsort(-logits[tokens], kind="stable")][:count]
