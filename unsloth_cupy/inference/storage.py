"""The storage of a KV cache without pages: floats, or int8 codes that attention reads directly."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..ops.attention.attention_paged_int8 import attention_paged_int8_forward
from ..ops.attention.kv_append import kv_append_
from ..ops.attention.kv_append_int8 import kv_append_int8_
from ..placement import full_like
from .codes import INT8, read

FEW = 16  # queries; at most this many read codes directly, for more the codes become floats first


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

    def attend(self, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """Store new keys and values; return causal attention of q, computed directly from codes.

        The layer must be one that ``reads_codes``; noted padding is masked.  Options are those of
        ``attention_paged``; its window applies only to a layer that keeps all tokens.

        Raises
        ------
        RangeError, ShapeError, DTypeError, FrameworkError
            As ``append``.
        """
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
