"""The indexer of sparse attention: the keys that each query attends to, chosen by their scores.

score[query, key] = sum over heads of w[query, head] relu(q[query, head] . k[key] / dim^1/2)
w = x A_w / heads^1/2        q = c A_q, c as in latent attention        k = layer_norm(x A_k)

The first elements of q and k are rotated.  A choice has no gradient, nor have these weights.

DeepSeek-AI, DeepSeek-V3.2, 2025.
"""

from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...ops.linear.linear import linear
from ...ops.norms.layer_norm import layer_norm
from ...ops.position.rope_qk import rope_qk
from ...ops.quantized.weight import Quantized
from ...parallel.taped import value_of
from ..configs.config import INNER_EPS, Indexer

SHARED = "index"  # name of the choice of an earlier layer


def chosen_keys(
    call: Any, indexer: Indexer, layer: int, module: str, x: Any, low: Any
) -> tuple[Array | None, Array | None]:
    """Return the index keys of new tokens, (batch, tokens, dim), and the mask of chosen keys.

    The mask is (batch, 1, tokens, keys), True for the keys of a query; None: all are chosen.  With
    the pages of an engine it is the list that ``PackedRows.attend`` reads.
    """
    if indexer.shared[layer]:
        return None, (call.attention.keys.shared or {}).get(SHARED)
    x, low = value_of(x), value_of(low)
    batch, tokens, _ = x.shape

    def weight(name: str) -> Any:
        own = value_of(call.parameters[f"{module}indexer.{name}"])
        return own.dequantize() if isinstance(own, Quantized) else own

    q = linear(low, weight("wq_b.weight")).reshape(batch, tokens, indexer.heads, indexer.dim)
    norm = weight("k_norm.weight"), weight("k_norm.bias")
    k = layer_norm(linear(x, weight("wk.weight")), *norm, eps=INNER_EPS)[:, :, None]
    cos, sin, *_ = call.attention.tables[call.config.layer_types[layer]]
    places = call.attention.positions
    q, k = rope_qk(q, k, cos, sin, places, interleaved=indexer.interleaved)
    factors = linear(x, weight("weights_proj.weight")) * x.dtype.type(indexer.heads**-0.5)
    own, latents = k[:, :, 0], call.attention.keys.latents
    if latents is None and call.attention.keys.cached:
        problem = "sparse attention stores the keys of its indexer in latent rows"
        cure = "use a cache with model.cache_sizes, not int8"
        raise ConfigError(f"Transformer: {problem}; {cure}")
    groups: Any = ()
    if latents is not None:
        groups = latents.index_keys(layer, own, indexer.keys)
    elif tokens > indexer.keys:
        key = np.arange(tokens, like=own)
        groups = ((slice(None), own, (key[:, None] >= key)[None], False),)
    chosen = list[Array]()
    for new, keys, visible, listed in groups:
        queries, weights = (
            each.reshape(-1, *each.shape[2:])[new].reshape(len(keys), -1, *each.shape[2:])
            for each in (q, factors)
        )
        scores = _scores(queries, keys, weights)
        chosen.append(_best(indexer, scores, _seen(call, visible), listed))
    mask: Any = (chosen if len(chosen) > 1 else chosen[0]) if chosen else None
    if any(indexer.shared) and call.attention.keys.shared is not None:
        call.attention.keys.shared[SHARED] = mask
    return own, mask


def _scores(q: Array, keys: Array, factors: Array) -> Array:
    """Return the scores of all keys, (batch, tokens, keys) float32 or wider, head by head."""
    wide = np.promote_types(q.dtype, FLOAT32)
    turned = keys.astype(wide, copy=False).swapaxes(1, 2)
    total: Any = np.zeros_like(q, wide, shape=(*q.shape[:2], keys.shape[1]))
    for head in range(q.shape[2]):
        products = q[:, :, head].astype(wide, copy=False) @ turned
        total += np.maximum(products, 0) * factors[:, :, head, None].astype(wide, copy=False)
    return total * wide.type(q.shape[-1] ** -0.5)


def _seen(call: Any, visible: Array) -> Array:
    """Return which of the visible keys are in the text of the query, and are not padding."""
    offsets, padding = call.recurrence.offsets, call.attention.keys.padding
    if offsets is not None:
        key = np.arange(visible.shape[-1], like=visible)
        text = np.searchsorted(offsets[1:], key, side="right")
        visible = visible & (text[:, None] == text)
    if padding is not None:
        visible = visible & padding[:, 0]
    return visible


def _best(indexer: Indexer, scores: Array, visible: Array, listed: bool) -> Array:
    """Return which keys are among the best that a query may see; of equal ones the first.

    ``listed``: the keys of a single query, in order, (rows, keys); those it does not see are last.
    """
    scores = np.where(visible, scores, -np.inf)
    order = np.argsort(-scores, axis=-1, kind="stable")
    if listed:
        keys: Array = np.sort(order[:, 0, : indexer.keys], axis=-1)
        return keys
    ranks = np.argsort(order, axis=-1, kind="stable")
    mask: Array = ((ranks < indexer.keys) & visible)[:, None]
    return mask
