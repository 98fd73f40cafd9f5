"""The gated delta rule by chunks of tokens, in NumPy; a chunk of one token is the recurrence.

In a chunk that begins with state S, with g the sums of its decays so far and F[i, j] =
exp(g[i] - g[j]) for j <= i, else 0, all of which channels may have each their own, and W the
errors that tokens correct, of which beta is the share:

    C = F K K^T below its diagonal      A = C beta      (I + A) W = V - exp(g) K S      U = beta W
    out = exp(g) Q S + (F Q K^T) U              S' = exp(g[-1]) S + (exp(g[-1] - g) K)^T U

The inverse of I + A is made of those of halves of its diagonal (UT transform): with T11 and T22,
the other block is -T22 A21 T11.  No sum of terms that cancel, as powers of A would be.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ._decays import (
    OfChannels,
    OfTokens,
    beside,
    from_here,
    turned,
    up_to_here,
    without_diagonal,
)


class Layout:
    """The chunks of texts, each of which begins a new one; the last of a text may be shorter."""

    def __init__(self, batch: int, tokens: int, offsets: Array | None, chunk: int) -> None:
        self.on_device = offsets is not None and type(offsets) is not np.ndarray
        if self.on_device:
            self._pad(tokens, offsets, chunk)
            return
        self.spans: list[tuple[int, int]] = []
        self.first: Any = []  # whether a chunk begins a text; whether it ends one
        self.last: Any = []
        self.text: Any = []  # the texts of a chunk: every row of a batch, or one
        edges = [0, tokens] if offsets is None else offsets.tolist()
        for text, (start, stop) in enumerate(itertools.pairwise(edges)):
            for at in range(start, stop, chunk):
                self.spans.append((at, min(at + chunk, stop)))
                self.first.append(at == start)
                self.last.append(at + chunk >= stop)
                self.text.append(slice(None) if offsets is None else slice(text, text + 1))

    def _pad(self, tokens: int, offsets: Any, chunk: int) -> None:
        """Lay out texts that are not read: chunks of one length, the rest of which is 0.

        So are whole chunks, as many as there could be more.
        """
        lengths = offsets[1:] - offsets[:-1]
        counts = np.maximum(-(-lengths // chunk), 1)
        stops = np.cumsum(counts)
        count = tokens // chunk + len(lengths)
        number = np.arange(count, like=offsets)
        text = np.minimum(np.searchsorted(stops, number, side="right"), len(lengths) - 1)
        place = number - (stops - counts)[text]
        self.spans = [(i * chunk, (i + 1) * chunk) for i in range(count)]
        self.first, self.last = place == 0, place == counts[text] - 1
        self.text = [text[i : i + 1] for i in range(count)]
        inside = place[:, None] * chunk + np.arange(chunk, like=offsets)
        self.real = (inside < lengths[text][:, None]).reshape(-1)
        self.token = np.minimum((offsets[text][:, None] + inside).reshape(-1), tokens - 1)
        token = np.arange(tokens, like=offsets)
        text = np.searchsorted(offsets[1:], token, side="right")
        self.home = token - offsets[text] + (stops - counts)[text] * chunk

    def lay(self, array: Array) -> Array:
        """Return an array of tokens in the order of chunks."""
        if not self.on_device:
            return array
        if not array.shape[1]:
            return np.zeros_like(array, shape=(1, self.real.size, *array.shape[2:]))
        real = self.real.reshape(-1, *[1] * (array.ndim - 2))
        return np.where(real, array[0, self.token], 0)[None]

    def back(self, array: Array) -> Array:
        """Return an array of chunks as one of tokens."""
        return array[:, self.home] if self.on_device else array


class Chunk(NamedTuple):
    """What a chunk needs of its own tokens, whatever its state is."""

    rows: Array  # Q, scaled, and K: (batch, heads, 1, 2, chunk, dim)
    v: Array  # (batch, heads, groups, chunk, value_dim)
    beta: Array  # (batch, heads, groups, chunk, 1)
    decays: OfTokens | OfChannels
    pairs: Array  # F Q K^T, and C: (batch, heads, groups, 2, chunk, chunk)
    inverse: Array  # of I + A

    @property
    def k(self) -> Array:
        """Return keys."""
        return self.rows[..., 1, :, :]

    def errors(self, state: Array) -> Array:
        """Return W."""
        read = (self.decays.into * self.k) @ state
        return self.inverse @ np.subtract(self.v, read, out=read)

    def out(self, state: Array, u: Array) -> Array:
        """Return what queries read of the state before the chunk and of what it writes."""
        result: Array = self.pairs[..., 0, :, :] @ u
        result += (self.decays.into * self.rows[..., 0, :, :]) @ state
        return result

    def end(self, state: Array, u: Array) -> Array:
        """Return the state after the chunk."""
        after: Array = turned(self.decays.onward * self.k) @ u
        after += self.decays.whole * state
        return after

    def gradients(self, state: Array, w: Array, do: Array, dend: Array) -> tuple[Array, ...]:
        """Return those of q, scaled, k, v, decay, beta and of the state before the chunk."""
        decays, u = self.decays, self.beta * w
        grads = np.stack([do, do], axis=3)  # to what queries and keys read of the state and of U
        do = grads[..., 0, :, :]
        du = turned(self.pairs[..., 0, :, :]) @ do
        du += (decays.onward * self.k) @ dend
        dv = turned(self.inverse) @ (self.beta * du)
        np.negative(dv, out=grads[..., 1, :, :])  # what keys read is subtracted
        dpairs = (beside(grads) @ turned(w)).reshape(self.pairs.shape)
        dbeta = np.einsum("bhgiv,bhgiv->bhgi", du, w)
        dbeta += np.einsum("bhgij,bhgij->bhgj", dpairs[..., 1, :, :], self.pairs[..., 1, :, :])
        dpairs *= turned(self.beta)[..., None, :, :]
        drows, dk, ddecay = decays.gradients(self.rows, dpairs, self.pairs)
        into = decays.into[..., None, :, :]
        from_state = (beside(grads) @ turned(state)).reshape(*grads.shape[:-1], state.shape[-2])
        from_state *= into
        from_end = u @ turned(dend)
        from_end *= decays.onward
        dstate = decays.whole * dend
        # exp(decay[t]) is a factor of all that passes from before t to t or later: no terms cancel
        ddecay += from_here(decays.total(self.rows, from_state).sum(axis=3))
        ddecay += up_to_here(decays.total(self.k, from_end))
        ddecay += decays.total(turned(state), turned(dstate)).sum(axis=-2, keepdims=True)
        dstate += turned(beside(into * self.rows)) @ beside(grads)
        drows += from_state.sum(axis=2, keepdims=True)
        dk += from_end.sum(axis=2, keepdims=True)
        dk += drows[..., 1, :, :]
        return drows[..., 0, :, :], dk, dv, ddecay, dbeta[..., None], dstate


class Chunks:
    """The chunks of a call."""

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        decay: Array,
        beta: Array,
        offsets: Array | None,
        chunk: int,
        scale: float,
    ) -> None:
        batch, tokens = q.shape[:2]
        self.layout = Layout(batch, tokens, offsets, chunk)
        self.heads, self.scale = q.shape[2], scale
        self.arrays = [self.layout.lay(a) for a in (q, k, v, decay, beta)]
        self.views = [self.by_head(array) for array in self.arrays]
        self.kind: Any = OfTokens if decay.ndim == 3 else OfChannels

    def by_head(self, array: Array) -> Array:
        """Return a view of an array of tokens, (batch, heads, groups, tokens, columns)."""
        batch, tokens, heads, *columns = array.shape
        shape = batch, tokens, self.heads, heads // max(self.heads, 1), *(columns or [1])
        return np.moveaxis(array.reshape(shape), 1, 3)

    def take(self, number: int, view: Array, heads: slice) -> Array:
        """Return a view of some heads of one chunk, (batch, heads, groups, chunk, ...)."""
        return view[:, heads, :, slice(*self.layout.spans[number])]

    def at(self, number: int, heads: slice) -> Chunk:
        """Return some heads of one chunk."""
        q, k, v, decay, beta = (self.take(number, view, heads) for view in self.views)
        decay, beta = decay.copy(), beta.copy()  # in order, as is all that is made of them
        rows = np.stack([q, k], axis=3)
        rows[..., 0, :, :] *= self.scale
        decays = self.kind.of(decay, rows.dtype)
        pairs = decays.pairs(rows)
        without_diagonal(pairs[..., 1, :, :])
        below = pairs[..., 1, :, :] * turned(beta)
        return Chunk(rows, v, beta, decays, pairs, inverse(below))

    def begin(self, number: int, initial: Array, state: Array | None) -> Array:
        """Return the state before a chunk, from that after the one before it."""
        own: Array = initial[self.layout.text[number]]
        return own if state is None else chosen(self.layout.first[number], own, state)


def chosen(condition: Any, one: Array, other: Array) -> Array:
    """Return one array or the other; the condition may be on a device."""
    if isinstance(condition, bool):
        return one if condition else other
    return np.where(condition, one, other)


def inverse(below: Array) -> Array:
    """Return the inverse of I + A, where A has values below its diagonal alone."""
    size = below.shape[-1]
    whole = 1 << (size - 1).bit_length()
    a = below
    if whole != size:
        a = np.zeros((*below.shape[:-2], whole, whole), below.dtype, like=below)
        a[..., :size, :size] = below
    result = np.zeros_like(a)
    each = np.arange(whole)
    result[..., each, each] = 1
    odd = each[1::2]
    result[..., odd, odd - 1] = -a[..., odd, odd - 1]  # blocks of 2
    half = 2
    while half < whole:
        pairs = whole // (2 * half)
        each = np.arange(pairs)
        shape = *a.shape[:-2], pairs, 2 * half, pairs, 2 * half
        blocks = result.reshape(shape)
        first, second = blocks[..., each, :half, each, :half], blocks[..., each, half:, each, half:]
        left = a.reshape(shape)[..., each, half:, each, :half]
        blocks[..., each, half:, each, :half] = -(second @ left @ first)
        half *= 2
    return result[..., :size, :size]
