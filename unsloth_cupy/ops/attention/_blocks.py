"""Blocks of scores for the NumPy definition of attention: which keys each run of queries sees.

A block covers a range of batches, heads and consecutive queries, and the keys that these queries
see.  With causal or a window, it leaves out keys that none of its queries sees.  On a host with
several cores, blocks run in parallel.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.dtypes import Array
from ...core.replay import is_fixed
from ...core.stand_in import is_planned
from ...errors import RangeError
from ..common import threads
from ..common.fixed_order import COLUMNS
from ._options import FARTHEST, TILE, Options
from ._products import SINGLE

HOST_SCORES = 2**17  # scores of a block: 512 KiB in float32, which fit into a core's cache
DEVICE_SCORES = 2**24  # 64 MiB in float32: large blocks, so that there are few launches


class Block(NamedTuple):
    """The ranges of batches, heads, queries and keys that one block of scores covers."""

    batch: slice
    kv_heads: slice
    heads: slice
    rows: slice  # of queries
    keys: Any  # a slice, or an array of key indices if block_mask leaves gaps
    edges: tuple[slice, ...]  # columns of keys in which causal, window or lengths hide some pairs
    gaps: bool  # whether block_mask hides some pairs


class Blocks:
    """The blocks of one attention call."""

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        options: Options,
    ) -> None:
        self.q, self.k, self.v = q, k, v
        self.batch, self.queries, self.heads, _ = q.shape
        self.keys, self.kv_heads = k.shape[1:3]
        self.group = self.heads // self.kv_heads if self.kv_heads else 0
        self.left, self.right = (None if n is None else int(n) for n in options.reach)
        self.block_mask = four_axes(options.block_mask)
        self.on_host = isinstance(q, np.ndarray)
        self.fixed = is_fixed() and type(q) is np.ndarray  # see _fixed_products.py
        self._place(options.key_lengths, options.query_start)
        self._choose_steps()

    def _place(self, key_lengths: Any, query_start: Any) -> None:
        """Set the number of keys and the position of the first query, shared or for each batch.

        On the host these numbers become Python integers, and keys past a length are never read.  On
        a device, the host would have to wait for the numbers: keys past a length become zeros.
        """
        self.length: Any = self.keys
        if key_lengths is not None and not (self.on_host and is_planned(key_lengths)):
            self.length = key_lengths.astype(np.int64)
            if not self.on_host:
                # (batch, keys, 1, 1)
                exists = (np.arange(self.keys, like=self.k) < self.length[:, None])[..., None, None]
                self.k, self.v = np.where(exists, self.k, 0), np.where(exists, self.v, 0)
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
        """Set how many batches, kv heads and queries a block covers."""
        depth = max(self.q.shape[3], self.v.shape[3], 1)
        # Rows of a product: fewer are slow, and with more, a product on one thread (SINGLE) has too
        # few keys.
        rows = 64 if depth <= TILE else 32
        self.width: int | None = max(8, SINGLE // (rows * depth))  # keys of a product
        # a product has group * queries rows; on a device, whole rows of block_mask
        rows = max(1, rows >> (self.group - 1).bit_length()) if self.on_host else TILE
        near = self.left is not None and self.right is not None
        span = self.left + self.right + rows if near else self.keys  # type: ignore[operator]
        scores = self.group * min(rows, self.queries) * min(span, self.keys)
        room = (HOST_SCORES if self.on_host else DEVICE_SCORES) // max(1, scores)
        kv_heads = max(1, min(room, self.kv_heads))
        # then batch elements differ in the keys that they see: one in a block
        single = self.on_host and (self.each_batch or self.block_mask is not None)
        self.steps = (1 if single else max(1, room // kv_heads), kv_heads, rows)

    def walk(
        self, step: Callable[[Block], None], *, in_order: bool = False, serial: bool = False
    ) -> None:
        """Call step on every block in which some query sees a key.

        Blocks run in parallel, so step may only write rows of its own queries.  With in_order,
        blocks that share keys run one after another, so step may also add to rows of its keys.
        With serial, all blocks run one after another.
        """

        def run(blocks: list[Block]) -> None:
            """Call step on the blocks of one task, in order, except those without keys."""
            for block in map(self._narrowed, blocks):
                if not isinstance(block.keys, slice) or block.keys.start < block.keys.stop:
                    step(block)

        array: Any = self.q
        if is_planned(array):
            self._walk_planned(step, in_order, serial)
            return
        if in_order:
            groups = itertools.groupby(self._blocks(), lambda block: (block.batch, block.kv_heads))
            tasks = [list(blocks) for _, blocks in groups]
        else:
            tasks = [[block] for block in self._blocks()]
        if serial or not self.on_host or len(tasks) == 1 or threads.count() == 1:
            self.width = None  # blocks run one by one: products may use all threads of BLAS
            for task in tasks:
                run(task)
        else:
            threads.each(run, tasks)

    def _walk_planned(self, step: Callable[[Block], None], in_order: bool, serial: bool) -> None:
        """Plan memory: call step on the largest block alone, and count it for each thread."""
        sizes = zip((self.batch, self.kv_heads, self.queries), self.steps, strict=True)
        batches, kv_heads, rows = (-(-size // step) for size, step in sizes)
        first = map(self._narrowed, itertools.islice(self._blocks(), rows))
        largest = max(first, key=_pairs, default=None)
        if largest is None or not _pairs(largest):
            return
        tasks = batches * kv_heads * (1 if in_order else rows)
        workers = 1 if serial or not self.on_host else min(threads.count(), tasks)
        self.width = self.width if workers > 1 else None
        array: Any = self.q
        with array.side_by_side(workers):
            step(largest)

    def _blocks(self) -> Iterator[Block]:
        """Yield all blocks, with keys still to be set by ``_narrowed``."""
        batches, kv_heads, rows = self.steps
        for batch in _slices(self.batch, batches):
            for kv in _slices(self.kv_heads if self.heads else 0, kv_heads):
                heads = slice(kv.start * self.group, kv.stop * self.group)
                for row in _slices(self.queries, rows):
                    yield Block(batch, kv, heads, row, None, (), False)

    def _narrowed(self, block: Block) -> Block:
        """Return the block with the keys that its queries see, and the columns to mask (edges)."""
        if not self.on_host and (self.each_batch or self.block_mask is not None):
            gaps = self.block_mask is not None  # the host does not wait for values of a device
            return block._replace(keys=slice(0, self.keys), edges=(slice(None),), gaps=gaps)
        start, length = self._at(self.start, block), self._at(self.length, block)
        low, high = start + block.rows.start, start + block.rows.stop - 1
        first, clear, over, stop = 0, 0, length, length  # every row sees the keys clear .. over - 1
        if self.left is not None:
            first = min(max(low - self.left, 0), length)
            clear = min(max(high - self.left, first), length)
        if self.right is not None:
            stop = max(min(high + self.right + 1, length), first)
            over = max(min(low + self.right + 1, stop), first)
        first -= first % COLUMNS * self.fixed  # a fixed order has blocks of COLUMNS keys from 0 on
        # partly hidden columns are first .. clear - 1 and over .. stop - 1
        pairs = ((first, clear), (over, stop)) if clear < over else ((first, stop),)
        edges = tuple(slice(a - first, b - first) for a, b in pairs if a < b)
        block = block._replace(keys=slice(first, stop), edges=edges)
        if self.block_mask is None:
            return block
        tiles = self.tiles(block)
        some, every = tiles.any(axis=(0, 1, 2)), tiles.all(axis=(0, 1, 2))
        block = block._replace(gaps=bool((some != every).any()))
        some = np.repeat(some, TILE)[first:stop]
        if some.all():
            return block
        keys = np.flatnonzero(some) + first
        edges = (slice(None),) if edges else ()
        return block._replace(keys=keys if keys.size else slice(0, 0), edges=edges)

    def offsets(self, block: Block, columns: slice = slice(None)) -> Array:
        """Return key position minus query position for each pair of a block: (..., rows, keys)."""
        rows = np.arange(block.rows.start, block.rows.stop, like=self.q)[:, None]
        return self.numbers(block.keys)[columns] - (rows + self._at(self.start, block))

    def distances(self, block: Block) -> Array:
        """Return the distance of each key from each query; starts are clipped to +-FARTHEST."""
        rows = np.arange(block.rows.start, block.rows.stop, like=self.q)[:, None]
        start = np.clip(self._at(self.start, block), -FARTHEST, FARTHEST)
        return np.abs(self.numbers(block.keys) - (rows + start))

    def hidden(self, block: Block, columns: slice) -> Array:
        """Return True for each pair that causal, window or lengths hide."""
        offsets = self.offsets(block, columns)
        hidden = np.zeros_like(offsets, dtype=bool)
        if self.left is not None:
            hidden |= offsets < -self.left
        if self.right is not None:
            hidden |= offsets > self.right
        if not isinstance(self.length, int) and not self.on_host:
            hidden = hidden | (self.numbers(block.keys)[columns] >= self._at(self.length, block))
        return hidden

    def tiles(self, block: Block) -> Array:
        """Return the block's row of block_mask; all queries of a block lie in one tile."""
        row = block.rows.start // TILE
        tiles: Array = self.block_mask[:, :, row : row + 1]
        return tiles[index_of(tiles[..., :1], block)]

    def numbers(self, keys: Any) -> Array:
        """Return the positions of a block's keys."""
        return np.arange(keys.start, keys.stop, like=self.q) if isinstance(keys, slice) else keys

    def _at(self, number: Any, block: Block) -> Any:
        """Return start or length of the block's batch: an integer, or an array on a device."""
        if isinstance(number, int):
            return number
        if self.on_host:
            return int(number[block.batch.start])
        return number[block.batch].reshape(-1, 1, 1, 1, 1)  # (batch, 1, 1, 1, 1)


def _pairs(block: Block) -> int:
    """Return how many queries times keys a block has."""
    keys = block.keys.stop - block.keys.start if isinstance(block.keys, slice) else len(block.keys)
    return int(keys) * (block.rows.stop - block.rows.start)


def four_axes(array: Any) -> Any:
    """Return the array with leading axes of size 1 up to four axes; None stays None."""
    # ones before its own axes
    return None if array is None else array.reshape((1,) * (4 - array.ndim) + array.shape)


def index_of(array: Array, block: Block) -> tuple[Any, ...]:
    """Return the index of the block's part of an array whose axes of size 1 broadcast."""
    parts = (block.batch, block.heads, block.rows, block.keys)
    return tuple(
        slice(None) if size == 1 else part for size, part in zip(array.shape, parts, strict=True)
    )


def _slices(size: int, step: int) -> Iterator[slice]:
    """Yield consecutive slices of at most step elements that cover size."""
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
