"""Stand-ins for arrays: code runs on them to find out what it would allocate and launch.

They have a layout and allocate further stand-ins.  ``Recorded`` stands for an array of a call that
is recorded for replay; ``Planned`` for an array that was never allocated.
"""

from collections.abc import Callable, Iterable
from typing import Any


class StandIn:
    """The layout of an array: its shape, dtype, strides and address."""

    form: Any  # an array that has the shape, the dtype and the strides
    planned = False  # True: there are no elements to compute with
    empty: Callable[..., Any]  # (shape, dtype, new) -> a stand-in; ``new``, if passed, allocates
    spanned: Callable[[int], Any]  # (n): a view of the first n elements, as one axis
    steps: Callable[[Iterable[Any]], Iterable[Any]]  # those of a loop that are run on it

    shape = property(lambda self: self.form.shape)
    dtype = property(lambda self: self.form.dtype)
    strides = property(lambda self: self.form.strides)
    ndim = property(lambda self: self.form.ndim)
    size = property(lambda self: self.form.size)
    nbytes = property(lambda self: self.form.nbytes)
    itemsize = property(lambda self: self.form.itemsize)
    flags = property(lambda self: self.form.flags)


def is_planned(array: Any) -> bool:
    """Return whether an array is a stand-in without elements."""
    return isinstance(array, StandIn) and array.planned


def representative_steps(like: Any, steps: Iterable[Any]) -> Iterable[Any]:
    """Return the steps of a loop that frees memory in each, as many as a stand-in needs.

    For a planned array that is the first, as all use equal memory; a recorded one refuses, as a
    replay would hold the memory of all.
    """
    return like.steps(steps) if isinstance(like, StandIn) else steps
