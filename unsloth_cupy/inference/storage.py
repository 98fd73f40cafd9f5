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

    def reads_codes(self, layer: int, new: int) -> bool:
        """Say whether ``attend`` is for so many new tokens of a layer: few, of int8, in order."""
        return self.dtype == INT8 and self.windows[layer] is None and new <= FEW

    def attend(self, layer: int, q: Array, k: Array, v: Array, **options: Any) -> Array:
        """Store new keys and values; return causal attention of q over codes, as they are kept.

        Of a layer that ``reads_codes``; options are those of ``attention_paged``.

        Raises
        ------
        RangeError, ShapeError, DTypeError, FrameworkError
            As ``append``.
        """
        self.check_append("attend", layer, k, v)
        self._store(layer, k, v)
        rows = np.arange(self.shape[0], dtype=np.int32, like=self.real)
        held = full_like(rows, self.filled[layer])
        stored = self.keys[layer], self.values[layer], self.scales[layer]
        return attention_paged_int8_forward(q, *stored, rows[:, None], held, **options)[0]
