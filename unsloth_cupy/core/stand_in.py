"""Arrays that stand for others: code runs on them to learn what it would do.

A launch or a definition asks a stand-in how it lies, and for new arrays.  ``Recorded`` stands for
an array of a call that is to be replayed; ``Planned`` for one that is not there at all: it has no
elements, and a ledger that is ``keeping`` sees what it would hold.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class StandIn:
    """What is known of an array: shape, dtype, strides, and where it lies."""

    form: Any  # an array that has the shape, the dtype and the strides
    planned = False  # there is nothing to compute with

    shape = property(lambda self: self.form.shape)
    dtype = property(lambda self: self.form.dtype)
    strides = property(lambda self: self.form.strides)
    ndim = property(lambda self: self.form.ndim)
    size = property(lambda self: self.form.size)
    nbytes = property(lambda self: self.form.nbytes)
    itemsize = property(lambda self: self.form.itemsize)
    flags = property(lambda self: self.form.flags)

    def empty(self, shape: Any, dtype: Any, new: Any = None) -> Any:
        """Return a new stand-in, of what ``new`` makes of shape and dtype where it is given."""
        raise NotImplementedError

    def spanned(self, size: int) -> Any:
        """Return a view of so many elements from the first on, as one axis."""
        raise NotImplementedError


def is_planned(array: Any) -> bool:
    """Say whether an array has no elements."""
    return isinstance(array, StandIn) and array.planned


def representative_steps(like: Any, steps: Iterable[Any]) -> Iterable[Any]:
    """Return the steps of a loop; for a planned array the first, as all of them take alike."""
    return itertools.islice(steps, 1) if is_planned(like) else steps


class Ledger(Protocol):
    """What sees memory that is taken and given back."""

    def take(self, size: int) -> int:
        """Enter so many bytes; return their number."""

    def give_back(self, number: int) -> None:
        """Take the bytes of this number off."""


_ledger: ContextVar[tuple[Ledger, int] | None] = ContextVar("ledger", default=None)
_addresses = itertools.count(256, 256)  # no two arrays lie in one place


@contextmanager
def keeping(ledger: Ledger) -> Iterator[None]:
    """Enter what planned arrays take, inside a ``with`` block."""
    token = _ledger.set((ledger, 1))
    try:
        yield
    finally:
        _ledger.reset(token)


@contextmanager
def side_by_side(count: int) -> Iterator[None]:
    """Enter what is taken inside a ``with`` block count times: as many threads do the same."""
    now = _ledger.get()
    token = _ledger.set(None if now is None else (now[0], now[1] * count))
    try:
        yield
    finally:
        _ledger.reset(token)


class Memory:
    """What an array and its views lie in; it is given back when the last of them is gone."""

    def __init__(self, size: int) -> None:
        ledger = _ledger.get()
        self.address, self.ledger, self.number = next(_addresses), None, -1
        if ledger is not None:
            self.ledger, self.number = ledger[0], ledger[0].take(size * ledger[1])

    def __del__(self) -> None:
        """Give the bytes back."""
        if self.ledger is not None:
            self.ledger.give_back(self.number)
