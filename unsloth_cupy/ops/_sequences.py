"""Sequences that lie end to end: taken one by one or, where offsets are not read, padded."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .._typing import Array
from ..errors import RangeError


class Sequence(NamedTuple):
    """The tokens of one sequence, as a batch of one."""

    start: int
    stop: int
    lengths: None = None

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
        inside = np.arange(tokens if longest is None else min(longest, tokens), like=offsets)
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


def check_offsets(call: str, name: str, offsets: Array, tokens: int) -> None:
    """Raise unless offsets, which the host may read, rise from 0 to the number of tokens."""
    falls = (np.diff(offsets) < 0).any()
    if offsets[0] != 0 or offsets[-1] != tokens or falls:
        found = f"{name} goes from {offsets[0]} to {offsets[-1]}"
        found += ", and falls in between" if falls else ""
        raise RangeError(f"{call}: {found}; it must rise from 0 to {tokens}, the tokens")
