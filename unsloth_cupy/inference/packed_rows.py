"""New tokens of many rows, end to end in one row, and the pages that they read and write."""

from collections.abc import Sequence
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
from .paged_rows import check_attention


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
        Of each token its position and its row's length, then the tables of pages of each pool, row
        by row.
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
        every = tokens, ends, *(part.known.reshape(-1) for part in self.parts)
        self.numbers: Any = np.concatenate(every)

    def place(self, numbers: Array) -> None:
        """Read the new tokens, then ``numbers``, from an array on the device of the cache."""
        tokens, rows = self.offsets[-1], len(self.offsets) - 1
        self.numbers, self.tokens, numbers = numbers, numbers[:tokens], numbers[tokens:]
        self.positions = numbers[:tokens]
        self.lengths = numbers[tokens : tokens + rows]
        of_rows: Any = None
        if tokens > rows:
            of_rows = np.repeat(np.arange(rows), np.diff(self.offsets))
        tables = numbers[tokens + rows :].reshape(len(self.parts), rows, self.width)
        for part, table in zip(self.parts, tables, strict=True):
            part.place(table, of_rows)
        start, stop = self.singles, self.singles + self.fresh
        starts = np.array(self.offsets[start : stop + 1], np.int32) - self.offsets[start]
        like = self.cache.first.keys
        self.starts_of_fresh = to_device_of(starts, like) if self.fresh else None

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

    def attend(self, layer: int, q: Array, k: Any, v: Any, **options: Any) -> Array:
        """Store new keys and values; return the attention of q, (1, tokens, heads, dim).

        k is None if ``turn`` has stored both.
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

        def paged(q: Array, rows: slice) -> Array:
            table, lengths = part.table[rows], self.lengths[rows]
            if latent is not None:
                return latent_attention(q, k_pages[:, :, 0], lengths, table, **options)
            more = {**options, "scales": scales}
            return attention_paged(q, k_pages, v_pages, table, lengths, **more)

        outs, first = list[Array](), self.offsets[self.singles]
        if self.singles:
            own = q[0, :first, None]
            if part.grouped:
                out = part.attend_groups(own, k_pages, v_pages, **options)
            else:
                out = paged(own, slice(self.singles))
            outs.append(out.reshape(1, -1, *out.shape[2:]))
        row = self.singles + self.fresh
        if self.fresh:
            new, most = slice(first, self.offsets[row]), max(self.counts[self.singles : row])
            both: Any = q, k, v
            starts = [self.starts_of_fresh] * 2
            more = {**options, "max_queries": most, "max_keys": most}
            outs.append(attention_varlen(*(x[0, new] for x in both), *starts, **more)[None])
        for index in range(row, len(self.offsets) - 1):
            start, stop = self.offsets[index : index + 2]
            outs.append(paged(q[:, start:stop], slice(index, index + 1)))
        return outs[0] if len(outs) == 1 else np.concatenate(outs, axis=1)


class Part:
    """The pages of a call's rows in one pool."""

    def __init__(
        self, rows: PackedRows, cache: PagedKVCache, tables: Sequence[Sequence[int]]
    ) -> None:
        self.rows, self.cache = rows, cache
        table = np.full((len(rows.offsets) - 1, rows.width), -1, np.int32)
        for place, (row, own) in enumerate(zip(table, tables, strict=False)):
            row[: len(own)] = own
            # a row without earlier tokens reads no page, and stores nothing before its window
            if GONE in own and rows.before[place]:
                row[row == GONE] = next((page for page in own if page != GONE), -1)
        self.known, self.table = table, table  # on the host; on the device of the cache
        self.of_tokens: Any = None
        self.slots: Any = None  # of the new tokens in the storage of a layer on the host
        self.stored: Any = None  # which tokens have a slot; None: all
        self.groups: dict[int | None, list[tuple[Array, Any, Any]]] = {}  # by window, on the host
        self.grouped = False

    def place(self, table: Array, of_rows: Any) -> None:
        """Use a table on the device; ``of_rows`` are the rows of the tokens, None if one each."""
        self.table = self.of_tokens = table
        self.slots, self.grouped, self.groups = None, False, {}
        if of_rows is not None:
            self.of_tokens = table[to_device_of(of_rows, table)]
        rows = self.rows
        own: Any = table
        if isinstance(own, np.ndarray) and self.cache.scales is None and not rows.fixed:
            page, positions = self.cache.keys.shape[2], rows.known[0]
            pages = self.of_tokens[np.arange(len(positions)), positions // page]
            self.slots = pages * page + positions % page
            if rows.fresh and (pages < 0).any():
                self.stored = pages >= 0
                self.slots = self.slots[self.stored]
            self.grouped = self.cache.latent is None and not is_fixed()

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

    def _groups(self, left: int | None) -> list[tuple[Array, Any, Any]]:
        """Return rows with one token in groups of similar lengths, with slots of the keys they see.

        A group is one call of attention on the host: NumPy's calls cost more than short rows.
        Slots are (rows, keys), of the last ``left`` tokens and the newest one, padded with the slot
        of the newest; the mask (rows, 1, 1, keys) is False at padding.  At most half of the keys
        are padding.  One row has no mask, and a slice of slots if its pages are neighbours.
        """
        lengths, table = self.rows.known[1][: self.rows.singles], self.known[: self.rows.singles]
        page, groups, first = self.cache.keys.shape[2], list[tuple[Array, Any, Any]](), 0
        counts = lengths if left is None else np.minimum(lengths, left + 1)
        order = np.argsort(-counts, kind="stable")
        while first < len(order):
            most = counts[order[first]]
            stop = first + int(np.count_nonzero(counts[order[first:]] * 2 >= most))
            rows = order[first:stop]
            key = (lengths - counts)[rows, None] + np.arange(most)
            seen = key < lengths[rows, None]
            key = np.where(seen, key, lengths[rows, None] - 1)
            slots: Any = np.take_along_axis(table[rows], key // page, axis=1) * page + key % page
            mask = None if seen.all() else to_device_of(seen[:, None, None], self.cache.keys)
            if len(rows) == 1 and (np.diff(slots[0]) == 1).all():
                slots = slice(int(slots[0, 0]), int(slots[0, -1]) + 1)  # no copy
            groups.append((rows, slots, mask))
            first = stop
        return groups

    def attend_groups(self, q: Array, k_pages: Array, v_pages: Array, **options: Any) -> Array:
        """Return the attention of rows with one token on the host, (rows, 1, heads, value_dim)."""
        out = np.empty_like(q, shape=(*q.shape[:3], v_pages.shape[3]))
        window = options.pop("window", None)
        left = None if window is None else window[0]
        if left not in self.groups:
            self.groups[left] = self._groups(left)
        stored = [each.reshape(-1, *each.shape[2:]) for each in (k_pages, v_pages)]
        for rows, slots, mask in self.groups[left]:
            k, v = (each[slots] for each in stored)
            if type(slots) is slice:
                k, v = k[None], v[None]
            if len(q) == 1:
                return attention(q, k, v, mask=mask, **options)
            out[rows] = attention(q[rows], k, v, mask=mask, **options)
        return out
