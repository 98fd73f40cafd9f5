"""The storage of a cache in order: floats, or codes of eight bits that are read as they are."""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..ops.attention.attention_paged_int8 import attention_paged_int8_forward
from ..ops.attention.kv_append import kv_append_
from ..ops.attention.kv_append_int8 import kv_append_int8_
from ..placement import full_like
from .codes import INT8, read

FEW = 16  # queries that read codes as they are: more multiply what these stand for


class Storage:
    """Keys and values of layers, each with a number of tokens that it was given."""

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
        """Return the keys and values of some slots: views, or what codes stand for."""
        keys, values = self.keys[layer][:, part], self.values[layer][:, part]
        if self.dtype != INT8:
            return keys, values
        of_keys, of_values = self.scales[layer][:, :, part]
        return read(keys, of_keys, dtype), read(values, of_values, dtype)

    def reads_codes(self, layer: int, new: int, window: int | None = None) -> bool:
        """Say whether ``attend`` is for so many new tokens of a layer: few, of int8.

        Of a layer with a window for one, which sees all that the layer holds, unless the window of
        its model is narrower: slots of a ring are not in order.
        """
        kept = self.windows[layer]
        ring = kept is not None and new == 1 and (window is None or window >= kept)
        return self.dtype == INT8 and (ring or (kept is None and new <= FEW))

    def attend(self, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """Store new keys and values; return causal attention of q over codes, as they are kept.

        Of a layer that ``reads_codes``; what was noted as padding is not seen.  Options are those
        of ``attention_paged``, its window that of a layer which keeps all tokens.

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
        """Return which slots hold no padding, (batch, 1, 1, slots); None where none was noted."""
        if self.note(None, 0) is None:
            return None
        slots, last = self.keys[layer].shape[1], self.filled[layer] - 1
        if last < slots:
            return self.real[:, None, None, :slots]
        slot, ring = np.arange(slots, like=self.real), slots - self.sinks
        token = np.where(slot < self.sinks, slot, slot + (last - slot) // ring * ring)
        return self.real[:, None, None, token]
