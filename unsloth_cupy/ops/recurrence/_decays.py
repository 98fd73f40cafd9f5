"""The decays in a chunk: one for each token, or one for each channel of its key.

With g the running sums of decays, token i reads what token j wrote, times exp(g[i] - g[j]).  If all
channels share a decay, these factors are a matrix F.  If each channel has a decay, F would be a
matrix for each channel.  Instead a chunk is halved again and again; with m the last token of the
lower half,

    exp(g[i] - g[j]) = exp(g[i] - g[m]) exp(g[m] - g[j])        j <= m < i

so that each pair of halves is a product of matrices.  No factor is above 1, however strong decays
are.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array

LEAST = -800.0  # decays below it count as -800: exp(-800) is 0 in every dtype, and sums are finite


def sums(decay: Array) -> Array:
    """Return the running sums of decays, in float64: their differences would lose digits."""
    return np.cumsum(np.maximum(decay, LEAST), axis=-2, dtype=np.float64)


def transposed(array: Array) -> Array:
    """Return matrices with their last two axes swapped."""
    return array.swapaxes(-1, -2)  # (..., columns, rows)


def decay_matrix(g: Array, dtype: Any) -> Array:
    """Return F (..., chunk, chunk): exp(g[i] - g[j]) for j <= i, else 0, from g (..., chunk, 1)."""
    row = np.arange(g.shape[-2], like=g)
    away = (g - transposed(g)).astype(dtype)  # rounded after the difference, which cancels digits
    away = np.where(row[:, None] >= row, away, dtype.type(-np.inf))
    return np.exp(away, out=away)


def sums_across(squares: Array) -> Array:
    """Return for each t the sum of all [i, j] with i >= t > j: (batch, heads, groups, chunk, 1)."""
    row = np.arange(squares.shape[-1], like=squares)
    here = (row[:, None] >= row).astype(squares.dtype)
    before = squares @ (1 - here)  # [i, t]: sums over j < t
    return np.einsum("bhgit,it->bhgt", before, here)[..., None]


def joined(stack: Array) -> Array:
    """Return matrices (..., 2, rows, columns) as one matrix (..., 2 * rows, columns)."""
    *lead, count, rows, columns = stack.shape
    return stack.reshape(*lead, count * rows, columns)


def without_diagonal(squares: Array) -> None:
    """Set the diagonals of square matrices to 0."""
    each = np.arange(squares.shape[-1], like=squares)
    squares[..., each, each] = 0


def sums_from_here(array: Array) -> Array:
    """Return, for each row, the sum of the row and of all later rows."""
    return np.cumsum(array[..., ::-1, :], axis=-2)[..., ::-1, :]


def sums_before(array: Array) -> Array:
    """Return, for each row, the sum of all earlier rows."""
    result = np.zeros_like(array)
    result[..., 1:, :] = np.cumsum(array[..., :-1, :], axis=-2)
    return result


class TokenDecays(NamedTuple):
    """The factors of decays that all channels share: (batch, heads, groups, chunk, 1)."""

    into: Array  # exp(g): from the start of the chunk to each token
    onward: Array  # exp(g[-1] - g): from each token to the end of the chunk
    whole: Array  # exp(g[-1]): through the chunk, (batch, heads, groups, 1, 1)
    fade: Array  # F, (batch, heads, groups, chunk, chunk)

    @classmethod
    def of(cls, decay: Array, dtype: Any) -> "TokenDecays":
        """Return the factors of decays."""
        g = sums(decay)
        into, onward = (np.exp(each.astype(dtype)) for each in (g, g[..., -1:, :] - g))
        return cls(into, onward, into[..., -1:, :], decay_matrix(g, dtype))

    def pairs(self, rows: Array) -> Array:
        """Return F Q K^T and F K K^T, which are 0 above their diagonals."""
        product = joined(rows) @ transposed(rows[..., 1, :, :])
        product = product.reshape(*rows.shape[:-1], rows.shape[-2])  # (..., 2, chunk, chunk)
        return product * self.fade[..., None, :, :]

    def total(self, a: Array, b: Array) -> Array:
        """Return the gradient of decays, the sum of a * b over channels."""
        axes = "bhgnic"[: a.ndim]  # CuPy has no vecdot
        return np.einsum(f"{axes},{axes}->{axes[:-1]}", a, b)[..., None]

    def gradients(self, rows: Array, dpairs: Array, pairs: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of rows, keys and decay, from the gradient ``dpairs`` of pairs."""
        across = sums_across((dpairs * pairs).sum(axis=3))
        own = (dpairs * self.fade[..., None, :, :]).sum(axis=2, keepdims=True)
        without_diagonal(own[..., 1, :, :])
        drows = (joined(own) @ rows[..., 1, :, :]).reshape(rows.shape)
        return drows, transposed(joined(own)) @ joined(rows), across


class ChannelDecays(NamedTuple):
    """The factors of decays of each channel: (batch, heads, groups, chunk, dim)."""

    into: Array  # exp(g)
    onward: Array  # exp(g[-1] - g)
    whole: Array  # exp(g[-1]), (batch, heads, groups, dim, 1)
    g: Array  # running sums of decays

    @classmethod
    def of(cls, decay: Array, dtype: Any) -> "ChannelDecays":
        """Return the factors of decays."""
        g = sums(decay)
        into, onward = (np.exp(each.astype(dtype)) for each in (g, g[..., -1:, :] - g))
        return cls(into, onward, transposed(into[..., -1:, :]), g)

    def pairs(self, rows: Array) -> Array:
        """Return, for j <= i, the sums over channels of rows[i] k[j] exp(g[i] - g[j])."""
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
            view[key] = np.moveaxis(late @ transposed(early), -3, 0)  # (parts, ..., half, half)
        return result[..., :size, :size]

    def total(self, a: Array, b: Array) -> Array:
        """Return the gradient of decays, a * b for each channel."""
        return a * b

    def gradients(self, rows: Array, dpairs: Array, pairs: Array) -> tuple[Array, Array, Array]:
        """Return the gradients of rows, keys and decay, from the gradient ``dpairs`` of pairs."""
        size = self.g.shape[-2]
        whole = _whole(size)
        each = np.arange(size, like=rows)
        alone = dpairs[..., 0, each, each][..., None]  # of a query and the key of the same token
        q, k = rows[..., 0, :, :], rows[..., 1, :, :]
        dk = _padded(alone * q, whole)
        ddecay = np.zeros_like(dk)
        drows = np.zeros_like(dk, shape=(*dk.shape[:3], 2, *dk.shape[3:]))
        drows[..., 0, :size, :] = alone * k
        rows, k = _padded(rows, whole), _padded(k, whole)
        dpairs = _padded(transposed(_padded(transposed(dpairs), whole)), whole)
        for half, upper, lower in self._levels(k.dtype):
            late, (early_k, _) = _halves(rows, half)[1], _halves(k, half)
            own = _taken(dpairs, half)
            of_late = upper * (own @ (lower * early_k[:, :, :, None]))
            early = (transposed(own) @ (upper * late)).sum(axis=3) * lower[:, :, :, 0]
            _halves(drows, half)[1][...] += of_late
            _halves(dk, half)[0][...] += early
            # decay[t] is a factor of every pair (i, j) with i >= t > j: sum these, nothing cancels
            to_early, to_late = _halves(ddecay, half)
            to_late += sums_from_here((late * of_late).sum(axis=3))
            to_early += sums_before(early_k * early)
        dk, ddecay = dk[..., :size, :], ddecay[..., :size, :]
        drows = drows[..., :size, :].sum(axis=2, keepdims=True)
        return drows, dk.sum(axis=2, keepdims=True), ddecay

    def _levels(self, dtype: Any) -> Iterator[tuple[int, Array, Array]]:
        """Yield lengths of halves, with exp(g[i] - g[m]) (upper) and exp(g[m] - g[j]) (lower)."""
        size = self.g.shape[-2]
        whole = _whole(size)
        g = self.g[..., None, :, :]  # the same for queries and keys
        g = np.concatenate([g, *[g[..., -1:, :]] * (whole - size)], axis=-2)
        half = whole // 2
        while half:
            lower, upper = _halves(g, half)
            middle = lower[..., -1:, :]
            yield half, *(np.exp(a.astype(dtype)) for a in (upper - middle, middle - lower))
            half //= 2


def _whole(size: int) -> int:
    """Return the smallest power of two that is at least ``size``."""
    return 1 << (size - 1).bit_length()


def _padded(array: Array, rows: int) -> Array:
    """Return an array with ``rows`` rows: its own, then zeros."""
    result = np.zeros_like(array, shape=(*array.shape[:-2], rows, array.shape[-1]))
    result[..., : array.shape[-2], :] = array
    return result


def _halves(array: Array, half: int) -> tuple[Array, Array]:
    """Return views of the lower and the upper halves of all parts: (..., parts, half, columns)."""
    rows, columns = array.shape[-2:]
    # (..., parts, 2, half, columns)
    parts = array.reshape(*array.shape[:-2], rows // (2 * half), 2, half, columns)
    return parts[..., 0, :, :], parts[..., 1, :, :]


def _blocks(square: Array, half: int) -> tuple[Array, Any]:
    """Return a view of square matrices, and the index of its blocks (parts, ..., half, half).

    The rows of a block are an upper half, its columns the lower half of the same part.
    """
    parts = square.shape[-1] // (2 * half)
    each = np.arange(parts, like=square)
    # parts and halves of rows, of columns
    view = square.reshape(*square.shape[:-2], parts, 2, half, parts, 2, half)
    return view, np.s_[..., each, 1, :, each, 0, :]


def _taken(square: Array, half: int) -> Array:
    """Return the blocks of ``_blocks``, as (..., parts, half, half)."""
    view, key = _blocks(square, half)
    return np.moveaxis(view[key], 0, -3)
