"""A weight plus the change of its adapter, rounded as in a file; products compute it in parts.

    linear(x, SummedWeight(weight, a, b, scale, "q4_0"))        y = x Q(weight + scale b a)^T

A part is computed in one pass from the stored weight, and a product reads it while it is still in
cache: no dense sum and no dense weight exist.  One pass is enough for kinds whose scales belong to
few neighbouring values of a row.  Other kinds need a first pass over the rows: int8 has one scale
per row, nf4-double encodes the scales of all blocks together, and the scale of ternary is a mean of
all values.  A kind without a kernel has a ``reader``, a function from a part of the sum to the
values that are read back from a file; it may compute on the host.
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
SUMMED = (*KINDS, DOUBLE)  # the kinds whose weights can be computed part by part


def can_sum(kind: str, weight: Any, block: int | None = None) -> bool:
    """Return whether parts of a weight can be computed separately: rows are whole blocks.

    ``block`` is the block size of a kind with a ``reader``.
    """
    if (block is None and kind not in SUMMED) or weight.dtype not in KERNEL_DTYPES:
        return False
    values = block_of(_plain(kind)) if block is None else block
    return weight.size > 0 and weight.shape[-1] % values == 0


class SummedWeight(Chunked):
    """``weight + scale b a``, rounded to the values that are read back from a file of a kind.

    Parameters
    ----------
    weight : (outputs, inputs) or (experts, outputs, inputs) array or Quantized
    a, b : (rank, inputs) and (outputs, rank) array, or with experts as the first axis
    scale : float
    kind : str
        One of ``SUMMED``, or any kind with a ``reader``; ``can_sum`` must be True for the weight.
    reader : callable, optional
        Rounds rows of whole blocks of ``block`` values each.
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
        """Write the part that begins at value ``start`` to w, and return w."""
        if self.reader is not None:
            return self._read(self.reader, w, start, offsets)
        weight, pair, more = self.weight, (self.a, self.b), (self.sizes, offsets)
        how: Any = {"kind": _plain(self.kind), "scale": self.scale, "members": self.experts}
        if isinstance(weight, Nf4 | FourBits):
            packed, absmax, codes = weight.coded()
            how |= {"block": weight.block, "stored": weight.kind, "start": start}
            return nf4_rounded_sum_(w, packed, absmax, *pair, codes, *more, **how)
        if not isinstance(weight, Quantized):
            dense = weight.reshape(self.rows, self.shape[-1])  # (all rows, inputs)
            return rounded_sum_(w, dense, *pair, *more, start=start, **how)
        top, columns = self._place(w, start)
        for a, rows in self._of_experts(slice(top, top + len(w))):
            dense = weight._dense(rows, columns, FLOAT32)
            low, sizes = contiguous(a[:, columns]), self._sizes_of(rows, columns)
            part = w[rows.start - top : rows.stop - top]
            rounded_sum_(part, dense, low, self.b[rows], sizes, **how | {"members": 1})
        return w

    def _read(self, reader: Reader, w: Array, start: int, offsets: Array | None) -> Array:
        """Write the part with the reader, expert by expert, without experts that have no rows."""
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
        """Yield factor a of each expert that has some of these rows, and the rows it has."""
        height, rank = self.rows // self.experts, self.b.shape[1]
        for expert in range(rows.start // height, -(-rows.stop // height)):
            first, last = expert * height, (expert + 1) * height
            own = slice(max(first, rows.start), min(last, rows.stop))
            yield self.a[expert * rank : (expert + 1) * rank], own

    def _sizes_of(self, rows: slice, columns: slice) -> Array | None:
        """Return the sizes (see ``rounded_sum_``) of a part."""
        if self.sizes is None or self.kind == "ternary":
            return self.sizes
        if self.kind == "int8":
            return self.sizes[rows]
        block = block_of(_plain(self.kind))
        whole = self.sizes.reshape(self.rows, -1)  # (rows, blocks of a row)
        return whole[rows, columns.start // block : columns.stop // block].reshape(-1)

    def _largest(self, values: int) -> Array:
        """Return the largest magnitude of each run of ``values`` values of a row of the sum."""
        result = empty((self.size // values,), FLOAT32, like=self.a)
        per_row = self.shape[-1] // values
        for rows, sizes in self._sizes(self._chunks(self.a, self.rows, self.shape[-1])):
            largest = sizes.reshape(-1, values).max(axis=1)  # (runs,)
            result[rows.start * per_row : rows.stop * per_row] = largest
        return result

    def _mean(self) -> Array:
        """Return the scale of ternary, summed in the order in which a whole weight is summed."""
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
        """Return a part of the sum in float32, a new array; ``a`` is the factor of its expert."""
        weight = self.weight
        if isinstance(weight, Quantized):
            total = weight._dense(rows, columns, FLOAT32)
        else:
            total = weight.reshape(self.rows, -1)[rows, columns].astype(FLOAT32, order="C")
        return lora_add_(total, contiguous(a[:, columns]), self.b[rows], scale=self.scale)


def _plain(kind: str) -> str:
    """Return the kind whose blocks a kind has: nf4 for nf4-double."""
    return "nf4" if kind == DOUBLE else kind


def _matrix(factor: Array) -> Array:
    """Return a factor in float32, with the matrices of all experts below each other."""
    # (experts * rows, columns)
    whole = factor.reshape(-1, factor.shape[-1]).astype(FLOAT32, copy=False)
    return contiguous(whole)
