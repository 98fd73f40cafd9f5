"""The decays of a chunk: of a token, or of each channel of its key.

With g the sums of decays so far, what token j wrote is read by token i times exp(g[i] - g[j]): of
one factor for all channels this is a matrix F.  Of a factor for each channel no such matrix is
made.  A chunk is halved again and again; between its halves, which meet at m,

    exp(g[i] - g[j]) = exp(g[i] - g[m]) exp(g[m] - g[j])        j <= m < i

so that each part is a product of matrices.  No factor is above 1, however strong decays are.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array

LEAST = -800.0  # a decay below it counts as this: exp is 0 in every dtype, and sums are finite


def sums(decay: Array) -> Array:
    """Return the sums of decays so far, wide enough for their differences."""
    return np.cumsum(np.maximum(decay, LEAST), axis=-2, dtype=np.float64)


def turned(array: Array) -> Array:
    """Return matrices transposed."""
    return array.swapaxes(-1, -2)


def fading(g: Array, dtype: Any) -> Array:
    """Return exp(g[i] - g[j]) for j <= i, else 0, of sums of decays (..., chunk, 1)."""
    row = np.arange(g.shape[-2], like=g)
    away = (g - turned(g)).astype(dtype)  # rounded after the difference
    away = np.where(row[:, None] >= row, away, dtype.type(-np.inf))
    return np.exp(away, out=away)


def crossing(squares: Array) -> Array:
    """Return for each t the sum of all [i, j] with i >= t > j, (batch, heads, groups, chunk, 1)."""
    row = np.arange(squares.shape[-1], like=squares)
    here = (row[:, None] >= row).astype(squares.dtype)
    before = squares @ (1 - here)  # sums over j < t
    return np.einsum("bhgit,it->bhgt", before, here)[..., None]


def beside(stack: Array) -> Array:
    """Return matrices (..., 2, rows, columns) as one of all rows."""
    *lead, count, rows, columns = stack.shape
    return stack.reshape(*lead, count * rows, columns)


def without_diagonal(squares: Array) -> None:
    """Set the diagonals of square matrices to 0."""
    each = np.arange(squares.shape[-1], like=squares)
    squares[..., each, each] = 0


def from_here(array: Array) -> Array:
    """Return for each row the sum of it and of those after it."""
    return np.cumsum(array[..., ::-1, :], axis=-2)[..., ::-1, :]


def up_to_here(array: Array) -> Array:
    """Return for each row the sum of those before it."""
    result = np.zeros_like(array)
    result[..., 1:, :] = np.cumsum(array[..., :-1, :], axis=-2)
    return result


class OfTokens(NamedTuple):
    """Decays that all channels share, (batch, heads, groups, chunk, 1)."""

    into: Array  # exp(g)
    onward: Array  # exp(g[-1] - g)
    whole: Array  # exp(g[-1]), a column
    fade: Array  # F, (batch, heads, groups, chunk, chunk)

    @classmethod
    def of(cls, decay: Array, dtype: Any) -> "OfTokens":
        """Return the factors of decays."""
        g = sums(decay)
        into, onward = (np.exp(each.astype(dtype)) for each in (g, g[..., -1:, :] - g))
        return cls(into, onward, into[..., -1:, :], fading(g, dtype))

    def pairs(self, rows: Array) -> Array:
        """Return F Q K^T and F K K^T, which have no values above their diagonals."""
        product = beside(rows) @ turned(rows[..., 1, :, :])
        product = product.reshape(*rows.shape[:-1], rows.shape[-2])
        return product * self.fade[..., None, :, :]

    def total(self, a: Array, b: Array) -> Array:
        """Return what decays of tokens get of a gradient of each channel, a * b."""
        axes = "bhgnic"[: a.ndim]  # CuPy has no vecdot
        return np.einsum(f"{axes},{axes}->{axes[:-1]}", a, b)[..., None]

    def gradients(self, rows: Array, dpairs: Array, pairs: Array) -> tuple[Array, Array, Array]:
        """Return those of rows, of keys and of decay from dpairs, of ``pairs``."""
        across = crossing((dpairs * pairs).sum(axis=3))
        own = (dpairs * self.fade[..., None, :, :]).sum(axis=2, keepdims=True)
        without_diagonal(own[..., 1, :, :])
        drows = (beside(own) @ rows[..., 1, :, :]).reshape(rows.shape)
        return drows, turned(beside(own)) @ beside(rows), across


class OfChannels(NamedTuple):
    """Decays of each channel, (batch, heads, groups, chunk, dim)."""

    into: Array
    onward: Array
    whole: Array  # (batch, heads, groups, dim, 1)
    g: Array

    @classmethod
    def of(cls, decay: Array, dtype: Any) -> "OfChannels":
        """Return the factors of decays."""
        g = sums(decay)
        into, onward = (np.exp(each.astype(dtype)) for each in (g, g[..., -1:, :] - g))
        return cls(into, onward, turned(into[..., -1:, :]), g)

    def pairs(self, rows: Array) -> Array:
        """Return the sums over channels of rows[i] k[j] exp(g[i] - g[j]), for j <= i."""
        size = self.g.shape[-2]
        whole = _whole(size)
        k = rows[..., 1:, :, :]
        shape = *self.g.shape[:-2], 2, whole, whole
        result = np.zeros_like(rows, shape=shape)
        each = np.arange(size, like=rows)
        result[..., each, each] = (rows * k).sum(axis=-1)
        rows, k = _padded(rows, whole), _padded(k, whole)
        for half, upper, lower in self._levels(k.dtype):
            late, early = _halves(rows, half)[1] * upper, _halves(k, half)[0] * lower
            view, key = _blocks(result, half)
            view[key] = np.moveaxis(late @ turned(early), -3, 0)
        return result[..., :size, :size]

    def total(self, a: Array, b: Array) -> Array:
        """Return the gradient of each channel, a * b, as it is."""
        return a * b

    def gradients(self, rows: Array, dpairs: Array, pairs: Array) -> tuple[Array, Array, Array]:
        """Return those of rows, of keys and of decay from dpairs, of ``pairs``."""
        size = self.g.shape[-2]
        whole = _whole(size)
        each = np.arange(size, like=rows)
        alone = dpairs[..., 0, each, each][..., None]  # of a query and its own key
        q, k = rows[..., 0, :, :], rows[..., 1, :, :]
        dk = _padded(alone * q, whole)
        ddecay = np.zeros_like(dk)
        drows = np.zeros_like(dk, shape=(*dk.shape[:3], 2, *dk.shape[3:]))
        drows[..., 0, :size, :] = alone * k
        rows, k = _padded(rows, whole), _padded(k, whole)
        dpairs = _padded(turned(_padded(turned(dpairs), whole)), whole)
        for half, upper, lower in self._levels(k.dtype):
            late, (early_k, _) = _halves(rows, half)[1], _halves(k, half)
            own = _taken(dpairs, half)
            of_late = upper * (own @ (lower * early_k[:, :, :, None]))
            early = (turned(own) @ (upper * late)).sum(axis=3) * lower[:, :, :, 0]
            _halves(drows, half)[1][...] += of_late
            _halves(dk, half)[0][...] += early
            # decay[t] is a factor of all that passes from before t to t or later: no terms cancel
            to_early, to_late = _halves(ddecay, half)
            to_late += from_here((late * of_late).sum(axis=3))
            to_early += up_to_here(early_k * early)
        dk, ddecay = dk[..., :size, :], ddecay[..., :size, :]
        drows = drows[..., :size, :].sum(axis=2, keepdims=True)
        return drows, dk.sum(axis=2, keepdims=True), ddecay

    def _levels(self, dtype: Any) -> Iterator[tuple[int, Array, Array]]:
        """Yield the lengths of halves, and exp(g[i] - g[m]) and exp(g[m] - g[j]) of these."""
        size = self.g.shape[-2]
        whole = _whole(size)
        g = self.g[..., None, :, :]  # of queries and keys alike
        g = np.concatenate([g, *[g[..., -1:, :]] * (whole - size)], axis=-2)
        half = whole // 2
        while half:
            lower, upper = _halves(g, half)
            middle = lower[..., -1:, :]
            yield half, *(np.exp(a.astype(dtype)) for a in (upper - middle, middle - lower))
            half //= 2


def _whole(size: int) -> int:
    """Return the least power of two that is not below a size."""
    return 1 << (size - 1).bit_length()


def _padded(array: Array, rows: int) -> Array:
    """Return an array with so many rows: zeros after its own."""
    result = np.zeros_like(array, shape=(*array.shape[:-2], rows, array.shape[-1]))
    result[..., : array.shape[-2], :] = array
    return result


def _halves(array: Array, half: int) -> tuple[Array, Array]:
    """Return views of the lower and of the upper halves of parts, (..., parts, half, columns)."""
    rows, columns = array.shape[-2:]
    parts = array.reshape(*array.shape[:-2], rows // (2 * half), 2, half, columns)
    return parts[..., 0, :, :], parts[..., 1, :, :]


def _blocks(square: Array, half: int) -> tuple[Array, Any]:
    """Return a view of squares and the index of the pairs of halves, (parts, ..., half, half).

    Rows are of upper halves, columns of the lower halves of the same parts.
    """
    parts = square.shape[-1] // (2 * half)
    each = np.arange(parts, like=square)
    view = square.reshape(*square.shape[:-2], parts, 2, half, parts, 2, half)
    return view, np.s_[..., each, 1, :, each, 0, :]


def _taken(square: Array, half: int) -> Array:
    """Return the pairs of halves, (..., parts, half, half)."""
    view, key = _blocks(square, half)
    return np.moveaxis(view[key], 0, -3)
