"""A matrix of which some rows are replaced, without a copy of it: a table with trained tokens.

y = x W^T                W is the matrix with rows[i] in place of its row places[i]
dx = dy W                drows = dy[:, places]^T x: nothing else has a gradient
"""

from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array, Stored
from ...placement import full_like
from ..common.gemm import gemm
from ..quantized.weight import Transposed
from .embedding import embedding


class ReplacedRows(Stored):
    """A dense matrix (outputs, inputs) with rows in place of some of its own.

    Products accept it as a weight.  The gradient of a weight of this kind is that of its rows,
    (replaced rows, inputs).

    Attributes
    ----------
    matrix : (outputs, inputs) array
        It is neither changed nor copied.
    places : (replaced rows,) int64 array
        Which rows are replaced, each once.
    rows : (replaced rows, inputs) array, in the dtype of matrix
    """

    ndim = 2
    strides = ()  # part of the key of a replay
    trained = True
    home = property(lambda self: self.matrix)
    size = property(lambda self: self.matrix.size)
    nbytes = property(lambda self: self.matrix.nbytes + self.rows.nbytes)
    device = property(lambda self: self.matrix.device)
    data = property(lambda self: self.matrix.data)
    ctypes = property(lambda self: self.matrix.ctypes)
    T = property(Transposed)

    def __init__(self, matrix: Array, places: Array, rows: Array) -> None:
        self.matrix, self.places, self.rows = matrix, places, rows
        self.shape, self.dtype = matrix.shape, matrix.dtype

    def __len__(self) -> int:
        return self.shape[0]

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

    def embedded(self, tokens: Array) -> tuple[Array, Array, Array]:
        """Return the rows of tokens; whether each is a replaced one, and which."""
        x, count = embedding(tokens, self.matrix), len(self.rows)
        numbers = full_like(self.places, count, shape=(len(self),))
        numbers[self.places] = np.arange(count, like=self.places)
        number = numbers[tokens]
        replaced = (number < count)[..., None]
        number = number.clip(0, count - 1)
        return np.where(replaced, self.rows[number], x), replaced, number


def columns_with_gradient(dy: Array, weight: Any) -> Array:
    """Return the columns of dy, (rows, outputs), that the gradient of a weight is made of."""
    return dy[:, weight.places] if isinstance(weight, ReplacedRows) else dy


def gradient_shape(weight: Any) -> tuple[int, ...]:
    """Return the shape of the gradient of a weight."""
    shape: tuple[int, ...] = (weight.rows if isinstance(weight, ReplacedRows) else weight).shape
    return shape
