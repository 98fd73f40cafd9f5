"""Checks of tokens, masks and packed texts before a forward pass, and positions of tokens."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core import arrays
from ...core.dtypes import KINDS
from ...errors import ConfigError, DTypeError, ShapeError
from ...inference.kv_cache import KVCache
from ...inference.paged_kv_cache import PagedKVCache
from ...inference.paged_rows import PagedRows, rows_of
from ...ops.attention.sequences import check_offsets
from ...placement import to_numpy
from ...training.checkpoint import CheckpointConfig
from ..configs.config import Rope


class Angles(NamedTuple):
    """The rotary embeddings of a model, by layer type."""

    tables: Mapping[str, Callable[[int], tuple[Any, ...]]]
    ropes: Mapping[str, Rope]


class Places(NamedTuple):
    """Rotary tables, positions and mask of a call, which all blocks use."""

    tables: Mapping[str, tuple[Any, Any]]  # cos and sin, by layer type
    positions: Any  # (batch, tokens); None: the rows of the tables, in order
    mask: Any  # (batch, 1, 1, keys) True where keys are not padding; None: no padding
    offsets: Any = None  # (texts + 1,) starts of the texts packed into a row


def check(
    tokens: Any,
    mask: Any = None,
    cache: Any = None,
    offsets: Any = None,
    checkpoints: Any = None,
    sequences: Any = None,
) -> KVCache | PagedRows | None:
    """Raise unless the shapes and dtypes of tokens, mask, offsets and cache agree.

    Return the cache; a paged cache as the ``PagedRows`` of these sequences.
    """
    operands = {"tokens": tokens, "mask": mask, "offsets": offsets}
    for name, array in operands.items():
        if array is not None or name == "tokens":
            arrays.framework_of(array, f"Transformer: {name}")  # raises for numbers and lists
    arrays.common("Transformer", [*operands], [*operands.values()])
    if not isinstance(checkpoints, CheckpointConfig | None):
        cure = "pass a CheckpointConfig, or None"
        raise ConfigError(f"Transformer: checkpoint is {checkpoints!r}; {cure}")
    if tokens.ndim != 2:
        cure = "pass tokens[None]" if tokens.ndim == 1 else "pass (batch, tokens)"
        problem = f"Transformer: tokens are {tokens.shape}, not (batch, tokens); {cure}"
        raise ShapeError(problem, expected=("batch", "tokens"), actual=tuple(tokens.shape))
    batch, new = tokens.shape
    rows = rows_of("Transformer", cache, sequences, batch)
    past = cache.length if isinstance(cache, KVCache) else 0
    if isinstance(cache, KVCache):
        if cache.shape[0] != batch:
            cache_batch = cache.shape[0]
            problem = f"Transformer: tokens are {tokens.shape}, the cache has batch={cache_batch}"
            raise ShapeError(problem, expected=(cache_batch, "tokens"), actual=tuple(tokens.shape))
        cache.check_room(new)
    if offsets is not None:
        _check_offsets(tokens, offsets, mask, cache)
    if mask is None:
        return rows
    if isinstance(cache, PagedKVCache):
        cure = "leave mask out, and pass texts of different lengths one at a time"
        raise ConfigError(f"Transformer: a PagedKVCache does not hold padding; {cure}")
    if mask.shape not in ((batch, new), (batch, past + new)):
        problem = f"Transformer: mask is {mask.shape}, tokens {tokens.shape}; make them equal"
        raise ShapeError(problem, expected=tuple(tokens.shape), actual=tuple(mask.shape))
    if mask.dtype.kind not in "biu":
        raise DTypeError(f"Transformer: mask is {mask.dtype}; it must be bool or an integer")
    return rows


def _check_offsets(tokens: Any, offsets: Any, mask: Any, cache: Any) -> None:
    """Raise unless offsets are valid starts of packed texts, without a mask or a cache."""
    if mask is not None or cache is not None:
        other = "mask" if mask is not None else "cache"
        raise ConfigError(
            f"Transformer: offsets are for packed texts without padding; leave {other} out"
        )
    if offsets.ndim != 1 or not len(offsets):
        problem = f"Transformer: offsets are {offsets.shape}; they must be (texts + 1,)"
        raise ShapeError(problem, expected=("texts + 1",), actual=tuple(offsets.shape))
    if offsets.dtype not in KINDS["int"]:
        raise DTypeError(f"Transformer: offsets are {offsets.dtype}; they must be int32 or int64")
    if isinstance(offsets, np.ndarray):  # on a GPU, reading the values would synchronise
        check_offsets("Transformer", "offsets", offsets, tokens.size)


def real_keys(mask: Any, cache: KVCache | None, new: int) -> Any:
    """Return a mask of the keys that are not padding, (batch, keys); None if all are real."""
    padded = cache is not None and cache.padded
    real = None if mask is None else mask != 0
    # NumPy only: on a GPU, ``all`` would make the host wait.
    if isinstance(real, np.ndarray) and real.all() and not padded:
        real = None
    return real if cache is None else cache.note(real, new)


def places(
    angles: Angles, tokens: Any, mask: Any, cache: KVCache | PagedRows | None, offsets: Any
) -> Places:
    """Return the places of tokens.

    Positions continue after the tokens in the cache, and do not count padding; the texts of a pack
    each begin at 0.
    """
    if offsets is not None:
        return _packed(angles, tokens.size, offsets)
    start, new = cache.length if cache is not None else 0, tokens.shape[1]
    length, positions, real = start + new, None, None
    if isinstance(cache, PagedRows):
        start, positions = cache.places(new)
    else:
        real = real_keys(mask, cache, new)
    if real is not None:
        index = real.cumsum(axis=1)[:, start:] - 1
        positions = index * (index > 0)
        if _by_length(angles):  # without padding; the host waits for the GPU here
            length = int(positions.max()) + 1 if positions.size else 1
    rows = slice(None) if positions is not None else slice(start, start + new)
    rows_of_tables: dict[str, Any] = {
        kind: tuple(table[rows] for table in tables(max(length, 1)))
        for kind, tables in angles.tables.items()
    }
    return Places(rows_of_tables, positions, None if real is None else real[:, None, None, :])


def _packed(angles: Angles, total: int, offsets: Any) -> Places:
    """Return the places of packed texts, which each begin at position 0."""
    if _by_length(angles):  # angles differ by the length of a text: the tables get a row per token
        lengths = [n for n in np.diff(to_numpy(offsets)).tolist() if n]
        by_kind: dict[str, Any] = {}
        for kind, tables in angles.tables.items():
            texts = [[table[:n] for table in tables(n)] for n in lengths]
            by_kind[kind] = tuple(np.concatenate(parts) for parts in zip(*texts, strict=True))
        return Places(by_kind if lengths else _tables(angles, 1), None, None, offsets)
    index = np.arange(total, like=offsets)
    positions = index - offsets[np.searchsorted(offsets[1:], index, side="right")]
    # On a GPU, reading the longest text would make the host wait; no text is longer than all.
    longest = int(np.diff(offsets).max(initial=1)) if isinstance(offsets, np.ndarray) else total
    return Places(_tables(angles, longest), positions[None], None, offsets)


def _tables(angles: Angles, length: int) -> dict[str, tuple[Any, Any]]:
    """Return cos and sin of ``length`` positions, by layer type."""
    return {kind: tables(max(length, 1)) for kind, tables in angles.tables.items()}


def _by_length(angles: Angles) -> bool:
    """Return whether rotary angles depend on the length of a text."""
    return any(rope.original is not None for rope in angles.ropes.values())
