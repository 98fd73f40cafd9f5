"""Packed sequences for NumPy definitions: one at a time or, on a device, all in a padded batch."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import RangeError, ShapeError
from ._blocks import four_axes
from ._options import TILE, Options


class Sequence(NamedTuple):
    """The tokens of one packed sequence, as a batch of one."""

    start: int
    stop: int
    lengths: None = None

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start

    def take(self, array: Array, fill: float) -> Array:
        """Return the sequence's tokens of a packed array: (1, size, ...)."""
        return array[None, self.start : self.stop]

    def give(self, array: Array, part: Array) -> None:
        """Write the sequence's tokens, (1, size, ...), into a packed array."""
        array[self.start : self.stop] = part[0]


class Padded:
    """The tokens of all packed sequences, as a batch that is padded at the end."""

    def __init__(self, offsets: Array, longest: int | None, tokens: int) -> None:
        self.lengths = offsets[1:] - offsets[:-1]
        self.size = tokens if longest is None else min(longest, tokens)
        position = np.arange(self.size, like=offsets)
        self.real = position < self.lengths[:, None]  # (sequences, size): not padding
        self.token = np.minimum(offsets[:-1, None] + position, tokens - 1)  # (sequences, size)
        # for each packed token, its sequence and its position there
        token = np.arange(tokens, like=offsets)
        self.sequence = np.searchsorted(offsets[1:], token, side="right")
        self.position = token - offsets[self.sequence]

    def take(self, array: Array, fill: float) -> Array:
        """Return a packed array as (sequences, longest, ...), padded with fill."""
        # (sequences, size, 1, ...)
        real = self.real.reshape(*self.real.shape, *[1] * (array.ndim - 1))
        padded = np.where(real, array[self.token], fill)
        return padded.astype(array.dtype, copy=False)  # CuPy's where widens bfloat16

    def give(self, array: Array, part: Array) -> None:
        """Write (sequences, longest, ...), without its padding, into a packed array."""
        array[:] = part[self.sequence, self.position]


def sides_of(
    call: str,
    q: Array,
    k: Array,
    q_offsets: Array,
    k_offsets: Array,
    max_queries: int | None,
    max_keys: int | None,
) -> Iterator[tuple[Any, Any]]:
    """Yield the queries and keys of each ``Sequence``; on a device, ``Padded`` ones of all."""
    if type(q_offsets) is not np.ndarray:  # the host does not wait for offsets of a device
        yield (
            Padded(q_offsets, max_queries, q.shape[0]),
            Padded(k_offsets, max_keys, k.shape[0]),
        )
        return
    for name, offsets, tokens, longest_name, longest in (
        ("q_offsets", q_offsets, q.shape[0], "max_queries", max_queries),
        ("k_offsets", k_offsets, k.shape[0], "max_keys", max_keys),
    ):
        check_offsets(call, name, offsets, tokens)
        most = int(np.diff(offsets).max(initial=0))
        if longest is not None and most > longest:
            problem = f"{name} has a sequence of {most} tokens"
            raise RangeError(f"{call}: {problem}; {longest_name}={longest} must be at least that")
    rows, keys = (itertools.pairwise(offsets.tolist()) for offsets in (q_offsets, k_offsets))
    for row, key in zip(rows, keys, strict=True):
        yield Sequence(*row), Sequence(*key)


def longest(options: Options, max_queries: int | None, max_keys: int | None) -> list[int | None]:
    """Return the most queries and the most keys of a sequence; None if no array has a limit."""
    arrays = options.mask, options.bias, options.block_mask
    both: list[int | None] = []
    for axis, most in ((-2, max_queries), (-1, max_keys)):
        sizes = [tile * array.shape[axis] for _, array, tile in _sized_by(axis, *arrays)]
        both.append(min(sizes, default=None) if most is None else most)
    return both


def check_longest(
    call: str, mask: Any, bias: Any, block_mask: Any, max_queries: int | None, max_keys: int | None
) -> None:
    """Raise ShapeError if mask, bias or block_mask does not fit max_queries or max_keys."""
    for axis, name, most in ((-2, "max_queries", max_queries), (-1, "max_keys", max_keys)):
        for array_name, array, tile in _sized_by(axis, mask, bias, block_mask):
            size = array.shape[axis]
            expected = size if most is None else -(-most // tile)
            if size != expected:
                problem = f"{array_name} of shape {array.shape} has {size} for {name}={most}"
                problem = f"{call}: {problem}; it must be {expected}"
                raise ShapeError(problem, expected=expected, actual=size)


def _sized_by(axis: int, mask: Any, bias: Any, block_mask: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield name, array and tile size of the arrays that do not broadcast along an axis.

    block_mask has an element for each tile of TILE rows, also if it has only one.
    """
    for name, array, tile in ("mask", mask, 1), ("bias", bias, 1), ("block_mask", block_mask, TILE):
        if array is not None and array.ndim >= -axis and (tile > 1 or array.shape[axis] != 1):
            yield name, array, tile


def share_of(array: Any, number: int, rows: Any, keys: Any, tile: int = 1) -> Any:
    """Return the part of a mask or bias that belongs to a sequence; with padding, to all.

    The array has axes (sequences, heads, max_queries, max_keys), some of which may be absent or 1;
    ``tile`` counts rows and keys for each of its elements.
    """
    if array is None:
        return None
    array = four_axes(array)
    batch = slice(None) if keys.lengths is not None else slice(number, number + 1)
    parts = (batch, slice(None), slice(-(-rows.size // tile)), slice(-(-keys.size // tile)))
    shared = (slice(None) if size == 1 else p for size, p in zip(array.shape, parts, strict=True))
    return array[tuple(shared)]


def check_offsets(call: str, name: str, offsets: Array, tokens: int) -> None:
    """Raise RangeError unless host offsets rise from 0 to the number of tokens."""
    falls = (np.diff(offsets) < 0).any()
    if offsets[0] != 0 or offsets[-1] != tokens or falls:
        problem = f"{name} goes from {offsets[0]} to {offsets[-1]}"
        problem += ", and falls in between" if falls else ""
        raise RangeError(
            f"{call}: {problem}; it must rise from 0 to {tokens}, the number of tokens"
        )
