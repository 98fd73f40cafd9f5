"""Pools of pages: layers with a window or chunks have fewer pages of a sequence than others.

pools = PagePools([of_layers_without_a_window, of_layers_with_one], {0: (0, 0), 1: (1, 0)})
sequence = pools.begin([])                      the same number in each pool
"""

from collections.abc import Sequence
from typing import Any

from .paged_kv_cache import GONE, PagedKVCache

Pages = list[int]  # of the same tokens, one of each pool; GONE where a pool has none


class PagePools:
    """Caches of the same sequences, each with the pages of some layers.

    Only the first pool may have layers that read all tokens.  All pools have pages of one size.

    Parameters
    ----------
    pools : list of PagedKVCache
        The caches.
    places : dict of int to (int, int)
        By layer of the model, its pool, and its layer there.
    chunk : int, optional
        Tokens of a chunk, in layers whose queries attend to their own chunk: those of the pool with
        this ``chunk``; without such a pool, some layers of the first pool.
    """

    def __init__(
        self,
        pools: Sequence[PagedKVCache],
        places: dict[int, tuple[int, int]],
        chunk: int | None = None,
    ) -> None:
        self.pools, self.places, self.chunk = [*pools], places, chunk
        chunked = next((pool for pool in self.pools if pool.chunk is not None), self.pools[0])
        self.chunked = None if chunk is None else chunked
        self.first = self.pools[0]
        self.page = self.first.keys.shape[2]
        self.latent, self.scales = self.first.latent, self.first.scales

    def held(self, sequence: Any) -> int:
        """Return the number of tokens in a sequence."""
        return max(self.first.filled[sequence], default=0)

    def begin(self, pages: Sequence[Pages]) -> int:
        """Return a new sequence whose first tokens are in these full pages, which it shares."""
        own = {pool.begin([each[n] for each in pages]) for n, pool in enumerate(self.pools)}
        return own.pop()

    def fork(self, sequence: Any) -> int:
        """Return a new sequence with the same tokens, which shares the pages."""
        return {pool.fork(sequence) for pool in self.pools}.pop()

    def clear(self) -> None:
        """Remove all sequences from all pools."""
        for pool in self.pools:
            pool.clear()

    def free(self, sequence: Any) -> None:
        """Remove a sequence from all pools."""
        for pool in self.pools:
            pool.free(sequence)

    def extend(self, sequences: Sequence[Any], counts: Sequence[int]) -> list[int]:
        """Count new tokens of sequences; return how many tokens each had before."""
        starts = [self.held(sequence) for sequence in sequences]
        for pool in self.pools:
            pool.extend(sequences, counts)
        return starts

    def missing(self, sequences: Sequence[Any], counts: Sequence[int]) -> list[int]:
        """Return how many pages each pool lacks for new tokens of sequences."""
        pairs = ((pool.missing(sequences, counts), len(pool.free_pages)) for pool in self.pools)
        return [max(0, need - free) for need, free in pairs]

    def pages_of(self, sequence: Any, place: int) -> Pages:
        """Return the pages of the tokens from ``place * page`` on."""
        return [pool.tables[sequence][place] for pool in self.pools]

    def hold(self, pages: Pages) -> None:
        """Count one more owner of each page."""
        for pool, page in zip(self.pools, pages, strict=True):
            if page != GONE:
                pool.hold([page])

    def release(self, pages: Pages) -> None:
        """Count one owner less of each page."""
        for pool, page in zip(self.pools, pages, strict=True):
            if page != GONE:
                pool.release([page])

    def share(self, sequence: Any, place: int, pages: Pages) -> None:
        """Let a sequence use other pages with the same tokens, where it has a page of its own."""
        for pool, page in zip(self.pools, pages, strict=True):
            table = pool.tables[sequence]
            if page != table[place] and GONE not in (page, table[place]):
                pool.hold([page])
                pool.release([table[place]])
                table[place] = page

    def usable(self, nodes: Sequence[Pages]) -> int:
        """Return how many of these pages, which follow each other, a sequence can begin with.

        The pages in the windows of the next token must exist.
        """
        for count in range(len(nodes), 0, -1):
            spans = (pool.first_seen(count * self.page) for pool in self.pools)
            gone = (
                GONE in [each[n] for each in nodes[first:count]] for n, first in enumerate(spans)
            )
            if not any(gone):
                return count
        return 0
