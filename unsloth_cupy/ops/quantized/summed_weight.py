"""A weight plus the change of its adapter, as a file has it, of which products make parts.

    linear(x, SummedWeight(weight, a, b, scale, "q4_0"))        y = x Q(weight + scale b a)^T

A part is made in one pass, from the weight as it is stored, and read by the product while it is
still in cache: there is neither a dense sum nor a dense weight.  That is so of kinds whose scales
belong to few neighbouring values of a row.  int8 has one scale for a row, nf4-double codes the
scales of all blocks together, and that of ternary is a mean of all: a first pass over the rows
takes their largest magnitudes or their sums.  A kind without a kernel has a ``reader``, from a part
of the sum to what a reader of the file gets for it, which computes on the host, say.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty
from ...core.dtypes import FLOAT32, KERNEL_DTYPES, Array
from ...core.stand_in import is_planned, representative_steps
from ..linear.lora_merge import lora_add_
from ._file_values import KINDS, block_of
from ._planes import row_blocks
from ._ternary_rules import absmean, totals
from .blocks import FourBits
from .nf4 import Nf4, double_quantized
from .nf4_dequantize import double_absmax, sizes_of
from .rounded_sum import nf4_rounded_sum_, rounded_sum_
from .weight import CHUNK_STEP, Chunked, Quantized

DOUBLE = "nf4-double"
Reader = Callable[[Array], Array]  # from rows of whole blocks in float32 to as many numbers
SUMMED = (*KINDS, DOUBLE)  # the kinds of files whose weights can be made part by part


def can_sum(kind: str, weight: Any, block: int | None = None) -> bool:
    """Return whether parts of a weight can be made by themselves: rows are whole blocks.

    ``block`` is that of a kind with a ``reader``.
    """
    if (block is None and kind not in SUMMED) or weight.dtype not in KERNEL_DTYPES:
        return False
    values = block_of(_plain(kind)) if block is None else block
    return weight.size > 0 and weight.shape[-1] % values == 0


class SummedWeight(Chunked):
    """``weight + scale b a`` as a reader of a file of a kind gets it.

    Parameters
    ----------
    weight : (outputs, inputs) or (experts, outputs, inputs) array or Quantized
    a, b : (rank, inputs) and (outputs, rank) array, or with experts as the first axis
    scale : float
    kind : str
        One of ``SUMMED``, or any kind with a ``reader``; ``can_sum`` the weight.
    reader : callable, optional
        It rounds rows of whole blocks of ``block`` values each by themselves.
    """

    def __init__(
        self,
        weight: Any,
        a: Array,
        b: Array,
        scale: float,
        kind: str,
        reader: Reader | None = None,
        block: int | None = None,
    ) -> None:
        self.reader, self.least_step = reader, max(CHUNK_STEP, block or 0)  # whole blocks
        self.weight, self.kind, self.scale = weight, kind, float(scale)
        self.home = weight.home if isinstance(weight, Quantized) else weight
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        self.a, self.b = (_matrix(each) for each in (a, b))
        self.sizes: Array | None = None
        if reader is not None:
            return
        if kind == "ternary":
            self.sizes = self._mean()
        elif kind == "int8":
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
        if self.reader is not None and self.experts == 1:
            weight = self.reader(self._sum(self.a, rows, columns))
            return weight.astype(dtype, copy=False)
        w = empty((rows.stop - rows.start, columns.stop - columns.start), dtype, like=self.a)
        return self._write(w, rows.start * self.shape[-1] + columns.start)

    def dense_where(self, offsets: Array, dtype: np.dtype[Any]) -> Array:
        """Return a stack in ``dtype``; matrices of groups without rows may hold anything."""
        w = empty((self.rows, self.shape[-1]), dtype, like=self.a)
        return self._write(w, 0, offsets).reshape(self.shape)

    def _write(self, w: Array, start: int, offsets: Array | None = None) -> Array:
        """Write the part that begins at value ``start`` to w, and return it."""
        if self.reader is not None:
            return self._read(self.reader, w, start, offsets)
        weight, pair, more = self.weight, (self.a, self.b), (self.sizes, offsets)
        how: Any = {"kind": _plain(self.kind), "scale": self.scale, "members": self.experts}
        if isinstance(weight, Nf4 | FourBits):
            packed, absmax, codes = weight.coded()
            how |= {"block": weight.block, "stored": weight.kind, "start": start}
            return nf4_rounded_sum_(w, packed, absmax, *pair, codes, *more, **how)
        if not isinstance(weight, Quantized):
            dense = weight.reshape(self.rows, self.shape[-1])
            return rounded_sum_(w, dense, *pair, *more, start=start, **how)
        top, columns = self._place(w, start)
        for a, rows in self._of_experts(slice(top, top + len(w))):
            dense = weight._dense(rows, columns, FLOAT32)
            low, sizes = contiguous(a[:, columns]), self._sizes_of(rows, columns)
            part = w[rows.start - top : rows.stop - top]
            rounded_sum_(part, dense, low, self.b[rows], sizes, **how | {"members": 1})
        return w

    def _read(self, reader: Reader, w: Array, start: int, offsets: Array | None) -> Array:
        """Do what ``_write`` does by the reader, experts with rows one by one."""
        top, columns = self._place(w, start)
        height = self.rows // self.experts
        ends = None if offsets is None or is_planned(offsets) else offsets.tolist()
        for a, rows in self._of_experts(slice(top, top + len(w))):
            expert = rows.start // height
            if ends is None or ends[expert] < ends[expert + 1]:
                w[rows.start - top : rows.stop - top] = reader(self._sum(a, rows, columns))
        return w

    def _place(self, w: Array, start: int) -> tuple[int, slice]:
        """Return the first row and the columns of a part."""
        top, left = divmod(start, self.shape[-1])
        return top, slice(left, left + w.shape[1])

    def _of_experts(self, rows: slice) -> Iterator[tuple[Array, slice]]:
        """Yield a of each expert with some of these rows, and its part of them."""
        height, rank = self.rows // self.experts, self.b.shape[1]
        for expert in range(rows.start // height, -(-rows.stop // height)):
            first, last = expert * height, (expert + 1) * height
            own = slice(max(first, rows.start), min(last, rows.stop))
            yield self.a[expert * rank : (expert + 1) * rank], own

    def _sizes_of(self, rows: slice, columns: slice) -> Array | None:
        """Return the given sizes of a part."""
        if self.sizes is None or self.kind == "ternary":
            return self.sizes
        if self.kind == "int8":
            return self.sizes[rows]
        block = block_of(_plain(self.kind))
        whole = self.sizes.reshape(self.rows, -1)
        return whole[rows, columns.start // block : columns.stop // block].reshape(-1)

    def _largest(self, values: int) -> Array:
        """Return the largest magnitude of each so many values of a row of the sum."""
        result = empty((self.size // values,), FLOAT32, like=self.a)
        per_row = self.shape[-1] // values
        for rows, sizes in self._sizes(self._chunks(self.a, self.rows, self.shape[-1])):
            largest = sizes.reshape(-1, values).max(axis=1)
            result[rows.start * per_row : rows.stop * per_row] = largest
        return result

    def _mean(self) -> Array:
        """Return the scale of ternary, added in the order in which a whole weight is."""
        result = empty((self.rows, 1), np.float64, like=self.a)
        parts = representative_steps(self.a, row_blocks(self.rows, self.shape[-1]))
        for rows, sizes in self._sizes(parts):
            result[rows] = totals(sizes[:, None])
        mean: Array = absmean(result.sum(), np.float64(self.size), FLOAT32)
        return mean.reshape(1)

    def _sizes(self, parts: Iterable[slice]) -> Iterator[tuple[slice, Array]]:
        """Yield the magnitudes of rows of the sum, part by part."""
        for part in parts:
            for a, rows in self._of_experts(part):
                total = self._sum(a, rows, slice(0, self.shape[-1]))
                yield rows, np.abs(total, out=total)
                del total

    def _sum(self, a: Array, rows: slice, columns: slice) -> Array:
        """Return a part of the sum in float32, a new array; ``a`` is that of its expert."""
        weight = self.weight
        if isinstance(weight, Quantized):
            total = weight._dense(rows, columns, FLOAT32)
        else:
            total = weight.reshape(self.rows, -1)[rows, columns].astype(FLOAT32, order="C")
        return lora_add_(total, contiguous(a[:, columns]), self.b[rows], scale=self.scale)


def _plain(kind: str) -> str:
    """Return the kind of blocks of a kind."""
    return "nf4" if kind == DOUBLE else kind


def _matrix(factor: Array) -> Array:
    """Return a factor in float32, those of all experts one behind another."""
    whole = factor.reshape(-1, factor.shape[-1]).astype(FLOAT32, copy=False)
    return contiguous(whole)
