"""4-bit weights in the microscaling format MXFP4, the format of gpt-oss's experts.

w = level[code] * 2^(scale - 127)        one scale, a byte, for 32 consecutive values of a row

The levels are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, so values in bfloat16 are exact.

OCP Microscaling Formats (MX) Specification 1.0, 2023.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Self

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import FLOAT32, Array, float_dtype
from ...core.gpu import device_of
from ...core.stand_in import representative_steps
from ...errors import ConfigError, ShapeError
from ...placement import to_device_of
from . import _four_bits
from ._state import array_of, checked_state
from .blocks import BLOCK, UINT8, FourBits
from .nf4_dequantize import powers_of_two
from .weight import check_finite, dense_weight, in_kernel_dtype

BIAS, LARGEST = 127, 254  # bias and largest byte of exponents; 255 is NaN
TOP = 2  # exponent of the largest level, 6
STEP = 2**18  # values that are encoded at a time, which bounds the memory of temporary arrays


def mxfp4_quantize(w: Array) -> "Mxfp4":
    """Quantize a weight to MXFP4: ``w`` is about ``level[code] * 2**(scale - 127)``.

    The exponent of a block is the exponent of its largest absolute value minus 2, the exponent of
    the largest level.  Values are rounded to the nearest level (of two equally near levels, the one
    with an even code) and are limited to 6.

    Parameters
    ----------
    w : (outputs, inputs) or (experts, outputs, inputs) float
        The dense weight, or a stack of weights, as an array of any library; inputs is a multiple of
        32.

    Returns
    -------
    weight : Mxfp4
        On the device of w: 4.25 bits per value.

    Raises
    ------
    RangeError
        A value is not finite; the message names its position.
    ShapeError, DTypeError
        w is not a matrix or a stack of floats, inputs is not a multiple of 32, or w is quantized
        already.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import Mxfp4, linear, mxfp4_quantize
    >>> x, w = np.random.default_rng(0).standard_normal((2, 64, 64), np.float32)
    >>> weight = mxfp4_quantize(w)
    >>> assert isinstance(weight, Mxfp4) and weight.nbytes * 7 < w.nbytes
    >>> again = mxfp4_quantize(weight.dequantize())
    >>> np.testing.assert_array_equal(again.dequantize(), weight.dequantize())
    >>> np.testing.assert_allclose(
    ...     linear(x, weight), linear(x, weight.dequantize()), rtol=1e-5, atol=1e-5
    ... )
    """
    w = dense_weight("mxfp4_quantize", w, stacks=True)
    if w.shape[-1] % BLOCK:
        problem = (
            f"mxfp4_quantize: rows of w have {w.shape[-1]} values, not whole blocks of {BLOCK}"
        )
        expected = (*w.shape[:-1], -(-w.shape[-1] // BLOCK) * BLOCK)
        raise ShapeError(f"{problem}; pad them with 0", expected=expected, actual=w.shape)
    with device_of(w):
        values = in_kernel_dtype(w)
        blocks = values.reshape(values.size // BLOCK, BLOCK)  # (blocks, 32)
        packed = empty((len(blocks), BLOCK // 2), UINT8, like=w)
        scales, sizes = empty((len(blocks),), UINT8, like=w), empty((len(blocks),), FLOAT32, like=w)
        rows = STEP // BLOCK
        for top in representative_steps(w, range(0, len(blocks), rows)):
            part = slice(top, min(top + rows, len(blocks)))
            packed[part], scales[part], sizes[part] = encoded(blocks[part].astype(FLOAT32))
        check_finite("mxfp4_quantize", values, sizes)
        shape = *w.shape[:-1], w.shape[-1] // BLOCK
        return Mxfp4(packed.reshape(*w.shape[:-1], -1), scales.reshape(shape), dtype=w.dtype)


def encoded(part: Array) -> tuple[Array, Array, Array]:
    """Return bytes of codes, scales and the largest absolute values of float32 blocks."""
    sizes = np.abs(part).max(axis=1)
    # frexp's mantissa is below 1, so its exponent is greater by 1
    exponents = np.where(sizes > 0, np.frexp(sizes)[1] - 1 - TOP, -BIAS)
    exponents = np.clip(exponents, -BIAS, LARGEST - BIAS)
    with np.errstate(invalid="ignore", over="ignore"):  # callers check sizes
        shares = np.ldexp(np.abs(part), -exponents[:, None])
    codes = np.zeros_like(part, UINT8)
    levels = _four_bits.SIZES["mxfp4"]
    for code, (low, high) in enumerate(pairwise(levels)):
        middle = (low + high) / 2
        codes += shares >= middle if code % 2 else shares > middle  # a tie goes to an even code
    codes |= np.where(part < 0, UINT8.type(8), UINT8.type(0))  # bit 3 is the sign
    return codes[:, ::2] | codes[:, 1::2] << 4, (exponents + BIAS).astype(UINT8), sizes


class Mxfp4(FourBits):
    """A frozen MXFP4 weight, or a stack of weights; see ``Quantized`` for its interface.

    Attributes
    ----------
    packed : (..., outputs, inputs / 2) uint8
        Two codes per byte, the first in its low bits.
    scales : (..., outputs, inputs / 32) uint8
        The exponent of each block of 32 values, plus 127.

    Raises
    ------
    ShapeError, DTypeError
        The arrays do not fit each other, or dtype is not a float dtype.
    """

    KIND, SCALES, OF_STACKS = "mxfp4", UINT8, True

    def __init__(self, packed: Array, scales: Array, *, dtype: Any = FLOAT32) -> None:
        super().__init__(packed, scales, dtype=dtype)
        self._powers = to_device_of(powers_of_two(), packed)

    def coded(self) -> tuple[Array, Array, Array]:
        """Return codes, powers of two and exponents, the arguments of the ops of 4-bit weights."""
        return self.packed.reshape(-1), self._powers, self.scales.reshape(-1)

    def state(self) -> dict[str, Any]:
        """Return the arrays of files, by the last part of their names: blocks and scales."""
        blocks = self.packed.reshape(*self.scales.shape, BLOCK // 2)  # (..., outputs, blocks, 16)
        return {"weight_blocks": blocks, "weight_scales": self.scales}

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint with such weights."""
        return {"quant_method": "mxfp4"}

    def requantized(self, w: Array) -> Self:
        """Return another weight, quantized in the same way as this one."""
        quantized: Any = mxfp4_quantize(w)
        return quantized

    @classmethod
    def from_state(cls, state: Mapping[str, Any], dtype: Any = FLOAT32) -> Self:
        """Return the weight from the arrays of ``state``, or from the arrays of a gpt-oss file.

        The two names end in ``blocks`` and ``scales``: (..., outputs, inputs / 32, 16) and
        (..., outputs, inputs / 32) uint8.  ``dtype`` is the dtype of the dense weight, which files
        do not contain.

        Raises
        ------
        ConfigError
            An array is missing, or its shape, dtype or values do not fit the other array; the
            message names it.
        """
        call = "Mxfp4.from_state"
        ends = {
            end: [n for n in checked_state(call, state) if n.endswith(end)]
            for end in ("blocks", "scales")
        }
        if any(len(names) != 1 for names in ends.values()) or len(state) != 2:
            names = ", ".join(map(str, state)) or "nothing"
            raise ConfigError(
                f"{call}: there is {names}; pass two arrays, ..._blocks and ..._scales"
            )
        (blocks_name,), (scales_name,) = ends.values()
        shape = tuple(getattr(state[scales_name], "shape", ()))
        if len(shape) not in (2, 3):
            raise ConfigError(
                f"{call}: {scales_name} is {shape}; it must be (..., outputs, blocks)"
            )
        scales = array_of(call, state, scales_name, shape, UINT8)
        blocks = array_of(call, state, blocks_name, (*shape, BLOCK // 2), UINT8)
        if bool((scales > LARGEST).any()):
            raise ConfigError(f"{call}: {scales_name} holds 255, which is NaN; use 0 .. 254")
        packed = blocks.reshape(*shape[:-1], shape[-1] * BLOCK // 2)  # (..., outputs, inputs / 2)
        return cls(packed, scales, dtype=float_dtype(call, dtype))
