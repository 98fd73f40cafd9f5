"""Arrays that stand for others: code runs on them to learn what it would do.

They know how they lie, and make new ones.  ``Recorded`` stands for an array of a call that is to be
replayed; ``Planned`` for one that is not there at all.
"""

from collections.abc import Callable
from typing import Any


class StandIn:
    """What is known of an array: shape, dtype, strides, and where it lies."""

    form: Any  # an array that has the shape, the dtype and the strides
    planned = False  # there is nothing to compute with
    empty: Callable[..., Any]  # (shape, dtype, new) -> a stand-in, of what ``new`` makes if given
    spanned: Callable[[int], Any]  # a view of so many elements from the first on, as one axis

    shape = property(lambda self: self.form.shape)
    dtype = property(lambda self: self.form.dtype)
    strides = property(lambda self: self.form.strides)
    ndim = property(lambda self: self.form.ndim)
    size = property(lambda self: self.form.size)
    nbytes = property(lambda self: self.form.nbytes)
    itemsize = property(lambda self: self.form.itemsize)
    flags = property(lambda self: self.form.flags)


def is_planned(array: Any) -> bool:
    """Say whether an array has no elements."""
    return isinstance(array, StandIn) and array.planned
