"""Codes -1, 0 and 1 as two bit planes.

Bit ``d % 32`` of word ``d // 32`` of a row belongs to column d: it is set in the first plane if the
code is 1, in the second if it is -1.  Words are little-endian.  Planes are bytes, (rows, 2, bytes):
both planes of a row are neighbours, and a row ends with a whole word, padded with 0.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.stand_in import is_planned, representative_steps
from ...errors import ConfigError, RangeError
from ...placement import to_device_of

WORD = 32  # columns of a word
MARKED_BYTES = 32  # bytes of a plane per mark: the smallest memory transaction of a GPU
BLOCK = 2**20  # values that are unpacked at a time, which bounds the memory of temporary arrays
ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)  # set bits of each byte


class Statistics(NamedTuple):
    """Shares of the codes of a ternary matrix, and its quantization error."""

    sparsity: float  # share of codes that are 0
    plus: float  # share of codes that are 1
    minus: float  # share of codes that are -1
    mean_error: float | None  # mean of |w - codes * scale|; None if w is not stored
    largest_error: float | None  # maximum of the same


def row_bytes(columns: int) -> int:
    """Return the bytes of a row of a plane."""
    return -(-columns // WORD) * (WORD // 8)


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Return slices of rows with about BLOCK values each."""
    step = max(1, BLOCK // max(columns, 1))
    return (slice(top, min(top + step, rows)) for top in range(0, rows, step))


def planes_of(codes: Any) -> Array:
    """Return the planes of a matrix of codes."""
    rows, columns = codes.shape
    planes = np.zeros_like(codes, dtype=np.uint8, shape=(rows, 2, row_bytes(columns)))
    for plane, sign in ((planes[:, 0], 1), (planes[:, 1], -1)):
        is_set = codes == sign
        if type(codes) is np.ndarray:
            packed = np.packbits(is_set, axis=-1, bitorder="little")
            plane[:, : packed.shape[1]] = packed
            continue
        for bit in range(8):
            part = is_set[:, bit::8].astype(np.uint8)
            plane[:, : part.shape[1]] |= part << bit
    return planes


def codes_of(planes: Any, columns: int) -> Array:
    """Return the int8 codes of the first ``columns`` columns."""
    bits = _bits(planes, columns)
    return bits[:, 0] - bits[:, 1]


def _bits(planes: Any, columns: int) -> Array:
    """Return the bits of planes as int8 0 and 1, (rows, 2, columns)."""
    if is_planned(planes):
        return empty((*planes.shape[:2], columns), np.int8, like=planes)
    if type(planes) is np.ndarray:
        bits = np.unpackbits(planes, axis=-1, count=columns, bitorder="little")
        return bits.view(np.int8)
    separate = (planes[..., None] >> to_device_of(np.arange(8, dtype=np.uint8), planes)) & 1
    # (rows, 2, bytes, 8) as (rows, 2, padded columns)
    return separate.reshape(*planes.shape[:2], 8 * planes.shape[2])[..., :columns].astype(np.int8)


def count_ones(values: Any) -> int:
    """Return the number of set bits in an array of bytes with at least one axis."""
    table, step = to_device_of(ONES, values), max(1, BLOCK // max(1, values[:1].size))
    parts = (values[top : top + step] for top in range(0, len(values), step))
    return sum(int(table[part].sum(dtype=np.int64)) for part in parts)


def scales_by_row(scale: Any) -> Any:
    """Return scales as (rows, groups), or as (1, groups) if all rows share them."""
    return scale if scale.ndim == 2 else scale[None]


def scale_of_columns(scale: Any, group: int, columns: int) -> Array:
    """Return the scale of every column, (rows, columns or 1), from the scales of groups."""
    if scale.shape[1] == 1:
        return scale
    return np.repeat(scale, group, axis=1)[:, :columns]


def dense(
    planes: Any, scale: Any, group: int, rows: slice, columns: slice, dtype: np.dtype[Any]
) -> Array:
    """Return a part of the matrix as a new array: codes times the scales of their groups."""
    scale = scales_by_row(scale)
    # unpacked from the word on in which the part begins
    first, last = columns.start // WORD * WORD, max(columns.stop, columns.start)
    byte_columns = slice(first // 8, row_bytes(last))
    shape = rows.stop - rows.start, last - first
    result = empty(shape, dtype, like=planes)
    for part in representative_steps(planes, row_blocks(*shape)):
        block = slice(rows.start + part.start, rows.start + part.stop)
        scales = scale if len(scale) == 1 else scale[block]
        values = codes_of(planes[block, :, byte_columns], last - first).astype(scales.dtype)
        values *= scale_of_columns(scales, group, last)[:, -(last - first) :]
        result[part] = values
    return result[:, columns.start - first :]


def marks_of(planes: Any) -> Array:
    """Return the marks: a bit for every 256 columns of a row, 0 if all their codes are 0."""
    rows, _, plane_bytes = planes.shape
    chunks = -(-plane_bytes // MARKED_BYTES)
    used = np.zeros_like(planes, dtype=np.bool_, shape=(rows, -(-chunks // 8) * 8))
    for i in range(chunks):
        part = planes[:, :, i * MARKED_BYTES : (i + 1) * MARKED_BYTES]
        used[:, i] = part.max(axis=(1, 2)) > 0
    bits = used.reshape(rows, -(-chunks // 8), 8).astype(np.uint8)  # (rows, mark bytes, 8)
    return (bits << to_device_of(np.arange(8, dtype=np.uint8), planes)).sum(axis=-1, dtype=np.uint8)


def check_group(call: str, group: Any) -> None:
    """Raise ConfigError unless ``group`` columns are whole words of the planes."""
    if not isinstance(group, int) or group < WORD or group % WORD:
        raise ConfigError(f"{call}: group={group!r}; it must be a multiple of {WORD} columns")


def check_codes(call: str, codes: Any) -> None:
    """Raise RangeError if a code is not -1, 0 or 1."""
    for part in row_blocks(*codes.shape):
        wrong = (codes[part] < -1) | (codes[part] > 1)
        if wrong.any():
            row, column = (int(axis[0]) for axis in np.nonzero(wrong))
            row += part.start
            value = int(codes[row, column])
            raise RangeError(
                f"{call}: codes[{row}, {column}] is {value}; it must be -1, 0 or 1",
                expected=range(-1, 2),
                actual=value,
            )
