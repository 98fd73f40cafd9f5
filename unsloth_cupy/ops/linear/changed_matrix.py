"""An embedding table or output head with trained changes, without a copy of the matrix.

y = x W^T    dx = dy W
W is the matrix with other rows in some places         drows = dy[:, places]^T x
W is the matrix + scale b a        da = scale (dy b)^T x, db = scale dy^T (x a^T)
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from ...core.arrays import zeroed
from ...core.dtypes import FLOAT32, Array, Stored
from ...placement import full_like
from ..common.gemm import gemm
from ..quantized.weight import Transposed
from .embedding import embedding


class ChangedMatrix(Stored, ABC):
    """A dense matrix (outputs, inputs) with trained changes, which products accept as a weight.

    Attributes
    ----------
    matrix : (outputs, inputs) array
        The base, which is neither changed nor copied.
    """

    ndim = 2
    strides = ()  # a part of the key of a replay, which every array must have
    trained = True
    matrix: Any
    home = property(lambda self: self.matrix)
    shape = property(lambda self: self.matrix.shape)
    dtype = property(lambda self: self.matrix.dtype)
    size = property(lambda self: self.matrix.size)
    device = property(lambda self: self.matrix.device)
    data = property(lambda self: self.matrix.data)
    ctypes = property(lambda self: self.matrix.ctypes)
    T = property(Transposed)
    nbytes = property(lambda self: sum(array.nbytes for array in self.held().values()))

    def __len__(self) -> int:
        return int(self.matrix.shape[0])

    @abstractmethod
    def held(self) -> dict[str, Any]:
        """Return the arrays that store the matrix, by name."""

    @abstractmethod
    def product_transposed(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W.T`` to out, or add it."""

    @property
    @abstractmethod
    def gradient_shape(self) -> tuple[int, int]:
        """The shape of the gradient, which has only the changes."""

    @abstractmethod
    def embedded(self, tokens: Array) -> Array:
        """Return the rows of tokens."""

    @abstractmethod
    def embedded_gradient(self, dx: Array, tokens: Array) -> Array:
        """Return the gradient of ``embedded``."""

    @abstractmethod
    def add_gradient(self, dy: Array, x: Array, out: Array, add: bool) -> None:
        """Write the gradient of ``y = x @ W.T`` to out, or add it."""


class ReplacedRows(ChangedMatrix):
    """A matrix some of whose rows are replaced; its gradient is the gradient of these rows.

    Attributes
    ----------
    places : (replaced rows,) int64 array
        The indices of the replaced rows, each once.
    rows : (replaced rows, inputs) array, in the dtype of matrix
    """

    def __init__(self, matrix: Array, places: Array, rows: Array) -> None:
        self.matrix, self.places, self.rows = matrix, places, rows

    def held(self) -> dict[str, Any]:
        """Return the arrays that store the matrix, by name."""
        return {"matrix": self.matrix, "rows": self.rows}

    def product(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W`` to out, or add it."""
        gemm(a, self.matrix, out=out, add=add)
        wide = np.promote_types(self.dtype, FLOAT32)
        change = self.rows.astype(wide) - self.matrix[self.places].astype(wide)
        gemm(a[:, self.places], change.astype(a.dtype, copy=False), out=out, add=True)

    def product_transposed(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W.T`` to out, or add it."""
        columns = gemm(a, self.rows.T, dtype=out.dtype)
        if add:
            columns = columns + out[:, self.places]
        gemm(a, self.matrix.T, out=out, add=add)
        out[:, self.places] = columns

    @property
    def gradient_shape(self) -> tuple[int, int]:
        """The shape of the rows."""
        return self.rows.shape[0], self.rows.shape[1]

    def add_gradient(self, dy: Array, x: Array, out: Array, add: bool) -> None:
        """Write the gradient of the rows to out, or add it."""
        gemm(dy[:, self.places].T, x, out=out, add=add)

    def embedded(self, tokens: Array) -> Array:
        """Return the rows of tokens."""
        replaced, number = self._numbers(tokens)
        own, others = self.rows[number], embedding(tokens, self.matrix)
        kind = np.promote_types(own.dtype, others.dtype)  # CuPy's where widens bfloat16
        rows: Array = np.where(replaced, own, others).astype(kind, copy=False)
        return rows

    def embedded_gradient(self, dx: Array, tokens: Array) -> Array:
        """Return the gradient of ``embedded``."""
        replaced, number = self._numbers(tokens)
        back = _embedding_backward
        gradient: Array = back(zeroed(dx, replaced[..., 0]), number, self.rows)[1]
        return gradient

    def _numbers(self, tokens: Array) -> tuple[Array, Array]:
        """Return whether the row of each token is replaced, and its index in ``rows``.

        The index is meaningless, but valid, for other tokens.
        """
        count = len(self.rows)
        numbers = full_like(self.places, count, shape=(len(self),))
        numbers[self.places] = np.arange(count, like=self.places)
        number = numbers[tokens]
        return (number < count)[..., None], number.clip(0, count - 1)


class AddedLowRank(ChangedMatrix):
    """A matrix + scale b a; its gradient stores da and db^T side by side.

    Attributes
    ----------
    a, b : (rank, inputs) and (outputs, rank) array, in the dtype of matrix
    scale : float
    """

    def __init__(self, matrix: Array, a: Array, b: Array, scale: float) -> None:
        self.matrix, self.a, self.b, self.scale = matrix, a, b, scale

    def held(self) -> dict[str, Any]:
        """Return the arrays that store the matrix, by name."""
        return {"matrix": self.matrix, "a": self.a, "b": self.b}

    def _low(self, a: Array, by: Array) -> Array:
        """Return ``scale a @ by``, in the dtype of a."""
        wide = gemm(a, by, dtype=np.promote_types(a.dtype, FLOAT32))
        return (wide * wide.dtype.type(self.scale)).astype(a.dtype, copy=False)

    def product(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W`` to out, or add it."""
        gemm(a, self.matrix, out=out, add=add)
        gemm(self._low(a, self.b), self.a, out=out, add=True)

    def product_transposed(self, a: Array, out: Array, add: bool) -> None:
        """Write ``a @ W.T`` to out, or add it."""
        gemm(a, self.matrix.T, out=out, add=add)
        gemm(self._low(a, self.a.T), self.b.T, out=out, add=True)

    @property
    def gradient_shape(self) -> tuple[int, int]:
        """(rank, inputs + outputs)."""
        return self.a.shape[0], self.a.shape[1] + self.b.shape[0]

    def parts(self, gradient: Array) -> tuple[Array, Array]:
        """Return da and db, parts of a gradient."""
        inputs = self.a.shape[1]
        return gradient[:, :inputs], gradient[:, inputs:].T

    def add_gradient(self, dy: Array, x: Array, out: Array, add: bool) -> None:
        """Write the gradients of a and b to out, or add them."""
        inputs = self.a.shape[1]
        gemm(self._low(dy, self.b).T, x, out=out[:, :inputs], add=add)
        gemm(self._low(x, self.a.T).T, dy, out=out[:, inputs:], add=add)

    def embedded(self, tokens: Array) -> Array:
        """Return the rows of tokens."""
        x = embedding(tokens, self.matrix)
        low = embedding(tokens, self.b).reshape(-1, self.b.shape[1])  # (all tokens, rank)
        added = self._low(low, self.a).reshape(*x.shape)  # (*rows, inputs)
        return x + added

    def embedded_gradient(self, dx: Array, tokens: Array) -> Array:
        """Return the gradient of ``embedded``."""
        rows, back = dx.reshape(-1, dx.shape[-1]), _embedding_backward
        low = embedding(tokens, self.b).reshape(-1, self.b.shape[1])  # (all tokens, rank)
        dlow = self._low(rows, self.a.T).reshape(*tokens.shape, -1)  # (*rows, rank)
        da, db = self._low(low.T, rows), back(dlow, tokens, self.b)[1]
        gradient: Array = np.concatenate([da, db.T], axis=1)
        return gradient


_embedding_backward: Any = embedding.backward


def weight_gradient(
    dy: Array, x: Array, weight: Any, out: Array | None = None, add: bool = False
) -> Array:
    """Return the gradient of the weight in ``y = x @ weight.T``; write or add it to out, if any."""
    if not isinstance(weight, ChangedMatrix):
        return gemm(dy.T, x, out=out, add=add)
    result = np.empty_like(x, shape=weight.gradient_shape) if out is None else out
    weight.add_gradient(dy, x, result, add)
    return result


def gradient_shape(weight: Any) -> tuple[int, ...]:
    """Return the shape of the gradient of a weight."""
    changed = isinstance(weight, ChangedMatrix)
    shape: tuple[int, ...] = weight.gradient_shape if changed else weight.shape
    return shape
