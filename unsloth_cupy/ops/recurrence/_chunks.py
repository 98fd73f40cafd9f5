"""The gated delta rule by chunks of tokens, in NumPy; a chunk of one token is the recurrence.

A chunk begins with the state S and ends with S'.  g are the running sums of its decays, and F[i, j]
= exp(g[i] - g[j]) for j <= i, else 0; each channel may have its own g and F.  W are the errors of
tokens, of which they correct the share beta:

    C = F K K^T below its diagonal      A = C beta      (I + A) W = V - exp(g) K S      U = beta W
    out = exp(g) Q S + (F Q K^T) U              S' = exp(g[-1]) S + (exp(g[-1] - g) K)^T U

The inverse of I + A is computed from the inverses T11 and T22 of the two halves of its diagonal (UT
transform): its other block is -T22 A21 T11.  Powers of A would be sums whose terms cancel.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ._decays import (
    ChannelDecays,
    TokenDecays,
    joined,
    sums_before,
    sums_from_here,
    transposed,
    without_diagonal,
)


class Layout:
    """The chunks of all texts: each text begins a new chunk, and its last one may be shorter."""

    def __init__(self, batch: int, tokens: int, offsets: Array | None, chunk: int) -> None:
        self.on_device = offsets is not None and type(offsets) is not np.ndarray
        if self.on_device:
            self._pad(tokens, offsets, chunk)
            return
        self.spans: list[tuple[int, int]] = []
        self.first: Any = []  # whether a chunk begins a text
        self.last: Any = []  # whether a chunk ends a text
        self.text: Any = []  # the texts of a chunk: every row of a batch, or one packed text
        edges = [0, tokens] if offsets is None else offsets.tolist()
        for text, (start, stop) in enumerate(itertools.pairwise(edges)):
            for at in range(start, stop, chunk):
                self.spans.append((at, min(at + chunk, stop)))
                self.first.append(at == start)
                self.last.append(at + chunk >= stop)
                self.text.append(slice(None) if offsets is None else slice(text, text + 1))

    def _pad(self, tokens: int, offsets: Any, chunk: int) -> None:
        """Lay out texts whose offsets the host does not read: all chunks have the same length.

        The rest of a short chunk is 0, and so are whole chunks at the end: there are as many chunks
        as texts of any lengths could need.
        """
        lengths = offsets[1:] - offsets[:-1]
        counts = np.maximum(-(-lengths // chunk), 1)
        stops = np.cumsum(counts)
        count = tokens // chunk + len(lengths)  # the most chunks that any lengths could need
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
        # of each token, its place in chunks
        self.home = token - offsets[text] + (stops - counts)[text] * chunk

    def lay(self, array: Array) -> Array:
        """Return an array of tokens, laid out in chunks."""
        if not self.on_device:
            return array
        if not array.shape[1]:
            return np.zeros_like(array, shape=(1, self.real.size, *array.shape[2:]))
        real = self.real.reshape(-1, *[1] * (array.ndim - 2))  # (all places, 1, ...)
        return np.where(real, array[0, self.token], 0)[None]

    def back(self, array: Array) -> Array:
        """Return an array that is laid out in chunks as an array of tokens."""
        return array[:, self.home] if self.on_device else array

    def before(self, number: int, begin: Array, state: Array | None) -> Array:
        """Return the states before a chunk: begin at the start of a text, else ``state``."""
        own: Array = begin[self.text[number]]
        return own if state is None else _select(self.first[number], own, state)

    def after(self, number: int, ends: Array, dstate: Array) -> Array:
        """Return the gradients of states after a chunk: ends if a text ends there, else dstate."""
        return _select(self.last[number], ends[self.text[number]], dstate)


class Chunk(NamedTuple):
    """What a chunk computes from its own tokens, without the state."""

    rows: Array  # scaled Q, and K: (batch, heads, 1, 2, chunk, dim)
    v: Array  # (batch, heads, groups, chunk, value_dim)
    beta: Array  # (batch, heads, groups, chunk, 1)
    decays: TokenDecays | ChannelDecays
    pairs: Array  # F Q K^T, and C: (batch, heads, groups, 2, chunk, chunk)
    inverse: Array  # of I + A: (batch, heads, groups, chunk, chunk)

    @property
    def k(self) -> Array:
        """Return K: (batch, heads, 1, chunk, dim)."""
        return self.rows[..., 1, :, :]

    def errors(self, state: Array) -> Array:
        """Return W, the errors that tokens correct."""
        read = (self.decays.into * self.k) @ state
        return self.inverse @ np.subtract(self.v, read, out=read)

    def out(self, state: Array, u: Array) -> Array:
        """Return what queries read from the state before the chunk and from its own tokens."""
        result: Array = self.pairs[..., 0, :, :] @ u
        result += (self.decays.into * self.rows[..., 0, :, :]) @ state
        return result

    def end(self, state: Array, u: Array) -> Array:
        """Return the state after the chunk."""
        after: Array = transposed(self.decays.onward * self.k) @ u
        after += self.decays.whole * state
        return after

    def gradients(self, state: Array, w: Array, do: Array, dend: Array) -> tuple[Array, ...]:
        """Return the gradients of scaled q, k, v, decay, beta and the state before the chunk."""
        decays, u = self.decays, self.beta * w
        # gradients of what queries and keys read: (batch, heads, groups, 2, chunk, value_dim)
        grads = np.stack([do, do], axis=3)
        do = grads[..., 0, :, :]
        du = transposed(self.pairs[..., 0, :, :]) @ do
        du += (decays.onward * self.k) @ dend
        dv = transposed(self.inverse) @ (self.beta * du)
        np.negative(dv, out=grads[..., 1, :, :])  # what keys read is subtracted
        # (batch, heads, groups, 2, chunk, chunk)
        dpairs = (joined(grads) @ transposed(w)).reshape(self.pairs.shape)
        dbeta = np.einsum("bhgiv,bhgiv->bhgi", du, w)
        dbeta += np.einsum("bhgij,bhgij->bhgj", dpairs[..., 1, :, :], self.pairs[..., 1, :, :])
        dpairs *= transposed(self.beta)[..., None, :, :]
        drows, dk, ddecay = decays.gradients(self.rows, dpairs, self.pairs)
        into = decays.into[..., None, :, :]
        # (batch, heads, groups, 2, chunk, dim)
        from_state = (joined(grads) @ transposed(state)).reshape(*grads.shape[:-1], state.shape[-2])
        from_state *= into
        from_end = u @ transposed(dend)
        from_end *= decays.onward
        dstate = decays.whole * dend
        # exp(decay[t]) is a factor of all that tokens before t pass to t or later: nothing cancels
        ddecay += sums_from_here(decays.total(self.rows, from_state).sum(axis=3))
        ddecay += sums_before(decays.total(self.k, from_end))
        ddecay += decays.total(transposed(state), transposed(dstate)).sum(axis=-2, keepdims=True)
        dstate += transposed(joined(into * self.rows)) @ joined(grads)
        drows += from_state.sum(axis=2, keepdims=True)
        dk += from_end.sum(axis=2, keepdims=True)
        dk += drows[..., 1, :, :]
        return drows[..., 0, :, :], dk, dv, ddecay, dbeta[..., None], dstate


class Chunks:
    """The arrays of a call, laid out in chunks."""

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
        self.kind: Any = TokenDecays if decay.ndim == 3 else ChannelDecays

    def by_head(self, array: Array) -> Array:
        """Return an array of tokens as a view (batch, heads, groups, tokens, columns)."""
        batch, tokens, heads, *columns = array.shape
        shape = batch, tokens, self.heads, heads // max(self.heads, 1), *(columns or [1])
        return np.moveaxis(array.reshape(shape), 1, 3)  # (batch, heads, groups, tokens, columns)

    def take(self, number: int, view: Array, heads: slice) -> Array:
        """Return some heads of one chunk as a view (batch, heads, groups, chunk, ...)."""
        return view[:, heads, :, slice(*self.layout.spans[number])]

    def at(self, number: int, heads: slice) -> Chunk:
        """Return some heads of one chunk."""
        q, k, v, decay, beta = (self.take(number, view, heads) for view in self.views)
        decay, beta = decay.copy(), beta.copy()  # contiguous, and so is all that follows from them
        rows = np.stack([q, k], axis=3)
        rows[..., 0, :, :] *= self.scale
        decays = self.kind.of(decay, rows.dtype)
        pairs = decays.pairs(rows)
        without_diagonal(pairs[..., 1, :, :])
        below = pairs[..., 1, :, :] * transposed(beta)
        return Chunk(rows, v, beta, decays, pairs, inverse(below))


def _select(condition: Any, one: Array, other: Array) -> Array:
    """Return ``one`` where the condition, which may be on a device, is True, else ``other``."""
    if isinstance(condition, bool):
        return one if condition else other
    return np.where(condition, one, other)


def inverse(below: Array) -> Array:
    """Return the inverse of I + A, where A is 0 on and above its diagonal."""
    size = below.shape[-1]
    whole = 1 << (size - 1).bit_length()  # a power of two, which can be halved down to 1
    a = below
    if whole != size:
        a = np.zeros((*below.shape[:-2], whole, whole), below.dtype, like=below)
        a[..., :size, :size] = below
    result = np.zeros_like(a)
    each = np.arange(whole)
    result[..., each, each] = 1
    odd = each[1::2]
    result[..., odd, odd - 1] = -a[..., odd, odd - 1]  # the inverses of blocks of 2 x 2
    half = 2
    while half < whole:
        pairs = whole // (2 * half)
        each = np.arange(pairs)
        shape = *a.shape[:-2], pairs, 2 * half, pairs, 2 * half
        blocks = result.reshape(shape)  # (..., pairs, 2 * half, pairs, 2 * half)
        first, second = blocks[..., each, :half, each, :half], blocks[..., each, half:, each, half:]
        left = a.reshape(shape)[..., each, half:, each, :half]
        blocks[..., each, half:, each, :half] = -(second @ left @ first)
        half *= 2
    return result[..., :size, :size]
