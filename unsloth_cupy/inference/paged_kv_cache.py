"""A KV cache in pages: sequences of any length share one allocation, and may share a prefix.

    cache = PagedKVCache(layers, pages, page, kv_heads, dim, dtype="float32")
    sequence = cache.allocate(tokens)
    k_pages, v_pages = cache.append(layer, [sequence], k, v)
    attention_paged(q, k_pages, v_pages, cache.page_table([sequence]), cache.lengths([sequence]))

Bytes: 2 * layers * pages * page * kv_heads * dim * itemsize; half of that for latent attention.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import arrays
from ..core.call import check_options, is_integer
from ..core.dtypes import Array, float_dtype
from ..errors import ConfigError, DeviceMemoryError, RangeError
from ..machine import array_bytes, check_bytes
from ..ops.attention.kv_append import kv_append_paged_
from ..ops.attention.kv_append_int8 import kv_append_int8_
from ..placement import array_on_device, on_gpu_of_attribute, to_device_of
from .int8_cache import (
    STORED,
    check_latent,
    check_length,
    check_new,
    scale_bytes,
    scales_like,
    windows_of,
)

GONE = -2  # entry in the table of a sequence for a page before the window, which it no longer has


@on_gpu_of_attribute("keys")
@check_options
class PagedKVCache:
    """Keys and values of every layer in pages of ``page`` tokens; pages belong to sequences.

    Parameters
    ----------
    layers, pages, page, kv_heads, dim : int
        Sizes; any page size from 1.
    dtype : dtype or its name
        float16, bfloat16, float32 or float64; or int8: codes, and a scale for each token and head.
    like : array, optional
        The cache is on the device of this array; by default on the host, in NumPy arrays.
    window : int, None, or a list with one of them per layer
        Queries attend only to the last ``window`` tokens, themselves included.  ``append`` frees
        the pages to which the new queries of no layer attend; their entries in ``page_table``
        become another page of the sequence, so pass ``window=(window - 1, 0)`` to
        ``attention_paged``.  If one layer has no window, no page is freed.
    chunk : int, optional
        In place of a window: queries attend only to tokens of their own chunk, ``chunk`` tokens
        from a multiple of ``chunk`` on.  Pages before the chunk of the next token are freed.
    latent : int, optional
        For latent attention, with one kv head, floats, no window and no chunk: the first ``latent``
        numbers of a key are its value, so no values are stored.

    Attributes
    ----------
    keys, values : (layers, pages, page, kv_heads, dim) dtype
        The storage; a sequence has the same pages in every layer.  With ``latent``, values are a
        view of the keys.
    scales : (layers, 2, pages, page, kv_heads) float32, or None
        For int8, the scales of the codes of keys and of values; pass those of a layer to
        ``attention_paged``.

    Raises
    ------
    ConfigError
        A size is negative, page is 0, window, chunk or latent are invalid, or dtype is not a float.

    Notes
    -----
    Forked sequences share pages; the first sequence that writes to a shared page gets a copy of the
    page.  Kwon and others, Efficient Memory Management for Large Language Model Serving with
    PagedAttention, 2023.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page: int,
        kv_heads: int,
        dim: int,
        *,
        dtype: Any,
        like: Array | None = None,
        window: int | Sequence[int | None] | None = None,
        chunk: int | None = None,
        latent: int | None = None,
    ) -> None:
        shape = (layers, pages, page, kv_heads, dim)
        if not all(map(is_integer, shape)) or page == 0:
            cure = "sizes must be integers, none of them negative, and page 1 or more"
            raise ConfigError(f"PagedKVCache{shape}: {cure}")
        kind = float_dtype("PagedKVCache", dtype, STORED)
        place = array_on_device("PagedKVCache", like)
        check_latent("PagedKVCache", latent, kv_heads, dim, kind)
        if latent is not None and window is not None:
            problem = f"PagedKVCache(latent={latent}, window={window!r})"
            raise ConfigError(f"{problem}: latent attention has no window; leave it out")
        if chunk is not None and not (is_integer(chunk, 1) and window is latent is None):
            problem = f"PagedKVCache(chunk={chunk!r}, window={window!r}, latent={latent})"
            cure = "pass a number of tokens, 1 or more, without window and latent"
            raise ConfigError(f"{problem}: {cure}")
        size = (2 if latent is None else 1) * array_bytes(shape, kind.itemsize) + scale_bytes(
            kind, array_bytes(shape[:-1], 1)
        )
        check_bytes(f"PagedKVCache{shape}", size, place)
        self.windows, self.chunk = windows_of("PagedKVCache", window, layers), chunk
        self.keys = arrays.empty(shape, kind, place)
        self.latent = latent
        self.values = (
            arrays.empty(shape, kind, place) if latent is None else self.keys[..., :latent]
        )
        if self.frees:  # attention also reads slots without a token, before it masks them
            self.keys[...] = self.values[...] = 0
        self.scales = scales_like(kind, (layers, 2, *shape[1:-1]), place)
        self.clear()
        self.numbers = itertools.count()  # of new sequences

    def clear(self) -> None:
        """Remove all sequences; all pages become free."""
        pages = self.keys.shape[1]
        self.uses = [0] * pages  # by page: the number of sequences with this page
        self.free_pages = list(range(pages))[::-1]  # a stack: the lowest free page is used first
        self.tables: dict[int, list[int]] = {}  # by sequence: its pages, or GONE
        self.filled: dict[int, list[int]] = {}  # by sequence: the number of tokens in each layer

    @property
    def frees(self) -> bool:
        """Whether a sequence gives up pages that no later token attends to."""
        return self.chunk is not None or any(self.windows)

    def allocate(self, tokens: int) -> int:
        """Return a new, empty sequence with pages for ``tokens`` tokens.

        It can grow further while there are free pages.

        Raises
        ------
        DeviceMemoryError
            There are too few free pages; nothing changes.
        ConfigError
            tokens is negative.
        """
        if not is_integer(tokens):
            cure = "pass an integer, 0 or more"
            raise ConfigError(f"PagedKVCache.allocate(tokens={tokens!r}): {cure}")
        pages = -(-tokens // self.keys.shape[2])
        self._check_free("allocate", pages)
        sequence = next(self.numbers)
        self.tables[sequence] = [self._take() for _ in range(pages)]
        self.filled[sequence] = [0] * len(self.keys)
        return sequence

    def append(
        self, layer: int, sequences: Sequence[int], k: Array, v: Array | None
    ) -> tuple[Array, Array]:
        """Store the keys and values of new tokens of some sequences, in place.

        Parameters
        ----------
        layer : int
            0 .. layers - 1.
        sequences : sequence of int
            Sequences that ``allocate`` and ``fork`` returned, each once.
        k, v : (sequences, tokens, kv_heads, dim) dtype of the cache, or floats for one of int8
            Keys and values of the new tokens; for a latent cache v is None.

        Returns
        -------
        k_pages, v_pages : (pages, page, kv_heads, dim)
            The storage of this layer, for ``attention_paged``.

        Raises
        ------
        DeviceMemoryError
            There are too few free pages; nothing changes.
        RangeError
            There is no such layer or sequence, or a sequence is passed twice.
        ShapeError, DTypeError, FrameworkError
            k or v do not fit the sequences and the storage.
        """
        self.check_layer("append", layer)
        self.check_sequences("append", sequences)
        if len(set(sequences)) < len(sequences):
            raise RangeError(f"PagedKVCache.append: {[*sequences]} has a sequence twice; fork it")
        storage = self.keys[layer], self.latent
        check_new("PagedKVCache.append", "sequences", len(sequences), k, v, *storage)
        starts = [self.filled[sequence][layer] for sequence in sequences]
        for sequence in sequences:
            self._leave(*self._take_out(sequence, slice(self._first_seen(sequence))))
        self._make_room(sequences, starts, [k.shape[1]] * len(sequences))
        table, first = self.page_table(sequences), self._placed(starts)
        stored = self.keys[layer], self.values[layer]
        if v is None:  # a thread writes the same row twice
            v, stored = k, (self.keys[layer],) * 2
        if self.scales is None:
            kv_append_paged_(k, v, *stored, table, first)
        else:
            kv_append_int8_(k, v, *stored, self.scales[layer], table, first)
        for sequence in sequences:
            self.filled[sequence][layer] += k.shape[1]
        return self.keys[layer], self.values[layer]

    def missing(self, sequences: Sequence[int], counts: Sequence[int]) -> int:
        """Return how many free pages ``extend`` would take; first free those before the windows."""
        starts = self._begun(sequences)
        unread = sum(self._unread(*each) for each in zip(sequences, starts, counts, strict=True))
        return self._new_pages(sequences, starts, counts)[1] - unread

    def _begun(self, sequences: Sequence[int]) -> list[int]:
        """Free the pages before the windows of sequences; return their numbers of tokens."""
        if self.frees:
            for sequence in sequences:
                if first := self._first_seen(sequence):
                    self._leave(*self._take_out(sequence, slice(first)))
        return [max(self.filled[sequence], default=0) for sequence in sequences]

    def extend(self, sequences: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Count new tokens of sequences in all layers; return how many tokens each had before.

        The sequences get pages for the tokens, whose keys and values the caller stores.  The first
        tokens of an empty sequence attend to each other without pages, unless these hold codes; so
        it gets no pages for those that no later token sees.

        Raises
        ------
        DeviceMemoryError
            There are too few free pages; no page changes its sequence but those that windows free.
        """
        starts = self._begun(sequences)
        unread = [self._unread(*each) for each in zip(sequences, starts, counts, strict=True)]
        for sequence, gone in zip(sequences, unread, strict=True):
            self.tables[sequence] += [GONE] * gone
        try:
            self._make_room(sequences, starts, counts)
        except DeviceMemoryError:
            for sequence, gone in zip(sequences, unread, strict=True):
                del self.tables[sequence][:gone]
            raise
        for sequence, start, new in zip(sequences, starts, counts, strict=True):
            self.filled[sequence] = [start + new] * len(self.filled[sequence])
        return starts

    def _unread(self, sequence: int, start: int, new: int) -> int:
        """Return the first pages of new tokens that neither they nor later tokens read."""
        if start or self.tables[sequence] or self.scales is not None:
            return 0
        return self.first_seen(max(new - 1, 0))

    def begin(self, pages: Sequence[int]) -> int:
        """Return a new sequence whose first tokens are in these full pages, which it shares.

        Entries that are GONE are pages before its window.
        """
        self.hold([page for page in pages if page != GONE])
        sequence = next(self.numbers)
        self.tables[sequence] = [*pages]
        self.filled[sequence] = [len(pages) * self.keys.shape[2]] * len(self.keys)
        return sequence

    def hold(self, pages: Sequence[int]) -> None:
        """Count one more owner of each page; ``release`` counts one less."""
        for page in pages:
            self.uses[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Count one owner less of each page; pages without an owner become free."""
        self._leave(*pages)

    @property
    def stored(self) -> tuple[Array, ...]:
        """The arrays of keys and, unless keys contain them, of values."""
        return (self.keys,) if self.latent is not None else (self.keys, self.values)

    def page_table(self, sequences: Sequence[int]) -> Array:
        """Return the pages of each sequence, in order: (sequences, most pages) int32.

        Shorter rows are padded with -1.  A page before the window is replaced by the first page in
        the window.

        Raises
        ------
        RangeError
            There is no such sequence.
        """
        self.check_sequences("page_table", sequences)
        rows = [self.tables[sequence] for sequence in sequences]
        table = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
            row[row == GONE] = next((page for page in pages if page != GONE), -1)
        return self._placed(table)

    def lengths(self, sequences: Sequence[int], layer: int = 0) -> Array:
        """Return the number of tokens of each sequence in a layer: (sequences,) int32.

        Raises
        ------
        RangeError
            There is no such sequence, or no such layer.
        """
        self.check_sequences("lengths", sequences)
        self.check_layer("lengths", layer)
        return self._placed([self.filled[sequence][layer] for sequence in sequences])

    def fork(self, sequence: int) -> int:
        """Return a new sequence with the same tokens; both share the pages, which are not copied.

        Raises
        ------
        RangeError
            There is no such sequence.
        """
        self.check_sequences("fork", [sequence])
        new = next(self.numbers)
        self.tables[new], self.filled[new] = [*self.tables[sequence]], [*self.filled[sequence]]
        for page in self.tables[new]:
            self.uses[page] += page != GONE
        return new

    def truncate(self, length: int, sequences: Sequence[int] | None = None) -> None:
        """Remove all tokens after the first ``length`` tokens of some sequences, by default of all.

        Pages without a token become free.  The other tokens have the same bits as before; a shorter
        sequence stays as it is.

        Raises
        ------
        RangeError
            length is not an integer, 0 or more; there is no such sequence; or a page in the window
            of the next token was before an earlier window and has been freed.  Nothing changes
            then.
        """
        check_length("PagedKVCache", length)
        chosen = [*self.tables] if sequences is None else sequences
        self.check_sequences("truncate", chosen)
        page = self.keys.shape[2]
        for sequence in chosen:
            lengths = [min(held, length) for held in self.filled[sequence]]
            first = self._first_seen(sequence, lengths)
            if GONE in self.tables[sequence][first : -(-length // page)]:
                gone = f"{self.tables[sequence].count(GONE) * page} tokens of sequence {sequence}"
                cure = "keep more tokens, or create the cache without a window"
                raise RangeError(
                    f"PagedKVCache.truncate({length}): the window has dropped {gone}; {cure}"
                )
        for sequence in chosen:
            held = self.filled[sequence] = [min(held, length) for held in self.filled[sequence]]
            empty = slice(-(-max(held, default=0) // page), None)
            self._leave(*self._take_out(sequence, empty))
            del self.tables[sequence][empty]

    def free(self, sequence: int) -> None:
        """Remove a sequence; its pages become free unless other sequences share them.

        Raises
        ------
        RangeError
            There is no such sequence, or it has been freed already.
        """
        self.check_sequences("free", [sequence])
        self._leave(*self._take_out(sequence, slice(None)))
        del self.filled[sequence], self.tables[sequence]

    def _first_seen(self, sequence: int, lengths: Sequence[int] | None = None) -> int:
        """Return the first page in the window of the next queries of any layer.

        ``lengths`` are the numbers of tokens in the layers, by default the current ones.
        """
        held = self.filled[sequence] if lengths is None else lengths
        return self._first(held)

    def _first(self, lengths: Sequence[int]) -> int:
        """Return the first page in the window or chunk of the token at ``lengths`` of any layer."""
        if self.chunk is not None:
            return min(lengths, default=0) // self.chunk * self.chunk // self.keys.shape[2]
        pairs = zip(lengths, self.windows, strict=True)
        first = min((0 if w is None else max(n - w + 1, 0) for n, w in pairs), default=0)
        return first // self.keys.shape[2]

    def first_seen(self, length: int) -> int:
        """Return the first page that the token after ``length`` tokens attends to."""
        return self._first([length] * len(self.windows))

    def _take_out(self, sequence: int, part: slice) -> list[int]:
        """Mark pages of a sequence as GONE, and return these pages, the last page first."""
        table = self.tables[sequence]
        pages = [page for page in table[part][::-1] if page != GONE]
        table[part] = [GONE] * len(table[part])
        return pages

    def _new_pages(
        self, sequences: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[tuple[list[int], int]], int]:
        """Return the entries of shared pages that new tokens need copied, and the number of pages.

        The number includes the copies.
        """
        page = self.keys.shape[2]
        shared, pages = [], 0
        leaving: dict[int, int] = {}  # by page: the number of sequences that get a copy
        for sequence, start, new in zip(sequences, starts, counts, strict=True):
            table = self.tables[sequence]
            pages += max(0, -(-(start + new) // page) - len(table))
            for index in range(start // page, min(-(-(start + new) // page), len(table))):
                if table[index] == GONE:  # its tokens are not stored
                    continue
                if self.uses[table[index]] - leaving.get(table[index], 0) > 1:
                    shared.append((table, index))
                    leaving[table[index]] = leaving.get(table[index], 0) + 1
        return shared, pages + len(shared)

    def _make_room(
        self, sequences: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Give each sequence unshared pages for its new tokens, or raise and change nothing."""
        page = self.keys.shape[2]
        shared, pages = self._new_pages(sequences, starts, counts)
        self._check_free("append", pages)
        for table, index in shared:
            old, table[index] = table[index], self._take()
            for storage in self.stored:
                storage[:, table[index]] = storage[:, old]
            if self.scales is not None:
                self.scales[:, :, table[index]] = self.scales[:, :, old]
            self._leave(old)
        for sequence, start, new in zip(sequences, starts, counts, strict=True):
            while len(self.tables[sequence]) * page < start + new:
                self.tables[sequence].append(self._take())

    def _take(self) -> int:
        """Return a free page, which is in use from now on."""
        page = self.free_pages.pop()
        self.uses[page] = 1
        return page

    def _leave(self, *pages: int) -> None:
        """Count one sequence less for each page; free the pages without a sequence."""
        for page in pages:
            self.uses[page] -= 1
            if not self.uses[page]:
                self.free_pages.append(page)

    def check_layer(self, call: str, layer: Any) -> None:
        """Raise unless there is such a layer; the error shows the name of the call."""
        if not is_integer(layer) or layer >= len(self.keys):
            last = len(self.keys) - 1
            raise RangeError(f"PagedKVCache.{call}: layer {layer} is not in 0 .. {last}")

    def check_sequences(self, call: str, sequences: Any) -> None:
        """Raise unless these are sequences of this cache; the error shows the name of the call."""
        array = getattr(sequences, "shape", (0,)) == ()  # len() of such an array raises
        if not hasattr(sequences, "__len__") or isinstance(sequences, str) or array:
            cure = "pass a list of sequences that allocate or fork returned"
            raise ConfigError(f"PagedKVCache.{call}: sequences are {sequences!r}; {cure}")
        for sequence in sequences:
            if not is_integer(sequence) or sequence not in self.tables:
                cure = "pass a sequence that allocate or fork returned and that is not freed"
                raise RangeError(f"PagedKVCache.{call}: there is no sequence {sequence!r}; {cure}")

    def _check_free(self, call: str, pages: int) -> None:
        """Raise DeviceMemoryError unless so many pages are free."""
        free = len(self.free_pages)
        if pages > free:
            bytes_of_page = sum(storage[:, :1].nbytes for storage in self.stored)
            raise DeviceMemoryError(
                f"PagedKVCache.{call}: {pages} pages are needed, {free} of {len(self.uses)} are"
                " free; free a sequence, or create the cache with more pages",
                (len(self.uses) - free + pages) * bytes_of_page,
                len(self.uses) * bytes_of_page,
            )

    def _placed(self, numbers: Any) -> Array:
        """Return integers as an int32 array on the device of the cache."""
        array: Array = to_device_of(np.asarray(numbers, np.int32), self.keys)
        return array
