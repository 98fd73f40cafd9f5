"""Sequences that lie end to end: taken one by one or, where offsets are not read, padded."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import RangeError, ShapeError
from ._blocks import four_axes
from ._options import TILE, Options


class Sequence(NamedTuple):
    """The tokens of one sequence, as a batch of one."""

    start: int
    stop: int
    lengths: None = None

    @property
    def size(self) -> int:
        """Return how many tokens there are."""
        return self.stop - self.start

    def take(self, array: Array, fill: float) -> Array:
        """Return these tokens of a packed array."""
        return array[None, self.start : self.stop]

    def give(self, array: Array, part: Array) -> None:
        """Write these tokens into a packed array."""
        array[self.start : self.stop] = part[0]


class Padded:
    """The tokens of all sequences, as a batch whose short sequences are filled up."""

    def __init__(self, offsets: Array, longest: int | None, tokens: int) -> None:
        self.lengths = offsets[1:] - offsets[:-1]
        self.size = tokens if longest is None else min(longest, tokens)
        inside = np.arange(self.size, like=offsets)
        self.real = inside < self.lengths[:, None]
        self.token = np.minimum(offsets[:-1, None] + inside, tokens - 1)
        every = np.arange(tokens, like=offsets)
        self.sequence = np.searchsorted(offsets[1:], every, side="right")
        self.position = every - offsets[self.sequence]

    def take(self, array: Array, fill: float) -> Array:
        """Return a packed array as (sequences, longest, ...)."""
        real = self.real.reshape(*self.real.shape, *[1] * (array.ndim - 1))
        return np.where(real, array[self.token], fill)

    def give(self, array: Array, part: Array) -> None:
        """Write (sequences, longest, ...) into a packed array."""
        array[:] = part[self.sequence, self.position]


def sides_of(
    q: Array,
    k: Array,
    q_offsets: Array,
    k_offsets: Array,
    max_queries: int | None,
    max_keys: int | None,
) -> Iterator[tuple[Any, Any]]:
    """Yield the rows and the keys of each sequence; of all at once where offsets are not read."""
    if type(q) is not np.ndarray:  # reading offsets would stall a device
        yield (
            Padded(q_offsets, max_queries, q.shape[0]),
            Padded(k_offsets, max_keys, k.shape[0]),
        )
        return
    for name, offsets, tokens, longest_name, longest in (
        ("q_offsets", q_offsets, q.shape[0], "max_queries", max_queries),
        ("k_offsets", k_offsets, k.shape[0], "max_keys", max_keys),
    ):
        check_offsets("attention_varlen", name, offsets, tokens)
        most = int(np.diff(offsets).max(initial=0))
        if longest is not None and most > longest:
            problem = f"{name} has a sequence of {most} tokens"
            raise RangeError(
                f"attention_varlen: {problem}; {longest_name}={longest} must be as many"
            )
    rows, keys = (itertools.pairwise(offsets.tolist()) for offsets in (q_offsets, k_offsets))
    for row, key in zip(rows, keys, strict=True):
        yield Sequence(*row), Sequence(*key)


def longest(options: Options, max_queries: int | None, max_keys: int | None) -> list[int | None]:
    """Return the most queries and keys of a sequence, or None where any number may be."""
    arrays = options.mask, options.bias, options.block_mask
    both: list[int | None] = []
    for axis, most in ((-2, max_queries), (-1, max_keys)):
        sizes = [tile * array.shape[axis] for _, array, tile in _of_axis(axis, *arrays)]
        both.append(min(sizes, default=None) if most is None else most)
    return both


def check_longest(
    call: str, mask: Any, bias: Any, block_mask: Any, max_queries: int | None, max_keys: int | None
) -> None:
    """Raise ShapeError where arrays are for others than max_queries and max_keys say."""
    for axis, name, most in ((-2, "max_queries", max_queries), (-1, "max_keys", max_keys)):
        for of, array, tile in _of_axis(axis, mask, bias, block_mask):
            size = array.shape[axis]
            fitting = size if most is None else -(-most // tile)
            if size != fitting:
                problem = f"{of} of shape {array.shape} has {size} for {name}={most}"
                problem = f"{call}: {problem}; it must be {fitting}"
                raise ShapeError(problem, expected=fitting, actual=size)


def _of_axis(axis: int, mask: Any, bias: Any, block_mask: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield the arrays whose size on an axis says for how many they are: name, array, tile."""
    for name, array, tile in ("mask", mask, 1), ("bias", bias, 1), ("block_mask", block_mask, TILE):
        if array is not None and array.ndim >= -axis and (tile > 1 or array.shape[axis] != 1):
            yield name, array, tile


def share_of(array: Any, number: int, rows: Any, keys: Any, tile: int = 1) -> Any:
    """Return what the sequence of a number has of an array that is for a padded batch, or all."""
    if array is None:
        return None
    array = four_axes(array)
    batch = slice(None) if keys.lengths is not None else slice(number, number + 1)
    parts = (batch, slice(None), slice(-(-rows.size // tile)), slice(-(-keys.size // tile)))
    shared = (slice(None) if size == 1 else p for size, p in zip(array.shape, parts, strict=True))
    return array[tuple(shared)]


def check_offsets(call: str, name: str, offsets: Array, tokens: int) -> None:
    """Raise unless offsets, which the host may read, rise from 0 to the number of tokens."""
    falls = (np.diff(offsets) < 0).any()
    if offsets[0] != 0 or offsets[-1] != tokens or falls:
        course = f"{name} goes from {offsets[0]} to {offsets[-1]}"
        course += ", and falls in between" if falls else ""
        raise RangeError(f"{call}: {course}; it must rise from 0 to {tokens}, the tokens")
