"""The KV cache: keys and values of earlier tokens, which attention reads during generation.

    cache = KVCache(layers, batch, capacity, kv_heads, dim, dtype="float32")
    k, v = cache.append(layer, k, v)        all keys and values of this layer, old and new

Bytes: 2 * layers * batch * slots * kv_heads * dim * itemsize, where slots is capacity, or
sinks + window if that is less; for int8, dim + 4 instead of dim * itemsize.  For latent attention,
where the first numbers of a key are its value: layers * batch * slots * dim * itemsize.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..core import arrays
from ..core.call import check_options, is_integer
from ..core.dtypes import Array, float_dtype
from ..errors import ConfigError, DTypeError, RangeError, ShapeError
from ..machine import array_bytes, check_bytes
from ..ops.attention.attention import attention
from ..ops.attention.attention_paged_int8 import attention_paged_int8_forward
from ..ops.attention.kv_append import kv_append_
from ..ops.attention.kv_append_int8 import kv_append_int8_
from ..ops.attention.latent_attention import latent_attention
from ..placement import array_on_device, check_library, full_like, on_gpu_of_attribute
from .int8_cache import (
    INT8,
    MOST_LAYERS,
    STORED,
    check_latent,
    check_latent_options,
    check_length,
    check_new,
    read,
    scale_bytes,
    scales_like,
    windows_of,
)

ORDERLESS = {"scale", "softcap", "sinks"}  # options of attention that ignore the order of keys
# Most queries for which attention reads codes; for more, codes are converted to floats once.
FEW = 16


@on_gpu_of_attribute("real")
@check_options
class KVCache:
    """Keys and values of every layer, filled from the left.

    Parameters
    ----------
    layers, batch, capacity, kv_heads, dim : int
        Sizes; capacity is the largest number of tokens per row.
    dtype : dtype or its name
        float16, bfloat16, float32 or float64; or int8: codes, and a scale for each token and head.
    like : array, optional
        The cache is on the device of this array; by default on the host, in NumPy arrays.
    window : int, None, or a list with one of them per layer
        A layer stores the first ``sinks`` tokens and the last ``window`` of the others; None stores
        all.  If capacity is at least sinks + window, there is always room for new tokens.
    sinks : int
        Number of first tokens that layers with a window always store.
    latent : int, optional
        For latent attention, with one kv head and floats: the first ``latent`` numbers of a key are
        its value, so no values are stored.

    Attributes
    ----------
    keys, values : list of (batch, slots, kv_heads, dim) dtype
        The storage of each layer.  Token p is in slot p; with a window, the slots from ``sinks`` on
        are a ring buffer.  With ``latent``, values are views of the keys.
    scales : list of (2, batch, slots, kv_heads) float32, or None
        For int8, the scales of the codes of keys and of values.
    real : (batch, tokens) bool
        False for padding; a model records its mask here with ``note``, and attention applies it.
    states : dict of int to tuple
        The states of layers without attention, by layer: see ``recurrent``.
    padded : bool
        True if any token may be padding: False until a model records a mask.

    Raises
    ------
    ConfigError
        A size is negative, window, sinks or latent are invalid, or dtype is not one of these.

    Notes
    -----
    Keys are stored without change, after the rotary embedding of their position among all tokens.
    Xiao and others, Efficient Streaming Language Models with Attention Sinks, 2024.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        dim: int,
        *,
        dtype: Any,
        like: Array | None = None,
        window: int | Sequence[int | None] | None = None,
        sinks: int = 0,
        latent: int | None = None,
    ) -> None:
        shape = (layers, batch, capacity, kv_heads, dim)
        if not all(map(is_integer, shape)) or layers > MOST_LAYERS:
            problem = (
                f"sizes must be integers, none of them negative, and layers at most {MOST_LAYERS}"
            )
            raise ConfigError(f"KVCache{shape}: {problem}")
        kind = float_dtype("KVCache", dtype, STORED)
        windows = windows_of("KVCache", window, layers)
        check_latent("KVCache", latent, kv_heads, dim, kind)
        if not is_integer(sinks):
            raise ConfigError(
                f"KVCache(sinks={sinks!r}): pass the number of first tokens to keep, 0 or more"
            )
        place = array_on_device("KVCache", like)
        self.capacity, self.sinks = capacity, int(sinks)
        # a window beyond the capacity has no effect
        self.windows = [w if w is not None and sinks + w <= capacity else None for w in windows]
        slots = [capacity if w is None else self.sinks + int(w) for w in self.windows]
        shapes = [(batch, each, kv_heads, dim) for each in slots]
        heads = sum(array_bytes(each[:-1], 1) for each in shapes)
        held = (2 if latent is None else 1) * heads * max(dim, 1) * kind.itemsize + scale_bytes(
            kind, heads
        )
        held += array_bytes((batch, capacity), 1)  # ``real``, which has all tokens of a window, too
        check_bytes(f"KVCache{shape}", held, place)
        self.keys = [arrays.empty(s, kind, place) for s in shapes]
        self.latent = latent
        self.values = (
            [arrays.empty(s, kind, place) for s in shapes]
            if latent is None
            else [keys[..., :latent] for keys in self.keys]
        )
        self.scales = [scales_like(kind, (2, *each[:-1]), place) for each in shapes]
        self.shape, self.dtype = (batch, kv_heads, dim), kind
        self.real = arrays.empty((batch, capacity), np.dtype(bool), place)
        self.filled = [0] * layers
        self.states: dict[int, tuple[Array, ...]] = {}
        self.reset()

    @property
    def length(self) -> int:
        """The number of tokens that were appended to each row: the position of the next token."""
        return max(self.filled, default=0)

    @property
    def lengths(self) -> Array:
        """The number of tokens in each row of the storage, with padding: (batch,) int32."""
        held = (min(n, k.shape[1]) for n, k in zip(self.filled, self.keys, strict=True))
        lengths = arrays.empty(self.shape[:1], np.dtype("int32"), self.real)
        return full_like(lengths, max(held, default=0))

    def check_room(self, new: int, layer: int | None = None) -> None:
        """Raise RangeError unless a layer, or all layers, have room for new tokens."""
        if layer is not None:
            self._check_layer("check_room", layer)
        if not is_integer(new):
            raise RangeError(f"KVCache.check_room: new={new!r}; pass a number of tokens")
        self._check_room("check_room", new, range(len(self.keys)) if layer is None else [layer])

    def _check_room(self, call: str, new: int, layers: Iterable[int]) -> None:
        """Raise RangeError unless layers without a window have room for ``new`` tokens."""
        held = max((self.filled[i] for i in layers if self.windows[i] is None), default=None)
        if held is not None and held + new > self.capacity:
            problem = f"{new} tokens do not fit: {held} of capacity={self.capacity} are in use"
            cure = f"create the cache with capacity={held + new} or call reset()"
            raise RangeError(f"KVCache.{call}: {problem}; {cure}")

    @property
    def stored(self) -> list[Array]:
        """The arrays of keys and, unless keys contain them, of values."""
        return self.keys + (self.values if self.latent is None else [])

    def append(self, layer: int, k: Array, v: Array | None) -> tuple[Array, Array]:
        """Store keys and values of new tokens; return all keys and values that these may attend to.

        Parameters
        ----------
        layer : int
            0 .. layers - 1.
        k, v : (batch, tokens, kv_heads, dim) dtype of the cache, or floats for one of int8
            Keys and values of the new tokens; for a latent cache v is None.

        Returns
        -------
        k, v : (batch, keys, kv_heads, dim) dtype of k
            All tokens of this layer, in order; with a window the sinks, the ``window - 1`` tokens
            before the new tokens, and the new tokens.  Valid until the next ``append``, ``reorder``
            or ``reset``, as they may be views of the storage.

        Raises
        ------
        RangeError
            There is no such layer, or no room for the tokens; the cache is not changed.
        ShapeError, DTypeError, FrameworkError
            k or v do not fit the storage.
        """
        self.check_append("append", layer, k, v)
        slots, start = self.keys[layer].shape[1], self.filled[layer]
        stop = start + k.shape[1]
        together: Any = None
        if stop > slots:  # new tokens may attend to tokens that they overwrite: copy these first
            old = self._slots(layer, start - int(self.windows[layer] or 0) + 1, start)
            parts = [self._held(layer, part, k.dtype) for part in old]
            new = k, k[..., : self.latent] if v is None else v
            together = new
            if start:
                pairs = zip(*parts, new, strict=True)
                together = tuple(np.concatenate(each, axis=1) for each in pairs)
        self._store(layer, k, v)
        return together or self._held(layer, slice(0, stop), k.dtype)

    def _store(self, layer: int, k: Array, v: Array | None) -> None:
        """Write keys and values of new tokens to their slots."""
        keys, values, start = self.keys[layer], self.values[layer], self.filled[layer]
        if v is None:  # a thread writes the same row twice
            v, values = k, keys
        sinks = min(self.sinks, keys.shape[1])
        if self.dtype == INT8:
            kv_append_int8_(k, v, keys, values, self.scales[layer], start=start, sinks=sinks)
        else:
            kv_append_(k, v, keys, values, start=start, sinks=sinks)
        self.filled[layer] = start + k.shape[1]

    def _held(self, layer: int, part: slice, dtype: Any) -> tuple[Array, Array]:
        """Return the keys and values of some slots: views, or codes converted to floats."""
        keys, values = self.keys[layer][:, part], self.values[layer][:, part]
        if self.dtype != INT8:
            return keys, values
        of_keys, of_values = self.scales[layer][:, :, part]
        return read(keys, of_keys, dtype), read(values, of_values, dtype)

    def _slots(self, layer: int, first: int, stop: int) -> list[slice]:
        """Return the slots of the sinks, then of the tokens first .. stop - 1: up to two slices."""
        first, ring = max(first, self.sinks), self.keys[layer].shape[1] - self.sinks
        runs = [slice(0, min(self.sinks, stop))]
        if first < stop:
            a, b = ((n - self.sinks) % ring + self.sinks for n in (first, stop - 1))
            end = self.sinks + ring
            runs += [slice(a, b + 1)] if a <= b else [slice(a, end), slice(self.sinks, b + 1)]
        return runs

    def mask(self, layer: int, queries: int) -> Array | None:
        """Return the mask of the last append: the keys that each of its queries attends to.

        Parameters
        ----------
        layer : int
            0 .. layers - 1.
        queries : int
            Number of tokens of the last append.

        Returns
        -------
        mask : (queries, keys) bool, or None
            True for sinks and for the window of the query, never for a later key: ``mask`` of
            ``attention``.  None where causal attention is enough: no token was dropped, or a
            single query attends to all keys.

        Raises
        ------
        RangeError
            There is no such layer, or it has fewer tokens.
        """
        self._check_layer("mask", layer)
        if not is_integer(queries) or queries > self.filled[layer]:
            held = f"layer {layer} holds {self.filled[layer]} tokens"
            raise RangeError(f"KVCache.mask: queries={queries!r} were not appended; {held}")
        window = self.windows[layer]
        return None if window is None else self.attended_keys(layer, queries, window)

    def attended_keys(self, layer: int, queries: int, window: int) -> Array | None:
        """Return the mask of the last append for a window: its sinks, and the window of each query.

        (queries, keys) bool, False for keys after the query; None if no earlier key is hidden.
        """
        self._check_layer("attended_keys", layer)
        stop = self.filled[layer]
        if not is_integer(window) or not is_integer(queries) or queries > stop:
            problem = f"KVCache.attended_keys: queries={queries!r}, window={window!r}"
            raise RangeError(f"{problem}; layer {layer} holds {stop} tokens")
        if stop <= self.sinks + window or (queries == 1 and window == self.windows[layer]):
            return None
        key = np.arange(stop, like=self.real)  # (tokens,)
        query = np.arange(stop - queries, stop, like=self.real)[:, None]  # (queries, 1)
        attended = (key <= query) & ((key < self.sinks) | (key > query - window))
        return self.held(layer, queries, attended)

    def held(self, layer: int, queries: int, every: Array) -> Array:
        """Return the columns of ``every`` (..., tokens) for the keys of the last append."""
        self._check_layer("held", layer)
        check_library("KVCache.held: every", every)
        window, tokens = self.windows[layer], every.shape[-1] if every.ndim else 0
        first = self.sinks if window is None else tokens - queries - window + 1
        if first <= self.sinks:
            return every
        parts = (
            [every[..., : self.sinks], every[..., first:]] if self.sinks else [every[..., first:]]
        )
        return np.concatenate(parts, axis=-1) if self.sinks else parts[0]

    def reads_codes(self, layer: int, new: int, window: int | None = None) -> bool:
        """Return whether ``attend`` computes attention of ``new`` tokens from the codes of int8.

        It does for a few tokens.  The slots of a window's ring are not in order, so in a layer with
        a window it does for a single token, which attends to all slots, unless ``window`` is
        narrower than the layer's.
        """
        self._check_layer("reads_codes", layer)
        if not is_integer(new) or not (window is None or is_integer(window)):
            problem = f"KVCache.reads_codes: new={new!r}, window={window!r}"
            raise ConfigError(f"{problem}; pass numbers of tokens")
        own = self.windows[layer]
        ring = own is not None and new == 1 and (window is None or window >= own)
        return self.dtype == INT8 and (ring or (own is None and new <= FEW))

    def attend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array | None,
        *,
        causal: bool = True,
        window: Any = None,
        mask: Array | None = None,
        **options: Any,
    ) -> Array:
        """Store new keys and values; return the attention of q over all keys of the layer.

        The options are the options of ``attention``, for the keys that ``append`` returns.  Padding
        that was recorded with ``note`` is masked.  The narrower of the windows of the call and of
        the layer applies; with causal every query attends to the layer's sinks.  If ``reads_codes``
        is True for the number of new tokens, and no option depends on the order of the keys,
        attention reads the codes.  A latent cache uses ``latent_attention``, and needs ``scale``.

        Raises
        ------
        RangeError, ShapeError, DTypeError, FrameworkError
            As ``append``.
        ConfigError
            An option is invalid, or not an option of latent attention.
        """
        self._check_layer("attend", layer)
        check_library("KVCache.attend: q", q)
        if q.ndim != 4:
            axes = "(batch, tokens, heads, dim)"
            problem = f"KVCache.attend: q is {q.shape}; it must be {axes}"
            raise ShapeError(problem, expected=axes, actual=tuple(q.shape))
        own, new = self.windows[layer], q.shape[1]
        match window:
            case None | (None, _):
                width = own
            case (left, _) if is_integer(left):
                width = left + 1 if own is None else min(left + 1, own)  # with the query itself
            case _:
                width = None  # attention raises
        orderless = causal and mask is None and options.keys() <= ORDERLESS
        if orderless and v is not None and self.reads_codes(layer, new, width):
            return self._attend_codes(layer, q, k, v, window=window, **options)
        if self.latent is not None:
            check_latent_options("KVCache.attend", options)
        k, v = self.append(layer, k, v)
        attended = None
        if own is not None and width is not None:
            # sinks lie outside of a window, and latent attention has none: a mask instead
            if self.sinks or not causal or self.latent is not None:
                attended = self.attended_keys(layer, new, width)
                window = None if causal else window
            else:
                window = width - 1, 0
        for visible in (self._padding(layer, new), attended):
            mask = visible if mask is None else mask if visible is None else mask & visible
        if self.latent is not None:
            lengths = full_like(self._rows, k.shape[1])
            options = {"scale": options["scale"], "causal": causal, "mask": mask}
            return latent_attention(q, k[:, :, 0], lengths, rank=self.latent, **options)
        return attention(q, k, v, causal=causal, window=window, mask=mask, **options)

    def _padding(self, layer: int, new: int) -> Array | None:
        """Return a mask of the keys of the last append that are not padding.

        (batch, 1, 1, keys) bool; None if no mask was recorded.
        """
        real = self.note(None, 0)
        if real is None:
            return None
        # (batch, 1, 1, keys)
        return self.held(layer, new, real[:, : self.filled[layer]])[:, None, None]

    def _attend_codes(self, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """Store new keys and values; return causal attention of q, computed from the codes.

        Each row of the cache is one page of the kernel for pages.
        """
        self.check_append("attend", layer, k, v)
        self._store(layer, k, v)
        rows = self._rows
        held = full_like(rows, min(self.filled[layer], self.keys[layer].shape[1]))
        stored = self.keys[layer], self.values[layer], self.scales[layer]
        options["mask"] = self._real_slots(layer)
        if self.windows[layer] is not None:  # the slots are the window, in the order of a ring
            options["window"] = None
        return attention_paged_int8_forward(q, *stored, rows[:, None], held, **options)[0]

    @property
    def _rows(self) -> Array:
        """The indices of the rows: (batch,) int32."""
        rows: Array = np.arange(self.shape[0], dtype=np.int32, like=self.real)
        return rows

    def _real_slots(self, layer: int) -> Array | None:
        """Return a mask of slots without padding (batch, 1, 1, slots), or None if none is noted."""
        if self.note(None, 0) is None:
            return None
        slots, last = self.keys[layer].shape[1], self.filled[layer] - 1
        if last < slots:
            return self.real[:, None, None, :slots]
        slot, ring = np.arange(slots, like=self.real), slots - self.sinks
        # the last token that was written to each slot of the ring
        token = np.where(slot < self.sinks, slot, slot + (last - slot) // ring * ring)
        return self.real[:, None, None, token]

    def note(self, real: Array | None, new: int) -> Array | None:
        """Record the padding of the last tokens, which include the next ``new`` tokens.

        ``real`` (batch, last tokens) is False for padding; None records nothing.  Return the record
        of all tokens, (batch, tokens) bool, or None if nothing was ever recorded.
        """
        if not is_integer(new):
            raise ConfigError(f"KVCache.note: new={new!r}; pass a number of tokens")
        stop = self.length + new
        if real is not None:
            check_library("KVCache.note: real", real)
            if real.ndim != 2 or len(real) != len(self.real) or real.shape[1] > stop:
                expected = (len(self.real), stop)
                problem = f"KVCache.note: real is {real.shape}; it must be {expected}, or narrower"
                raise ShapeError(problem, expected=expected, actual=tuple(real.shape))
        self.padded |= real is not None
        if not self.padded:
            return None
        if (more := stop - self.real.shape[1]) > 0:
            room = arrays.empty((len(self.real), max(more, stop)), np.dtype(bool), self.real)
            room[...] = True
            self.real = np.concatenate([self.real, room], axis=1)
        if real is not None:
            self.real[:, stop - real.shape[1] : stop] = real
        return self.real[:, :stop]

    def reset(self) -> None:
        """Remove all tokens; the storage stays allocated."""
        self.filled = [0] * len(self.filled)
        self.states = {}
        self.real[...] = True
        self.padded = False

    def truncate(self, length: int) -> None:
        """Remove all tokens after the first ``length`` tokens of every row.

        The other tokens have the same bits as before; a shorter row stays as it is.  A layer with a
        window that has dropped tokens can only be shortened by one token, or to its sinks, as the
        tokens in the window of the next token are overwritten.

        Raises
        ------
        RangeError
            length is not an integer, 0 or more, or a window has dropped tokens that would be in the
            window again; the cache is not changed.
        """
        check_length("KVCache", length)
        if behind := [layer for layer in self.states if self.filled[layer] > length]:
            problem = f"layer {behind[0]} has a state after {self.filled[behind[0]]} tokens"
            cure = "call reset() and append the text again"
            raise RangeError(f"KVCache.truncate({length}): {problem}, none before; {cure}")
        for layer, (held, keys) in enumerate(zip(self.filled, self.keys, strict=True)):
            slots = keys.shape[1]
            if self.sinks < length < held - 1 and held > slots:
                window = f"layer {layer} has a window and keeps {slots} of {held} tokens"
                cure = f"pass {held - 1}, or create the cache without a window"
                raise RangeError(f"KVCache.truncate({length}): {window}; {cure}")
        self.filled = [min(held, length) for held in self.filled]
        self.real[:, length:] = True

    def reorder(self, index: Array) -> None:
        """Replace the tokens of row i by the tokens of row ``index[i]``, as in beam search.

        Raises
        ------
        ShapeError, DTypeError, RangeError
            index is not (batch,) integers in 0 .. batch - 1; values on a GPU are not checked.
        """
        batch = self.shape[0]
        check_library("KVCache.reorder: index", index)
        if index.shape != (batch,):
            problem = f"KVCache.reorder: index is {index.shape}; it must be ({batch},)"
            raise ShapeError(problem, expected=(batch,), actual=tuple(index.shape))
        if index.dtype.kind not in "iu":
            raise DTypeError(f"KVCache.reorder: index is {index.dtype}; it must hold integers")
        known = batch and isinstance(index, np.ndarray)
        if known and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise RangeError(f"KVCache.reorder: index must be in 0 .. {batch - 1}: {index}")
        for layer, filled in enumerate(self.filled):
            for storage in self.stored[layer :: len(self.filled)]:  # one array at a time is copied
                storage[:, :filled] = storage[index, :filled]
        for scales, filled in zip(self.scales, self.filled, strict=True):
            if scales is not None:
                scales[:, :, :filled] = scales[:, index, :filled]
        self.real[...] = self.real[index]
        self.states = {i: tuple(s[index] for s in each) for i, each in self.states.items()}

    def recurrent(self, layer: int, tokens: int = 0, *states: Array) -> tuple[Array | None, ...]:
        """Return the states of a layer without attention; first store ``states``, if passed.

        ``states`` are the states after ``tokens`` new tokens, with a row for each row of the cache.
        Before the first token the states are (None, None).
        """
        self._check_layer("recurrent", layer)
        if states:
            self.states[layer] = states
            self.filled[layer] += tokens
        return self.states.get(layer, (None, None))

    def check_append(self, call: str, layer: int, k: Any, v: Any) -> None:
        """Raise unless there is such a layer, and it has room for these keys and values."""
        self._check_layer(call, layer)
        storage = self.keys[layer], self.latent
        check_new(f"KVCache.{call}", "batch", self.shape[0], k, v, *storage)
        self._check_room(call, k.shape[1], [layer])

    def _check_layer(self, call: str, layer: Any) -> None:
        """Raise RangeError unless there is such a layer."""
        if not is_integer(layer) or layer >= len(self.keys):
            last = len(self.keys) - 1
            raise RangeError(f"KVCache.{call}: layer {layer} is not in 0 .. {last}")
