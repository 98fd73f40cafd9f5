"""Codes -1, 0 and 1 as two planes of bits.

Bit ``d % 32`` of word ``d // 32`` of a row says of column d, in the first plane, that its code is
1, and in the second that it is -1.  Words are little-endian; planes hold their bytes, (rows, 2,
bytes), so that rows lie together, and a row ends with its last word, whose spare bits are 0.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import Array
from ...core.stand_in import is_planned
from ...errors import ConfigError, RangeError
from ...placement import placed
from ..common.steps import representative_steps

WORD = 32  # columns of a word
MARKED_BYTES = 32  # of a plane that a mark stands for: what memory gives at least
BLOCK = 2**20  # values that are unpacked at a time
ONES = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)


class Statistics(NamedTuple):
    """What a ternary matrix is like."""

    sparsity: float  # share of codes that are 0
    plus: float  # share that is 1
    minus: float  # share that is -1
    mean_error: float | None  # of |w - codes * scale|; None where w is not known
    largest_error: float | None


def row_bytes(columns: int) -> int:
    """Return the bytes that a row of a plane takes."""
    return -(-columns // WORD) * (WORD // 8)


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Return slices of rows that hold about BLOCK values each."""
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
    """Return the int8 codes of the first columns."""
    bits = _bits(planes, columns)
    return bits[:, 0] - bits[:, 1]


def _bits(planes: Any, columns: int) -> Array:
    if is_planned(planes):
        return empty((*planes.shape[:2], columns), np.int8, like=planes)
    if type(planes) is np.ndarray:
        bits = np.unpackbits(planes, axis=-1, count=columns, bitorder="little")
        return bits.view(np.int8)
    spread = (planes[..., None] >> placed(np.arange(8, dtype=np.uint8), planes)) & 1
    return spread.reshape(*planes.shape[:2], 8 * planes.shape[2])[..., :columns].astype(np.int8)


def ones(values: Any) -> int:
    """Return how many bits of these bytes, which have rows, are set."""
    table, step = placed(ONES, values), max(1, BLOCK // max(1, values[:1].size))
    parts = (values[top : top + step] for top in range(0, len(values), step))
    return sum(int(table[part].sum(dtype=np.int64)) for part in parts)


def by_row(scale: Any) -> Any:
    """Return scales as rows and groups, where one row of them stands for all."""
    return scale if scale.ndim == 2 else scale[None]


def spread(scale: Any, group: int, columns: int) -> Array:
    """Return the scale of every column, (rows, columns), from one a group."""
    if scale.shape[1] == 1:
        return scale
    return np.repeat(scale, group, axis=1)[:, :columns]


def dense(
    planes: Any, scale: Any, group: int, rows: slice, columns: slice, dtype: np.dtype[Any]
) -> Array:
    """Return a part of the matrix as a new array: codes times the scale of their group."""
    scale = by_row(scale)
    first, last = columns.start // WORD * WORD, max(columns.stop, columns.start)
    held, shape = slice(first // 8, row_bytes(last)), (rows.stop - rows.start, last - first)
    found = empty(shape, dtype, like=planes)
    for part in representative_steps(planes, row_blocks(*shape)):
        there = slice(rows.start + part.start, rows.start + part.stop)
        scales = scale if len(scale) == 1 else scale[there]
        values = codes_of(planes[there, :, held], last - first).astype(scales.dtype)
        values *= spread(scales, group, last)[:, -(last - first) :]
        found[part] = values
    return found[:, columns.start - first :]


def marks_of(planes: Any) -> Array:
    """Return a bit for every 256 columns of a row: whether a code of theirs is not 0."""
    rows, _, held = planes.shape
    chunks = -(-held // MARKED_BYTES)
    used = np.zeros_like(planes, dtype=np.bool_, shape=(rows, -(-chunks // 8) * 8))
    for i in range(chunks):
        part = planes[:, :, i * MARKED_BYTES : (i + 1) * MARKED_BYTES]
        used[:, i] = part.max(axis=(1, 2)) > 0
    bits = used.reshape(rows, -(-chunks // 8), 8).astype(np.uint8)
    return (bits << placed(np.arange(8, dtype=np.uint8), planes)).sum(axis=-1, dtype=np.uint8)


def check_group(call: str, group: Any) -> None:
    """Raise unless groups of so many columns end with words of the planes."""
    if not isinstance(group, int) or group < WORD or group % WORD:
        raise ConfigError(f"{call}: group={group!r}; it must be a multiple of {WORD} columns")


def check_codes(call: str, codes: Any) -> None:
    """Raise where a code is not -1, 0 or 1."""
    for part in row_blocks(*codes.shape):
        wrong = (codes[part] < -1) | (codes[part] > 1)
        if wrong.any():
            row, column = (int(axis[0]) for axis in np.nonzero(wrong))
            row += part.start
            found = int(codes[row, column])
            raise RangeError(
                f"{call}: codes[{row}, {column}] is {found}; it must be -1, 0 or 1",
                expected=range(-1, 2),
                actual=found,
            )
