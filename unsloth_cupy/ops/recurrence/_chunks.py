"""The gated delta rule by chunks of tokens, in NumPy; a chunk of one token is the recurrence.

In a chunk that begins with state S, with g the sums of its decays so far and F[i, j] =
exp(g[i] - g[j]) for j <= i, else 0:

    (I + A) U = B      A = beta F K K^T below its diagonal      B = beta (V - exp(g) K S)
    out = exp(g) Q S + (F Q K^T) U              S' = exp(g[-1]) S + (exp(g[-1] - g) K)^T U

The inverse of I + A is made of those of halves of its diagonal (UT transform): with T11 and T22,
the other block is -T22 A21 T11.  No sum of terms that cancel, as powers of A would be.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array

LEAST = -800.0  # a decay below it counts as this: exp is 0 in every dtype, and sums are finite


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
    into: Array  # exp(g)
    onward: Array  # exp(g[-1] - g)
    whole: Array  # exp(g[-1])
    fade: Array  # F, (batch, heads, groups, chunk, chunk)
    kk: Array  # K K^T
    below: Array  # A
    inverse: Array  # of I + A

    def solve(self, state: Array) -> tuple[Array, Array]:
        """Return V - exp(g) K S, and U."""
        rest = self.v - self.into * (self.k @ state)
        return rest, self.inverse @ (self.beta * rest)

    def end(self, state: Array, u: Array) -> Array:
        """Return the state after the chunk."""
        return self.whole * state + turned(self.onward * self.k) @ u

    def gradients(self, state: Array, do: Array, dend: Array) -> tuple[Array, ...]:
        """Return those of q, scaled, k, v, decay, beta and of the state before the chunk."""
        rest, u = self.solve(state)
        p = self.fade * (self.q @ turned(self.k))
        du = turned(p) @ do
        du += (self.onward * self.k) @ dend
        db = turned(self.inverse) @ du
        dv = self.beta * db
        da, dp, strict = -(db @ turned(u)), do @ turned(u), np.tril(self.fade, -1)
        dqk, dkk = dp * self.fade, da * self.beta * strict
        dbeta = (db * rest).sum(axis=-1)
        dbeta += (da * strict * self.kk).sum(axis=-1)
        from_q = self.into * (do @ turned(state))
        from_k = -self.into * (dv @ turned(state))
        from_end = self.onward * (u @ turned(dend))
        dstate = self.whole * dend
        # exp(decay[t]) is a factor of all that passes from before t to t or later: no terms cancel
        pairs = np.cumsum(dp * p + da * self.below, axis=-1)
        across = np.tril(pairs, -1).sum(axis=-2)
        after = (self.q * from_q + self.k * from_k).sum(axis=-1)
        before = (self.k * from_end).sum(axis=-1)
        ddecay = np.cumsum(after[..., ::-1], axis=-1)[..., ::-1]
        ddecay = ddecay + (state * dstate).sum(axis=(-1, -2))[..., None]
        ddecay[..., 1:] += across[..., :-1] + np.cumsum(before, axis=-1)[..., :-1]
        dstate += turned(self.into * self.q) @ do
        dstate -= turned(self.into * self.k) @ dv
        dq = from_q + dqk @ self.k
        dk = from_k + from_end + turned(dqk) @ self.q + (dkk + turned(dkk)) @ self.k
        return (
            *(dq.sum(axis=2, keepdims=True), dk.sum(axis=2, keepdims=True)),
            *(dv, ddecay, dbeta, dstate),
        )


def turned(array: Array) -> Array:
    """Return matrices transposed."""
    return array.swapaxes(-1, -2)


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
        g = np.cumsum(np.maximum(decay, LEAST), axis=-1, dtype=np.float64)  # differences cancel
        row = np.arange(g.shape[-1], like=q)
        away = np.where(row[:, None] >= row, g[..., :, None] - g[..., None, :], -np.inf)
        fade = np.exp(away.astype(q.dtype))
        onward = np.exp((g[..., -1:] - g).astype(q.dtype))[..., None]
        into = np.exp(g.astype(q.dtype))[..., None]
        kk = k @ turned(k)
        below = np.tril(beta * fade * kk, -1)
        return Chunk(
            *(q, k, v, beta, into, onward, into[..., -1:, :], fade, kk, below, inverse(below))
        )

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
