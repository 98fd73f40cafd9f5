"""Calls of an invariant model: the bits of a text's results do not depend on other texts.

``ops/common/fixed_order.py`` fixes the order of the sums in a row.  This module removes padding, so
that every text begins at key 0, and raises for calls in which the order is not fixed.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..inference.kv_cache import KVCache
from ..inference.paged_rows import PagedRows
from ..ops.common.fixed_order import refuse
from ..ops.linear.embedding import embedding
from ..placement import to_device_of, to_numpy
from .configs.config import Config


def without_padding(hidden: Callable[..., Any], tokens: Array, mask: Any, **arguments: Any) -> Any:
    """Return hidden states of padded rows, computed from packed texts; undefined at padding."""
    real = None if mask is None else to_numpy(mask) != 0
    if real is None or real.all() or not real.any() or arguments.get("cache") is not None:
        return hidden(tokens, mask=mask, **arguments)
    starts = np.append(0, real.sum(axis=1).cumsum())  # of the texts, packed into one row
    arguments["offsets"] = to_device_of(starts, tokens)
    x = hidden(tokens[to_device_of(real, tokens)][None], **arguments)
    place = np.maximum(real.reshape(-1).cumsum() - 1, 0).reshape(real.shape)
    return embedding(to_device_of(place, tokens), x.reshape(*x.shape[1:]))


def check_invariant(config: Config, divided: bool, rows: Any, mask: Any) -> None:
    """Raise a ConfigError for a call whose bits would depend on more than its texts."""
    kind = config.model_type
    if divided:
        refuse("ranks that divide a model, or the tokens of a row, add in another order")
    if config.recurrent:
        refuse(f"layers of a {kind} without attention add by chunks, which depend on the call")
    if config.chunk is not None or config.indexer is not None:
        refuse(f"the keys that a query of a {kind} sees are not added in a fixed order")
    if config.bit_layers:
        refuse(f"the linear layers of a {kind} round their inputs, and have no fixed order here")
    if any(rope.original is not None for rope in config.ropes.values()):
        refuse(f"the rotary angles of a {kind} depend on the length of the whole text")
    if rows is not None and len({config.heads_of(layer) for layer in range(config.layers)}) > 1:
        refuse(
            f"a cache pads the heads of a {kind} to one size, and adds in the order of this size"
        )
    codes = isinstance(rows, PagedRows) and rows.cache.scales is not None
    if codes or (isinstance(rows, KVCache) and rows.dtype == np.int8):
        refuse("a cache of int8 codes rounds keys and values, which training does not")
    if isinstance(rows, KVCache):
        ring = any(width is not None for width in rows.windows)
        if ring or rows.padded or (mask is not None and not to_numpy(mask).all()):
            problem = "windows move the keys of a KVCache" if ring else "padding moves keys"
            refuse(f"{problem} away from their positions; pass a PagedKVCache, or")
