"""A part of a weight of 4 bits as a dense one.

w[r, c] = level[code] * absmax        of the value at start + r * columns + c of the flat weight
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ShapeError
from ...placement import placed
from ..common import dynamic_codes
from ..common.no_kernel import no_kernel
from . import _four_bits

THREADS, DEPTH = 256, 4  # of a block; accesses of a thread
TABLE = 256  # values of 8 bits, then the offset, then a scale of each 256 blocks
SCALES = TABLE + 1


def double_absmax(scale: Array, offset: float) -> Array:
    """Return what kernels read beside the codes of absmax: their table, offset and scales."""
    head = np.append(dynamic_codes.dynamic_map(True), np.float32(offset))
    found = empty((SCALES + len(scale),), FLOAT32, like=scale)
    found[:SCALES], found[SCALES:] = placed(head, scale), scale
    return found


def sizes_of(absmax: Array, codes: Array | None) -> Array:
    """Return the absmax of each block, from what kernels read."""
    if codes is None:
        return absmax
    scales = np.repeat(absmax[SCALES:], dynamic_codes.BLOCK)[: codes.size]
    return absmax[:TABLE][codes] * scales + absmax[TABLE]


def check_held(
    call: str,
    packed: Array,
    absmax: Array,
    codes: Array | None,
    inputs: int,
    values: int,
    block: int,
) -> None:
    """Raise ShapeError where arrays do not hold so many values, in whole rows of inputs."""
    blocks, held = -(-values // block), absmax if codes is None else codes
    row, scales = max(1, inputs // 2), max(1, inputs // block)
    wanted = -(-values // 2), blocks
    whole = inputs % 2 or packed.size % row == 0
    whole = whole and (inputs % block or held.size % scales == 0)
    if codes is not None:
        whole = whole and absmax.size >= SCALES + -(-codes.size // dynamic_codes.BLOCK)
    if packed.size < wanted[0] or held.size < blocks or not whole:
        found = packed.size, held.size
        problem = f"{call}: {packed.size} bytes of packed and {held.size} of absmax"
        cure = f"{values} values take {wanted[0]} and {wanted[1]}, in whole rows of {inputs}"
        raise ShapeError(f"{problem}; {cure}", expected=wanted, actual=found)


@op(
    "w(outputs, inputs), packed(bytes): byte, absmax(scales): stat, absmax_codes?(blocks): byte"
    " -> dense(outputs, inputs)",
    widen=False,
    no_gradient="it changes an array, and the weight is frozen",
    traffic=lambda a: a["w"].nbytes + a["w"].size // 2 + a["absmax"].nbytes,
)
def nf4_dequantize_(
    w: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None = None,
    *,
    columns: int,
    start: int = 0,
    block: int = 64,
    fp4: bool = False,
) -> Array:
    """Write over w the part of a weight of so many columns whose first value is number start.

    ``absmax`` is what ``double_absmax`` gives where absmax has codes.
    """
    top, left = divmod(start, max(1, columns))
    part = slice(top, top + len(w)), slice(left, left + w.shape[1])
    sizes = sizes_of(absmax, absmax_codes)
    w[...] = _four_bits.decode(packed, sizes, *part, columns, block, fp4)
    return w


@nf4_dequantize_.require
def _check(
    call: str,
    w: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None,
    columns: int,
    start: int,
    block: int,
) -> None:
    rows, width = w.shape
    last = start + (rows - 1) * columns + width if w.size else 0
    check_held(call, packed, absmax, absmax_codes, columns, last, block)


@nf4_dequantize_.kernel
def _launch(
    w: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None,
    columns: int,
    start: int,
    block: int,
    fp4: bool,
) -> Any:
    if not all(a is None or a.flags.c_contiguous for a in (w, packed, absmax, absmax_codes)):
        return no_kernel("w, codes or absmax are not packed")
    rows, width = w.shape
    if width == columns or rows == 1:
        rows, width, apart = 1, rows * width, 0  # all lie in one row
    else:
        apart = columns
    wide = lanes(start | apart | (width if rows > 1 else 0), w, packed)
    constants = _constants(w.dtype, wide, fp4, absmax_codes is not None)
    tiles = -(-width // (wide * THREADS * DEPTH))
    kernel = load("nf4_dequantize.cu", "nf4_dequantize_", w, constants)
    shift = block.bit_length() - 1
    kernel[rows * tiles, THREADS](
        w, packed, absmax, absmax_codes, start, apart, width, tiles, shift
    )
    return w


@cache
def _constants(dtype: Any, lanes: int, fp4: bool, double: bool) -> Constants:
    return Constants(T=dtype, LANES=lanes, THREADS=THREADS, FP4=fp4, DOUBLE=double)
