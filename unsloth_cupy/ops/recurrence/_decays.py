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
        row = np.arange(g.shape[-2], like=g)
        away = np.where(row[:, None] >= row, g - turned(g), -np.inf)
        into = np.exp(g.astype(dtype))
        onward, fade = (np.exp(each.astype(dtype)) for each in (g[..., -1:, :] - g, away))
        return cls(into, onward, into[..., -1:, :], fade)

    def pairs(self, left: Array, k: Array) -> Array:
        """Return F left k^T, which has no values above its diagonal."""
        product: Array = self.fade * (left @ turned(k))
        return product

    def total(self, of_channels: Array) -> Array:
        """Return what decays of tokens get of a gradient of each channel."""
        return of_channels.sum(axis=-1, keepdims=True)

    def gradients(
        self, q: Array, k: Array, dp: Array, dc: Array, p: Array, c: Array
    ) -> tuple[Array, Array, Array]:
        """Return those of q, k and decay from dp and dc, of p = pairs(q, k) and c = pairs(k, k)."""
        passing = np.cumsum(dp * p + dc * c, axis=-1)
        across = np.zeros_like(self.into)
        across[..., 1:, 0] = np.tril(passing, -1).sum(axis=-2)[..., :-1]
        dp, dc = dp * self.fade, dc * self.fade
        return dp @ k, turned(dp) @ q + (dc + turned(dc)) @ k, across


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

    def pairs(self, left: Array, k: Array) -> Array:
        """Return the sums over channels of left[i] k[j] exp(g[i] - g[j]), for j <= i."""
        size = self.g.shape[-2]
        whole = _whole(size)
        result = np.zeros((*self.g.shape[:-2], whole, whole), k.dtype, like=k)
        each = np.arange(size, like=k)
        result[..., each, each] = (left * k).sum(axis=-1)
        left, k = _padded(left, whole), _padded(k, whole)
        for half, upper, lower in self._levels(k.dtype):
            rows, columns = _halves(left, half)[1] * upper, _halves(k, half)[0] * lower
            view, key = _blocks(result, half)
            view[key] = np.moveaxis(rows @ turned(columns), -3, 0)
        return result[..., :size, :size]

    def total(self, of_channels: Array) -> Array:
        """Return the gradient of each channel as it is."""
        return of_channels

    def gradients(
        self, q: Array, k: Array, dp: Array, dc: Array, p: Array, c: Array
    ) -> tuple[Array, Array, Array]:
        """Return those of q, k and decay from dp and dc, of p = pairs(q, k) and c = pairs(k, k)."""
        size = self.g.shape[-2]
        whole = _whole(size)
        each = np.arange(size, like=k)
        alone = dp[..., each, each][..., None]  # of a query and its own key
        dq, dk = _padded(alone * k, whole), _padded(alone * q, whole)
        q, k = _padded(q, whole), _padded(k, whole)
        dp, dc = (_padded(turned(_padded(turned(each), whole)), whole) for each in (dp, dc))
        ddecay = np.zeros_like(dq)
        for half, upper, lower in self._levels(k.dtype):
            (_, late_q), (early_k, late_k) = _halves(q, half), _halves(k, half)
            own_p, own_c = _taken(dp, half), _taken(dc, half)
            of_q, of_k = (upper * (each @ (lower * early_k)) for each in (own_p, own_c))
            early = turned(own_p) @ (upper * late_q) + turned(own_c) @ (upper * late_k)
            early *= lower
            _halves(dq, half)[1][...] += of_q
            for to, part in zip(_halves(dk, half), (early, of_k), strict=True):
                to[...] += part
            # decay[t] is a factor of all that passes from before t to t or later: no terms cancel
            to_early, to_late = _halves(ddecay, half)
            to_late += from_here(late_q * of_q + late_k * of_k)
            to_early += up_to_here(early_k * early)
        return dq[..., :size, :], dk[..., :size, :], ddecay[..., :size, :]

    def _levels(self, dtype: Any) -> Iterator[tuple[int, Array, Array]]:
        """Yield the lengths of halves, and exp(g[i] - g[m]) and exp(g[m] - g[j]) of these."""
        size = self.g.shape[-2]
        whole = _whole(size)
        last = self.g[..., -1:, :]
        g = np.concatenate([self.g, *[last] * (whole - size)], axis=-2)
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
