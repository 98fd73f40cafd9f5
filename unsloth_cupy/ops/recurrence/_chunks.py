"""The gated delta rule by chunks of tokens, in NumPy; a chunk of one token is the recurrence.

In a chunk that begins with state S, with g the sums of its decays so far and F[i, j] =
exp(g[i] - g[j]) for j <= i, else 0, all of which channels may have each their own:

    (I + A) U = B      A = beta F K K^T below its diagonal      B = beta (V - exp(g) K S)
    out = exp(g) Q S + (F Q K^T) U              S' = exp(g[-1]) S + (exp(g[-1] - g) K)^T U

The inverse of I + A is made of those of halves of its diagonal (UT transform): with T11 and T22,
the other block is -T22 A21 T11.  No sum of terms that cancel, as powers of A would be.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ._decays import OfChannels, OfTokens, from_here, turned, up_to_here


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

    q: Array  # (batch, heads, 1, chunk, dim), scaled
    k: Array
    v: Array  # (batch, heads, groups, chunk, value_dim)
    beta: Array  # (batch, heads, groups, chunk, 1)
    decays: OfTokens | OfChannels
    alike: Array  # F K K^T below its diagonal, (batch, heads, groups, chunk, chunk)
    inverse: Array  # of I + A

    def scores(self) -> Array:
        """Return F Q K^T."""
        return self.decays.pairs(self.q, self.k)

    def read(self, rows: Array, state: Array) -> Array:
        """Return what rows of queries or keys read of the state before the chunk."""
        product: Array = (self.decays.into * rows) @ state
        return product

    def solve(self, state: Array) -> tuple[Array, Array]:
        """Return V - exp(g) K S, and U."""
        rest = self.v - self.read(self.k, state)
        return rest, self.inverse @ (self.beta * rest)

    def end(self, state: Array, u: Array) -> Array:
        """Return the state after the chunk."""
        after: Array = turned(self.decays.onward * self.k) @ u
        after += self.decays.whole * state
        return after

    def gradients(
        self, state: Array, rest: Array, u: Array, do: Array, dend: Array
    ) -> tuple[Array, ...]:
        """Return those of q, scaled, k, v, decay, beta and of the state before the chunk.

        ``rest`` and ``u`` are what ``solve`` returned.
        """
        decays, p = self.decays, self.scores()
        du = turned(p) @ do
        du += (decays.onward * self.k) @ dend
        db = turned(self.inverse) @ du
        dv = self.beta * db
        da, dp = np.tril(-(db @ turned(u)), -1), np.tril(do @ turned(u))
        dbeta = (db * rest).sum(axis=-1)
        dbeta += (da * self.alike).sum(axis=-1)
        from_q = decays.into * (do @ turned(state))
        from_k = -decays.into * (dv @ turned(state))
        from_end = decays.onward * (u @ turned(dend))
        dstate = decays.whole * dend
        dq, dk, ddecay = decays.gradients(self.q, self.k, dp, self.beta * da, p, self.alike)
        dq += from_q
        dk += from_k + from_end
        # exp(decay[t]) is a factor of all that passes from before t to t or later: no terms cancel
        ddecay += from_here(decays.total(self.q * from_q + self.k * from_k))
        ddecay += up_to_here(decays.total(self.k * from_end))
        ddecay += decays.total(turned((state * dstate).sum(axis=-1, keepdims=True)))
        dstate += turned(decays.into * self.q) @ do
        dstate -= turned(decays.into * self.k) @ dv
        return (
            *(dq.sum(axis=2, keepdims=True), dk.sum(axis=2, keepdims=True)),
            *(dv, ddecay, dbeta, dstate),
        )


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

    def take(self, number: int, array: Array) -> Array:
        """Return one chunk of an array, (batch, heads, groups, chunk, ...)."""
        part = array[:, slice(*self.layout.spans[number])]
        groups = part.shape[2] // max(self.heads, 1)
        part = part.reshape(*part.shape[:2], self.heads, groups, *part.shape[3:])
        return np.moveaxis(part, 1, 3).copy()

    def give(self, number: int, array: Array, part: Array) -> None:
        """Write such a chunk, or of one group the sum of all."""
        to = array[:, slice(*self.layout.spans[number])]
        to[...] = np.moveaxis(part, 3, 1).reshape(to.shape)

    def at(self, number: int) -> Chunk:
        """Return one chunk."""
        q, k, v, decay, beta = (self.take(number, array) for array in self.arrays)
        q *= self.scale
        beta = beta[..., None]
        kind: Any = OfTokens if decay.ndim == 4 else OfChannels
        decays = kind.of(decay[..., None] if kind is OfTokens else decay, q.dtype)
        alike = np.tril(decays.pairs(k, k), -1)
        return Chunk(q, k, v, beta, decays, alike, inverse(beta * alike))

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
    half = 1
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
