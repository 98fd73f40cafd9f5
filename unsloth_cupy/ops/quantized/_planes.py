"""Codes -1, 0 and 1 as two planes of bits.

Bit ``d % 32`` of word ``d // 32`` of a row says of column d, in the first plane, that its code is
1, and in the second that it is -1.  Words are little-endian; planes hold their bytes,
(2, rows, bytes), and a row ends with its last word, whose spare bits are 0.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError, RangeError
from ...placement import placed

WORD = 32  # columns of a word
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
    planes = np.zeros_like(codes, dtype=np.uint8, shape=(2, rows, row_bytes(columns)))
    for plane, sign in zip(planes, (1, -1), strict=True):
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
    plus, minus = _bits(planes, columns).view(np.int8)
    plus -= minus
    return plus


def _bits(planes: Any, columns: int) -> Array:
    if type(planes) is np.ndarray:
        return np.unpackbits(planes, axis=-1, count=columns, bitorder="little")
    spread = (planes[..., None] >> placed(np.arange(8, dtype=np.uint8), planes)) & 1
    return spread.reshape(*planes.shape[:-1], -1)[..., :columns]


def count(planes: Any) -> tuple[int, int]:
    """Return how many codes are 1, and how many are -1."""
    table = placed(ONES, planes)
    totals = [0, 0]
    for part in row_blocks(planes.shape[1], planes.shape[2] * 8):
        for i in (0, 1):
            totals[i] += int(table[planes[i, part]].sum(dtype=np.int64))
    return totals[0], totals[1]


def spread(scale: Any, group: int, columns: int) -> Array:
    """Return the scale of every column, (rows, columns), from one a group."""
    if scale.shape[1] == 1:
        return scale
    return np.repeat(scale, group, axis=1)[:, :columns]


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
