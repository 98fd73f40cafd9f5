"""8-bit weights in the format of bitsandbytes: int8 codes, and a scale for each row.

w = codes * absmax / 127

Dettmers and others, LLM.int8(), 2022.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array, float_dtype
from ...core.gpu import device_of
from ...errors import ConfigError
from ...placement import check_library, to_device_of, to_numpy
from ..common.int8_codes import INT8
from ._state import array_of, check_array, checked_state
from .int8_product import MOST_ROWS, int8_dequantize_, int8_few_rows_
from .int8_quantize import int8_quantize_forward
from .weight import Quantized, check_finite, dense_weight, in_kernel_dtype, on_gpu


def int8_weight(w: Array) -> "Int8":
    """Quantize a weight to 8 bits: each row is integers -127 .. 127 times a scale.

    Parameters
    ----------
    w : (outputs, inputs) or (experts, outputs, inputs) float
        The dense weight, or a stack of weights, as an array of any library.

    Returns
    -------
    weight : Int8
        On the device of w; its codes and absmax equal those of bitsandbytes, which rounds w to
        float16 first.  For a value in the middle between two codes bitsandbytes may choose the
        other code, as it does not round 127 / absmax once.

    Raises
    ------
    RangeError
        A value is not finite; the message names its position.
    ShapeError, DTypeError
        w is not a matrix or a stack of floats, or is quantized already.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import Int8, int8_linear, int8_weight, linear
    >>> rng = np.random.default_rng(0)
    >>> x, w = rng.standard_normal((4, 64), np.float32), rng.standard_normal((32, 64), np.float32)
    >>> weight = int8_weight(w)
    >>> assert isinstance(weight, Int8)
    >>> assert weight.nbytes < w.nbytes / 3
    >>> assert np.abs(int8_linear(x, weight) - linear(x, w)).max() < 0.5
    """
    w = dense_weight("int8_weight", w, stacks=True)
    with device_of(w):
        values = in_kernel_dtype(w)
        codes, _, absmax = int8_quantize_forward(values)
        check_finite("int8_weight", values, absmax)
        return Int8(codes, absmax, dtype=w.dtype)


class Int8(Quantized):
    """A frozen 8-bit weight, or a stack of weights; see ``Quantized`` for its interface.

    ``int8_linear`` rounds x; ``linear`` and other ops that accept a ``Quantized`` do not.

    Attributes
    ----------
    codes : (..., outputs, inputs) int8
        The codes, in -127 .. 127.
    absmax : (..., outputs) float32
        The largest absolute value of each row, which has code 127 or -127.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        The arrays do not fit each other, or dtype is not a float dtype.

    Notes
    -----
    On a GPU, a product with 1 to 16 rows reads the codes once, and takes as long as that read.  A
    product with more rows uses chunks of the weight that are dequantized into L2: if the product
    converted codes to floats itself, tensor cores would wait for that in each tile of rows.
    """

    KIND = "int8"

    def __init__(self, codes: Array, absmax: Array, *, dtype: Any = FLOAT32) -> None:
        sizes = tuple(getattr(codes, "shape", ()))
        check_array("Int8: codes", codes, np.int8, sizes if len(sizes) == 3 else None)
        check_array("Int8: absmax", absmax, FLOAT32, sizes[:-1])
        self.codes = self.home = contiguous(codes)
        self.absmax, self.dtype = absmax, float_dtype("Int8", dtype)
        self.shape = tuple(map(int, sizes))

    def held(self) -> dict[str, Any]:
        """Return the arrays that store the weight, by name."""
        return {"codes": self.codes, "absmax": self.absmax}

    def facts(self) -> dict[str, Any]:
        """Return the arguments of the constructor other than the arrays of ``held``."""
        return {"dtype": self.dtype}

    @property
    def stacks(self) -> bool:
        """True for a matrix, as each row has its own absmax."""
        return self.ndim == 2

    def _cut(self, axis: int, places: Sequence[slice]) -> Self:
        """Return rows or columns; a part of a row has the absmax of the whole row."""
        codes = [self.codes[:, where] if axis else self.codes[where] for where in places]
        absmax = [self.absmax] if axis else [self.absmax[where] for where in places]
        return type(self)(np.concatenate(codes, axis), np.concatenate(absmax), dtype=self.dtype)

    def _dense(self, rows: slice, columns: slice, dtype: np.dtype[Any]) -> Array:
        codes = self.codes.reshape(self.rows, self.shape[-1])[rows, columns]
        dense = empty(codes.shape, dtype, like=self.codes)
        int8_dequantize_(dense, codes, self.absmax.reshape(-1)[rows])
        return dense

    def _few_rows(self, x: Array, out: Array, add: bool) -> bool:
        if len(x) > MOST_ROWS or not on_gpu(x) or x.dtype not in KERNEL_DTYPES:
            return False
        if not out.flags.c_contiguous or out.dtype not in (x.dtype, FLOAT32):
            return False
        int8_few_rows_(x, self.codes, self.absmax, out, add=add)
        return True

    def state(self) -> dict[str, Any]:
        """Return the arrays that bitsandbytes saves, by the last part of their names."""
        # weight_format 0: codes in row order
        row_major = to_device_of(np.zeros((), np.uint8), self.codes)
        return {"weight": self.codes, "SCB": self.absmax, "weight_format": row_major}

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint with such weights."""
        facts = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
        return {**facts, "llm_int8_threshold": 6.0, "llm_int8_has_fp16_weight": False}

    def requantized(self, w: Array) -> Self:
        """Return another matrix, quantized in the same way as this one."""
        quantized: Any = int8_weight(w)
        return quantized

    @classmethod
    def from_state(cls, state: Mapping[str, Any], dtype: Any = FLOAT32) -> Self:
        """Return the weight from the arrays of ``state``, or from arrays that bitsandbytes saved.

        ``dtype`` is the dtype of the dense weight, which files do not contain.

        Raises
        ------
        ConfigError
            An array is missing, or its shape, dtype or values do not fit the other arrays; the
            message names it.
        """
        call = "Int8.from_state"
        codes: Any = checked_state(call, state).get("weight")
        if getattr(codes, "ndim", 2) not in (2, 3):
            raise ConfigError(f"{call}: weight is {tuple(codes.shape)}; it must have 2 or 3 axes")
        shape = tuple(getattr(codes, "shape", (0, 0)))
        codes = array_of(call, state, "weight", shape, INT8)
        absmax = array_of(call, state, "SCB", shape[:-1], FLOAT32)
        form = state.get("weight_format", np.zeros(()))
        check_library(f"{call}: weight_format", form)
        if to_numpy(form).any():
            raise ConfigError(f"{call}: codes are not in row order; save them with a newer program")
        if bool((absmax < 0).any()):
            raise ConfigError(f"{call}: SCB holds a negative number; all must be 0 or more")
        if bool((codes == -128).any()):
            raise ConfigError(f"{call}: weight holds -128; codes are in -127 .. 127")
        return cls(codes, absmax, dtype=float_dtype(call, dtype))
