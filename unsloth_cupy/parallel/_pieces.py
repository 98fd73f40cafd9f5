"""ZeRO-1: the elements of parameters that each rank updates, and groups of them to send."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ..training.adamw import SMALL

CHUNK_BYTES = 32 * 2**20  # most bytes of parameters that a rank sends in one exchange: 32 MiB


class Piece(NamedTuple):
    """Elements of a parameter in C order that one rank updates."""

    name: str
    where: slice


def divided(sizes: Mapping[str, int], ranks: int) -> list[list[Piece]]:
    """Return the pieces of each rank, with as equal numbers of elements as possible.

    A parameter is cut only at multiples of SMALL elements, and its last piece is not shorter than
    SMALL, unless the parameter is.  So the moments of a piece have the same number of bits, and the
    same quantization blocks, as in the whole parameter.
    """
    total = max(1, sum(sizes.values()))
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    before = 0
    for name, size in sizes.items():
        cuts = [*range(0, max(1, size - SMALL + 1), SMALL), size]
        for start, stop in pairwise(cuts):
            owner = min(ranks - 1, (2 * before + stop - start) * ranks // (2 * total))
            before += stop - start
            owned = pieces[owner]
            if owned and owned[-1].name == name:
                owned[-1] = Piece(name, slice(owned[-1].where.start, stop))
            else:
                owned.append(Piece(name, slice(start, stop)))
    return pieces


def chunked(pieces: list[Piece], live: Mapping[str, Any]) -> Iterator[list[Piece]]:
    """Yield groups of pieces with at most CHUNK_BYTES; larger pieces are split."""
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
    """Yield, for each exchange, the pieces of every rank."""
    chunks = [[*chunked(each, arrays)] for each in pieces]
    for turn in range(max(map(len, chunks))):
        yield [chunk[turn] if turn < len(chunk) else [] for chunk in chunks]


def length(where: slice) -> int:
    """Return the number of elements of a slice."""
    return int(where.stop - where.start)
