"""How kernels walk the heads of slices of a wider array, such as q beside k and v."""

import math
from typing import Any

from ...core.arrays import packed
from .rows import spanned

Steps = tuple[int, int]


def stepped(x: Any) -> tuple[Any, Steps]:
    """Return x (batch, tokens, heads, dim) for a kernel, and its steps from token and head to next.

    Steps count values.  Slices come as flat views of all they span, and what has no steps, see
    ``steps_of``, as a packed copy.
    """
    heads, dim = x.shape[2:]
    if not x.flags.c_contiguous and (steps := steps_of(x)) is not None:
        return spanned(x), steps
    return packed(x), (heads * dim, dim)


def steps_of(x: Any) -> Steps | None:
    """Return the steps; None where values of a head are apart, or tokens do not follow evenly."""
    batch, tokens, _, dim = x.shape
    size = x.dtype.itemsize
    of_batch, of_token, of_head, of_value = x.strides
    if tokens == 1:
        of_token = of_batch
    if (dim > 1 and of_value != size) or (batch > 1 and of_batch != tokens * of_token):
        return None
    even = min(of_token, of_head) >= 0 and math.gcd(of_token, of_head) % size == 0
    return (of_token // size, of_head // size) if even else None
