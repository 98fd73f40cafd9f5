"""Sampling of the next token: repetition penalty, most likely tokens, draws for all rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...ops.losses.linear_log_probs import of_logits


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


def draw_all(logits: Array, options: Any, uniform: Array) -> Array:
    """Return the tokens that ``_draw`` of generate.py returns, for all rows of a GPU in one pass.

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


def planned_draw(planned_logits: Any) -> tuple[Any, ...]:
    """Allocate planned arrays as a draw does; return those that are alive in the next step."""
    logits, (rows, vocab), of = wide(planned_logits), planned_logits.shape, planned_logits.of
    np.isnan(logits).any(axis=-1)
    if isinstance(planned_logits, np.ndarray):  # row by row: tokens, their logits, weights and sums
        arrays = [of((vocab,), np.float64) for _ in range(4)]
        del arrays
        chosen = of((rows,), np.int64)
    else:
        options = SimpleNamespace(temperature=1.0, top_k=None, top_p=None, min_p=None)
        chosen = draw_all(logits, options, of((rows, 1), np.float64))
    floats = planned_logits.astype(np.promote_types(planned_logits.dtype, FLOAT32), copy=False)
    of_logits(floats, chosen, 1.0)
    return planned_logits, logits


def likeliest(logits: Array, count: int) -> Array:
    """Return the ``count`` most likely tokens in order; of equal logits, the lower token first."""
    tokens = np.arange(logits.size)
    # Of 151,936 tokens, a draw takes 4 to 8 ms with a partition, 30 to 34 ms with a whole sort.
    if count < logits.size:
        tokens = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return tokens[np.argsort(-logits[tokens], kind="stable")][:count]
