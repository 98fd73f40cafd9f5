"""Sparse forms of a ternary matrix: CSR, ELL (rows of equal width), and runs of equal codes.

Each form stores all codes and scales, at any share of zeros, and can be multiplied: y = x w^T.  The
arrays are on the host.
"""

from typing import Any, NamedTuple, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError, RangeError, ShapeError
from ...placement import scipy_of, to_numpy
from ._planes import row_blocks, scale_of_columns

# Share of zeros from which on CSR multiplies 1 to 16 rows: for one row it is about as fast as the
# dense product (88.5 %: 0.33 ms beside 0.28 at 2048 x 2048, 1.2 beside 2.5 at 4096 x 4096).
SPARSE = 0.88
SEPARATE = 4  # most rows that are multiplied one by one; more rows share the reads of CSR
WIDTH = 1024  # columns of a part of CSR: float32 sums of so few terms are exact enough


class Ell(NamedTuple):
    """The ELL form: nonzero codes and their columns, in rows of equal width.

    Attributes
    ----------
    columns : (outputs, width) int32
        The columns in ascending order, padded with 0.
    codes : (outputs, width) int8
        1 and -1; 0 in the padding.
    scale, group, dtype, shape
        As in ``Ternary``.
    """

    columns: Array
    codes: Array
    scale: Array
    group: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def product(self, x: Array) -> Array:
        """Return x @ w.T for x (*rows, inputs)."""
        rows = _rows(x, self.shape)
        values = self.codes * _scale_at(self.scale, self.group, self.columns)
        y = np.empty((len(rows), self.shape[0]), rows.dtype)
        for output in range(self.shape[0]):
            factors = rows[:, self.columns[output]], values[output].astype(rows.dtype)
            y[:, output] = np.einsum("nd,d->n", *factors)
        return _shaped(y, x, self.shape)


class Runs(NamedTuple):
    """The run-length form: runs of neighbouring equal codes in a row.

    Attributes
    ----------
    lengths : (runs,) int32
        The number of columns of each run.
    codes : (runs,) int8
        The code of each run: -1, 0 or 1.
    starts : (outputs + 1,) int64
        The first run of each row, and the number of runs.
    scale, group, dtype, shape
        As in ``Ternary``.
    """

    lengths: Array
    codes: Array
    starts: Array
    scale: Array
    group: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def product(self, x: Array) -> Array:
        """Return x @ w.T for x (*rows, inputs): each run needs one sum of columns of x."""
        rows = _rows(x, self.shape)
        y = np.zeros((len(rows), self.shape[0]), rows.dtype)
        width = self.group or max(self.shape[1], 1)
        bounds = np.arange(0, self.shape[1], width)  # a run ends where the scale changes
        for output, (first, last) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
            ends = np.cumsum(self.lengths[first:last])
            begins = np.union1d(ends - self.lengths[first:last], bounds).astype(np.intp)
            if begins.size:
                codes = self.codes[first:last][np.searchsorted(ends, begins, side="right")]
                scale = _scale_at(self.scale, self.group, begins[None], output)[0]
                sums = np.add.reduceat(rows, begins, axis=1)
                y[:, output] = np.einsum("nd,d->n", sums, (codes * scale).astype(rows.dtype))
        return _shaped(y, x, self.shape)


def _rows(x: Any, shape: tuple[int, ...]) -> Array:
    """Return the rows of x in float32 or float64; raise unless they have as many columns as w."""
    if x.shape[-1:] != shape[1:]:
        raise ShapeError(
            f"product: x has shape {x.shape}; its last axis must be {shape[1]}, the inputs",
            expected=("*rows", shape[1]),
            actual=tuple(x.shape),
        )
    wide: Any = np.promote_types(x.dtype, FLOAT32)
    return (
        x.reshape(-1, shape[1]).astype(wide, copy=False)
        if x.size
        else np.zeros((int(np.prod(x.shape[:-1])), shape[1]), wide)
    )


def _shaped(y: Array, x: Any, shape: tuple[int, ...]) -> Array:
    """Return y with the leading axes and the dtype of x."""
    return y.reshape(*x.shape[:-1], shape[0]).astype(x.dtype, copy=False)  # (*rows, outputs)


def _scale_at(scale: Array, group: int | None, columns: Array, row: int | None = None) -> Array:
    """Return the scales of ``columns``: (outputs, n), or (1, n) for one ``row``."""
    if scale.ndim == 0:
        return np.broadcast_to(scale, columns.shape)
    scale = scale if row is None else scale[row : row + 1]
    if group is None:
        return np.broadcast_to(scale, columns.shape)
    return np.take_along_axis(scale, columns // group, axis=1)


class SparseForms:
    """The methods of ``Ternary`` that convert it to sparse forms, and sparse forms to it."""

    shape: tuple[int, ...]
    scale: Any
    group: int | None
    dtype: Any
    codes: Any  # (outputs, inputs) int8
    planes: Any
    statistics: Any
    from_codes: Any
    sparse_parts: list[Any] | None  # CSR of parts by columns, after the first product
    _dense: Any

    def sparse_product(self, x: Array) -> Array | None:
        """Return ``x @ W.T`` from CSR, or None.

        None if a dense product is faster, or if x is not finite: a dense product adds 0 times
        infinity, which is NaN, where CSR skips the 0.
        """
        host = isinstance(self.planes, np.ndarray) and isinstance(x, np.ndarray)
        if not host or self.statistics.sparsity < SPARSE or not np.isfinite(x).all():
            return None
        if self.sparse_parts is None:
            starts = range(0, self.shape[1], WIDTH)
            widths = [slice(start, min(start + WIDTH, self.shape[1])) for start in starts]
            self.sparse_parts = [self._sparse(columns) for columns in widths]
        x, y = x.astype(FLOAT32, copy=False), np.zeros((len(x), self.shape[0]), FLOAT32)
        for start, part in zip(range(0, self.shape[1], WIDTH), self.sparse_parts, strict=True):
            rows = np.ascontiguousarray(x[:, start : start + WIDTH])
            if len(rows) > SEPARATE:
                y += (part @ np.ascontiguousarray(rows.T)).T
                continue
            for row, totals in zip(rows, y, strict=True):
                np.add(totals, part @ row, out=totals)
        return y

    def _sparse(self, columns: slice) -> Any:
        """Return columns as a CSR array in float32; dense values exist for blocks of rows only."""
        sparse = scipy_of("sparse", np.empty(0))
        blocks = row_blocks(self.shape[0], columns.stop - columns.start)
        parts = [sparse.csr_array(self._dense(rows, columns, FLOAT32)) for rows in blocks]
        return sparse.vstack(parts, format="csr")

    def to_csr(self) -> Any:
        """Return a ``scipy.sparse.csr_array`` of the dequantized values, in the scale's dtype."""
        codes, scale = to_numpy(self.codes), to_numpy(self.scale)
        csr_array = scipy_of("sparse", codes).csr_array
        matrix = csr_array(codes)
        rows, columns = matrix.coords if hasattr(matrix, "coords") else matrix.nonzero()
        scales = scale_of_columns(np.atleast_2d(scale), self.group or 1, self.shape[1])
        factor = np.broadcast_to(scales, self.shape)[rows, columns]
        parts = matrix.data * factor, matrix.indices, matrix.indptr
        return csr_array(parts, shape=self.shape)

    @classmethod
    def from_csr(
        cls, matrix: Any, scale: Any = None, *, group: int | None = None, dtype: Any = FLOAT32
    ) -> Self:
        """Return the matrix of a sparse array; the codes are the signs of its values.

        Without ``scale``, all nonzero values of the array, or of each row, must have the same
        absolute value, which becomes the scale.  Pass ``scale`` for scales by group, or if a row of
        zeros has a scale.
        """
        matrix = scipy_of("sparse", np.empty(0)).csr_array(matrix)
        codes = np.sign(matrix.toarray()).astype(np.int8)
        scales: Any = _scale_of(matrix) if scale is None else scale
        return cls.from_codes(codes, scales, group=group, dtype=dtype)

    def to_ell(self) -> Ell:
        """Return the ELL form; its width is the largest number of nonzero codes in a row."""
        codes = to_numpy(self.codes)
        counts = (codes != 0).sum(axis=1)
        width = int(counts.max(initial=0))
        columns = np.zeros((len(codes), width), np.int32)
        nonzero = np.zeros((len(codes), width), np.int8)
        rows, positions = np.nonzero(codes)
        first = np.cumsum(counts) - counts
        slots = np.arange(len(rows)) - np.repeat(first, counts)
        columns[rows, slots], nonzero[rows, slots] = positions, codes[rows, positions]
        return Ell(columns, nonzero, to_numpy(self.scale), self.group, self.dtype, self.shape)

    @classmethod
    def from_ell(cls, ell: Ell) -> Self:
        """Return the matrix of an ELL form; raise if a column is outside the matrix."""
        columns = np.asarray(ell.columns)
        inside = (columns >= 0) & (columns < ell.shape[1])
        if columns.shape != np.shape(ell.codes) or len(columns) != ell.shape[0]:
            shapes = columns.shape, np.shape(ell.codes)
            problem = (
                f"columns are {shapes[0]} and codes {shapes[1]}; both must be (outputs, width)"
            )
            raise ShapeError(f"Ternary.from_ell: {problem}", expected=len(columns), actual=shapes)
        if not inside.all():
            problem = f"a column is outside 0 .. {ell.shape[1] - 1}"
            outside = int(columns[~inside][0])
            raise RangeError(
                f"Ternary.from_ell: {problem}", expected=range(ell.shape[1]), actual=outside
            )
        codes = np.zeros(ell.shape, np.int8)
        rows, slots = np.nonzero(ell.codes)
        codes[rows, columns[rows, slots]] = ell.codes[rows, slots]
        return cls.from_codes(codes, ell.scale, group=ell.group, dtype=ell.dtype)

    def to_runs(self) -> Runs:
        """Return the run-length form."""
        codes = to_numpy(self.codes)
        changes = np.ones(codes.shape, np.bool_)
        changes[:, 1:] = codes[:, 1:] != codes[:, :-1]
        rows, columns = np.nonzero(changes)
        starts = np.concatenate([[0], np.cumsum(changes.sum(axis=1))]).astype(np.int64)
        ends = np.append(columns[1:], 0)  # a run ends where the next one begins
        ends[starts[1:][np.diff(starts) > 0] - 1] = self.shape[1]  # the last run of a row
        lengths = (ends - columns).astype(np.int32)[: len(columns)]
        rest = to_numpy(self.scale), self.group, self.dtype, self.shape
        return Runs(lengths, codes[rows, columns], starts, *rest)

    @classmethod
    def from_runs(cls, runs: Runs) -> Self:
        """Return the matrix of a run-length form; raise if the runs do not fill every row."""
        rows, columns = runs.shape
        ends = np.concatenate([[0], np.cumsum(runs.lengths, dtype=np.int64)])
        fits = len(runs.starts) == rows + 1 and runs.starts[-1] == len(runs.lengths)
        if not (fits and (ends[runs.starts] == columns * np.arange(rows + 1)).all()):
            problem = f"the runs do not fill {rows} rows of {columns} columns"
            size, filled = rows * columns, int(ends[-1])
            raise ShapeError(f"Ternary.from_runs: {problem}", expected=size, actual=filled)
        codes = np.repeat(runs.codes, runs.lengths).reshape(runs.shape)
        return cls.from_codes(codes, runs.scale, group=runs.group, dtype=runs.dtype)


def _scale_of(matrix: Any) -> Array:
    """Return the common absolute value of all nonzero values of a CSR array, or one per row."""
    size = np.abs(matrix.data)
    top = size.max(initial=0)
    if (size[size > 0] == top).all():
        return np.asarray(top)
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    tops = np.zeros(matrix.shape[0], size.dtype)
    np.maximum.at(tops, rows, size)
    if ((size == tops[rows]) | (size == 0)).all():
        return tops[:, None]
    raise ConfigError(
        "Ternary.from_csr: the values of a row differ in absolute value; pass scale=..., and"
        " group=... if scales are by group"
    )
