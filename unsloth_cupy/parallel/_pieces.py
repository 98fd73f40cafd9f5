"""Which elements of which parameter each rank changes, and what is exchanged of them at a time."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ..training.optimizer import SMALL

CHUNK_BYTES = 32 * 2**20  # of parameters that a rank passes on at once


class Piece(NamedTuple):
    """Elements of a parameter in C order that one rank changes."""

    name: str
    where: slice


def divided(sizes: Mapping[str, int], ranks: int) -> list[list[Piece]]:
    """Return the pieces of each rank: as many elements in each as cuts allow.

    A parameter is cut at multiples of SMALL elements, and no piece of one of that size is smaller,
    so that a piece has averages of as many bits, and in the same blocks, as the whole has.
    """
    total = max(1, sum(sizes.values()))
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    before = 0
    for name, size in sizes.items():
        cuts = [*range(0, max(1, size - SMALL + 1), SMALL), size]
        for start, stop in pairwise(cuts):
            owner = min(ranks - 1, (2 * before + stop - start) * ranks // (2 * total))
            before += stop - start
            mine = pieces[owner]
            if mine and mine[-1].name == name:
                mine[-1] = Piece(name, slice(mine[-1].where.start, stop))
            else:
                mine.append(Piece(name, slice(start, stop)))
    return pieces


def chunked(pieces: list[Piece], live: Mapping[str, Any]) -> Iterator[list[Piece]]:
    """Yield pieces by groups of CHUNK_BYTES at most, larger ones in parts."""
    group: list[Piece] = []
    left = CHUNK_BYTES
    for name, where in pieces:
        start, size = where.start, live[name].dtype.itemsize
        while start < where.stop:
            stop = min(where.stop, start + max(1, left // size))
            group.append(Piece(name, slice(start, stop)))
            left -= (stop - start) * size
            start = stop
            if left < size:
                yield group
                group, left = [], CHUNK_BYTES
    if group:
        yield group


def turns(pieces: list[list[Piece]], arrays: Mapping[str, Any]) -> Iterator[list[list[Piece]]]:
    """Yield what all ranks exchange at a time: the pieces of each."""
    chunks = [[*chunked(each, arrays)] for each in pieces]
    for turn in range(max(map(len, chunks))):
        yield [chunk[turn] if turn < len(chunk) else [] for chunk in chunks]


def length(where: slice) -> int:
    """Return how many elements there are."""
    return int(where.stop - where.start)
