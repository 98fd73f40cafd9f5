"""The storage of a KV cache without pages: floats, or int8 codes that attention reads directly."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.call import is_integer
from ..core.dtypes import Array
from ..ops.attention.attention import attention
from ..ops.attention.attention_paged_int8 import attention_paged_int8_forward
from ..ops.attention.kv_append import kv_append_
from ..ops.attention.kv_append_int8 import kv_append_int8_
from ..placement import full_like, on_gpu_of_attribute
from .codes import INT8, read

ORDERLESS = {"scale", "softcap", "sinks"}  # options of attention for keys in any order
FEW = 16  # queries; at most this many read codes directly, for more the codes become floats first


@on_gpu_of_attribute("real")
class Storage:
    """Keys and values of layers, and the number of tokens that each layer has received."""

    keys: list[Array]
    values: list[Array]
    scales: list[Any]
    filled: list[int]
    windows: list[Any]
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    real: Array
    sinks: int
    check_append: Callable[[str, int, Any, Any], None]
    note: Callable[[Any, int], Any]
    append: Callable[[int, Any, Any], Any]

    def _store(self, layer: int, k: Array, v: Array) -> None:
        keys, values, start = self.keys[layer], self.values[layer], self.filled[layer]
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

    def reads_codes(self, layer: int, new: int, window: int | None = None) -> bool:
        """Return whether ``attend`` can process ``new`` tokens of a layer: few, in an int8 cache.

        In a layer with a window it takes only one, which sees everything that the layer holds, and
        none if the window of its model is narrower: the slots of a ring are not in order.
        """
        kept = self.windows[layer]
        ring = kept is not None and new == 1 and (window is None or window >= kept)
        return self.dtype == INT8 and (ring or (kept is None and new <= FEW))

    def attend(
        self,
        layer: int,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool = True,
        window: Any = None,
        mask: Array | None = None,
        **options: Any,
    ) -> Array:
        """Store new keys and values; return the attention of q over all that the layer holds.

        Options are those of ``attention``, for the keys that ``append`` returns.  Noted padding is
        masked.  The narrower of the windows of the call and of the layer applies; with causal every
        query sees the layer's sinks.  If the layer ``reads_codes`` of so many tokens, and no option
        depends on the order of the keys, attention is computed directly from the codes.

        Raises
        ------
        RangeError, ShapeError, DTypeError, FrameworkError
            As ``append``.
        ConfigError
            An option is invalid.
        """
        kept, new = self.windows[layer] if layer in range(len(self.keys)) else None, q.shape[1]
        match window:
            case None | (None, _):
                width = kept
            case (left, _) if is_integer(left):
                width = left + 1 if kept is None else min(left + 1, kept)
            case _:
                width = None  # attention raises
        orderless = causal and mask is None and options.keys() <= ORDERLESS
        if orderless and self.reads_codes(layer, new, width):
            return self._attend_codes(layer, q, k, v, window=window, **options)
        k, v = self.append(layer, k, v)
        seen = None
        if kept is not None and width is not None:
            if self.sinks or not causal:
                seen, window = self.seen(layer, new, width), None if causal else window
            else:
                window = width - 1, 0
        for hidden in (self._padding(layer, new), seen):
            mask = hidden if mask is None else mask if hidden is None else mask & hidden
        return attention(q, k, v, causal=causal, window=window, mask=mask, **options)

    def seen(self, layer: int, queries: int, window: int) -> Array | None:
        """Return which keys of the last append are sinks or in the windows of its queries.

        (queries, keys) bool, without keys after the query; None if no earlier key is hidden.
        """
        stop = self.filled[layer]
        if stop <= self.sinks + window or (queries == 1 and window == self.windows[layer]):
            return None
        key = np.arange(stop, like=self.real)
        query = np.arange(stop - queries, stop, like=self.real)[:, None]
        seen = (key <= query) & ((key < self.sinks) | (key > query - window))
        return self.held(layer, queries, seen)

    def held(self, layer: int, queries: int, every: Array) -> Array:
        """Return, from ``every`` (..., tokens), the columns of the keys of the last append."""
        window, tokens = self.windows[layer], every.shape[-1]
        first = self.sinks if window is None else tokens - queries - window + 1
        if first <= self.sinks:
            return every
        parts = (
            [every[..., : self.sinks], every[..., first:]] if self.sinks else [every[..., first:]]
        )
        return np.concatenate(parts, axis=-1) if self.sinks else parts[0]

    def _padding(self, layer: int, new: int) -> Array | None:
        """Return which keys of the last append are not padding, or None if no mask was noted.

        (batch, 1, 1, keys) bool.
        """
        real = self.note(None, 0)
        if real is None:
            return None
        return self.held(layer, new, real[:, : self.filled[layer]])[:, None, None]

    def _attend_codes(self, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """Store new keys and values; return causal attention of q, computed directly from codes."""
        self.check_append("attend", layer, k, v)
        self._store(layer, k, v)
        rows = np.arange(self.shape[0], dtype=np.int32, like=self.real)
        held = full_like(rows, min(self.filled[layer], self.keys[layer].shape[1]))
        stored = self.keys[layer], self.values[layer], self.scales[layer]
        options["mask"] = self._real_slots(layer)
        if self.windows[layer] is not None:
            options["window"] = None
        return attention_paged_int8_forward(q, *stored, rows[:, None], held, **options)[0]

    def _real_slots(self, layer: int) -> Array | None:
        """Return which slots are not padding, (batch, 1, 1, slots); None if no mask was noted."""
        if self.note(None, 0) is None:
            return None
        slots, last = self.keys[layer].shape[1], self.filled[layer] - 1
        if last < slots:
            return self.real[:, None, None, :slots]
        slot, ring = np.arange(slots, like=self.real), slots - self.sinks
        token = np.where(slot < self.sinks, slot, slot + (last - slot) // ring * ring)
        return self.real[:, None, None, token]
