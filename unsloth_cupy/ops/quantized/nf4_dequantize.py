"""Dequantization of a part of a 4-bit weight.

w[r, c] = level[code] * absmax        for value start + r * columns + c of the flattened weight

absmax is stored in float32 or in 8 bits; for MXFP4 as the exponent of 2^(code - 127), for Q4_0 as a
float16 of either sign.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ShapeError
from ...placement import to_device_of
from ..common import dynamic_codes
from ..common.checks import check_choice
from ..common.no_kernel import no_kernel
from . import _four_bits

THREADS, DEPTH = 256, 4  # threads of a block; accesses of a thread
# A ``double_absmax``: the values of 256 codes, the offset, then a scale for each 256 blocks.
TABLE = 256
SCALES = TABLE + 1  # index of the first scale


def double_absmax(scale: Array, offset: float) -> Array:
    """Return the array with which kernels decode 8-bit absmax: values of codes, offset, scales."""
    head = np.append(dynamic_codes.dynamic_map(True), np.float32(offset))
    table = empty((SCALES + len(scale),), FLOAT32, like=scale)
    table[:SCALES], table[SCALES:] = to_device_of(head, scale), scale
    return table


@cache
def powers_of_two() -> Array:
    """Return the values of 8-bit exponents; for 255, which no weight has, infinity."""
    return np.append(np.ldexp(np.float32(1), np.arange(TABLE - 1) - 127), np.float32(np.inf))


def sizes_of(absmax: Array, codes: Array | None) -> Any:
    """Return the float32 absmax of each block.

    With codes, ``absmax`` is a ``double_absmax``, or ``powers_of_two`` if the codes are exponents.
    """
    if codes is None:
        return absmax
    if absmax.size == TABLE:  # powers_of_two
        return absmax[codes]
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
    kind: str,
) -> None:
    """Raise ShapeError unless the arrays store ``values`` values, in whole rows of ``inputs``."""
    check_choice(call, "kind", kind, _four_bits.KINDS)
    blocks, scales = -(-values // block), absmax if codes is None else codes
    exponents = kind in _four_bits.EXPONENTS
    if exponents and (codes is None or absmax.size != TABLE):
        problem = f"{call}: {kind} has absmax_codes, and {TABLE} powers of two as absmax"
        raise ShapeError(problem, expected=(TABLE,), actual=tuple(absmax.shape))
    row_bytes, row_scales = max(1, inputs // 2), max(1, inputs // block)
    expected = -(-values // 2), blocks
    whole = inputs % 2 or packed.size % row_bytes == 0
    whole = whole and (inputs % block or scales.size % row_scales == 0)
    if codes is not None and not exponents:
        whole = whole and absmax.size >= SCALES + -(-codes.size // dynamic_codes.BLOCK)
    if packed.size < expected[0] or scales.size < blocks or not whole:
        actual = packed.size, scales.size
        problem = f"{call}: {packed.size} bytes of packed and {scales.size} of absmax"
        cure = f"{values} values take {expected[0]} and {expected[1]}, in whole rows of {inputs}"
        raise ShapeError(f"{problem}; {cure}", expected=expected, actual=actual)


@op(
    "w(outputs, inputs), packed(bytes): byte, absmax(scales): scale, absmax_codes?(blocks): byte,"
    " offsets?(groups+1): int -> dense(outputs, inputs)",
    widen=False,
    no_gradient="it changes an array, and the weight is frozen",
    traffic=lambda a: a["w"].nbytes + a["w"].size // 2 + a["absmax"].nbytes,
)
def nf4_dequantize_(
    w: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None = None,
    offsets: Array | None = None,
    *,
    columns: int,
    start: int = 0,
    block: int = 64,
    kind: str = "nf4",
) -> Array:
    """Write the part of a weight whose first value has the flat index ``start`` to w.

    ``columns`` is the width of the whole weight.  With ``absmax_codes``, ``absmax`` is a
    ``double_absmax``, or ``powers_of_two`` if the codes are exponents.  With ``offsets`` the weight
    is a stack with one matrix for each group of rows; the matrices of groups without rows are not
    written.
    """
    if offsets is not None:
        height, ends = len(w) // max(1, offsets.size - 1), offsets.tolist()  # rows of a matrix
        for group, (first, last) in enumerate(pairwise(ends)):
            if first < last:
                rows = slice(group * height, (group + 1) * height)
                arrays = w[rows], packed, absmax, absmax_codes
                how: Any = {"columns": columns, "block": block, "kind": kind}
                nf4_dequantize_(*arrays, start=rows.start * columns, **how)
        return w
    top, left = divmod(start, max(1, columns))
    part = slice(top, top + len(w)), slice(left, left + w.shape[1])
    sizes = sizes_of(absmax, absmax_codes)
    w[...] = _four_bits.decode(packed, sizes, *part, columns, block, kind)
    return w


@nf4_dequantize_.require
def _check(
    call: str,
    w: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None,
    offsets: Array | None,
    columns: int,
    start: int,
    block: int,
    kind: str,
) -> None:
    """Raise ShapeError unless the arrays store the part of the weight."""
    rows, width = w.shape
    last = start + (rows - 1) * columns + width if w.size else 0
    check_held(call, packed, absmax, absmax_codes, columns, last, block, kind)
    groups = 1 if offsets is None else offsets.size - 1
    if offsets is not None and (start or width != columns or not groups or rows % groups):
        problem = f"{call}: {rows} rows of {width} from value {start} on"
        problem += f" are no {groups} matrices with rows of {columns}"
        raise ShapeError(problem, expected=(groups, columns), actual=(rows, width))


@nf4_dequantize_.kernel
def _launch(
    w: Array,
    packed: Array,
    absmax: Array,
    absmax_codes: Array | None,
    offsets: Array | None,
    columns: int,
    start: int,
    block: int,
    kind: str,
) -> Any:
    """Write the part of the weight to w by the kernel, and return w."""
    if not all(a is None or a.flags.c_contiguous for a in (w, packed, absmax, absmax_codes)):
        return no_kernel("w, codes or absmax are not contiguous")
    rows, width = w.shape
    if offsets is not None:
        rows, width = offsets.size - 1, w.size // (offsets.size - 1)  # a matrix is one long row
        row_stride = width
    elif width == columns or rows == 1:
        rows, width, row_stride = 1, rows * width, 0  # the part is contiguous: one long row
    else:
        row_stride = columns
    count = lanes(start | row_stride | (width if rows > 1 else 0), w, packed)
    double = absmax_codes is not None and kind not in _four_bits.EXPONENTS
    dtype = None if offsets is None else offsets.dtype
    constants = _constants((w.dtype, absmax.dtype), count, kind, double, dtype)
    tiles = -(-width // (count * THREADS * DEPTH))
    kernel = load("nf4_dequantize.cu", "nf4_dequantize_", w, constants)
    shift = block.bit_length() - 1
    kernel[rows * tiles, THREADS](
        *(w, packed, absmax, absmax_codes, contiguous(offsets)),
        *(start, row_stride, width, tiles, shift),
    )
    return w


@cache
def _constants(dtypes: Any, lanes: int, kind: str, double: bool, offsets: Any) -> Constants:
    """Return the constants of nf4_dequantize.cu."""
    number, index = _four_bits.KINDS.index(kind), offsets or np.dtype("int32")
    shared = {"LANES": lanes, "THREADS": THREADS, "KIND": number, "DOUBLE": double}
    return Constants(T=dtypes[0], S=dtypes[1], **shared, GROUPED=offsets is not None, I=index)
