"""A paged KV cache for one call: each row of the call continues one sequence."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core.call import is_integer
from ..core.dtypes import Array
from ..errors import ConfigError, ShapeError
from ..ops.attention.attention import attention
from ..ops.attention.attention_paged import attention_paged
from ..ops.attention.latent_attention import latent_attention
from ..placement import to_device_of
from .int8_cache import check_latent_options
from .kv_cache import KVCache
from .paged_kv_cache import PagedKVCache

OPTIONS = {
    name
    for name, parameter in inspect.signature(attention_paged).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


def check_attention(cache: PagedKVCache, layer: int, options: dict[str, Any]) -> None:
    """Raise for unknown options of attention; narrow the window to the cache's window."""
    if unknown := sorted(options.keys() - OPTIONS):
        cure = f"choose from {', '.join(sorted(OPTIONS))}"
        raise ConfigError(f"a PagedKVCache has no option {unknown[0]!r} of attention; {cure}")
    known = layer in range(len(cache.windows))
    if known and (own := cache.windows[layer]) is not None:
        match options.get("window"):
            case None:
                options["window"] = own - 1, None
            case (left, right) if left is None or is_integer(left, own):
                options["window"] = own - 1, right


def all_keys(stored: Array, table: Array, new: Array, places: Array) -> tuple[Array, Array]:
    """Return the keys of pages with the new keys at their places, and which a new token sees."""
    keys = stored[table].reshape(len(table), -1, stored.shape[2])
    key = np.arange(keys.shape[1], dtype=places.dtype, like=keys)
    visible = key <= places[:, :, None]
    keys = np.where(visible[:, -1, :, None], keys, keys.dtype.type(0))  # others may hold anything
    keys[np.arange(len(table), like=keys)[:, None], places] = new
    return keys, visible


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

    def index_keys(self, layer: int, new: Array, most: int) -> Iterator[tuple[Any, Any, Any, bool]]:
        """Yield the keys that an indexer stores at the end of latent rows, as one group.

        See ``PackedRows.index_keys``; ``new`` are those of the new tokens, (batch, tokens, dim).
        """
        starts, tokens, stored = self.starts(layer), new.shape[1], self.cache.keys[layer]
        width = max(starts, default=0) + tokens
        if width <= most:
            return
        if not any(starts):
            key = np.arange(tokens, like=new)
            yield slice(None), new, (key[:, None] >= key)[None], False
            return
        table = self.cache.page_table(self.sequences)  # without the pages of new tokens
        more = max(0, -(-width // stored.shape[1]) - table.shape[1])
        table = np.pad(table, [(0, 0), (0, more)], constant_values=-1)
        places = to_device_of(np.add.outer(starts, np.arange(tokens)), new)
        yield slice(None), *all_keys(stored[:, :, 0, -new.shape[2] :], table, new, places), False

    def attend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        *,
        chunk: int | None = None,
        **options: Any,
    ) -> Array:
        """Store new keys and values; return the attention of q over all keys of each row.

        The narrower of the windows of the call and of the cache applies.  With ``chunk``, of the
        call or of the cache, queries attend to the keys in their own chunk of so many tokens.  A
        latent cache uses ``latent_attention``, and v is None.

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
        check_attention(self.cache, layer, options)
        known = layer in range(len(self.cache.windows))
        empty = known and not any(self.starts(layer))
        starts, chunk = self.starts(layer) if known else [], chunk or self.cache.chunk
        k_pages, v_pages = self.append(layer, k, v)
        if chunk is not None:
            pages = max(len(self.cache.tables[sequence]) for sequence in self.sequences)
            keys = k.shape[1] if empty else pages * k_pages.shape[1]
            places = np.add.outer(starts, np.arange(k.shape[1]))[:, :, None]  # of queries
            same = np.arange(keys) // chunk == places // chunk  # (batch, queries, keys)
            own, mask = to_device_of(same[:, None], q), options.get("mask")
            options["mask"] = own if mask is None else own & mask
        if empty and v is not None:  # k and v are all keys and values, in order: no pages to read
            return attention(q, k, v, **options)
        table = self.cache.page_table(self.sequences)
        lengths = self.cache.lengths(self.sequences, layer)
        scales = None if self.cache.scales is None else self.cache.scales[layer]
        return attention_paged(q, k_pages, v_pages, table, lengths, scales=scales, **options)

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
