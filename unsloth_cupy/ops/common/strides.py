"""Layouts of strided arrays, as kernels read them.

    row_layout       rows of slices, or of their heads, common to several arrays    see rows.cuh
    head_strides     heads of q, k or v in one wider array              strides of token and head
    token_strides    whole heads, batch and token in any order          strides of batch and token
    pitch_of         columns of a wider array                           distance of two rows
    key_strides      tokens of a cache or a wider array    tokens between batches, stride of token
    broadcast_strides    contiguous arrays, some axes broadcast         strides of all axes

Strides count values.  An array with any other layout is copied into a contiguous one.  An array
with gaps becomes a 1-D view of all memory that it spans, since a kernel gets only an address.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core import gpu
from ...core.arrays import contiguous, lanes
from ...core.stand_in import StandIn

MOST = 5  # arrays in one row layout: the struct Layouts of rows.cuh has so many


class RowLayout(NamedTuple):
    """Row r of an array starts ``r // inner * outer + r % inner * step`` values after its first."""

    inner: int
    strides: tuple[int, ...]  # outer and step of each array

    def alignment(self, columns: int) -> int:
        """Return a number whose power-of-two divisors also divide the starts of all rows."""
        for stride in self.strides:
            columns |= stride
        return columns

    def struct(self) -> dict[str, Any]:
        """Return the struct Layouts of rows.cuh."""
        strides = self.strides + (0,) * (2 * MOST - len(self.strides))
        return {"inner": self.inner, "outer": strides[::2], "step": strides[1::2]}


def row_layout(*arrays: Any) -> tuple[Sequence[Any], RowLayout]:
    """Return the arrays of a kernel, and their common row layout; an array may be None."""
    rows, columns = arrays[0].size // arrays[0].shape[-1], arrays[0].shape[-1]
    if all(a is None or a.flags.c_contiguous for a in arrays):
        return arrays, RowLayout(rows, (0, columns) * len(arrays))
    if not has_row_layout(*arrays):
        return row_layout(*map(contiguous, arrays))
    axes = _row_axes([a for a in arrays if a is not None], columns)
    # with fewer than two axes, the missing ones have length 1
    (_, outer), (inner, step) = ([(1, (0,) * len(arrays))] * 2 + axes)[-2:]
    strides = zip(outer, step, strict=False)
    pairs = [(0, 0) if a is None else next(strides) for a in arrays]
    flat = [a if a is None else spanned(a) for a in arrays]
    return flat, RowLayout(inner, tuple(stride for pair in pairs for stride in pair))


def has_row_layout(*arrays: Any) -> bool:
    """Return whether one row layout describes all these arrays."""
    present = [array for array in arrays if array is not None]
    if all(array.flags.c_contiguous for array in present):
        return True
    axes = _row_axes(present, present[0].shape[-1])
    rows = present[0].size // present[0].shape[-1]
    return len(axes) < 2 or (len(axes) == 2 and rows < 2**32)  # a kernel divides in 32 bits


def _row_axes(arrays: Sequence[Any], columns: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return length and strides of the fewest axes that enumerate the rows of all these arrays.

    If a kernel cannot read the rows at all, there are three axes, more than a row layout has.
    """
    axes: list[tuple[int, tuple[int, ...]]] = []
    for axis, length in enumerate(arrays[0].shape[:-1]):
        strides = tuple(a.strides[axis] // a.itemsize for a in arrays)
        if length == 1:
            continue
        # the axis continues the one before: both are one axis
        if axes and axes[-1][1] == tuple(length * stride for stride in strides):
            axes[-1] = axes[-1][0] * length, strides
        else:
            axes.append((length, strides))
    readable = all(
        (a.strides[-1] == a.itemsize or columns == 1) and _in_values(a.strides, a.itemsize)
        for a in arrays
    )
    return axes if readable else [(0, ())] * 3


def head_strides(x: Any) -> tuple[int, int] | None:
    """Return the strides of token and head in an array (batch, tokens, heads, dim).

    None if the values of a head are not contiguous, the stride of tokens changes between
    batches, or a stride is negative or no multiple of the value's size.
    """
    batch, tokens, _, dim = x.shape
    size = x.itemsize
    of_batch, of_token, of_head, of_value = x.strides
    if tokens == 1:  # the next token is in the next batch
        of_token = of_batch
    if (dim > 1 and of_value != size) or (batch > 1 and of_batch != tokens * of_token):
        return None
    return _in_values((of_token, of_head), size)


def with_head_strides(x: Any) -> tuple[Any, tuple[int, int]]:
    """Return x and its head strides for a kernel; without head strides x is made contiguous."""
    heads, dim = x.shape[2:]
    if not x.flags.c_contiguous and (strides := head_strides(x)) is not None:
        return spanned(x), strides
    return contiguous(x), (heads * dim, dim)


def token_strides(x: Any) -> tuple[Any, tuple[int, int]]:
    """Return x (batch, tokens, heads, dim) for a kernel, and its strides of batch and token."""
    size, (tokens, heads, dim) = x.itemsize, x.shape[1:]
    strides = x.strides[2:] == (dim * size, size) and _in_values(x.strides[:2], size)
    if x.flags.c_contiguous or not strides:  # NumPy's strides of axes of length 1 are arbitrary
        return contiguous(x), (tokens * heads * dim, heads * dim)
    return spanned(x), strides


def key_strides(
    k: Any, v: Any, *, dense: bool = False, packed: bool = False
) -> tuple[Any, Any, int, tuple[int, int]]:
    """Return k and v for a kernel, and their strides: of a batch in tokens, of a token in values.

    Kernels can read both 16 bytes at a time; arrays with other layouts are copied first.  ``dense``
    requires tokens without gaps, ``packed`` batches that follow each other without further tokens.
    The stride of a batch is common to both.
    """
    layouts = [_token_layout(a, dense) for a in (k, v)]
    tokens = {each and each[0] for each in layouts}
    if None in tokens or len(tokens) > 1 or (packed and tokens != {k.shape[-3]}):
        k, v = in_chunks(contiguous(k), contiguous(v))
        return k, v, k.shape[-3], (math.prod(k.shape[-2:]), math.prod(v.shape[-2:]))
    k, v = (a if a.flags.c_contiguous else spanned(a) for a in (k, v))
    return k, v, *tokens, tuple(each[1] for each in layouts if each)


def _token_layout(array: Any, dense: bool) -> tuple[int, int] | None:
    """Return the tokens between two batches and the values between two tokens, or None."""
    if not _in_chunks(array):
        return None
    *_, keys, heads, dim = array.shape
    if array.flags.c_contiguous:
        return keys, heads * dim
    size, (*lead, token, of_head, of_value) = array.itemsize, array.strides
    apart = token == heads * dim * size if dense else token % 16 == 0 and token > 0
    if not apart or (of_head, of_value) != (dim * size, size):
        return None
    tokens, rest = divmod(lead[0], token) if lead and array.shape[0] > 1 else (keys, 0)
    return None if rest or tokens < keys else (int(tokens), token // size)


def in_chunks(*arrays: Any) -> tuple[Any, ...]:
    """Return arrays that kernels can read 16 bytes at a time; others are replaced by copies."""
    return tuple(a if _in_chunks(a) else a.copy() for a in arrays)


def _in_chunks(array: Any) -> bool:
    """Return whether kernels can read an array 16 bytes at a time."""
    return lanes(16, array) * array.itemsize == 16


def pitch_of(array: Any) -> int:
    """Return the elements between the starts of two rows; 0 if the distance is not uniform."""
    *lead, right = array.strides
    size, step = array.itemsize, lead[-1] if lead else array.shape[-1] * array.itemsize
    uniform = all(lead[i] == array.shape[i + 1] * lead[i + 1] for i in range(len(lead) - 1))
    return step // size if uniform and right == size and step % size == 0 else 0


def broadcast_strides(array: Any, axes: int = 4) -> tuple[int, ...]:
    """Return the strides of a contiguous array's last axes; 0 for broadcast axes, and for None."""
    shape = () if array is None else array.shape
    shape = (1,) * (axes - len(shape)) + shape
    return tuple(0 if size == 1 else math.prod(shape[i + 1 :]) for i, size in enumerate(shape))


def _in_values(strides: tuple[int, ...], size: int) -> Any:
    """Return strides in values; None if a stride is negative or no multiple of the value's size."""
    whole = all(stride >= 0 and stride % size == 0 for stride in strides)
    return tuple(stride // size for stride in strides) if whole else None


def spanned(array: Any) -> Any:
    """Return a 1-D view of the memory from the first to the last element of an array."""
    extent = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    size = extent // array.itemsize + 1
    if isinstance(array, StandIn):
        return array.spanned(size)
    library = np if isinstance(array, np.ndarray) else gpu.cupy()
    return library.lib.stride_tricks.as_strided(array, (size,), (array.itemsize,))
