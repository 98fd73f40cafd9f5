"""A part of a weight plus the change of its adapter, rounded as in a file.

w = Q(weight + scale b a)        Q: the values that are read back from the file, see _file_values

The sums are added in the order of ``lora_add_``, so that a file that is written later is rounded
from equal bits.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ShapeError
from ..common.checks import check_choice
from ..common.no_kernel import no_kernel
from ..linear.lora_merge import lora_add_
from . import _four_bits
from ._file_values import KINDS, block_of, file_values
from .nf4_dequantize import check_held, sizes_of

THREADS, WIDTH = 256, 4  # threads of a block; columns of a thread: 16 bytes of a in float32
ROWS = 8  # rows of a thread, which has 32 sums then
SPAN, DEEP = 32 * WIDTH, THREADS // 32 * ROWS  # columns and rows of a block of threads


@op(
    "w(outputs, inputs), source(whole, columns): constant, a(lows, columns): stat,"
    " b(whole, rank): stat, sizes?(given): stat, offsets?(groups+1): int -> sum(outputs, inputs)",
    widen=False,
    no_gradient="it changes an array, and rounding has none: straight_gradients go through",
    traffic=lambda a: (
        a["w"].nbytes + a["w"].size * a["source"].itemsize + a["a"].nbytes + a["b"].nbytes
    ),
    operations=lambda a: 2 * a["w"].size * a["b"].shape[1],
)
def rounded_sum_(
    w: Array,
    source: Array,
    a: Array,
    b: Array,
    sizes: Array | None = None,
    offsets: Array | None = None,
    *,
    kind: str = "nf4",
    start: int = 0,
    scale: float = 1.0,
    members: int = 1,
) -> Array:
    """Write a part of ``Q(source + scale b a)`` to w; its first value has the flat index ``start``.

    A stack of ``members`` matrices is one matrix of all their rows; a and b have the factors of all
    members below each other.  With ``offsets``, members of groups without rows may hold anything.

    ``sizes`` depends on the kind: for int8 the absmax of all rows, by default 127; for ternary the
    magnitude of all values, by default 1; for nf4 and fp4 the absmax of all blocks as stored in the
    file, by default each block's own.
    """
    rows, columns = _part(w, start, source.shape[1])
    dense = source[rows, columns].astype(FLOAT32)  # a copy, to which the change is added
    return _write(w, dense, a, b, sizes, kind, start, scale, members)


@op(
    "w(outputs, inputs), packed(bytes): byte, absmax(scales): scale, a(lows, columns): stat,"
    " b(whole, rank): stat, absmax_codes?(blocks): byte, sizes?(given): stat,"
    " offsets?(groups+1): int -> sum(outputs, inputs)",
    widen=False,
    no_gradient="it changes an array, and rounding has none: straight_gradients go through",
    traffic=lambda a: (
        a["w"].nbytes + a["w"].size // 2 + a["absmax"].nbytes + a["a"].nbytes + a["b"].nbytes
    ),
    operations=lambda a: 2 * a["w"].size * a["b"].shape[1],
)
def nf4_rounded_sum_(
    w: Array,
    packed: Array,
    absmax: Array,
    a: Array,
    b: Array,
    absmax_codes: Array | None = None,
    sizes: Array | None = None,
    offsets: Array | None = None,
    *,
    kind: str = "nf4",
    start: int = 0,
    scale: float = 1.0,
    members: int = 1,
    block: int = 64,
    stored: str = "nf4",
) -> Array:
    """Do what ``rounded_sum_`` does for a 4-bit weight: see ``nf4_dequantize_`` for its arrays."""
    columns = a.shape[1]
    scales = sizes_of(absmax, absmax_codes)
    dense = _four_bits.decode(packed, scales, *_part(w, start, columns), columns, block, stored)
    return _write(w, dense, a, b, sizes, kind, start, scale, members)


def _part(w: Array, start: int, columns: int) -> tuple[slice, slice]:
    """Return the rows and columns of a part of a weight."""
    top, left = divmod(start, max(1, columns))
    return slice(top, top + w.shape[0]), slice(left, left + w.shape[1])


def _write(
    w: Array,
    total: Array,
    a: Array,
    b: Array,
    sizes: Array | None,
    kind: str,
    start: int,
    scale: float,
    members: int,
) -> Array:
    """Add the change to a part in float32, and write the rounded values to w."""
    (rows, columns), pitch = _part(w, start, a.shape[1]), a.shape[1]
    height, rank = len(b) // max(1, members), b.shape[1]
    for expert in range(rows.start // max(1, height), -(-rows.stop // max(1, height))):
        first, last = max(rows.start, expert * height), min(rows.stop, (expert + 1) * height)
        low = contiguous(a[expert * rank : (expert + 1) * rank, columns].astype(FLOAT32))
        own = slice(first - rows.start, last - rows.start)
        factor = b[first:last].astype(FLOAT32, copy=False)
        lora_add_.definition(total[own], low, factor, scale=scale)
    own_sizes = None if sizes is None else sizes.astype(FLOAT32, copy=False)
    if own_sizes is not None and kind == "int8":
        own_sizes = own_sizes[rows]
    elif own_sizes is not None and kind != "ternary":
        block = block_of(kind)
        whole = own_sizes.reshape(len(b), pitch // block)  # (rows, blocks of a row)
        own_sizes = whole[rows, columns.start // block : columns.stop // block].reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN stay, as on a GPU
        w[...] = file_values(total, kind, own_sizes)
    return w


@rounded_sum_.require
def _check(
    call: str,
    w: Array,
    a: Array,
    b: Array,
    sizes: Array | None,
    offsets: Array | None,
    kind: str,
    start: int,
    members: int,
) -> None:
    """Raise unless the part has whole blocks, and the arrays fit the weight."""
    check_choice(call, "kind", kind, KINDS)
    (lows, columns), (height, rank), block = a.shape, b.shape, block_of(kind)
    rows, part = _part(w, start, columns)
    whole = rows.stop <= height and part.stop <= columns
    if not whole or columns % block or part.start % block or part.stop % block:
        problem = f"{call}: {w.shape} from value {start} on are not whole blocks of {block}"
        problem += f" of {height} rows of {columns}"
        raise ShapeError(problem, expected=(height, columns), actual=tuple(w.shape))
    groups = members if offsets is None else offsets.size - 1
    if members < 1 or lows != members * rank or height % members or groups != members:
        problem = f"{call}: a has {lows} rows, b {height}, of {members} members of rank {rank}"
        raise ShapeError(problem, expected=(members * rank,), actual=(lows,))
    if sizes is None:
        return
    expected = {"int8": height, "ternary": 1, "nf4": height * columns // block}
    expected["fp4"] = expected["nf4"]
    if sizes.size != expected.get(kind):
        needed = expected.get(kind, 0)
        problem = f"{call}: {sizes.size} sizes; {kind} takes {needed}"
        raise ShapeError(problem, expected=(needed,), actual=(sizes.size,))


@nf4_rounded_sum_.require
def _check_held(
    call: str,
    w: Array,
    packed: Array,
    absmax: Array,
    a: Array,
    b: Array,
    absmax_codes: Array | None,
    sizes: Array | None,
    offsets: Array | None,
    kind: str,
    start: int,
    members: int,
    block: int,
    stored: str,
) -> None:
    """Raise unless the arrays store the weight, and all fits as for ``rounded_sum_``."""
    _check(call, w, a, b, sizes, offsets, kind, start, members)
    check_held(
        call, packed, absmax, absmax_codes, a.shape[1], b.shape[0] * a.shape[1], block, stored
    )


@rounded_sum_.kernel
def _launch(
    w: Array,
    source: Array,
    a: Array,
    b: Array,
    sizes: Array | None,
    offsets: Array | None,
    kind: str,
    start: int,
    scale: float,
    members: int,
) -> Any:
    """Write the part to w by the kernel, and return w."""
    if (reason := _without_kernel(w, source, b, members, start // a.shape[1])) is not None:
        return no_kernel(reason)
    a, b, sizes, offsets = (contiguous(each) for each in (a, b, sizes, offsets))
    width = min(WIDTH, lanes(0, w), lanes(0, source))
    constants = _constants(w, a, kind, sizes, offsets, width, S=source.dtype)
    kernel = load("rounded_sum.cu", "rounded_sum_", w, constants)
    grid, part = _grid(w, a, b, start, scale, members)
    kernel[grid, THREADS](w, source, a, b, sizes, offsets, part)
    return w


@nf4_rounded_sum_.kernel
def _launch_nf4(
    w: Array,
    packed: Array,
    absmax: Array,
    a: Array,
    b: Array,
    absmax_codes: Array | None,
    sizes: Array | None,
    offsets: Array | None,
    kind: str,
    start: int,
    scale: float,
    members: int,
    block: int,
    stored: str,
) -> Any:
    """Write the part to w by the kernel, and return w."""
    if (reason := _without_kernel(w, packed, b, members, start // a.shape[1])) is not None:
        return no_kernel(reason)
    a, b, sizes, offsets = (contiguous(each) for each in (a, b, sizes, offsets))
    absmax, absmax_codes = contiguous(absmax), contiguous(absmax_codes)
    own = {
        "S": absmax.dtype,
        "FROM": _four_bits.KINDS.index(stored),
        "DOUBLE": absmax_codes is not None and stored not in _four_bits.EXPONENTS,
        "BYTES": min(WIDTH // 2, lanes(0, packed)),
    }
    width = min(WIDTH, lanes(0, w))
    constants = _constants(w, a, kind, sizes, offsets, width, **own)
    kernel = load("nf4_rounded_sum.cu", "nf4_rounded_sum_", w, constants)
    grid, part = _grid(w, a, b, start, scale, members)
    shift = block.bit_length() - 1
    kernel[grid, THREADS](w, packed, absmax, absmax_codes, a, b, sizes, offsets, part, shift)
    return w


def _without_kernel(w: Array, held: Array, b: Array, members: int, top: int) -> str | None:
    """Return the reason why no kernel writes this part; None if a kernel does."""
    if not w.flags.c_contiguous or not held.flags.c_contiguous:
        return "w or the weight is not contiguous"
    # a thread's rows must belong to one member
    if members > 1 and (b.shape[0] // members % ROWS or top % ROWS):
        return f"a matrix of the stack, or the part, begins at no multiple of {ROWS} rows"
    return None


def _grid(
    w: Array, a: Array, b: Array, start: int, scale: float, members: int
) -> tuple[int, dict[str, Any]]:
    """Return the number of blocks of threads, and the sizes and the place of the part."""
    (rows, width), (top, left) = w.shape, divmod(start, max(1, a.shape[1]))
    groups = -(-rows // DEEP)
    sizes = {"rows": rows, "width": width, "pitch": a.shape[1], "rank": b.shape[1]}
    place = {"top": top, "left": left, "height": max(1, b.shape[0] // members), "groups": groups}
    return groups * -(-width // SPAN), sizes | place | {"scale": scale}


def _constants(
    w: Array,
    a: Array,
    kind: str,
    sizes: Array | None,
    offsets: Array | None,
    width: int,
    **own: Any,
) -> Constants:
    """Return the constants of rounded_sum.cu or nf4_rounded_sum.cu."""
    index = np.dtype("int32") if offsets is None else offsets.dtype
    sized, grouped = sizes is not None, offsets is not None
    low = min(WIDTH, lanes(0, a))
    return _kept(w.dtype, KINDS.index(kind), sized, grouped, index, width, low, **own)


@cache
def _kept(
    dtype: Any, kind: int, sized: bool, grouped: bool, index: Any, width: int, low: int, **own: Any
) -> Constants:
    """Return the constants from a cache, so that a kernel is looked up by one object."""
    shared = {"T": dtype, "LANES": width, "A_LANES": low, "ROWS": ROWS, "THREADS": THREADS}
    return Constants(**shared, **own, KIND=kind, GIVEN=sized, GROUPED=grouped, I=index)
