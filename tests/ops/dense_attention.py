"""A second, plain definition of attention: all scores at once, every option as an array."""

from typing import Any

import numpy as np

from unsloth_cupy.ops.common import philox


def visible(
    shape: tuple[int, int, int, int],
    *,
    causal: bool = False,
    window: Any = None,
    mask: Any = None,
    key_lengths: Any = None,
    query_start: Any = None,
    block_mask: Any = None,
    **_: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return which query-key pairs are visible, and the distance of each pair."""
    batch, _, queries, keys = shape
    lengths = np.full(batch, keys) if key_lengths is None else np.asarray(key_lengths)
    start = lengths - queries if query_start is None else np.broadcast_to(query_start, batch)
    key = np.arange(keys)
    ahead = key - (start[:, None] + np.arange(queries))[..., None]  # batch, queries, keys
    seen = np.broadcast_to(key < lengths[:, None, None], ahead.shape)
    left, right = window or (None, None)
    if causal:
        seen = seen & (ahead <= 0)
    if left is not None:
        seen = seen & (ahead >= -left)
    if right is not None:
        seen = seen & (ahead <= right)
    seen = np.broadcast_to(seen[:, None], shape)
    if mask is not None:
        seen = seen & mask
    if block_mask is not None:
        tiles = block_mask.repeat(128, axis=-2).repeat(128, axis=-1)
        seen = seen & tiles[..., :queries, :keys]
    return seen, np.abs(ahead)[:, None]


def dense(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse, computed with (batch, heads, queries, keys) arrays."""
    batch, queries, heads, dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    q, k, v = (a.astype(np.float64).transpose(0, 2, 1, 3) for a in (q, k, v))
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
    seen, distance = visible((batch, heads, queries, keys), **options)
    scale = options.get("scale")
    score = q @ k.swapaxes(2, 3) * (dim**-0.5 if scale is None else scale)
    if (cap := options.get("softcap")) is not None:
        score = cap * np.tanh(score / cap)
    if (bias := options.get("bias")) is not None:
        score = score + bias
    if (alibi := options.get("alibi")) is not None:
        score = score - alibi[..., None, None] * distance
    score = np.where(seen, score, -np.inf)
    top = score.max(axis=-1, initial=-np.inf)
    if (sinks := options.get("sinks")) is not None:
        top = np.maximum(top, sinks[:, None])
    top = np.where(top == -np.inf, 0, top)
    score = np.exp(score - top[..., None])
    total = score.sum(axis=-1)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - top)
    p = score / np.where(total == 0, 1, total)[..., None]
    if dropout := options.get("dropout"):
        number = [np.arange(n) for n in (batch, heads, queries)]
        rows = (number[0][:, None, None], number[1][:, None], number[2])
        p = p * philox.keep_mask(options["seed"], dropout, rows, 0, keys) / (1 - dropout)
    with np.errstate(divide="ignore"):
        return (p @ v).transpose(0, 2, 1, 3), top + np.log(total)
