"""New tokens of many rows, end to end in one row, and the pages that they read and write."""

import weakref
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..core.replay import is_fixed
from ..ops.attention.attention import attention
from ..ops.attention.attention_paged import attention_paged
from ..ops.attention.attention_varlen import attention_varlen
from ..ops.attention.kv_append import kv_append_paged_
from ..ops.attention.kv_append_int8 import kv_append_int8_
from ..ops.attention.latent_attention import latent_attention
from ..ops.attention.rope_append import rope_append_
from ..placement import to_device_of
from .int8_cache import check_latent_options
from .page_pools import PagePools
from .paged_kv_cache import GONE, PagedKVCache
from .paged_rows import all_keys, check_attention


class PackedRows:
    """New tokens of several sequences, end to end in one row, after the tokens they have.

    Rows with one new token come first, then rows without earlier tokens, then the others.  Each
    kind is one call of attention; the last kind is one call per row.

    Parameters
    ----------
    cache : PagePools
        The pages, which count the new tokens.
    sequences, counts : list of int
        The sequence of each row, and its number of new tokens.
    rows, pages : int
        Least number of rows with one token, and of pages in a table.  Further rows have no tokens:
        nothing is stored for them, and their attention is 0.

    Attributes
    ----------
    numbers : (n,) int32 on the host
        The position of each token, the length of each row, then the tables of pages of each pool,
        row by row.
    offsets : list of int
        Start of each row among the tokens, then their number.
    """

    def __init__(
        self,
        cache: PagePools,
        sequences: Sequence[int],
        counts: Sequence[int],
        *,
        rows: int = 0,
        pages: int = 0,
    ) -> None:
        self.cache, self.sequences, self.counts = cache, [*sequences], [*counts]
        self.before = cache.extend(sequences, counts)
        self.fixed, self.padding = rows > 0, max(0, rows - len(self.counts))
        self.singles = sum(count == 1 for count in self.counts) + self.padding
        # int8 rounds keys: a token attends to codes, in whatever pieces its row is computed
        whole = [c > 1 and not b for c, b in zip(self.counts, self.before, strict=True)]
        self.fresh = sum(whole) if cache.scales is None and cache.latent is None else 0
        counts = [*self.counts, *[1] * self.padding]
        self.offsets = [0, *np.cumsum(counts).tolist()]
        before = np.array([*self.before, *[0] * self.padding])
        tokens = np.repeat(before - self.offsets[:-1], counts) + np.arange(self.offsets[-1])
        ends = before + counts
        ends[len(self.counts) :] = 0
        self.longest = int(ends.max(initial=0))
        tables = [[pool.tables[each] for each in self.sequences] for pool in cache.pools]
        self.width = max(pages, max(map(len, tables[0]), default=0))
        self.known = tokens, ends  # on the host
        self.parts = [Part(self, pool, own) for pool, own in zip(cache.pools, tables, strict=True)]
        known = (each.reshape(-1) for part in self.parts for each in part.known)
        self.numbers: Any = np.concatenate([tokens, ends, *known])

    def place(self, numbers: Array) -> None:
        """Read the new tokens, then ``numbers``, from an array on the device of the cache."""
        tokens, rows = self.offsets[-1], len(self.offsets) - 1
        self.numbers, self.tokens, numbers = numbers, numbers[:tokens], numbers[tokens:]
        self.positions = numbers[:tokens]
        self.lengths = numbers[tokens : tokens + rows]
        of_rows: Any = None
        if tokens > rows:
            of_rows = np.repeat(np.arange(rows), np.diff(self.offsets))
        numbers = numbers[tokens + rows :]
        for part in self.parts:
            numbers = part.place(numbers, of_rows)
        self.starts_of_fresh = to_device_of(self._starts(), numbers) if self.fresh else None

    def _starts(self, chunk: int | None = None) -> Array:
        """Return the first token of each row without earlier tokens, or of each of its chunks."""
        own = self.offsets[self.singles : self.singles + self.fresh + 1]
        rows = (range(first, end, chunk or end - first) for first, end in pairwise(own))
        return np.array([*chain(*rows), own[-1]], np.int32) - own[0]

    @property
    def all_fresh(self) -> bool:
        """Whether no row has earlier tokens."""
        return not any(self.before)

    @property
    def turns(self) -> bool:
        """Whether ``turn`` may take the place of ``rope_qk`` and ``append``, in one launch."""
        plain = self.cache.scales is None and self.parts[0].slots is None
        return plain and self.singles == len(self.offsets) - 1

    def turn(
        self, layer: int, q: Array, k: Array, v: Array, cos: Array, sin: Array, positions: Array
    ) -> tuple[Array, None]:
        """Store rotated k and v, and return the rotated q; each row has one token."""
        pool, place = self.cache.places[layer]
        part = self.parts[pool]
        q, k, v = (each[0, :, None] for each in (q, k, v))
        stored = part.cache.keys[place], part.cache.values[place]
        own = self.positions, positions[0, :, None], part.table
        return rope_append_(q, k, v, cos, sin, *stored, *own)[0].swapaxes(0, 1), None

    def append(self, layer: int, k: Array, v: Array | None) -> None:
        """Store new keys and values, (1, tokens, kv_heads, dim); v is None for a latent cache."""
        pool, place = self.cache.places[layer]
        self.parts[pool].append(place, k, v)

    def index_keys(self, layer: int, new: Array, most: int) -> Iterator[tuple[Any, Any, Any, bool]]:
        """Yield the keys that an indexer stores at the end of latent rows, for groups of tokens.

        ``new`` are those of the new tokens, (1, tokens, dim).  A group has a slice of tokens, all
        keys (rows, keys, dim), which of them each query sees (rows, queries, keys), and whether
        ``attend`` reads a list of the chosen keys, in order, not a mask.  There is no group if no
        row has more than ``most`` tokens.
        """
        if self.longest <= most:
            return
        pool, place = self.cache.places[layer]
        table, first = self.parts[pool].table, self.offsets[self.singles]
        stored = self.parts[pool].cache.keys[place][:, :, 0, -new.shape[-1] :]
        if self.singles:
            own, places = new[0, :first, None], self.positions[:first, None]
            yield slice(first), *all_keys(stored, table[: self.singles], own, places), True
        for index in range(self.singles, len(self.offsets) - 1):
            tokens = slice(*self.offsets[index : index + 2])
            pages = -(-int(self.known[1][index]) // stored.shape[1])
            own, places = new[:, tokens], self.positions[None, tokens]
            yield tokens, *all_keys(stored, table[index : index + 1, :pages], own, places), False

    def attend(
        self,
        layer: int,
        q: Array,
        k: Any,
        v: Any,
        *,
        in_chunk: bool = False,
        mask: Any = None,
        **options: Any,
    ) -> Array:
        """Store new keys and values; return the attention of q, (1, tokens, heads, dim).

        k is None if ``turn`` has stored both.  ``in_chunk``: queries see the keys of their chunk
        only.  ``mask`` is what queries see in each group of ``index_keys``; None: all earlier keys.
        """
        (pool, place), latent = self.cache.places[layer], self.cache.latent
        part = self.parts[pool]
        if latent is None:
            check_attention(part.cache, place, options)
        else:
            check_latent_options("PagedKVCache", options)
            options = {"rank": latent, "scale": options["scale"]}
        if k is not None:
            part.append(place, k, v)
        k_pages, v_pages = part.cache.keys[place], part.cache.values[place]
        scales = None if part.cache.scales is None else part.cache.scales[place]

        def paged(q: Array, table: Array, lengths: Array, mask: Any = None) -> Array:
            if latent is not None:
                return latent_attention(q, k_pages[:, :, 0], lengths, table, mask=mask, **options)
            more = {**options, "scales": scales, "mask": mask}
            return attention_paged(q, k_pages, v_pages, table, lengths, **more)

        outs, first = list[Array](), self.offsets[self.singles]
        masks = iter(mask if type(mask) is list else [mask] * len(self.offsets))
        if self.singles:
            own, lengths = q[0, :first, None], self.lengths[: self.singles]
            table, listed = part.table[: self.singles], next(masks)
            if part.grouped:
                out = part.attend_groups(own, k_pages, v_pages, in_chunk, **options)
            elif in_chunk:
                out = paged(own, *part.last_chunks())
            elif listed is not None:  # rows of the chosen keys, as pages of one token
                page = k_pages.shape[1]
                table = np.take_along_axis(table, listed // page, axis=1) * page + listed % page
                lengths = np.minimum(lengths, listed.shape[1])
                rows = k_pages.reshape(-1, 1, k_pages.shape[3])
                out = latent_attention(own, rows, lengths, table, **options)
            else:
                out = paged(own, table, lengths)
            outs.append(out.reshape(1, -1, *out.shape[2:]))
        row = self.singles + self.fresh
        if self.fresh:
            new, most = slice(first, self.offsets[row]), max(self.counts[self.singles : row])
            both: Any = q, k, v
            starts = [part.starts_of_chunks if in_chunk else self.starts_of_fresh] * 2
            most = min(most, part.chunk or most) if in_chunk else most
            more = {**options, "max_queries": most, "max_keys": most}
            outs.append(attention_varlen(*(x[0, new] for x in both), *starts, **more)[None])
        for index in range(row, len(self.offsets) - 1):
            if in_chunk:
                outs.extend(paged(q[:, new], *more) for new, *more in part.chunks[index])
                continue
            start, stop = self.offsets[index : index + 2]
            chosen, lengths = next(masks), self.lengths[index : index + 1]
            pages = self.width if chosen is None else chosen.shape[3] // k_pages.shape[1]
            table = part.table[index : index + 1, :pages]
            outs.append(paged(q[:, start:stop], table, lengths, chosen))
        return outs[0] if len(outs) == 1 else np.concatenate(outs, axis=1)


class Part:
    """The pages of a call's rows in one pool.

    ``chunk`` is the number of tokens of a chunk, if some layers of the pool have chunks.  Then a
    row with one token has a further table, of its last chunk.
    """

    def __init__(
        self, rows: PackedRows, cache: PagedKVCache, tables: Sequence[Sequence[int]]
    ) -> None:
        self.rows: Any = weakref.proxy(rows)  # a cycle would keep the pages alive
        self.cache = cache
        table = np.full((len(rows.offsets) - 1, rows.width), -1, np.int32)
        for place, (row, own) in enumerate(zip(table, tables, strict=False)):
            row[: len(own)] = own
            # a row without earlier tokens reads no page, and stores nothing before its window
            if GONE in own and rows.before[place]:
                row[row == GONE] = next((page for page in own if page != GONE), -1)
        self.table = table  # on the device of the cache
        self.chunk = rows.cache.chunk if cache is rows.cache.chunked else None
        self.known = [table, *self._last_chunks(table)]  # on the host
        self.of_chunks: list[Array] = []  # the tables of last chunks, on the device of the cache
        self.chunks: dict[int, list[tuple[Any, ...]]] = {}  # of rows with several tokens
        self.starts_of_chunks: Any = None
        self.of_tokens: Any = None
        self.slots: Any = None  # of the new tokens in the storage of a layer on the host
        self.stored: Any = None  # which tokens have a slot; None: all
        self.groups: dict[Any, list[tuple[Array, Any, Any]]] = {}  # by window, on the host
        self.grouped = False

    def place(self, numbers: Array, of_rows: Any) -> Array:
        """Read tables from an array on the device, and return the rest of the array.

        ``of_rows`` are the rows of the tokens, None if one each.
        """
        placed = list[Array]()
        for each in self.known:
            placed.append(numbers[: each.size].reshape(each.shape))
            numbers = numbers[each.size :]
        table, *self.of_chunks = placed
        self.table = self.of_tokens = table
        self.slots, self.grouped, self.groups = None, False, {}
        if of_rows is not None:
            self.of_tokens = table[to_device_of(of_rows, table)]
        rows = self.rows
        if self.chunk is not None:
            further = range(rows.singles + rows.fresh, len(rows.offsets) - 1)
            self.chunks = {index: [*self._chunks(index, self.chunk)] for index in further}
            if rows.fresh:
                self.starts_of_chunks = to_device_of(rows._starts(self.chunk), table)
        own: Any = table
        if isinstance(own, np.ndarray) and self.cache.scales is None and not rows.fixed:
            page, positions = self.cache.keys.shape[2], rows.known[0]
            pages = self.of_tokens[np.arange(len(positions)), positions // page]
            self.slots = pages * page + positions % page
            if rows.fresh and (pages < 0).any():
                self.stored = pages >= 0
                self.slots = self.slots[self.stored]
            self.grouped = self.cache.latent is None and not is_fixed()
        return numbers

    def _last_chunks(self, table: Array) -> list[Array]:
        """Return the pages of the last chunk of rows with one token; nothing without chunks.

        Then the tokens in these pages, and how many of them are before the chunk.
        """
        if self.chunk is None:
            return []
        rows, page, chunk = self.rows, self.cache.keys.shape[2], self.chunk
        ends, table = rows.known[1][: rows.singles], table[: rows.singles]
        start = np.maximum(ends - 1, 0) // chunk * chunk
        first = start // page
        # a chunk that does not begin with a page is in one page more
        pages = min(rows.width, -(-chunk // page) + (chunk % page > 0))
        index = first[:, None] + np.arange(pages)
        own = np.take_along_axis(table, np.minimum(index, max(rows.width - 1, 0)), axis=1)
        return [own, ends - first * page, start - first * page]

    def last_chunks(self) -> tuple[Array, Array, Any]:
        """Return table, lengths and mask of the last chunks of rows with one token."""
        table, lengths, before = self.of_chunks
        page, mask = self.cache.keys.shape[2], None
        if self.chunk is not None and self.chunk % page:
            key = np.arange(table.shape[1] * page, dtype=before.dtype, like=before)
            mask = (key >= before[:, None])[:, None, None]
        return table, lengths, mask

    def _chunks(self, index: int, chunk: int) -> Iterator[tuple[Any, ...]]:
        """Yield the new tokens of a row chunk by chunk: a slice, with table, lengths and mask."""
        rows, page = self.rows, self.cache.keys.shape[2]
        before, offset = rows.before[index], rows.offsets[index] - rows.before[index]
        stop = before + rows.counts[index]
        for start in range(before // chunk * chunk, stop, chunk):
            end, first = min(start + chunk, stop), start // page
            table = self.table[index : index + 1, first : -(-end // page)]
            lengths = to_device_of(np.array([end - first * page], np.int32), table)
            mask = None
            if hidden := start - first * page:
                mask = (np.arange(table.shape[1] * page, like=table) >= hidden)[None, None, None]
            yield slice(offset + max(start, before), offset + end), table, lengths, mask

    def append(self, place: int, k: Array, v: Array | None) -> None:
        """Store new keys and values, (1, tokens, kv_heads, dim); v is None for a latent cache."""
        cache = self.cache
        stored = cache.keys[place], cache.values[place]
        if self.slots is not None:
            pairs = ((k, stored[0]),) if v is None else zip((k, v), stored, strict=True)
            for new, pages in pairs:
                own = new[0] if self.stored is None else new[0, self.stored]
                pages.reshape(-1, *pages.shape[2:])[self.slots] = own
            return
        if v is None:
            v, stored = k, (cache.keys[place],) * 2
        k, v = (each.reshape(-1, 1, *each.shape[2:]) for each in (k, v))
        places = self.of_tokens, self.rows.positions
        if cache.scales is None:
            kv_append_paged_(k, v, *stored, *places)
        else:
            kv_append_int8_(k, v, *stored, cache.scales[place], *places)

    def _groups(self, left: int | None, in_chunk: bool) -> list[tuple[Array, Any, Any]]:
        """Return rows with one token in groups of similar lengths, with slots of the keys they see.

        A group is one call of attention on the host: NumPy's calls cost more than short rows.
        Slots are (rows, keys), of the last ``left`` tokens and the newest one, or of its chunk,
        padded with the slot of the newest; the mask (rows, 1, 1, keys) is False at padding.  At
        most half of the keys are padding.  One row whose pages are neighbours has no mask, and a
        slice of slots, which needs no copy.
        """
        lengths, table = self.rows.known[1][: self.rows.singles], self.known[0][: self.rows.singles]
        page, groups, first = self.cache.keys.shape[2], list[tuple[Array, Any, Any]](), 0
        counts = lengths if left is None else np.minimum(lengths, left + 1)
        if in_chunk and self.chunk is not None:
            counts = (lengths - 1) % self.chunk + 1
        order = np.argsort(-counts, kind="stable")
        while first < len(order):
            most = counts[order[first]]
            stop = first + int(np.count_nonzero(counts[order[first:]] * 2 >= most))
            rows, first = order[first:stop], stop
            if len(rows) == 1:
                (row,) = rows
                start, last = int(lengths[row] - most), int(lengths[row] - 1)
                own = table[row, start // page : last // page + 1]
                if (own[1:] == own[:-1] + 1).all():
                    start = int(own[0]) * page + start % page
                    groups.append((rows, slice(start, start + int(most)), None))
                    continue
            key = (lengths - counts)[rows, None] + np.arange(most)
            seen = key < lengths[rows, None]
            key = np.where(seen, key, lengths[rows, None] - 1)
            slots: Any = np.take_along_axis(table[rows], key // page, axis=1) * page + key % page
            mask = None if seen.all() else to_device_of(seen[:, None, None], self.cache.keys)
            groups.append((rows, slots, mask))
        return groups

    def attend_groups(
        self, q: Array, k_pages: Array, v_pages: Array, in_chunk: bool, **options: Any
    ) -> Array:
        """Return the attention of rows with one token on the host, (rows, 1, heads, value_dim)."""
        out = np.empty_like(q, shape=(*q.shape[:3], v_pages.shape[3]))
        window = options.pop("window", None)
        left = None if window is None else window[0]
        if (left, in_chunk) not in self.groups:
            self.groups[left, in_chunk] = self._groups(left, in_chunk)
        stored = [each.reshape(-1, *each.shape[2:]) for each in (k_pages, v_pages)]
        for rows, slots, mask in self.groups[left, in_chunk]:
            if type(slots) is slice:
                k, v = (each[None, slots] for each in stored)
            else:  # each[slots] takes 1.4 times as long
                k, v = (np.take(each, slots, axis=0) for each in stored)
            if len(q) == 1:
                return attention(q, k, v, mask=mask, **options)
            out[rows] = attention(q[rows], k, v, mask=mask, **options)
        return out
