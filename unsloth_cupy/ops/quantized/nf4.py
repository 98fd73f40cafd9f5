"""4-bit weights, NF4 and FP4, with the bytes of bitsandbytes.

w = level[code] * absmax        one absmax per block; with double quantization
absmax = map[absmax_code] * absmax_scale + absmax_offset        one absmax_scale per 256 blocks

Dettmers, Pagnoni, Holtzman and Zettlemoyer, QLoRA, 2023.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from ...core.arrays import empty
from ...core.call import check_options, in_any_case, is_integer, is_number
from ...core.dtypes import FLOAT32, FLOATS, KERNEL_DTYPES, Array, float_dtype
from ...core.gpu import device_of
from ...errors import ConfigError, DTypeError, naming
from ...placement import to_device_of
from ..common import dynamic_codes
from ..common.checks import check_choice
from ..linear.linear import linear
from . import _four_bits
from ._state import array_of, check_array, check_table, json_of, stored_shape, weight_shape
from .nf4_dequantize import SCALES, double_absmax, nf4_dequantize_, sizes_of
from .nf4_product import has_kernel, nf4_product_
from .nf4_quantize import KINDS, nf4_quantize_forward
from .weight import (
    Quantized,
    check_finite,
    cut_flat,
    dense_weight,
    in_blocks,
    in_kernel_dtype,
    on_gpu,
)

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # powers of two: kernels shift an index
LARGEST = float(np.finfo(FLOAT32).max)
NESTED = dynamic_codes.BLOCK  # blocks that share an absmax_scale


@check_options
def nf4_quantize(w: Array, *, block: int = 64, double: bool = False, kind: str = "nf4") -> "Nf4":
    """Quantize a weight to 4 bits: ``w`` is about ``level[code] * absmax``, block by block.

    Parameters
    ----------
    w : (outputs, inputs) or (experts, outputs, inputs) float
        The dense weight, or a stack of weights, as an array of any library.  Blocks are consecutive
        values of the flattened weight; the last block may be short.
    block : int
        Values that share an absmax: a power of two, 32 to 4096.
    double : bool
        Store absmax in 8 bits, too: 4.127 bits per value instead of 4.5 with block 64.
    kind : str
        ``"nf4"`` or ``"fp4"``.

    Returns
    -------
    weight : Nf4
        On the device of w; its bytes are those of bitsandbytes.

    Raises
    ------
    ConfigError
        block or kind is not one of these.
    RangeError
        A value is not finite; the message names its position.
    ShapeError, DTypeError
        w is not a matrix or a stack of floats, or is quantized already.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import Nf4, linear, nf4_linear, nf4_quantize
    >>> x, w = np.random.default_rng(0).standard_normal((2, 64, 64), np.float32)
    >>> weight = nf4_quantize(w)
    >>> assert isinstance(weight, Nf4) and weight.nbytes < w.nbytes / 6
    >>> np.testing.assert_allclose(nf4_linear(x, weight), linear(x, weight), rtol=1e-5)
    """
    kind = in_any_case(kind, KINDS)
    _check_format("nf4_quantize", block, kind)
    w = dense_weight("nf4_quantize", w, stacks=True)
    with device_of(w):
        values = in_kernel_dtype(w)
        flat = values.reshape(math.prod(w.shape[:-1]), w.shape[-1])  # (all rows, inputs)
        packed, absmax = nf4_quantize_forward(flat, block=block, kind=kind)
        check_finite("nf4_quantize", values, absmax)
        scales = double_quantized(absmax) if double else {"absmax": absmax}
        return Nf4(packed, tuple(w.shape), block=block, kind=kind, dtype=w.dtype, **scales)


def double_quantized(absmax: Array) -> dict[str, Any]:
    """Return absmax as one byte per block, a scale for each 256 blocks, and an offset."""
    # the mean: what is left has either sign; empty: the sum of no values is 0
    offset = absmax.mean(dtype=np.float64).astype(FLOAT32) if absmax.size else absmax.sum()
    codes, scale = dynamic_codes.encode(absmax - offset, signed=True)
    return {"absmax_codes": codes, "absmax_scale": scale, "absmax_offset": float(offset)}


class Nf4(Quantized):
    """A frozen 4-bit weight; see ``Quantized`` for its interface.

    Attributes
    ----------
    packed : (ceil(outputs * inputs / 2),) uint8
        Two codes per byte, the first in its high bits.
    absmax : (blocks,) float32
        The largest absolute value of each block.
    block : int
    kind : str
        nf4 or fp4.
    absmax_codes, absmax_scale, absmax_offset : (blocks,) uint8, (blocks / 256,) float32, float
        The stored form of absmax with double quantization; None without.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        The arrays do not fit shape and block, or an option is unknown.
    """

    KIND = "nf4"
    _absmax: Any

    def __init__(
        self,
        packed: Array,
        shape: tuple[int, ...],
        *,
        absmax: Array | None = None,
        absmax_codes: Array | None = None,
        absmax_scale: Array | None = None,
        absmax_offset: float | None = None,
        block: int = 64,
        kind: str = "nf4",
        dtype: Any = FLOAT32,
    ) -> None:
        _check_format("Nf4", block, kind)
        self.packed = self.home = packed
        self.shape, self.dtype = weight_shape("Nf4", shape, stacks=True), float_dtype("Nf4", dtype)
        self.block, self.kind = int(block), kind
        blocks = -(-self.size // block)
        check_array("Nf4: packed", packed, np.uint8, (-(-self.size // 2),))
        if absmax_codes is None:
            check_array("Nf4: absmax", absmax, FLOAT32, (blocks,))
        else:
            check_array("Nf4: absmax_codes", absmax_codes, np.uint8, (blocks,))
            check_array("Nf4: absmax_scale", absmax_scale, FLOAT32, (-(-blocks // NESTED),))
            if not is_number(absmax_offset):
                raise ConfigError(f"Nf4: absmax_offset={absmax_offset!r}; pass a number")
        self.absmax_codes, self.absmax_scale = absmax_codes, absmax_scale
        self.absmax_offset, self._absmax = absmax_offset, absmax  # _absmax: as kernels read it
        if absmax_scale is not None and absmax_offset is not None:
            self._absmax = double_absmax(absmax_scale, absmax_offset)
            self.absmax_scale = self._absmax[SCALES:]

    @property
    def double(self) -> bool:
        """True if absmax is stored in 8 bits."""
        return self.absmax_codes is not None

    @property
    def absmax(self) -> Array:
        """The largest absolute value of each block, in float32."""
        return sizes_of(self._absmax, self.absmax_codes)

    def coded(self) -> tuple[Array, Array, Array | None]:
        """Return packed, absmax and absmax_codes, the arguments of the ops of 4-bit weights."""
        return self.packed, self._absmax, self.absmax_codes

    def held(self) -> dict[str, Any]:
        """Return the arrays that store the weight, by name."""
        if not self.double:
            return {"packed": self.packed, "absmax": self._absmax}
        scales = {"absmax_codes": self.absmax_codes, "absmax_scale": self.absmax_scale}
        return {"packed": self.packed, **scales}

    def facts(self) -> dict[str, Any]:
        """Return the arguments of the constructor other than the arrays of ``held``."""
        known = {"shape": self.shape, "block": self.block, "kind": self.kind, "dtype": self.dtype}
        return known | {"absmax_offset": self.absmax_offset}

    @property
    def stacks(self) -> bool:
        """True if no block is short.  With double quantization each weight has its own offset."""
        return self.ndim == 2 and not self.double and self.size % self.block == 0

    def _cut(self, axis: int, places: Sequence[slice]) -> Self:
        """Return rows or columns; absmax is float32 if a cut separates blocks with one scale."""
        shape, block = self.shape, self.block
        if not in_blocks(shape, axis, places, block):
            borders = ", ".join(f"{where.start}:{where.stop}" for where in places[:4])
            problem = f"{('rows', 'columns')[axis]} {borders} split blocks of {block} values"
            raise ConfigError(f"{self!r}: {problem}; cut at multiples of {block}, or use int8")
        size = sum(where.stop - where.start for where in places)
        facts = self.facts() | {"shape": (shape[0], size) if axis else (size, shape[1])}
        arrays: dict[str, Any] = {"packed": cut_flat(self.packed, shape, axis, places, 2)}
        if self.double and not axis and in_blocks(shape, 0, places, block * NESTED):
            for name, values in (("absmax_codes", block), ("absmax_scale", block * NESTED)):
                arrays[name] = cut_flat(getattr(self, name), shape, 0, places, values)
        else:
            arrays["absmax"] = cut_flat(self.absmax, shape, axis, places, block)
            facts["absmax_offset"] = None
        return type(self)(**arrays, **facts)

    def _dense(self, rows: slice, columns: slice, dtype: np.dtype[Any]) -> Array:
        inputs = self.shape[-1]
        if not (on_gpu(self.packed) and dtype in KERNEL_DTYPES):
            arguments = (self.packed, self.absmax, rows, columns, inputs, self.block, self.kind)
            return _four_bits.decode(*arguments).astype(dtype, copy=False)
        shape = rows.stop - rows.start, columns.stop - columns.start
        w, start = empty(shape, dtype, like=self.packed), rows.start * inputs + columns.start
        arrays = w, self.packed, self._absmax, self.absmax_codes
        return nf4_dequantize_(
            *arrays, columns=inputs, start=start, block=self.block, kind=self.kind
        )

    def dense_where(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        """Return a stack in ``dtype``; matrices of groups without rows may hold anything."""
        if not (on_gpu(self.packed) and dtype in KERNEL_DTYPES):
            return self.dequantize(dtype)
        w = empty((self.rows, self.shape[-1]), dtype, like=self.packed)
        arrays = w, self.packed, self._absmax, self.absmax_codes, offsets
        how: Any = {"columns": self.shape[-1], "block": self.block, "kind": self.kind}
        return nf4_dequantize_(*arrays, **how).reshape(self.shape)

    def _few_rows(self, x: Array, out: Array, add: bool) -> bool:
        if not (on_gpu(self.packed) and has_kernel(x, out)):
            return False
        arrays = self.packed, self._absmax, self.absmax_codes
        nf4_product_(out, x, *arrays, block=self.block, kind=self.kind, add=add)
        return True

    def state(self) -> dict[str, Any]:
        """Return the arrays that bitsandbytes saves, by the last part of their names."""
        facts: dict[str, Any] = {"quant_type": self.kind, "blocksize": self.block}
        facts |= {"dtype": self.dtype.name, "shape": list(self.shape)}
        arrays = {"absmax": self._absmax}
        if self.double:
            arrays = {"absmax": self.absmax_codes, "nested_absmax": self.absmax_scale}
            arrays["nested_quant_map"] = to_device_of(dynamic_codes.dynamic_map(True), self.packed)
            facts |= {"nested_blocksize": NESTED, "nested_dtype": "float32"}
            facts["nested_offset"] = self.absmax_offset
        levels = _four_bits.format_of(self.kind).levels
        arrays["quant_map"] = to_device_of(levels, self.packed)
        text = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        arrays[f"quant_state.bitsandbytes__{self.kind}"] = to_device_of(text, self.packed)
        named = {f"weight.{name}": array for name, array in arrays.items()}
        return {"weight": self.packed[:, None], **named}

    def quantization_config(self, dtype: str) -> dict[str, Any]:
        """Return the ``quantization_config`` of a checkpoint; products compute in ``dtype``."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_compute_dtype": dtype,
        }

    def requantized(self, w: Array) -> Self:
        """Return another matrix, quantized in the same way as this one."""
        weight: Any = nf4_quantize(w, block=self.block, double=self.double, kind=self.kind)
        return weight

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the weight from the arrays of ``state``, or from arrays that bitsandbytes saved.

        Raises
        ------
        ConfigError
            An array is missing, or its shape, dtype or values do not fit the other arrays; the
            message names it.
        """
        call = "Nf4.from_state"
        facts: Any = json_of(
            call, state, [f"weight.quant_state.bitsandbytes__{kind}" for kind in KINDS]
        )
        block, kind = facts.get("blocksize"), facts.get("quant_type")
        _check_format(call, block, kind)
        shape = stored_shape(call, facts)
        dtype = next((d for d in FLOATS if d.name == facts.get("dtype")), None)
        if dtype is None:
            raise ConfigError(f"{call}: dtype {facts.get('dtype')!r} is not a float dtype")
        size = math.prod(shape)
        blocks = -(-size // block)
        stored: Any = state.get("weight")
        if hasattr(stored, "view") and stored.dtype in FLOATS:  # bnb_4bit_quant_storage, for FSDP
            state = {**state, "weight": stored.reshape(-1).view(np.uint8)[:, None]}
        packed = array_of(call, state, "weight", (-(-size // 2), 1), np.uint8)
        check_table(call, state, "weight.quant_map", _four_bits.format_of(kind).levels)
        scales: dict[str, Any]
        if "weight.nested_absmax" in state:
            check_table(call, state, "weight.nested_quant_map", dynamic_codes.dynamic_map(True))
            codes = array_of(call, state, "weight.absmax", (blocks,), np.uint8)
            scale = array_of(call, state, "weight.nested_absmax", (-(-blocks // NESTED),), FLOAT32)
            offset = facts.get("nested_offset")
            known = isinstance(offset, float) and abs(offset) <= LARGEST  # False for NaN, too
            if facts.get("nested_blocksize") != NESTED or not known:
                raise ConfigError(f"{call}: nested_blocksize or nested_offset of {facts} is wrong")
            scales = {"absmax_codes": codes, "absmax_scale": scale, "absmax_offset": offset}
        else:
            scales = {"absmax": _absmax_of(call, state, (blocks,), shape, block)}
        return cls(packed[:, 0], shape, block=block, kind=kind, dtype=dtype, **scales)


@naming("nf4_linear", "linear")
def nf4_linear(x: Array, weight: Any, bias: Array | None = None) -> Array:
    """Return ``linear(x, weight, bias)`` for a 4-bit weight: ``x @ weight.T + bias``.

    Parameters
    ----------
    x : (*rows, inputs) float
    weight : Nf4
    bias : (outputs,) dtype of x or float32, optional

    Returns
    -------
    y : (*rows, outputs) float

    Raises
    ------
    DTypeError
        weight is not an Nf4, or the dtypes of x and bias do not match.
    ShapeError
        The arrays do not fit each other; the message shows the whole call.
    """
    if not isinstance(weight, Nf4):
        cure = "pass nf4_quantize(weight), or call linear"
        raise DTypeError(f"nf4_linear: weight is {type(weight).__name__}, not an Nf4; {cure}")
    return linear(x, weight, bias)  # type: ignore[arg-type]  # a Stored, like those of models


def _absmax_of(call: str, state: Mapping[str, Any], flat: Any, shape: Any, block: int) -> Array:
    """Return absmax by blocks; bitsandbytes on a CPU saves it transposed and in bfloat16."""
    name = "weight.absmax"
    absmax = state.get(name)
    if getattr(absmax, "ndim", 1) == 2 and len(shape) == 2:
        transposed = array_of(call, state, name, (shape[1] // block, shape[0]), FLOATS[1])
        return transposed.T.astype(FLOAT32).reshape(-1)  # (blocks,)
    return array_of(call, state, name, flat, FLOAT32)


def _check_format(call: str, block: Any, kind: Any) -> None:
    """Raise ConfigError unless block and kind are known."""
    check_choice(call, "kind", kind, KINDS)
    if not is_integer(block) or block not in BLOCKS:
        raise ConfigError(f"{call}(block={block!r}): choose from {', '.join(map(str, BLOCKS))}")
