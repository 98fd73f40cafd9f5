"""A ternary matrix as what it holds beside zeros: CSR, rows of one width, runs of one code.

Each keeps every code and scale, at any share of zeros, and multiplies: y = x w^T.  They live on the
host.
"""

from typing import Any, NamedTuple, Self

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError, RangeError, ShapeError
from ...placement import scipy_of, to_numpy
from ._planes import spread


class Ell(NamedTuple):
    """Rows of one width: the places of the codes that are not 0, and these codes.

    Attributes
    ----------
    columns : (outputs, width) int32
        Ascending; filled up with 0.
    codes : (outputs, width) int8
        1 and -1; 0 where filled up.
    scale, group, dtype, shape
        Those of the matrix.
    """

    columns: Array
    codes: Array
    scale: Array
    group: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, int]

    def product(self, x: Array) -> Array:
        """Return x @ w.T for x (*rows, inputs)."""
        rows = _rows(x, self.shape)
        values = self.codes * _scale_at(self.scale, self.group, self.columns)
        y = np.empty((len(rows), self.shape[0]), rows.dtype)
        for output in range(self.shape[0]):
            own = rows[:, self.columns[output]], values[output].astype(rows.dtype)
            y[:, output] = np.einsum("nd,d->n", *own)
        return _shaped(y, x, self.shape)


class Runs(NamedTuple):
    """Neighbours of one code in a row, as their number.

    Attributes
    ----------
    lengths : (runs,) int32
        Columns of each run.
    codes : (runs,) int8
        -1, 0 or 1.
    starts : (outputs + 1,) int64
        The first run of each row.
    scale, group, dtype, shape
        Those of the matrix.
    """

    lengths: Array
    codes: Array
    starts: Array
    scale: Array
    group: int | None
    dtype: np.dtype[Any]
    shape: tuple[int, int]

    def product(self, x: Array) -> Array:
        """Return x @ w.T for x (*rows, inputs): a run takes one sum of neighbours."""
        rows = _rows(x, self.shape)
        y = np.zeros((len(rows), self.shape[0]), rows.dtype)
        width = self.group or max(self.shape[1], 1)
        bounds = np.arange(0, self.shape[1], width)  # a run is cut where the scale changes
        for output, (first, last) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
            ends = np.cumsum(self.lengths[first:last])
            begins = np.union1d(ends - self.lengths[first:last], bounds).astype(np.intp)
            if begins.size:
                codes = self.codes[first:last][np.searchsorted(ends, begins, side="right")]
                scale = _scale_at(self.scale, self.group, begins[None], output)[0]
                sums = np.add.reduceat(rows, begins, axis=1)
                y[:, output] = np.einsum("nd,d->n", sums, (codes * scale).astype(rows.dtype))
        return _shaped(y, x, self.shape)


def _rows(x: Any, shape: tuple[int, int]) -> Array:
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


def _shaped(y: Array, x: Any, shape: tuple[int, int]) -> Array:
    return y.reshape(*x.shape[:-1], shape[0]).astype(x.dtype, copy=False)


def _scale_at(scale: Array, group: int | None, columns: Array, row: int | None = None) -> Array:
    """Return the scales of these columns, a row of them for each row or for one."""
    if scale.ndim == 0:
        return np.broadcast_to(scale, columns.shape)
    scale = scale if row is None else scale[row : row + 1]
    if group is None:
        return np.broadcast_to(scale, columns.shape)
    return np.take_along_axis(scale, columns // group, axis=1)


class SparseForms:
    """What ``Ternary`` becomes, and is made of again, without its zeros."""

    shape: tuple[int, int]
    scale: Any
    group: int | None
    dtype: Any
    codes: Any  # (outputs, inputs) int8
    from_codes: Any

    def to_csr(self) -> Any:
        """Return a ``scipy.sparse.csr_array`` of the dequantised values, in the scale's dtype."""
        codes, scale = to_numpy(self.codes), to_numpy(self.scale)
        csr_array = scipy_of("sparse", codes).csr_array
        matrix = csr_array(codes)
        rows, columns = matrix.coords if hasattr(matrix, "coords") else matrix.nonzero()
        scales = spread(np.atleast_2d(scale), self.group or 1, self.shape[1])
        factor = np.broadcast_to(scales, self.shape)[rows, columns]
        parts = matrix.data * factor, matrix.indices, matrix.indptr
        return csr_array(parts, shape=self.shape)

    @classmethod
    def from_csr(
        cls, matrix: Any, scale: Any = None, *, group: int | None = None, dtype: Any = FLOAT32
    ) -> Self:
        """Return the matrix of a sparse array: codes are the signs of its values.

        Where ``scale`` is absent, all values of the array, or else of each row, must have one size,
        which becomes the scale; give it where a row of zeros, or a group, has one to keep.
        """
        matrix = scipy_of("sparse", np.empty(0)).csr_array(matrix)
        dense = np.sign(matrix.toarray()).astype(np.int8)
        found: Any = _scale_of(matrix) if scale is None else scale
        return cls.from_codes(dense, found, group=group, dtype=dtype)

    def to_ell(self) -> Ell:
        """Return rows of one width: that of the row with most codes that are not 0."""
        codes = to_numpy(self.codes)
        numbers = (codes != 0).sum(axis=1)
        width = int(numbers.max(initial=0))
        columns = np.zeros((len(codes), width), np.int32)
        kept = np.zeros((len(codes), width), np.int8)
        rows, places = np.nonzero(codes)
        first = np.cumsum(numbers) - numbers
        slots = np.arange(len(rows)) - np.repeat(first, numbers)
        columns[rows, slots], kept[rows, slots] = places, codes[rows, places]
        return Ell(columns, kept, to_numpy(self.scale), self.group, self.dtype, self.shape)

    @classmethod
    def from_ell(cls, ell: Ell) -> Self:
        """Return the matrix of ``to_ell``; raise where a place is outside of it."""
        columns = np.asarray(ell.columns)
        inside = (columns >= 0) & (columns < ell.shape[1])
        if columns.shape != np.shape(ell.codes) or len(columns) != ell.shape[0]:
            found = columns.shape, np.shape(ell.codes)
            problem = f"columns are {found[0]} and codes {found[1]}; both must be (outputs, width)"
            raise ShapeError(f"Ternary.from_ell: {problem}", expected=len(columns), actual=found)
        if not inside.all():
            problem = f"a column lies outside 0 .. {ell.shape[1] - 1}"
            outside = int(columns[~inside][0])
            raise RangeError(
                f"Ternary.from_ell: {problem}", expected=range(ell.shape[1]), actual=outside
            )
        codes = np.zeros(ell.shape, np.int8)
        rows, slots = np.nonzero(ell.codes)
        codes[rows, columns[rows, slots]] = ell.codes[rows, slots]
        return cls.from_codes(codes, ell.scale, group=ell.group, dtype=ell.dtype)

    def to_runs(self) -> Runs:
        """Return the runs of one code, row by row."""
        codes = to_numpy(self.codes)
        changes = np.ones(codes.shape, np.bool_)
        changes[:, 1:] = codes[:, 1:] != codes[:, :-1]
        rows, places = np.nonzero(changes)
        starts = np.concatenate([[0], np.cumsum(changes.sum(axis=1))]).astype(np.int64)
        ends = np.append(places[1:], 0)
        ends[starts[1:][np.diff(starts) > 0] - 1] = self.shape[1]
        lengths = (ends - places).astype(np.int32)[: len(places)]
        held = to_numpy(self.scale), self.group, self.dtype, self.shape
        return Runs(lengths, codes[rows, places], starts, *held)

    @classmethod
    def from_runs(cls, runs: Runs) -> Self:
        """Return the matrix of ``to_runs``; raise where a row is not filled."""
        rows, columns = runs.shape
        ends = np.concatenate([[0], np.cumsum(runs.lengths, dtype=np.int64)])
        fits = len(runs.starts) == rows + 1 and runs.starts[-1] == len(runs.lengths)
        if not (fits and (ends[runs.starts] == columns * np.arange(rows + 1)).all()):
            problem = f"the runs do not fill {rows} rows of {columns} columns"
            wanted, filled = rows * columns, int(ends[-1])
            raise ShapeError(f"Ternary.from_runs: {problem}", expected=wanted, actual=filled)
        codes = np.repeat(runs.codes, runs.lengths).reshape(runs.shape)
        return cls.from_codes(codes, runs.scale, group=runs.group, dtype=runs.dtype)


def _scale_of(matrix: Any) -> Array:
    """Return the one size of the values of a CSR array, or that of each row."""
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
        "Ternary.from_csr: a row has values of several sizes; pass scale=..., and group=... where"
        " groups of a row have their own"
    )
