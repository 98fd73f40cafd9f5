"""Ternary codes as other programs keep them.

layout      of R rows and C columns, little-endian
planes      two planes of bits: see ``_planes``; 8 bytes for 32 columns of a row
bitnet      Hugging Face's: (S, C) bytes, S = ceil(R / 4), and code + 1 of row r in bits
            2 * (r // S) of byte row r % S
gguf_tq1_0  of every 256 columns 54 bytes: 48 that hold 5 codes + 1 to the base 3, as a fraction
            of 243 in 256ths; 4 that hold 4; the float16 scale
gguf_tq2_0  of every 256 columns 66 bytes: 64 that hold code + 1 of 4 columns 32 apart, two bits
            each, of the first half and then of the second; the float16 scale

Those of gguf have a scale a block, 0 where all codes are; the others hold no scale.
"""

import math
from typing import Any, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError, RangeError, ShapeError
from ...placement import placed, to_numpy
from ..common.choices import check_choice
from ._planes import codes_of, planes_of, row_bytes

GGUF = 256  # columns of a block
BLOCK_BYTES = {"gguf_tq1_0": 54, "gguf_tq2_0": 66}
LAYOUTS = ("planes", "bitnet", *BLOCK_BYTES)
POWERS = np.array([81, 27, 9, 3, 1], np.uint8)
PARTS = ((160, 5, 32), (80, 5, 16), (16, 4, 4))  # of TQ1_0: values, those of a byte, bytes


def check_layout(call: str, layout: str, columns: int) -> None:
    """Raise for a layout that is unknown, or that cannot hold rows of so many columns."""
    check_choice(call, "layout", layout, LAYOUTS)
    if layout in BLOCK_BYTES and columns % GGUF:
        raise ShapeError(
            f"{call}: {layout} holds rows by blocks of {GGUF}; {columns} columns do not fill them",
            expected=GGUF,
            actual=columns,
        )


def byte_shape(layout: str, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the bytes of a matrix."""
    if layout == "planes":
        return 2, rows, row_bytes(columns)
    if layout == "bitnet":
        return -(-rows // 4), columns
    return rows, columns // GGUF, BLOCK_BYTES[layout]


def _packed(planes: Array, scale: Array, columns: int, layout: str) -> Array:
    """Return the bytes of NumPy's planes; scale, (rows, blocks), is that of gguf's blocks."""
    if layout == "planes":
        return planes.swapaxes(0, 1)
    codes = codes_of(planes, columns)
    fields = (codes + 1).view(np.uint8)
    if layout == "bitnet":
        return _pack_bitnet(fields)
    blocks = fields.reshape(len(fields), -1, GGUF)
    used = codes.reshape(blocks.shape).any(axis=-1)
    with np.errstate(over="ignore"):  # what float16 cannot hold is infinite, and refused
        half = np.where(used, scale, 0).astype(np.float16)
    if not np.isfinite(half).all():
        raise RangeError(f"Ternary.pack: {layout} keeps scales in float16, which one exceeds")
    data = _pack_tq1(blocks) if layout == "gguf_tq1_0" else _pack_tq2(blocks)
    return np.concatenate([data, half[..., None].view(np.uint8)], axis=-1)


def _unpacked(data: Any, layout: str, shape: tuple[int, int]) -> tuple[Array, Array | None]:
    """Return planes, and the scales of gguf's blocks; raise where bytes are not such a matrix."""
    rows, columns = shape
    check_layout("Ternary.unpack", layout, columns)
    wanted = byte_shape(layout, rows, columns)
    data = np.ascontiguousarray(data).view(np.uint8) if isinstance(data, np.ndarray) else data
    flat = np.frombuffer(data, np.uint8)
    if flat.size != math.prod(wanted):
        raise ShapeError(
            f"Ternary.unpack: {layout} of {shape} takes {math.prod(wanted)} bytes, {wanted};"
            f" these are {flat.size}: cut short, or of another shape or layout",
            expected=math.prod(wanted),
            actual=flat.size,
        )
    given = flat.reshape(wanted)
    if layout == "planes":
        planes = given.swapaxes(0, 1).copy()
        check_planes("Ternary.unpack", planes, columns)
        return planes, None
    if layout == "bitnet":
        return planes_of(_codes(_unpack_bitnet(given, rows), layout)), None
    fields = (_unpack_tq1 if layout == "gguf_tq1_0" else _unpack_tq2)(given[..., :-2])
    scale = np.ascontiguousarray(given[..., -2:]).view(np.float16)[..., 0].astype(np.float32)
    return planes_of(_codes(fields.reshape(shape), layout)), scale


def check_planes(call: str, planes: Any, columns: int) -> None:
    """Raise where a column is 1 and -1 at once, or a bit beyond the last column is set."""
    both = (planes[:, 0] & planes[:, 1]).any(axis=-1)
    if both.any():
        row = int(both.argmax())
        raise RangeError(f"{call}: row {row} of the planes has a column that is both 1 and -1")
    spare = np.unpackbits(np.asarray(planes[..., columns // 8 :]), axis=-1, bitorder="little")
    if spare[..., columns % 8 :].any():
        raise RangeError(f"{call}: the planes have bits beyond the last of {columns} columns")


def _codes(fields: Array, layout: str) -> Array:
    """Return codes of fields 0, 1 and 2; raise for another."""
    if (fields > 2).any():
        row, column = (int(axis[0]) for axis in np.nonzero(fields > 2))
        raise RangeError(
            f"Ternary.unpack: field [{row}, {column}] of {layout} is {fields[row, column]}; codes"
            " are -1, 0 and 1, kept as 0, 1 and 2",
            expected=range(3),
            actual=int(fields[row, column]),
        )
    return fields.view(np.int8) - np.int8(1)


# ---- bitnet -------------------------------------------------------------------------------------
def _pack_bitnet(fields: Array) -> Array:
    rows, columns = fields.shape
    packed = np.zeros((-(-rows // 4), columns), np.uint8)
    for i in range(4):
        part = fields[i * len(packed) : (i + 1) * len(packed)]
        packed[: len(part)] |= part << np.uint8(2 * i)
    return packed


def _unpack_bitnet(packed: Array, rows: int) -> Array:
    return np.concatenate([(packed >> np.uint8(2 * i)) & 3 for i in range(4)])[:rows]


# ---- gguf ---------------------------------------------------------------------------------------
def _pack_tq1(blocks: Array) -> Array:
    found, start = [], 0
    for values, digits, count in PARTS:
        part = blocks[..., start : start + values].reshape(*blocks.shape[:2], digits, count)
        number = (part * POWERS[:digits, None]).sum(axis=-2, dtype=np.uint16)
        found.append((number * 256 + 242) // 243)  # so that a product with 3**i carries digit i out
        start += values
    return np.concatenate(found, axis=-1).astype(np.uint8)


def _unpack_tq1(data: Array) -> Array:
    found, start = [], 0
    for _, digits, count in PARTS:
        part = data[..., None, start : start + count]
        shifted = part * POWERS[::-1][:digits, None]  # of 8 bits: the digits before are carried out
        found.append(((shifted.astype(np.uint16) * 3) >> 8).reshape(*data.shape[:2], -1))
        start += count
    return np.concatenate(found, axis=-1).astype(np.uint8)


def _pack_tq2(blocks: Array) -> Array:
    part = blocks.reshape(*blocks.shape[:2], 2, 4, 32)
    fields = part[..., 0, :].copy()
    for i in (1, 2, 3):
        fields |= part[..., i, :] << np.uint8(2 * i)
    return fields.reshape(*blocks.shape[:2], 64)


def _unpack_tq2(data: Array) -> Array:
    part = data.reshape(*data.shape[:2], 2, 1, 32)
    return (part >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3


class ByteForms:
    """What ``Ternary`` becomes in other programs' files, and is read from."""

    shape: tuple[int, int]
    scales: Any
    planes: Any
    group: int | None

    def pack(self, layout: str) -> bytes:
        """Return the codes as the bytes of a layout: planes, bitnet, gguf_tq1_0 or gguf_tq2_0.

        Those of gguf hold a float16 scale a block of 256 columns, and are what gguf makes of the
        dequantised weight; the others hold no scale.
        """
        check_layout("Ternary.pack", layout, self.shape[1])
        scales: Any = to_numpy(self.scales)
        if layout in BLOCK_BYTES and self.group not in (None, GGUF):
            raise ConfigError(
                f"Ternary.pack: {layout} has a scale for {GGUF} columns, this a scale for"
                f" {self.group}; quantize with group={GGUF}"
            )
        return _packed(to_numpy(self.planes), scales, self.shape[1], layout).tobytes()

    @classmethod
    def unpack(
        cls,
        data: Any,
        layout: str,
        shape: tuple[int, int],
        *,
        scale: Any = None,
        dtype: Any = FLOAT32,
        like: Any = None,
        group: int | None = None,
        activations: str | None = None,
    ) -> Self:
        """Return the matrix of bytes in a layout of ``pack``.

        Parameters
        ----------
        data : bytes, or uint8 of any shape
        layout : str
        shape : (outputs, inputs)
        scale : optional
            1 where absent; the layouts of gguf bring theirs.
        dtype : float dtype
            What it computes in.
        like : array, optional
            Where it lives.
        group, activations : optional
            As of ``Ternary``.

        Raises
        ------
        ShapeError
            There are too few or too many bytes.
        RangeError
            They hold what is no code, or a scale that is NaN.
        """
        planes, found = _unpacked(data, layout, shape)
        group = GGUF if found is not None else group
        if found is None:
            found = np.ones((), np.float32) if scale is None else scale
        elif scale is not None:
            raise ConfigError(f"Ternary.unpack: {layout} brings its scales; leave scale out")
        if like is not None:
            planes = placed(planes, like)
            found = placed(found, like) if isinstance(found, np.ndarray) else found
        made: Any = cls
        return made(planes, found, shape, group=group, dtype=dtype, activations=activations)
