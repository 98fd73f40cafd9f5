"""Ternary codes in the byte layouts of other programs.

layout      bytes for R rows and C columns, little-endian
planes      two bit planes: see ``_planes``; 8 bytes for 32 columns of a row
bitnet      Hugging Face's: (S, C) bytes, S = ceil(R / 4); code + 1 of row r is in two bits of byte
            row r % S, from bit 2 * (r // S) on
gguf_tq1_0  54 bytes for 256 columns: 48 bytes with 5 fields (code + 1) each, base-3 digits of a
            number below 243, scaled to 256ths; 4 bytes with 4 fields each; the float16 scale
gguf_tq2_0  66 bytes for 256 columns: 64 bytes with two bits for each of 4 fields whose columns are
            32 apart, first for the first half of the columns; the float16 scale

The gguf layouts have one scale per block of 256 columns, 0 if all its codes are 0; the others have
no scale.
"""

import math
from typing import Any, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError, DTypeError, RangeError, ShapeError
from ...placement import to_device_of, to_numpy
from ..common.checks import check_choice
from ._planes import codes_of, planes_of, row_bytes
from ._state import matrix_shape

GGUF = 256  # columns of a block in the gguf layouts
BLOCK_BYTES = {"gguf_tq1_0": 54, "gguf_tq2_0": 66}
LAYOUTS = ("planes", "bitnet", *BLOCK_BYTES)
POWERS = np.array([81, 27, 9, 3, 1], np.uint8)  # of 3, highest digit first
PARTS = ((160, 5, 32), (80, 5, 16), (16, 4, 4))  # of TQ1_0: values, values per byte, bytes


def check_layout(call: str, layout: str, columns: int) -> None:
    """Raise for an unknown layout, or a layout that cannot store this number of columns."""
    check_choice(call, "layout", layout, LAYOUTS)
    if layout in BLOCK_BYTES and columns % GGUF:
        raise ShapeError(
            f"{call}: {layout} has blocks of {GGUF} columns; {columns} columns do not fill them",
            expected=GGUF,
            actual=columns,
        )


def byte_shape(layout: str, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of the bytes of a matrix in a layout."""
    if layout == "planes":
        return 2, rows, row_bytes(columns)
    if layout == "bitnet":
        return -(-rows // 4), columns
    return rows, columns // GGUF, BLOCK_BYTES[layout]


def _packed(planes: Array, scale: Array, columns: int, layout: str) -> Array:
    """Return the bytes of NumPy planes in a layout.

    ``scale``, the scales of gguf blocks, is broadcast to (rows, blocks).
    """
    if layout == "planes":
        return planes.swapaxes(0, 1)
    codes = codes_of(planes, columns)
    fields = (codes + 1).view(np.uint8)
    if layout == "bitnet":
        return _pack_bitnet(fields)
    blocks = fields.reshape(len(fields), -1, GGUF)  # (rows, blocks, 256)
    used = codes.reshape(blocks.shape).any(axis=-1)
    with np.errstate(over="ignore"):  # a scale beyond float16 becomes infinite: refused below
        half = np.where(used, scale, 0).astype(np.float16)
    if not np.isfinite(half).all():
        raise RangeError(f"Ternary.pack: {layout} stores scales in float16; one is too large")
    data = _pack_tq1(blocks) if layout == "gguf_tq1_0" else _pack_tq2(blocks)
    return np.concatenate([data, half[..., None].view(np.uint8)], axis=-1)


def _unpacked(data: Any, layout: str, shape: tuple[int, int]) -> tuple[Array, Array | None]:
    """Return planes and the scales of gguf blocks or None; raise if the bytes are not valid."""
    rows, columns = matrix_shape("Ternary.unpack", shape)
    check_layout("Ternary.unpack", layout, columns)
    expected = byte_shape(layout, rows, columns)
    try:
        data = np.ascontiguousarray(data).view(np.uint8) if isinstance(data, np.ndarray) else data
        flat = np.frombuffer(data, np.uint8)
    except (TypeError, ValueError):
        problem = f"Ternary.unpack: data is {type(data).__name__}"
        raise DTypeError(f"{problem}; pass bytes, or an array of uint8") from None
    if flat.size != math.prod(expected):
        raise ShapeError(
            f"Ternary.unpack: {layout} of {shape} takes {math.prod(expected)} bytes, {expected};"
            f" these are {flat.size}: cut short, or of another shape or layout",
            expected=math.prod(expected),
            actual=flat.size,
        )
    blocks = flat.reshape(expected)
    if layout == "planes":
        planes = blocks.swapaxes(0, 1).copy()
        check_planes("Ternary.unpack", planes, columns)
        return planes, None
    if layout == "bitnet":
        return planes_of(_codes(_unpack_bitnet(blocks, rows), layout)), None
    fields = (_unpack_tq1 if layout == "gguf_tq1_0" else _unpack_tq2)(blocks[..., :-2])
    scale = np.ascontiguousarray(blocks[..., -2:]).view(np.float16)[..., 0].astype(np.float32)
    return planes_of(_codes(fields.reshape(shape), layout)), scale


def check_planes(call: str, planes: Any, columns: int) -> None:
    """Raise if a column is both 1 and -1, or a bit beyond the last column is set."""
    both = (planes[:, 0] & planes[:, 1]).any(axis=-1)
    if both.any():
        row = int(both.argmax())
        raise RangeError(f"{call}: row {row} of the planes has a column that is both 1 and -1")
    spare = np.unpackbits(np.asarray(planes[..., columns // 8 :]), axis=-1, bitorder="little")
    if spare[..., columns % 8 :].any():
        raise RangeError(f"{call}: the planes have bits beyond the last of {columns} columns")


def _codes(fields: Array, layout: str) -> Array:
    """Return the codes of fields 0, 1 and 2; raise RangeError for any other field."""
    if (fields > 2).any():
        row, column = (int(axis[0]) for axis in np.nonzero(fields > 2))
        raise RangeError(
            f"Ternary.unpack: field [{row}, {column}] of {layout} is {fields[row, column]}; codes"
            " -1, 0 and 1 are stored as 0, 1 and 2",
            expected=range(3),
            actual=int(fields[row, column]),
        )
    return fields.view(np.int8) - np.int8(1)


# ---- bitnet -------------------------------------------------------------------------------------
def _pack_bitnet(fields: Array) -> Array:
    """Return the bytes of bitnet from fields 0, 1 and 2, (rows, columns)."""
    rows, columns = fields.shape
    packed = np.zeros((-(-rows // 4), columns), np.uint8)
    for i in range(4):
        part = fields[i * len(packed) : (i + 1) * len(packed)]
        packed[: len(part)] |= part << np.uint8(2 * i)
    return packed


def _unpack_bitnet(packed: Array, rows: int) -> Array:
    """Return the fields, (rows, columns), of bytes of bitnet."""
    return np.concatenate([(packed >> np.uint8(2 * i)) & 3 for i in range(4)])[:rows]


# ---- gguf ---------------------------------------------------------------------------------------
def _pack_tq1(blocks: Array) -> Array:
    """Return the bytes of TQ1_0, without scales, from fields (rows, blocks, 256)."""
    packed, start = [], 0
    for values, digits, count in PARTS:
        part = blocks[..., start : start + values].reshape(*blocks.shape[:2], digits, count)
        number = (part * POWERS[:digits, None]).sum(axis=-2, dtype=np.uint16)
        # rounded up, so that the carry of a product by 3 is the next digit: see _unpack_tq1
        packed.append((number * 256 + 242) // 243)
        start += values
    return np.concatenate(packed, axis=-1).astype(np.uint8)


def _unpack_tq1(data: Array) -> Array:
    """Return the fields of TQ1_0, from bytes (rows, blocks, 52)."""
    fields, start = [], 0
    for _, digits, count in PARTS:
        part = data[..., None, start : start + count]
        shifted = part * POWERS[::-1][:digits, None]  # in 8 bits, where higher digits overflow
        fields.append(((shifted.astype(np.uint16) * 3) >> 8).reshape(*data.shape[:2], -1))
        start += count
    return np.concatenate(fields, axis=-1).astype(np.uint8)


def _pack_tq2(blocks: Array) -> Array:
    """Return the bytes of TQ2_0, without scales, from fields (rows, blocks, 256)."""
    part = blocks.reshape(*blocks.shape[:2], 2, 4, 32)  # (rows, blocks, halves, fields, bytes)
    fields = part[..., 0, :].copy()
    for i in (1, 2, 3):
        fields |= part[..., i, :] << np.uint8(2 * i)
    return fields.reshape(*blocks.shape[:2], 64)


def _unpack_tq2(data: Array) -> Array:
    """Return the fields of TQ2_0, from bytes (rows, blocks, 64)."""
    part = data.reshape(*data.shape[:2], 2, 1, 32)
    return (part >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3


class ByteForms:
    """The methods of ``Ternary`` that write and read the byte layouts of other programs."""

    shape: tuple[int, ...]
    scales: Any
    planes: Any
    group: int | None

    def pack(self, layout: str) -> bytes:
        """Return the codes as bytes of a layout: planes, bitnet, gguf_tq1_0 or gguf_tq2_0.

        The gguf layouts have a float16 scale for each block of 256 columns; the bytes equal those
        that the package gguf writes for the dequantized weight.  The other layouts have no scale.
        """
        check_layout("Ternary.pack", layout, self.shape[1])
        scales: Any = to_numpy(self.scales)
        if layout in BLOCK_BYTES and self.group not in (None, GGUF):
            raise ConfigError(
                f"Ternary.pack: {layout} has a scale for {GGUF} columns, this weight one for"
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
            The scales, 1 by default; not for the gguf layouts, which contain their scales.
        dtype : float dtype
            The dtype in which products compute.
        like : array, optional
            An array on the device of the matrix; the host by default.
        group, activations : optional
            As in ``Ternary``.

        Returns
        -------
        weight : Ternary
            The matrix (outputs, inputs).

        Raises
        ------
        ShapeError
            There are too few or too many bytes.
        RangeError
            The bytes hold an invalid code, or a scale that is NaN.
        """
        planes, scales = _unpacked(data, layout, shape)
        group = GGUF if scales is not None else group
        if scales is None:
            scales = np.ones((), np.float32) if scale is None else scale
        elif scale is not None:
            raise ConfigError(f"Ternary.unpack: {layout} contains its scales; leave scale out")
        if like is not None:
            planes = to_device_of(planes, like)
            scales = to_device_of(scales, like) if isinstance(scales, np.ndarray) else scales
        create: Any = cls
        return create(planes, scales, shape, group=group, dtype=dtype, activations=activations)
