"""Weights whose rows are blocks of 32 values, each with a scale: MXFP4, and GGUF's Q4_0 and Q8_0.

w = level[code] * scale        Q4_0: 4 bits, level = code - 8; Q8_0: 8 bits, level = code

Scales of Q4_0 and Q8_0 are float16.  Source: the formats of llama.cpp.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, FLOATS, KERNEL_DTYPES, Array, float_dtype
from ...core.gpu import device_of
from ...errors import ConfigError, ShapeError
from ...placement import check_library
from ..common.int8_codes import INT8
from . import _four_bits
from ._state import array_of, check_array, checked_state
from .int8_product import MOST_ROWS, int8_dequantize_, int8_few_rows_
from .nf4_dequantize import nf4_dequantize_, sizes_of
from .nf4_product import has_kernel, nf4_product_
from .weight import Quantized, check_finite, dense_weight, in_kernel_dtype, on_gpu

BLOCK = 32  # values that share a scale
UINT8, FLOAT16 = np.dtype("uint8"), FLOATS[0]


class Blocks(Quantized):
    """A frozen weight, or a stack of weights: codes, and scales of blocks of 32 values.

    Attributes
    ----------
    packed : (..., outputs, inputs / codes of an item)
    scales : (..., outputs, inputs / 32)

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other, or dtype is not a float dtype.
    """

    CODES: ClassVar[np.dtype[Any]]  # dtype of packed
    SCALES: ClassVar[np.dtype[Any]]  # dtype of scales
    VALUES: ClassVar[int]  # codes of an item of packed

    def __init__(self, packed: Array, scales: Array, *, dtype: Any = FLOAT32) -> None:
        name, size = type(self).__name__, BLOCK // self.VALUES
        check_library(f"{name}: packed", packed)
        if len(packed.shape) not in (2, 3) or packed.shape[-1] % size:
            expected = f"(..., outputs, items), {size} for each block of {BLOCK}"
            problem = f"{name}: packed is {tuple(packed.shape)}; it must be {expected}"
            raise ShapeError(problem, expected=expected, actual=tuple(packed.shape))
        self.shape = (*map(int, packed.shape[:-1]), int(packed.shape[-1]) * self.VALUES)
        check_array(f"{name}: packed", packed, self.CODES, tuple(packed.shape))
        sizes = (*self.shape[:-1], self.shape[-1] // BLOCK)
        check_array(f"{name}: scales", scales, self.SCALES, sizes)
        self.packed = self.home = contiguous(packed)
        self.scales, self.dtype = contiguous(scales), float_dtype(name, dtype)

    def held(self) -> dict[str, Any]:
        """Return the arrays that store the weight, by name."""
        return {"packed": self.packed, "scales": self.scales}

    def facts(self) -> dict[str, Any]:
        """Return the arguments of the constructor other than the arrays of ``held``."""
        return {"dtype": self.dtype}

    @property
    def stacks(self) -> bool:
        """True for a matrix, as each row has its own scales."""
        return self.ndim == 2

    def _cut(self, axis: int, places: Sequence[slice]) -> Self:
        """Return rows or columns of a matrix; columns in whole blocks."""
        borders = [border for where in places for border in (where.start, where.stop)]
        if axis and any(border % BLOCK for border in borders):
            problem = f"{self!r}: columns {borders} split blocks of {BLOCK} values"
            raise ConfigError(f"{problem}; cut at multiples of {BLOCK}, or use int8")

        def part(array: Array, values: int) -> Array:
            if not axis:
                return np.concatenate([array[where] for where in places])
            cuts = [slice(where.start // values, where.stop // values) for where in places]
            return np.concatenate([array[:, where] for where in cuts], axis=1)

        arrays = part(self.packed, self.VALUES), part(self.scales, BLOCK)
        return type(self)(*arrays, **self.facts())


class FourBits(Blocks):
    """Blocks of two codes per byte, the first in its low bits."""

    CODES, VALUES = UINT8, 2
    block = BLOCK
    kind = property(lambda self: self.KIND)

    @abstractmethod
    def coded(self) -> tuple[Array, Array, Array | None]:
        """Return codes, absmax and exponents, the arguments of the ops of 4-bit weights."""

    @property
    def _how(self) -> Any:
        """The options of the ops of 4-bit weights."""
        return {"block": self.block, "kind": self.kind}

    def _dense(self, rows: slice, columns: slice, dtype: np.dtype[Any]) -> Array:
        inputs, (packed, absmax, codes) = self.shape[-1], self.coded()
        if not (on_gpu(packed) and dtype in KERNEL_DTYPES):
            arguments = packed, sizes_of(absmax, codes), rows, columns, inputs, BLOCK, self.KIND
            with np.errstate(over="ignore"):  # values beyond float16 become infinity, as on a GPU
                return _four_bits.decode(*arguments).astype(dtype, copy=False)
        shape = rows.stop - rows.start, columns.stop - columns.start
        w, start = empty(shape, dtype, like=packed), rows.start * inputs + columns.start
        return nf4_dequantize_(w, packed, absmax, codes, columns=inputs, start=start, **self._how)

    def dense_where(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        """Return a stack in ``dtype``; matrices of groups without rows may hold anything."""
        if not (on_gpu(self.packed) and dtype in KERNEL_DTYPES):
            return self.dequantize(dtype)
        w = empty((self.rows, self.shape[-1]), dtype, like=self.packed)
        dense = nf4_dequantize_(w, *self.coded(), offsets, columns=self.shape[-1], **self._how)
        return dense.reshape(self.shape)

    def _few_rows(self, x: Array, out: Array, add: bool) -> bool:
        if not (on_gpu(self.packed) and has_kernel(x, out)):
            return False
        nf4_product_(out, x, *self.coded(), add=add, **self._how)
        return True


class _OfFiles(Blocks):
    """Blocks of GGUF files; Hugging Face folders cannot store them, and have dense weights."""

    IN_FOLDERS, SCALES = False, FLOAT16

    def state(self) -> dict[str, Any]:
        """Return the arrays from which ``from_state`` restores the weight."""
        return {"weight": self.packed, "weight_scales": self.scales}

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """Return the entry of a folder's config.json, if folders could store such weights."""
        return {"quant_method": self.KIND}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], dtype: Any = FLOAT32) -> Self:
        """Return the weight from the arrays of ``state``.

        Raises
        ------
        ConfigError
            An array is missing, or its shape, dtype or values do not fit the other array.
        """
        call = f"{cls.__name__}.from_state"
        shape = tuple(getattr(checked_state(call, state).get("weight"), "shape", (0, 0)))
        packed = array_of(call, state, "weight", shape, cls.CODES)
        sizes = (*shape[:-1], shape[-1] * cls.VALUES // BLOCK)
        scales = array_of(call, state, "weight_scales", sizes, FLOAT16)
        return cls(packed, scales, dtype=float_dtype(call, dtype))

    @classmethod
    def quantized(cls, w: Array) -> Self:
        """Quantize a dense weight (..., outputs, inputs) as llama.cpp does.

        Raises
        ------
        RangeError
            A value is not finite.
        ShapeError, DTypeError
            w is not a matrix or a stack of floats, or inputs is not a multiple of 32.
        """
        call = f"{cls.__name__}.quantized"
        w = dense_weight(call, w, stacks=True)
        if w.shape[-1] % BLOCK:
            problem = f"{call}: rows of w have {w.shape[-1]} values, not whole blocks of {BLOCK}"
            raise ShapeError(problem, expected=(*w.shape[:-1], BLOCK), actual=w.shape)
        with device_of(w):
            values = in_kernel_dtype(w)
            blocks = values.reshape(-1, BLOCK).astype(FLOAT32)  # (blocks, 32)
            check_finite(call, values, np.abs(blocks).max(axis=1))
            codes, scales = cls._encoded(blocks)
            shape = *w.shape[:-1], w.shape[-1] // BLOCK
            return cls(
                codes.reshape(*w.shape[:-1], -1),
                scales.astype(FLOAT16).reshape(shape),
                dtype=w.dtype,
            )

    def requantized(self, w: Array) -> Self:
        """Return another weight, quantized in the same way as this one."""
        return type(self).quantized(w)

    @staticmethod
    @abstractmethod
    def _encoded(blocks: Array) -> tuple[Array, Array]:
        """Return the codes and scales of float32 blocks."""


def _inverse(scales: Array) -> Array:
    """Return 1 / scale as a column, and 0 for a scale of 0."""
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)[:, None]


class Q40(_OfFiles, FourBits):
    """A frozen 4-bit weight: w = (code - 8) * scale; see ``Blocks``.

    The value with the largest magnitude in a block is -8 times the scale, which has either sign.
    """

    KIND = "q4_0"

    def coded(self) -> tuple[Array, Array, None]:
        """Return codes and absmax, the arguments of the ops of 4-bit weights."""
        return self.packed.reshape(-1), self.scales.reshape(-1), None

    @staticmethod
    def _encoded(blocks: Array) -> tuple[Array, Array]:
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)[:, 0]
        scales = largest / np.float32(-8)
        # rounded by trunc(x + 8.5), as in llama.cpp; the largest value of the other sign gets 15
        codes = np.clip(np.trunc(blocks * _inverse(scales) + np.float32(8.5)), 0, 15).astype(UINT8)
        return codes[:, ::2] | codes[:, 1::2] << 4, scales


class Q80(_OfFiles):
    """A frozen 8-bit weight: w = code * scale; see ``Blocks``."""

    KIND = "q8_0"
    CODES, VALUES = INT8, 1

    def _dense(self, rows: slice, columns: slice, dtype: np.dtype[Any]) -> Array:
        inputs = self.shape[-1]
        first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
        whole = slice(first * BLOCK, last * BLOCK)
        codes = self.packed.reshape(self.rows, inputs)[rows, whole]
        scales = self.scales.reshape(self.rows, inputs // BLOCK)[rows, first:last].reshape(-1)
        dense = empty(codes.shape, dtype, like=codes)
        int8_dequantize_(dense, codes, scales, block=BLOCK)
        return dense[:, columns.start - whole.start : columns.stop - whole.start]

    def _few_rows(self, x: Array, out: Array, add: bool) -> bool:
        if len(x) > MOST_ROWS or not on_gpu(x) or x.dtype not in KERNEL_DTYPES:
            return False
        if not out.flags.c_contiguous or out.dtype not in (x.dtype, FLOAT32):
            return False
        int8_few_rows_(x, self.packed, self.scales.reshape(-1), out, block=BLOCK, add=add)
        return True

    @staticmethod
    def _encoded(blocks: Array) -> tuple[Array, Array]:
        scales = np.abs(blocks).max(axis=1) / np.float32(127)
        shares = blocks * _inverse(scales)
        # ties are rounded away from 0, as in llama.cpp
        codes = np.copysign(np.floor(np.abs(shares) + np.float32(0.5)), shares)
        return codes.astype(INT8), scales
