"""Tokens and masks, checked before anything is computed."""

from typing import Any

import numpy as np

from .. import _arrays
from .._typing import Array
from ..errors import DTypeError, ShapeError
from ..kv_cache import KVCache

IGNORE = -100  # the label of a token that does not count


def check(tokens: Any, mask: Any = None, cache: KVCache | None = None) -> None:
    """Raise unless tokens and mask are arrays that fit each other and the cache."""
    _arrays.common("Transformer", ("tokens", "mask"), (tokens, mask))
    if tokens.ndim != 2:
        cure = "pass tokens[None]" if tokens.ndim == 1 else "pass (batch, tokens)"
        raise ShapeError(f"Transformer: tokens are {tokens.shape}, not (batch, tokens); {cure}")
    batch, new = tokens.shape
    held = cache.length if cache is not None else 0
    if cache is not None and cache.shape[0] != batch:
        rows = cache.shape[0]
        raise ShapeError(f"Transformer: tokens are {tokens.shape}, the cache has batch={rows}")
    if cache is not None:
        cache.check_room(new)
    if mask is None:
        return
    if mask.shape not in ((batch, new), (batch, held + new)):
        raise ShapeError(f"Transformer: mask is {mask.shape}, tokens {tokens.shape}; make equal")
    if mask.dtype.kind not in "biu":
        raise DTypeError(f"Transformer: mask is {mask.dtype}; it must be bool or an integer")


def real_keys(mask: Any, cache: KVCache | None, new: int) -> Any:
    """Return which keys are no padding, (batch, keys), or None where all are known to be real."""
    padded = cache is not None and cache.padded
    real = None if mask is None else mask != 0
    if isinstance(real, np.ndarray) and real.all() and not padded:  # a GPU is not asked: it waits
        real = None
    return real if cache is None else cache.note(real, new)


def count_labels(labels: Array) -> Any:
    """Return how many labels count, at least 1, without asking a GPU."""
    return (labels[:, 1:] != IGNORE).sum().clip(1)
