"""The scores of attention, block by block, for the definitions of all attention ops.

score = cap * tanh(scale * q @ k.T / cap) + bias - slope * abs(query position - key position)

and -inf where a query may not see a key.  No temporary array here is larger than a block.
"""

import math

import numpy as np

from ...core.dtypes import Array
from ..common import philox
from . import _fixed_products
from ._blocks import Block, Blocks, four_axes, index_of
from ._options import TILE, Options
from ._products import by_keys, over_keys, stacked


class Scores(Blocks):
    """The scores of one attention call."""

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        options: Options,
        first_batch: int = 0,
    ) -> None:
        super().__init__(q, k, v, options)
        scale, softcap, alibi = options.scale, options.softcap, options.alibi
        # a head may have no columns: 1, not a division by 0
        self.scale = 1 / math.sqrt(max(q.shape[3], 1)) if scale is None else float(scale)
        self.softcap = None if softcap is None else float(softcap)
        self.dropout, self.seed = options.dropout, options.seed
        self.first_batch = first_batch  # dropout draws by batch numbers that begin with it
        self.mask = four_axes(options.mask)
        self.bias = four_axes(options.bias)
        self.alibi = None if alibi is None else four_axes(alibi[..., None, None])
        self.sinks = options.sinks

    def logits(self, block: Block) -> tuple[Array, Array, Array | None]:
        """Return the scaled queries, the scores and, with softcap, tanh(score / softcap).

        Scores are (batch, kv_heads, group * queries, keys): query heads that share a key head are
        rows of one product.
        """
        q = stacked(self.q, block, self.group) * self.scale
        # (batch, kv_heads, group * queries, keys)
        scores = self.by_keys(q, self.k[block.batch, block.keys, block.kv_heads])
        tanh = None
        if self.softcap is not None:
            scores /= self.softcap
            tanh = np.tanh(scores, out=scores)
            scores = tanh * self.softcap
        view = self.by_head(scores, block)  # (batch, kv_heads, group, queries, keys)
        if self.bias is not None:
            view += self._split(_part(self.bias, block))
        if self.alibi is not None:
            slope = self._split(_part(self.alibi, block))
            view -= slope * self.distances(block).astype(scores.dtype)
        if self.mask is not None:
            np.copyto(view, -math.inf, where=~self._split(_part(self.mask, block)))
        if block.gaps:
            # (batch or 1, heads or 1, 1, keys)
            tiles = self.tiles(block)[..., self.numbers(block.keys) // TILE]
            np.copyto(view, -math.inf, where=~self._split(tiles))
        for columns in block.edges:
            np.copyto(view[..., columns], -math.inf, where=self.hidden(block, columns))
        return q, scores, tanh

    def by_keys(self, a: Array, b: Array) -> Array:
        """Return (batch, kv_heads, rows, d) @ (batch, keys, kv_heads, d).T."""
        return _fixed_products.by_keys(a, b) if self.fixed else by_keys(a, b, self.width)

    def over_keys(self, p: Array, b: Array) -> Array:
        """Return (batch, kv_heads, rows, keys) @ (batch, keys, kv_heads, d)."""
        return _fixed_products.over_keys(p, b) if self.fixed else over_keys(p, b, self.width)

    def row_sums(self, p: Array, block: Block) -> Array:
        """Return the sums of the rows of a block: (batch, kv_heads, group, queries, 1)."""
        by_head = self.by_head(p, block)
        if self.fixed:
            # (batch, kv_heads, group, queries, 1)
            return _fixed_products.row_sums(p).reshape(*by_head.shape[:-1], 1)
        # row sums, as a product with a column of ones
        total: Array = (by_head[..., None, :] @ np.full_like(p, 1, shape=(p.shape[3], 1)))[..., 0]
        return total

    def by_head(self, scores: Array, block: Block) -> Array:
        """View the scores of a block as (batch, kv_heads, group, queries, keys)."""
        batch, kv_heads, _, keys = scores.shape
        return scores.reshape(batch, kv_heads, self.group, -1, keys)

    def kept(self, block: Block) -> Array:
        """Return True where dropout keeps a probability, with the axes of ``by_head``."""
        batch, head, row = (
            np.arange(part.start, part.stop, like=self.q)
            for part in (block.batch, block.heads, block.rows)
        )
        batch = batch[:, None, None] + self.first_batch  # (batch, 1, 1)
        keys = self.numbers(block.keys)
        gapless = isinstance(block.keys, slice)
        first, stop = (block.keys.start, block.keys.stop) if gapless else (0, self.keys)
        rows = (batch, head[:, None], row)
        kept = philox.keep_mask(int(self.seed or 0), self.dropout, rows, first, stop)
        return self._split(kept if gapless else kept[..., keys])

    def add_sum(self, total: Array, gradient: Array, block: Block) -> None:
        """Add the gradient of the scores (axes of ``by_head``) to the gradient of an operand.

        ``total`` has four axes; the gradient is summed over its axes of size 1, which broadcast.
        """
        batch, _, _, rows, keys = gradient.shape
        gradient = gradient.reshape(batch, -1, rows, keys)  # (batch, heads, queries, keys)
        axes = tuple(axis for axis, size in enumerate(total.shape) if size == 1)
        total[index_of(total, block)] += gradient.sum(axis=axes, keepdims=True)

    def _split(self, part: Array) -> Array:
        """View (batch or 1, heads or 1, queries or 1, keys or 1) with the axes of ``by_head``.

        They are (batch or 1, kv_heads or 1, group or 1, queries or 1, keys or 1).
        """
        batch, heads, rows, keys = part.shape
        group = 1 if heads == 1 else self.group
        # (batch, kv_heads, group, queries, keys)
        return part.reshape(batch, heads // group, group, rows, keys)


def _part(array: Array, block: Block) -> Array:
    """Return the block's part of an array with four axes, some of which may have size 1."""
    return array[index_of(array, block)]
