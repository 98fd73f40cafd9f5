"""A weight plus the change of its adapter, as a file has it, of which products make parts.

    linear(x, SummedWeight(weight, a, b, scale, "q4_0"))        y = x Q(weight + scale b a)^T

A part is made in one pass, from the weight as it is stored, and read by the product while it is
still in cache: there is neither a dense sum nor a dense weight.  That is so of kinds whose scales
belong to few neighbouring values of a row.  int8 has one scale for a row, and nf4-double codes the
scales of all blocks together: a first pass over the rows takes their largest magnitudes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ..linear.lora_merge import lora_add_
from ._file_values import KINDS, block_of
from .mxfp4 import Mxfp4
from .nf4 import Nf4, double_quantized
from .nf4_dequantize import double_absmax, sizes_of
from .rounded_sum import nf4_rounded_sum_, rounded_sum_
from .weight import CHUNK_STEP, Chunked, Quantized

DOUBLE = "nf4-double"
SUMMED = (*KINDS, DOUBLE)  # the kinds of files whose weights can be made part by part


def can_sum(kind: str, weight: Any) -> bool:
    """Return whether parts of a weight can be made by themselves: rows are whole blocks."""
    if kind not in SUMMED or weight.dtype not in KERNEL_DTYPES:
        return False
    return weight.size > 0 and weight.shape[-1] % block_of(_plain(kind)) == 0


class SummedWeight(Chunked):
    """``weight + scale b a`` as a reader of a file of a kind gets it.

    Parameters
    ----------
    weight : (outputs, inputs) or (experts, outputs, inputs) array or Quantized
    a, b : (rank, inputs) and (outputs, rank) array, or with experts as the first axis
    scale : float
    kind : str
        One of ``SUMMED`` for which ``can_sum`` the weight.
    """

    least_step = CHUNK_STEP  # whole blocks

    def __init__(self, weight: Any, a: Array, b: Array, scale: float, kind: str) -> None:
        self.weight, self.kind, self.scale = weight, kind, float(scale)
        self.home = weight.home if isinstance(weight, Quantized) else weight
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        self.a, self.b = (_matrix(each) for each in (a, b))
        self.sizes: Array | None = None
        if kind == "int8":
            self.sizes = self._largest(self.shape[-1])
        elif kind == DOUBLE:
            held = double_quantized(self._largest(block_of("nf4")))
            table = double_absmax(held["absmax_scale"], held["absmax_offset"])
            self.sizes = sizes_of(table, held["absmax_codes"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.weight!r}, {self.kind})"

    @property
    def experts(self) -> int:
        """The number of matrices."""
        return self.shape[0] if len(self.shape) == 3 else 1

    def _dense(self, rows: slice, columns: slice, dtype: np.dtype[Any]) -> Array:
        w = empty((rows.stop - rows.start, columns.stop - columns.start), dtype, like=self.a)
        return self._write(w, rows.start * self.shape[-1] + columns.start)

    def dense_where(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        """Return a stack in ``dtype``; matrices of groups without rows may hold anything."""
        w = empty((self.rows, self.shape[-1]), dtype, like=self.a)
        return self._write(w, 0, offsets).reshape(self.shape)

    def _write(self, w: Array, start: int, offsets: Array | None = None) -> Array:
        """Write the part that begins at value ``start`` to w, and return it."""
        weight, pair, more = self.weight, (self.a, self.b), (self.sizes, offsets)
        how: Any = {"kind": _plain(self.kind), "scale": self.scale, "members": self.experts}
        if isinstance(weight, Nf4 | Mxfp4):
            packed, absmax, codes = weight.coded()
            how |= {"block": weight.block, "stored": weight.kind, "start": start}
            return nf4_rounded_sum_(w, packed, absmax, *pair, codes, *more, **how)
        if not isinstance(weight, Quantized):
            dense = weight.reshape(self.rows, self.shape[-1])
            return rounded_sum_(w, dense, *pair, *more, start=start, **how)
        top, left = divmod(start, self.shape[-1])
        columns = slice(left, left + w.shape[1])
        for a, rows in self._of_experts(slice(top, top + len(w))):
            dense = weight._dense(rows, columns, FLOAT32)
            low, sizes = contiguous(a[:, columns]), self._sizes_of(rows, columns)
            part = w[rows.start - top : rows.stop - top]
            rounded_sum_(part, dense, low, self.b[rows], sizes, **how | {"members": 1})
        return w

    def _of_experts(self, rows: slice) -> Iterator[tuple[Array, slice]]:
        """Yield a of each expert with some of these rows, and its part of them."""
        height, rank = self.rows // self.experts, self.b.shape[1]
        for expert in range(rows.start // height, -(-rows.stop // height)):
            first, last = expert * height, (expert + 1) * height
            own = slice(max(first, rows.start), min(last, rows.stop))
            yield self.a[expert * rank : (expert + 1) * rank], own

    def _sizes_of(self, rows: slice, columns: slice) -> Array | None:
        """Return the given sizes of a part."""
        if self.sizes is None or self.kind == "int8":
            return None if self.sizes is None else self.sizes[rows]
        block = block_of(_plain(self.kind))
        whole = self.sizes.reshape(self.rows, -1)
        return whole[rows, columns.start // block : columns.stop // block].reshape(-1)

    def _largest(self, values: int) -> Array:
        """Return the largest magnitude of each so many values of a row of the sum."""
        result = empty((self.size // values,), FLOAT32, like=self.a)
        per_row = self.shape[-1] // values
        for part in self._chunks(self.a, self.rows, self.shape[-1]):
            for a, rows in self._of_experts(part):
                total = self._dense_source(rows)
                lora_add_(total, a, self.b[rows], scale=self.scale)
                largest = np.abs(total, out=total).reshape(-1, values).max(axis=1)
                result[rows.start * per_row : rows.stop * per_row] = largest
                del total
        return result

    def _dense_source(self, rows: slice) -> Array:
        """Return rows of the weight in float32, a new array."""
        weight, columns = self.weight, slice(0, self.shape[-1])
        if isinstance(weight, Quantized):
            return weight._dense(rows, columns, FLOAT32)
        dense: Array = weight.reshape(self.rows, -1)[rows].astype(FLOAT32)
        return dense


def _plain(kind: str) -> str:
    """Return the kind of blocks of a kind."""
    return "nf4" if kind == DOUBLE else kind


def _matrix(factor: Array) -> Array:
    """Return a factor in float32, those of all experts one behind another."""
    whole = factor.reshape(-1, factor.shape[-1]).astype(FLOAT32, copy=False)
    return contiguous(whole)
