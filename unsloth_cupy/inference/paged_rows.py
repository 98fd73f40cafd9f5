"""A paged KV cache for one call: each row of the call continues one sequence."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.call import is_integer
from ..core.dtypes import Array
from ..core.replay import is_fixed
from ..errors import ConfigError, ShapeError
from ..ops.attention.attention import attention
from ..ops.attention.attention_paged import attention_paged
from ..ops.attention.attention_varlen import attention_varlen
from ..ops.attention.kv_append import kv_append_paged_
from ..ops.attention.kv_append_int8 import kv_append_int8_
from ..ops.attention.latent_attention import latent_attention
from ..placement import to_device_of
from .int8_cache import check_latent_options
from .kv_cache import KVCache
from .paged_kv_cache import GONE, PagedKVCache

OPTIONS = {
    name
    for name, parameter in inspect.signature(attention_paged).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def rows_of(call: str, cache: Any, sequences: Any, batch: int) -> "KVCache | PagedRows | None":
    """Return a KVCache, or a PagedKVCache as PagedRows; raise ConfigError for other types."""
    if isinstance(cache, PagedKVCache):
        return PagedRows(call, cache, sequences, batch)
    if not isinstance(cache, KVCache | None):
        kind = type(cache).__name__
        raise ConfigError(f"{call}: cache is a {kind}; pass a KVCache or a PagedKVCache, or None")
    if sequences is not None:
        problem = f"{call}: sequences={sequences!r} are sequences of a PagedKVCache"
        raise ConfigError(f"{problem}; pass one as cache")
    return cache


class PagedRows:
    """A paged cache, and its sequence that each row of a call continues.

    Raises
    ------
    ConfigError
        sequences is None.
    ShapeError
        There are more sequences than rows, or fewer.
    RangeError
        There is no such sequence.
    """

    def __init__(
        self, call: str, cache: PagedKVCache, sequences: Sequence[int] | None, batch: int
    ) -> None:
        if sequences is None:
            cure = "pass sequences=[...] that its allocate or fork returned, one for each row"
            raise ConfigError(f"{call}: cache is a PagedKVCache; {cure}")
        cache.check_sequences(call, sequences)
        if len(sequences) != batch:
            cure = f"pass one for each row, of {batch}"
            problem = f"{call}: sequences={[*sequences]}; {cure}"
            raise ShapeError(problem, expected=batch, actual=len(sequences))
        self.cache, self.sequences = cache, [*sequences]

    @property
    def length(self) -> int:
        """The number of tokens of the longest row."""
        return max(self.starts(), default=0)

    def starts(self, layer: int = 0) -> list[int]:
        """Return the number of tokens of each row in a layer."""
        return [self.cache.filled[sequence][layer] for sequence in self.sequences]

    def places(self, new: int, layer: int = 0) -> tuple[int, Array | None]:
        """Return the positions of new tokens as (position of the first one, None).

        If rows differ, return (0, all positions): (batch, tokens) int32.
        """
        self.cache.check_layer("append", layer)
        starts = self.starts(layer)
        if len(set(starts)) <= 1:
            return next(iter(starts), 0), None
        positions = np.add.outer(starts, np.arange(new)).astype(np.int32)  # (batch, tokens)
        return 0, to_device_of(positions, self.cache.keys)

    def append(self, layer: int, k: Array, v: Array | None) -> tuple[Array, Array]:
        """Store new keys and values, as ``PagedKVCache.append`` does."""
        return self.cache.append(layer, self.sequences, k, v)

    def attend(self, layer: int, q: Array, k: Array, v: Array | None, **options: Any) -> Array:
        """Store new keys and values; return the attention of q over all keys of each row.

        The narrower of the windows of the call and of the cache applies.  A latent cache uses
        ``latent_attention``, and v is None.

        Raises
        ------
        ConfigError
            An option is no option of ``attention_paged``, or of ``latent_attention``.
        RangeError
            A sequence is passed twice, or there is no such layer.
        DeviceMemoryError
            There are too few free pages; nothing changes.
        """
        if self.cache.latent is not None:
            return self._attend_latents(layer, q, k, v, **options)
        self._check_options(layer, options)
        known = layer in range(len(self.cache.windows))
        empty = known and not any(self.starts(layer))
        k_pages, v_pages = self.append(layer, k, v)
        if empty and v is not None:  # k and v are all keys and values, in order: no pages to read
            return attention(q, k, v, **options)
        table = self.cache.page_table(self.sequences)
        lengths = self.cache.lengths(self.sequences, layer)
        scales = None if self.cache.scales is None else self.cache.scales[layer]
        return attention_paged(q, k_pages, v_pages, table, lengths, scales=scales, **options)

    def _check_options(self, layer: int, options: dict[str, Any]) -> None:
        """Raise for unknown options of attention; narrow the window to the cache's window."""
        if unknown := sorted(options.keys() - OPTIONS):
            cure = f"choose from {', '.join(sorted(OPTIONS))}"
            raise ConfigError(f"a PagedKVCache has no option {unknown[0]!r} of attention; {cure}")
        known = layer in range(len(self.cache.windows))
        if known and (own := self.cache.windows[layer]) is not None:
            match options.get("window"):
                case None:
                    options["window"] = own - 1, None
                case (left, right) if left is None or is_integer(left, own):
                    options["window"] = own - 1, right

    def _attend_latents(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        *,
        causal: bool = True,
        mask: Array | None = None,
        **options: Any,
    ) -> Array:
        """Store new latent rows, which contain the values; return latent attention of q."""
        check_latent_options("PagedKVCache", options)
        pages, _ = self.append(layer, k, v)
        places = (
            self.cache.lengths(self.sequences, layer),
            self.cache.page_table(self.sequences),
        )
        options = {"rank": self.cache.latent, "scale": options["scale"]}
        return latent_attention(q, pages[:, :, 0], *places, causal=causal, mask=mask, **options)


class PackedRows(PagedRows):
    """New tokens of several sequences, end to end in one row, after the tokens they have.

    Rows with one new token come first, then rows without earlier tokens, then the others.  Each
    kind is one call of attention; the last kind is one call per row.

    Parameters
    ----------
    cache : PagedKVCache
        The cache, whose ``extend`` counts the new tokens.
    sequences, counts : list of int
        The sequence of each row, and its number of new tokens.
    places : dict of int to int
        The layer of the cache that stores each layer of the model.
    rows, pages : int
        Least number of rows with one token, and of pages in a table.  Further rows have no tokens:
        nothing is stored for them, and their attention is 0.

    Attributes
    ----------
    numbers : (n,) int32 on the host
        Of each token its position and its row's length, then the tables of pages, row by row.
    offsets : list of int
        Start of each row among the tokens, then their number.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        sequences: Sequence[int],
        counts: Sequence[int],
        places: dict[int, int],
        *,
        rows: int = 0,
        pages: int = 0,
    ) -> None:
        self.cache, self.sequences, self.layers = cache, [*sequences], places
        self.counts, self.before = [*counts], cache.extend(sequences, counts)
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
        tables = [cache.tables[sequence] for sequence in self.sequences]
        self.width = max(pages, max(map(len, tables), default=0))
        table = np.full((len(counts), self.width), -1, np.int32)
        for row, own in zip(table, tables, strict=False):
            row[: len(own)] = own
            if GONE in own:
                row[row == GONE] = next((page for page in own if page != GONE), -1)
        self.numbers: Any = np.concatenate([tokens, ends, table.reshape(-1)])
        self.known = tokens, ends, table  # on the host

    def place(self, numbers: Array) -> None:
        """Read the new tokens, then ``numbers``, from an array on the device of the cache."""
        tokens, rows = self.offsets[-1], len(self.offsets) - 1
        self.numbers, self.tokens, numbers = numbers, numbers[:tokens], numbers[tokens:]
        self.positions = numbers[:tokens]
        self.slots: Any = None  # of the new tokens in the storage of a layer on the host
        self.groups: dict[int | None, list[tuple[Array, Any, Any]]] = {}  # by window, on the host
        self.grouped = False
        self.lengths = numbers[tokens : tokens + rows]
        self.table = numbers[tokens + rows :].reshape(rows, self.width)
        self.of_tokens = self.table
        if tokens > rows:
            counts = np.diff(self.offsets)
            index = to_device_of(np.repeat(np.arange(rows), counts), self.cache.keys)
            self.of_tokens = self.table[index]
        own: Any = numbers
        if isinstance(own, np.ndarray) and self.cache.scales is None and not self.fixed:
            page, (positions, _, table) = self.cache.keys.shape[2], self.known
            row = np.repeat(np.arange(rows), np.diff(self.offsets))
            self.slots = table[row, positions // page] * page + positions % page
            self.grouped = self.cache.latent is None and not is_fixed()
        start, stop = self.singles, self.singles + self.fresh
        starts = np.array(self.offsets[start : stop + 1], np.int32) - self.offsets[start]
        self.starts_of_fresh = to_device_of(starts, self.cache.keys) if self.fresh else None

    def _groups(self, left: int | None) -> list[tuple[Array, Any, Any]]:
        """Return rows with one token in groups of similar lengths, with slots of the keys they see.

        A group is one call of attention on the host: NumPy's calls cost more than short rows.
        Slots are (rows, keys), of the last ``left`` tokens and the newest one, padded with the slot
        of the newest; the mask (rows, 1, 1, keys) is False at padding.  At most half of the keys
        are padding.  One row has no mask, and a slice of slots if its pages are neighbours.
        """
        _, lengths, table = (each[: self.singles] for each in self.known)
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

    def _attend_groups(self, q: Array, k_pages: Array, v_pages: Array, **options: Any) -> Array:
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

    @property
    def all_fresh(self) -> bool:
        """Whether no row has earlier tokens."""
        return not any(self.before)

    def append(self, layer: int, k: Array, v: Array | None) -> tuple[Array, Array]:
        """Store new keys and values, (1, tokens, kv_heads, dim); v is None for a latent cache."""
        cache, place = self.cache, self.layers[layer]
        stored = cache.keys[place], cache.values[place]
        if self.slots is not None:
            pairs = ((k, stored[0]),) if v is None else zip((k, v), stored, strict=True)
            for new, pages in pairs:
                pages.reshape(-1, *pages.shape[2:])[self.slots] = new[0]
            return stored
        if v is None:
            v, stored = k, (cache.keys[place],) * 2
        k, v = (each.reshape(-1, 1, *each.shape[2:]) for each in (k, v))
        if cache.scales is None:
            kv_append_paged_(k, v, *stored, self.of_tokens, self.positions)
        else:
            places = self.of_tokens, self.positions
            kv_append_int8_(k, v, *stored, cache.scales[place], *places)
        return cache.keys[place], cache.values[place]

    def attend(self, layer: int, q: Array, k: Array, v: Array | None, **options: Any) -> Array:
        """Store new keys and values; return the attention of q, (1, tokens, heads, dim)."""
        place, latent = self.layers[layer], self.cache.latent
        if latent is None:
            self._check_options(place, options)
        else:
            check_latent_options("PagedKVCache", options)
            options = {"rank": latent, "scale": options["scale"]}
        k_pages, v_pages = self.append(layer, k, v)
        scales = None if self.cache.scales is None else self.cache.scales[place]

        def paged(q: Array, rows: slice) -> Array:
            table, lengths = self.table[rows], self.lengths[rows]
            if latent is not None:
                return latent_attention(q, k_pages[:, :, 0], lengths, table, **options)
            more = {**options, "scales": scales}
            return attention_paged(q, k_pages, v_pages, table, lengths, **more)

        parts, first = list[Array](), self.offsets[self.singles]
        if self.singles:
            own = q[0, :first, None]
            if self.grouped:
                out = self._attend_groups(own, k_pages, v_pages, **options)
            else:
                out = paged(own, slice(self.singles))
            parts.append(out.reshape(1, -1, *out.shape[2:]))
        row = self.singles + self.fresh
        if self.fresh:
            part, most = slice(first, self.offsets[row]), max(self.counts[self.singles : row])
            both: Any = q, k, v
            new: Any = [each[0, part] for each in both]
            new += [self.starts_of_fresh] * 2
            more = {**options, "max_queries": most, "max_keys": most}
            parts.append(attention_varlen(*new, **more)[None])
        for index in range(row, len(self.offsets) - 1):
            start, stop = self.offsets[index : index + 2]
            parts.append(paged(q[:, start:stop], slice(index, index + 1)))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
