"""The scores of attention, block by block: what every attention op has in common.

score = cap * tanh(scale * q @ k.T / cap) + bias - slope * abs(query position - key position)

and -inf where a query may not see a key.  A block is some batches, some heads, a run of queries
and the keys that these queries see; no array here is larger than a block.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import _philox
from .._typing import Array
from ..errors import ConfigError, RangeError

Window = tuple[int | None, int | None]

TILE = 128  # queries and keys that one element of block_mask stands for
HOST_SCORES = 2**18  # scores of a block: they stay in a core's cache
DEVICE_SCORES = 2**24  # few launches, 64 MiB
LEAST_ROWS = 64  # rows below which a matrix product runs slowly


class Block(NamedTuple):
    """A part of the scores."""

    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice  # of the queries
    keys: Any  # a slice, or the numbers of the keys where block_mask leaves gaps
    edges: tuple[slice, ...]  # columns, of keys, where causal, window or lengths hide some pairs
    gaps: bool  # block_mask hides some pairs


class Scores:
    """The scores of one attention call."""

    def __init__(
        self,
        q: Array,
        k: Array,
        mask: Array | None = None,
        key_lengths: Array | None = None,
        query_start: Array | int | None = None,
        block_mask: Array | None = None,
        causal: bool = False,
        window: Window | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        bias: Array | None = None,
        alibi: Array | None = None,
        dropout: float = 0.0,
        seed: int | None = None,
        first_batch: int = 0,
    ) -> None:
        check_options(window, softcap)
        _philox.check("attention", dropout, seed)
        self.q, self.k = q, k
        self.batch, self.queries, self.heads, dim = q.shape
        self.keys, self.kv_heads = k.shape[1:3]
        self.group = self.heads // self.kv_heads if self.kv_heads else 0
        self.scale = 1 / math.sqrt(max(dim, 1)) if scale is None else float(scale)
        self.softcap = None if softcap is None else float(softcap)
        self.dropout, self.seed = dropout, seed
        self.first_batch = first_batch  # what dropout adds to the number of a batch
        self.left, self.right = window or (None, None)
        if causal:
            self.right = 0
        self.mask, self.block_mask = _four_axes(mask), _four_axes(block_mask)
        self.bias, self.alibi = _four_axes(bias), None
        if alibi is not None:
            self.alibi = alibi.reshape(-1, self.heads, 1, 1)
        self.on_host = isinstance(q, np.ndarray)
        self._place(key_lengths, query_start)
        self._choose_steps()

    def _place(self, key_lengths: Any, query_start: Any) -> None:
        """Set the number of keys and the position of the first query, of all or of each batch.

        On the host these numbers become Python integers, and keys that do not exist are never
        read.  On a device nobody waits for them: keys that do not exist become zeros.
        """
        self.length: Any = self.keys
        if key_lengths is not None:
            self.length = key_lengths.astype(np.int64)
            if not self.on_host:
                self.k = self.existing(self.k)
            elif self.batch and not 0 <= self.length.min() <= self.length.max() <= self.keys:
                problem = f"key_lengths holds {self.length.min()} .. {self.length.max()}"
                raise RangeError(f"attention: {problem}; it must be in 0 .. {self.keys}, the keys")
        self.start: Any = self.length - self.queries
        if query_start is not None:
            self.start = query_start
            if getattr(query_start, "ndim", 0) == 0 and self.on_host:
                self.start = int(query_start)
            elif not isinstance(query_start, int):
                self.start = np.broadcast_to(query_start, (self.batch,)).astype(np.int64)
        self.each_batch = not (isinstance(self.start, int) and isinstance(self.length, int))

    def _choose_steps(self) -> None:
        """Set how many batches, kv heads and queries a block takes."""
        scores = HOST_SCORES if self.on_host else DEVICE_SCORES
        rows, least = TILE, max(1, LEAST_ROWS // max(self.group, 1))

        def width(rows: int) -> int:
            near = self.left is not None and self.right is not None
            span = self.left + self.right + rows if near else self.keys  # type: ignore[operator]
            return max(1, min(span, self.keys) * self.group)

        while rows > least and rows * width(rows) > scores:
            rows //= 2
        room = scores // max(1, min(rows, self.queries) * width(rows))
        kv_heads = max(1, min(room, self.kv_heads))
        alone = self.on_host and (self.each_batch or self.block_mask is not None)
        self.steps = (1 if alone else max(1, room // kv_heads), kv_heads, rows)

    def existing(self, array: Array) -> Array:
        """Return k or v with zeros, on a device, for the keys that do not exist."""
        if self.on_host or isinstance(self.length, int):
            return array
        exists = np.arange(self.keys, like=array) < self.length[:, None]
        return np.where(exists[..., None, None], array, 0)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks in which some query sees a key."""
        batches, kv_heads, rows = self.steps
        for batch in _slices(self.batch, batches):
            for kv in _slices(self.kv_heads if self.heads else 0, kv_heads):
                heads = slice(kv.start * self.group, kv.stop * self.group)
                for row in _slices(self.queries, rows):
                    block = self._narrowed(Block(batch, kv, heads, row, None, (), False))
                    if not isinstance(block.keys, slice) or block.keys.start < block.keys.stop:
                        yield block

    def _narrowed(self, block: Block) -> Block:
        """Return the block with only the keys that its queries see, and where to look closer."""
        if not self.on_host and (self.each_batch or self.block_mask is not None):
            gaps = self.block_mask is not None  # reading it here would stall the device
            return block._replace(keys=slice(0, self.keys), edges=(slice(None),), gaps=gaps)
        start, length = self._at(self.start, block), self._at(self.length, block)
        low, high = start + block.rows.start, start + block.rows.stop - 1
        first, clear, over, stop = 0, 0, length, length  # all rows see the keys clear .. over
        if self.left is not None:
            first = min(max(low - self.left, 0), length)
            clear = min(max(high - self.left, first), length)
        if self.right is not None:
            stop = max(min(high + self.right + 1, length), first)
            over = max(min(low + self.right + 1, stop), first)
        pairs = ((first, clear), (over, stop)) if clear < over else ((first, stop),)
        edges = tuple(slice(a - first, b - first) for a, b in pairs if a < b)
        block = block._replace(keys=slice(first, stop), edges=edges)
        if self.block_mask is None:
            return block
        tiles = self._tiles(block)
        some, every = tiles.any(axis=(0, 1, 2)), tiles.all(axis=(0, 1, 2))
        block = block._replace(gaps=bool((some != every).any()))
        some = np.repeat(some, TILE)[first:stop]
        if some.all():
            return block
        keys = np.flatnonzero(some) + first
        closer = (slice(None),) if edges else ()
        return block._replace(keys=keys if keys.size else slice(0, 0), edges=closer)

    def logits(self, block: Block) -> tuple[Array, Array, Array | None]:
        """Return scaled queries, scores and, with softcap, the tanh inside them.

        Scores are (batch, kv_heads, group * queries, keys): query heads that share a key head
        are rows of one product.
        """
        q = stacked(self.q, block, self.group) * self.scale
        scores = q @ self.k[block.batch, block.keys, block.kv_heads].transpose(0, 2, 3, 1)
        tanh = None
        if self.softcap is not None:
            scores /= self.softcap
            tanh = np.tanh(scores, out=scores)
            scores = tanh * self.softcap
        seen = self.by_head(scores, block)
        if self.bias is not None:
            seen += self._split(_part(self.bias, block))
        if self.alibi is not None:
            slope = self._split(_part(self.alibi, block))
            seen -= slope * np.abs(self.offsets(block)).astype(scores.dtype)
        if self.mask is not None:
            np.copyto(seen, -math.inf, where=~self._split(_part(self.mask, block)))
        if block.gaps:
            tiles = self._tiles(block)[..., self._numbers(block.keys) // TILE]
            np.copyto(seen, -math.inf, where=~self._split(tiles))
        for columns in block.edges:
            np.copyto(seen[..., columns], -math.inf, where=self._hidden(block, columns))
        return q, scores, tanh

    def by_head(self, scores: Array, block: Block) -> Array:
        """View the scores of a block as (batch, kv_heads, group, queries, keys)."""
        batch, kv_heads, _, keys = scores.shape
        return scores.reshape(batch, kv_heads, self.group, -1, keys)

    def offsets(self, block: Block, columns: slice = slice(None)) -> Array:
        """Return key position minus query position for each pair of a block."""
        rows = np.arange(block.rows.start, block.rows.stop, like=self.q)[:, None]
        return self._numbers(block.keys)[columns] - (rows + self._at(self.start, block))

    def kept(self, block: Block) -> Array:
        """Return where dropout keeps a probability, as (batch, kv_heads, group, queries, keys)."""
        batch, head, row = (
            np.arange(part.start, part.stop, like=self.q)
            for part in (block.batch, block.heads, block.rows)
        )
        batch = batch[:, None, None] + self.first_batch
        keys = self._numbers(block.keys)
        gapless = isinstance(block.keys, slice)
        first, stop = (block.keys.start, block.keys.stop) if gapless else (0, self.keys)
        rows = (batch, head[:, None], row)
        kept = _philox.kept(int(self.seed or 0), self.dropout, rows, first, stop)
        return self._split(kept if gapless else kept[..., keys])

    def add_sum(self, total: Array, gradient: Array, block: Block) -> None:
        """Add a gradient (batch, kv_heads, group, queries, keys) to that of what was broadcast."""
        batch, _, _, rows, keys = gradient.shape
        gradient = gradient.reshape(batch, -1, rows, keys)
        axes = tuple(axis for axis, size in enumerate(total.shape) if size == 1)
        total[_index(total, block)] += gradient.sum(axis=axes, keepdims=True)

    def _hidden(self, block: Block, columns: slice) -> Array:
        """Return where causal, window and lengths forbid a pair."""
        offsets = self.offsets(block, columns)
        hidden = np.zeros_like(offsets, dtype=bool)
        if self.left is not None:
            hidden |= offsets < -self.left
        if self.right is not None:
            hidden |= offsets > self.right
        if not isinstance(self.length, int) and not self.on_host:
            hidden = hidden | (self._numbers(block.keys)[columns] >= self._at(self.length, block))
        return hidden

    def _tiles(self, block: Block) -> Array:
        """Return the row of block_mask that the block's queries, all in one tile, lie in."""
        row = block.rows.start // TILE
        tiles: Array = self.block_mask[:, :, row : row + 1]
        return tiles[_index(tiles[..., :1], block)]

    def _split(self, part: Array) -> Array:
        """View (batch or 1, heads or 1, queries or 1, keys or 1) by group, as scores are."""
        batch, heads, rows, keys = part.shape
        group = 1 if heads == 1 else self.group
        return part.reshape(batch, heads // group, group, rows, keys)

    def _numbers(self, keys: Any) -> Array:
        return np.arange(keys.start, keys.stop, like=self.q) if isinstance(keys, slice) else keys

    def _at(self, number: Any, block: Block) -> Any:
        """Return a number of the block's batch: an integer, or an array on a device."""
        if isinstance(number, int):
            return number
        if self.on_host:
            return int(number[block.batch.start])
        return number[block.batch].reshape(-1, 1, 1, 1, 1)


def stacked(array: Array, block: Block, group: int) -> Array:
    """Return the block's (batch, queries, heads, n) as (batch, kv_heads, group * queries, n)."""
    part = array[block.batch, block.rows, block.heads].transpose(0, 2, 1, 3)
    batch, heads, rows, width = part.shape
    return part.reshape(batch, heads // group, group * rows, width)


def unstacked(array: Array, group: int) -> Array:
    """Return (batch, kv_heads, group * queries, n) as (batch, queries, heads, n)."""
    batch, kv_heads, rows, width = array.shape
    array = array.reshape(batch, kv_heads * group, rows // group, width)
    return array.transpose(0, 2, 1, 3)


def _four_axes(array: Any) -> Any:
    return None if array is None else array.reshape((1,) * (4 - array.ndim) + array.shape)


def _index(array: Array, block: Block) -> tuple[Any, ...]:
    """Return the index of the block's part of an array that broadcasts."""
    parts = (block.batch, block.heads, block.rows, block.keys)
    return tuple(
        slice(None) if size == 1 else part for size, part in zip(array.shape, parts, strict=True)
    )


def _part(array: Array, block: Block) -> Array:
    return array[_index(array, block)]


def _slices(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def check_options(window: Any, softcap: float | None) -> None:
    """Raise ConfigError for a window or a softcap that makes no sense."""
    if window is not None:
        pair = isinstance(window, tuple | list) and len(window) == 2
        if not pair or any(
            side is not None and (not isinstance(side, int) or side < 0) for side in window
        ):
            cure = "pass (left, right): keys seen before and after a query's own, None for all"
            raise ConfigError(f"attention: window={window!r}; {cure}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ConfigError(f"attention: softcap={softcap} must be above 0; pass None for no cap")
