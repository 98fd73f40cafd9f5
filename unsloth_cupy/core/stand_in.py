"""Stand-ins for arrays: code runs on stand-ins to show what it allocates and launches.

A stand-in has the layout of an array, and allocates stand-ins.  ``Recorded`` stands for an array of
a call that is recorded for replay, ``Planned`` for an array that was never allocated.
"""

from collections.abc import Callable, Iterable
from typing import Any


class StandIn:
    """The layout of an array: its shape, dtype, strides and address."""

    form: Any  # an array with this shape, dtype and strides
    planned = False  # True: no array, so there are no elements to compute with
    empty: Callable[..., Any]  # (shape, dtype, new) -> a stand-in; ``new``, if passed, allocates
    spanned: Callable[[int], Any]  # (n): a view of the first n elements, as one axis
    steps: Callable[[Iterable[Any]], Iterable[Any]]  # the steps of a loop that run on the stand-in

    shape = property(lambda self: self.form.shape)
    dtype = property(lambda self: self.form.dtype)
    strides = property(lambda self: self.form.strides)
    ndim = property(lambda self: self.form.ndim)
    size = property(lambda self: self.form.size)
    nbytes = property(lambda self: self.form.nbytes)
    itemsize = property(lambda self: self.form.itemsize)
    flags = property(lambda self: self.form.flags)


def is_planned(array: Any) -> bool:
    """Return whether an array is a stand-in for an array that was never allocated."""
    return isinstance(array, StandIn) and array.planned


def representative_steps(like: Any, steps: Iterable[Any]) -> Iterable[Any]:
    """Return the steps of a loop to run on ``like``; each step frees the memory it allocates.

    A planned array needs only the first step, as all use equal memory.  A recorded array refuses,
    as a replay would hold the memory of all steps.  Other arrays need all.
    """
    return like.steps(steps) if isinstance(like, StandIn) else steps
