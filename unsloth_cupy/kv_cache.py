"""What attention remembers while text is generated: the keys and values of past tokens.

    cache = KVCache(layers, batch, capacity, kv_heads, dim, dtype="float32")
    k, v = cache.append(layer, k, v)        all keys and values of this layer, old and new

Bytes: 2 * layers * batch * capacity * kv_heads * dim * itemsize.
"""

from typing import Any

import numpy as np

from . import _arrays
from ._signature import FLOATS
from ._typing import Array
from .errors import ConfigError, DTypeError, RangeError, ShapeError


class KVCache:
    """Keys and values of every layer, in one allocation each, filled from the left.

    Parameters
    ----------
    layers, batch, capacity, kv_heads, dim : int
        Sizes; capacity is the largest number of tokens a row can hold.
    dtype : dtype or its name
        float16, bfloat16, float32 or float64.
    like : array, optional
        The cache lives where this array lives; NumPy where absent.

    Attributes
    ----------
    keys, values : (layers, batch, capacity, kv_heads, dim) dtype
        The storage; what lies beyond ``lengths`` is not defined.
    real : (batch, capacity) bool
        Which tokens are no padding; a model notes it here and attention obeys it later.
    padded : bool
        Whether any may be: False until a model notes a mask.

    Raises
    ------
    ConfigError
        A size is negative, or dtype is no float.
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
    ) -> None:
        shape = (layers, batch, capacity, kv_heads, dim)
        if min(shape) < 0:
            raise ConfigError(f"KVCache{shape}: sizes must not be negative")
        if np.dtype(dtype) not in FLOATS:
            names = ", ".join(known.name for known in FLOATS)
            raise ConfigError(f"KVCache(dtype={dtype!r}): choose from {names}")
        place = np.empty(0) if like is None else like
        self.keys = _arrays.empty(shape, np.dtype(dtype), place)
        self.values = _arrays.empty(shape, np.dtype(dtype), place)
        self.real = _arrays.empty((batch, capacity), np.dtype(bool), place)
        self.filled = [0] * layers
        self.reset()

    @property
    def capacity(self) -> int:
        """The largest number of tokens that a row can hold."""
        return self.keys.shape[2]

    @property
    def length(self) -> int:
        """The number of tokens that each row holds, padding included."""
        return max(self.filled, default=0)

    @property
    def lengths(self) -> Array:
        """The number of tokens of each row, padding included: (batch,) int32."""
        lengths = _arrays.empty(self.keys.shape[1:2], np.dtype("int32"), self.keys)
        lengths[...] = self.length
        return lengths

    def append(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Store the keys and values of new tokens and return all of this layer's.

        Parameters
        ----------
        layer : int
            0 .. layers - 1.
        k, v : (batch, tokens, kv_heads, dim) dtype of the cache
            Of the new tokens.

        Returns
        -------
        k, v : (batch, lengths, kv_heads, dim)
            Views of the storage: valid until the next ``reorder`` or ``reset``.

        Raises
        ------
        RangeError
            There is no such layer, or no room for the tokens; the cache is left as it was.
        ShapeError, DTypeError
            k or v do not fit the storage.
        """
        layers, batch, capacity, kv_heads, dim = self.keys.shape
        if not 0 <= layer < layers:
            raise RangeError(f"KVCache.append: layer {layer} is not in 0 .. {layers - 1}")
        for name, array in (("k", k), ("v", v)):
            if array.shape != (batch, k.shape[1] if k.ndim > 1 else 0, kv_heads, dim):
                wanted = f"(batch={batch}, tokens, kv_heads={kv_heads}, dim={dim})"
                raise ShapeError(f"KVCache.append: {name} is {array.shape}; it must be {wanted}")
            if array.dtype != self.keys.dtype:
                cure = f"make the cache with dtype={array.dtype.name!r}"
                raise DTypeError(
                    f"KVCache.append: {name} is {array.dtype}, not {self.keys.dtype}; {cure}"
                )
        start = self.filled[layer]
        stop = start + k.shape[1]
        if stop > capacity:
            raise RangeError(
                f"KVCache.append: {k.shape[1]} tokens do not fit beside {start} of"
                f" capacity={capacity}; make the cache with capacity={stop} or call reset()"
            )
        self.keys[layer, :, start:stop] = k
        self.values[layer, :, start:stop] = v
        self.filled[layer] = stop
        return self.keys[layer, :, :stop], self.values[layer, :, :stop]

    def reset(self) -> None:
        """Forget every token; the storage is kept."""
        self.filled = [0] * len(self.filled)
        self.real[...] = True
        self.padded = False

    def reorder(self, index: Array) -> None:
        """Let row i go on from what row ``index[i]`` holds, as beam search does.

        Raises
        ------
        ShapeError, DTypeError, RangeError
            index is not (batch,) integers in 0 .. batch - 1.
        """
        batch, length = self.keys.shape[1], self.length
        if index.shape != (batch,):
            raise ShapeError(f"KVCache.reorder: index is {index.shape}; it must be ({batch},)")
        if index.dtype.kind not in "iu":
            raise DTypeError(f"KVCache.reorder: index is {index.dtype}; it must hold integers")
        if batch and not 0 <= int(index.min()) <= int(index.max()) < batch:
            raise RangeError(f"KVCache.reorder: index must be in 0 .. {batch - 1}: {index}")
        for storage in (self.keys, self.values):
            for layer in storage:  # one layer at a time: the copy stays small
                layer[:, :length] = layer[index, :length]
        self.real[...] = self.real[index]
