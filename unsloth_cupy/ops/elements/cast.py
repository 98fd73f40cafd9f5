"""Casts between float dtypes, and sums of values of any float dtype in float32.

y = x rounded to a dtype        total = total + x
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import KERNEL_DTYPES, Array
from ...core.kernel import load
from ...core.op import Op, op
from ...core.target import target_of
from ...errors import ConfigError, naming
from ..common.elementwise import THREADS, constants
from ..common.in_place import all_contiguous, check_overlap, check_writable
from ..common.no_kernel import no_kernel
from ..common.strides import pitch_of, spanned

PARTS = 3  # arrays that one launch writes side by side: q, k and v; cast.cu has three pointers


@naming("cast", *(f"cast_to_{dtype.name}" for dtype in KERNEL_DTYPES))
def cast(x: Array, dtype: Any) -> Array:
    """Round the values of x to a dtype; the gradient is rounded to the dtype of x.

    Parameters
    ----------
    x : (*axes) float
    dtype : dtype or its name
        float16, bfloat16 or float32.

    Returns
    -------
    y : (*axes) dtype
        x itself if it has that dtype; values beyond the range of float16 become infinite.

    Raises
    ------
    ConfigError
        The dtype is not one of the three.
    DTypeError
        x is not a float array.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import accumulate_, cast
    >>> x = cast(np.ones(4, np.float32), "bfloat16")
    >>> total = np.zeros(4, np.float32)
    >>> _ = accumulate_(total, x)
    >>> np.testing.assert_array_equal(total, 1)
    """
    name = _name(dtype)
    if name not in CASTS:
        raise ConfigError(f"cast(dtype={dtype!r}): choose from {', '.join(CASTS)}")
    return x if _name(getattr(x, "dtype", None)) == name else CASTS[name](x)


def _name(dtype: Any) -> str:
    """Return the name of a dtype of any library, "" for None, and ``str()`` of other objects."""
    name = str(dtype)
    if name.startswith("torch."):  # torch.compile cannot trace np.dtype
        return name.removeprefix("torch.")
    if isinstance(dtype, tuple | list | dict):  # NumPy makes structured dtypes of these
        return name
    try:
        return np.dtype(dtype).name if dtype is not None else ""
    except TypeError:
        return name


def _cast_to(dtype: np.dtype[Any]) -> Op[[Array], Array]:
    """Return the op that casts to a dtype: one for each, as a signature names the dtype."""

    def definition(x: Array) -> Array:
        return x

    def back(dy: Array, x: Array) -> Array:
        return dy

    definition.__name__, back.__name__ = f"cast_to_{dtype.name}", f"cast_to_{dtype.name}_backward"
    definition.__doc__ = f"Return x rounded to {dtype.name}."
    back.__doc__ = "Return the gradient of x: dy, rounded to the dtype of x."
    cast_to = op(f"x(*axes) -> y(*axes): {dtype.name}")(definition)
    cast_to.kernel(lambda x: _cast(x, dtype))
    cast_back = cast_to.gradient(back)
    cast_back.kernel(lambda dy, x: _cast(dy, x.dtype))
    # only the dtype of x is read
    cast_back.facts["traffic"] = lambda a: a["dy"].nbytes + a["dx"].nbytes
    return cast_to


def _cast(x: Array, dtype: Any) -> Array:
    """Return x rounded to a dtype, by the kernel."""
    y = empty(x.shape, dtype, like=x)
    _launch("cast", x, y)
    return y


def in_dtype(x: Array, dtype: Any) -> Array:
    """Return x rounded to a dtype, or x itself if it has that dtype.

    The kernel does it where possible: its launch can be recorded, ``astype`` cannot.
    """
    if x.dtype == dtype:
        return x
    kinds = {x.dtype, np.dtype(dtype)} <= {*KERNEL_DTYPES}
    if not kinds or target_of(x) is None or not x.size or not x.flags.c_contiguous:
        return x.astype(dtype, copy=False)
    return _cast(x, dtype)


def stacked(matrices: Sequence[Array], dtype: Any) -> Array:
    """Return the rows of all matrices as one matrix of a dtype."""
    lead, dense = matrices[0], all(m.flags.c_contiguous and m.size for m in matrices)
    if len(matrices) == 1:
        return in_dtype(lead, dtype)
    kinds = {np.dtype(dtype), lead.dtype} <= {*KERNEL_DTYPES}
    kinds = kinds and all(m.dtype == lead.dtype for m in matrices)
    if not (kinds and dense) or target_of(lead) is None:
        return np.concatenate([m.astype(dtype, copy=False) for m in matrices])
    whole = empty((sum(m.shape[0] for m in matrices), lead.shape[1]), dtype, like=lead)
    # matrices stacked on each other are "columns" side by side in one row of the whole memory
    _beside(matrices, whole, [m.size for m in matrices], [0] * len(matrices))
    return whole  # (all rows, columns)


def concatenate(arrays: Sequence[Any], out: Any) -> None:
    """Write the columns of arrays side by side to out, which has their dtype, in one launch."""
    if target_of(out) is None or out.dtype not in KERNEL_DTYPES:
        np.concatenate(arrays, axis=-1, out=out)
    elif out.size:
        arrays = [each if pitch_of(each) else contiguous(each) for each in arrays]
        _beside(arrays, out, [each.shape[-1] for each in arrays], [*map(pitch_of, arrays)])


def _beside(
    arrays: Sequence[Any], out: Any, columns: Sequence[int], pitches: Sequence[int]
) -> None:
    """Launch the kernel that writes arrays side by side, of which each has these columns.

    ``pitches`` are the distances of rows, in elements.
    """
    wide, *narrow = sorted((out, *arrays), key=lambda array: -array.dtype.itemsize)
    row = 16 // wide.dtype.itemsize  # values of an access: 16 bytes of the widest dtype at most
    for each in (*columns, *pitches):
        row |= each
    width, absent = lanes(row, wide, *narrow), PARTS - len(arrays)
    stops = [*itertools.accumulate(columns)]
    tiles = -(-stops[-1] // (THREADS * width))
    of = {"stop": stops + stops[-1:] * absent, "pitch": [*pitches, *[0] * absent], "tiles": tiles}
    chosen = constants(arrays[0].dtype, width, U=out.dtype)
    kernel = load("cast.cu", "beside", arrays[0], chosen)
    operands = *map(spanned, arrays), *[None] * absent
    kernel[out.size // stops[-1] * tiles, THREADS](*operands, out, of)


def _launch(name: str, x: Array, result: Array) -> None:
    """Launch a kernel of cast.cu on x and a result of another dtype."""
    wide, narrow = sorted((result, x), key=lambda array: -array.dtype.itemsize)
    width = lanes(16 // wide.dtype.itemsize, wide, narrow)
    kernel = load("cast.cu", name, x, constants(x.dtype, width, U=result.dtype))
    kernel[-(-x.size // (THREADS * width)), THREADS](x, result, x.size)


CASTS: Mapping[str, Op[[Array], Array]] = {d.name: _cast_to(d) for d in KERNEL_DTYPES}


def accumulate_(total: Array, x: Array) -> Array:
    """Add x to a float32 total in place: ``total = total + x``.

    Parameters
    ----------
    total : (*axes) float32, or float64 where x is float64
        Writable.  In 16 bits the sum would lose values that are small compared to it.
    x : (*axes) float

    Returns
    -------
    total : the argument itself

    Raises
    ------
    ConfigError
        total is read-only, or x overlaps it in part.
    GradientError
        total is on a tape; a change would falsify its record.
    ShapeError, DTypeError
        The arrays do not fit each other; total is then unchanged.
    """
    check_writable("accumulate_", "call add", total=total)
    check_overlap("accumulate_", {"total": total}, {"x": x})
    accumulate_over_(total, x)
    return total


@op(
    "total(*axes): stat, x(*axes) -> sum(*axes): stat",
    widen=False,
    no_gradient="it changes an array that a tape would record",
)
def accumulate_over_(total: Array, x: Array) -> Array:
    """Add x to total in place and return total."""
    return np.add(total, x, out=total)


@accumulate_over_.kernel
def _launch_accumulate(total: Array, x: Array) -> Array:
    """Launch accumulate; return NotImplemented if total is not contiguous."""
    if not all_contiguous(total):
        return no_kernel("total is not contiguous; pass a contiguous array")
    _launch("accumulate", contiguous(x), total)
    return total
